"""`Trace`: which experts every token chose, as a record that can prove what it belongs to.

Row *i* is the routing used when token *i* was the input, so *n* tokens that were sampled one after another leave *n - 1*
rows: the last sampled token was never an input. Only MoE layers are stored; `layers` names them.

    engine reply --check--> Trace --to_bytes--> Ray, disk --from_bytes--> Trace --> replay, comparison

Invariants (checked by `Trace.check`): ids are in range and distinct within a row and layer; the version runs cover all
rows once, in order; the token hash is that of the row's input tokens. `from_bytes` verifies a checksum over everything.
"""

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from moerl.errors import TraceError

MAGIC = b"moerl-trace-1\n"
_MAX_HEADER_BYTES = 1 << 20


class Layout(NamedTuple):
    """Which model a trace fits: `layers` are 0-based numbers of its MoE layers, `experts` routed experts, `topk` per token."""

    layers: tuple[int, ...]
    experts: int
    topk: int

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)


class VersionRun(NamedTuple):
    """Rows `start` (inclusive) to `stop` (exclusive) were computed by weights of `version`."""

    version: int
    start: int
    stop: int


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    layers: tuple[int, ...]
    experts: int
    topk: int
    rows: int
    tokens_hash: int
    versions: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Trace:
    """Routes of one sequence.

    Attributes:
        ids: uint8|uint16[row, moe_layer, k] expert numbers; the order within k carries no meaning.
        layout: the model it fits.
        tokens_hash: `hash_tokens` of the input tokens of all rows, in order.
        versions: runs of rows by weight version, ascending, without gaps.
    """

    ids: np.ndarray
    layout: Layout
    tokens_hash: int
    versions: tuple[VersionRun, ...]

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    def check(self) -> "Trace":
        """Return self if every invariant holds.

        Raises:
            TraceError: naming the first violated invariant, what was expected and what came.
        """
        expected = (self.rows, len(self.layout.layers), self.layout.topk)
        if self.ids.shape != expected:
            raise TraceError(f"trace ids have shape {self.ids.shape}, expected [row, moe_layer, k] = {expected}")
        if self.ids.dtype != self.layout.dtype:
            raise TraceError(f"trace ids are {self.ids.dtype}, expected {self.layout.dtype} for {self.layout.experts} experts")
        if problem := route_problem(self.ids, self.layout):
            raise TraceError(problem)
        ends = [0, *(run.stop for run in self.versions)]
        if [run.start for run in self.versions] != ends[:-1] or ends[-1] != self.rows or any(r.stop <= r.start for r in self.versions):
            raise TraceError(f"version runs {list(self.versions)} do not cover rows 0..{self.rows} once, in order")
        return self

    def check_tokens(self, tokens: np.ndarray) -> "Trace":
        """Return self if the rows belong to `tokens` (int[n], n = rows + 1: the last token has no row).

        Raises:
            TraceError: other length or other tokens.
        """
        if len(tokens) != self.rows + 1:
            raise TraceError(f"a trace of {self.rows} rows belongs to {self.rows + 1} tokens, got {len(tokens)}")
        if (found := hash_tokens(tokens[:-1])) != self.tokens_hash:
            raise TraceError(
                f"the trace belongs to other tokens: its token hash is {self.tokens_hash:016x}, these tokens have {found:016x}; "
                "was the rollout tokenized again, or paired with another sample?"
            )
        return self

    def check_layout(self, layout: Layout) -> "Trace":
        """Return self if it was recorded from a model with `layout`.

        Raises:
            TraceError: other layers, experts or top-k.
        """
        if self.layout != layout:
            raise TraceError(
                f"the trace was recorded from another model: it has {describe(self.layout)}, this model has {describe(layout)}"
            )
        return self

    def to_bytes(self) -> bytes:
        """Serialise: magic, header length, header, raw ids, xxh3 of all that."""
        header = msgspec.msgpack.encode(
            _Header(*self.layout, rows=self.rows, tokens_hash=self.tokens_hash, versions=tuple(tuple(v) for v in self.versions))
        )
        body = b"".join((MAGIC, len(header).to_bytes(4, "little"), header, np.ascontiguousarray(self.ids).tobytes()))
        return body + xxhash.xxh3_64_digest(body)

    @classmethod
    def from_bytes(cls, record: bytes) -> "Trace":
        """Parse and verify a record; every size is bounded before anything is allocated.

        Raises:
            TraceError: not a trace, cut short, or damaged.
        """
        start = len(MAGIC) + 4
        if len(record) < start + 8 or record[: len(MAGIC)] != MAGIC:
            raise TraceError(f"not a trace record: expected it to begin with {MAGIC!r}, got {bytes(record[:14])!r} of {len(record)} bytes")
        if xxhash.xxh3_64_digest(record[:-8]) != record[-8:]:
            raise TraceError("the trace record is damaged: its checksum does not match; read it again from its source")
        size = int.from_bytes(record[len(MAGIC) : start], "little")
        if size > min(_MAX_HEADER_BYTES, len(record) - start - 8):
            raise TraceError(f"the trace record claims a header of {size} bytes in a record of {len(record)}")
        try:
            header = msgspec.msgpack.decode(record[start : start + size], type=_Header)
        except msgspec.MsgspecError as error:
            raise TraceError(f"the trace record's header cannot be read: {error}") from error
        layout = Layout(header.layers, header.experts, header.topk)
        shape = (header.rows, len(header.layers), header.topk)
        payload = record[start + size : -8]
        if min(shape) < 0 or int(np.prod(shape, dtype=object)) * layout.dtype.itemsize != len(payload):
            raise TraceError(f"the trace record holds {len(payload)} bytes of routes, but its header says {layout.dtype} {shape}")
        ids = np.frombuffer(payload, dtype=layout.dtype).reshape(shape)
        return cls(ids, layout, header.tokens_hash, tuple(VersionRun(*run) for run in header.versions)).check()


def hash_tokens(tokens: np.ndarray) -> int:
    """xxh3 of token ids (any integer dtype, hashed as int64 little-endian)."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, dtype="<i8").tobytes())


def route_problem(ids: np.ndarray, layout: Layout) -> str | None:
    """What is wrong with integer routes `ids[row, moe_layer, k]`, as a sentence with the likely cause; None if nothing."""
    if ids.size == 0:
        return None
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= layout.experts:
        row, layer, _ = np.argwhere((ids < 0) | (ids >= layout.experts))[0]
        return (
            f"expert ids must lie in 0..{layout.experts - 1}, got {low}..{high} (first at row {row}, layer {layout.layers[layer]}); "
            "is the engine serving another model?"
        )
    if layout.topk > 1:
        ordered = np.sort(ids, axis=-1)
        duplicate = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
        zero = (ids == 0).all(axis=-1)
        if zero.any():
            empty = [layout.layers[i] for i in np.flatnonzero(zero.all(axis=0))]
            if empty:
                return (
                    f"all rows of layers {_ranges(empty)} are zero: the engine recorded nothing there; pipeline-parallel SGLang does not "
                    "return routes of later stages, and fused top-k kernels return before they are captured"
                )
            rows = np.flatnonzero(zero.any(axis=1))
            return f"{len(rows)} rows are all zero (first: row {rows[0]}): routes of these tokens were lost, as after an abort while queued"
        if duplicate.any():
            row, layer = np.argwhere(duplicate)[0]
            return f"experts within a row must be distinct, got {ids[row, layer].tolist()} at row {row}, layer {layout.layers[layer]}"
    return None


def describe(layout: Layout) -> str:
    return f"MoE layers {_ranges(list(layout.layers))}, {layout.experts} experts, top-{layout.topk}"


def _ranges(numbers: list[int]) -> str:
    """`[1, 2, 3, 7]` as "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in runs) or "none"
