"""`Trace`: which experts every token chose, as a record that can prove what it belongs to.

Row *i* is the routing used when token *i* was the input, so *n* tokens that were sampled one after another leave *n - 1*
rows: the last sampled token was never an input. Only MoE layers are stored; `layers` names them.

    engine reply --check--> Trace --to_bytes--> Ray, disk --from_bytes--> Trace --> replay, comparison
                              |  slice, select_layers, append, without, padded

Tokens are proved by a sum over the rows (see `tokens`): the hash of two parts that follow one another is the sum of theirs.
Cutting needs the tokens, and checks them first, so that a slice is as well proved as what it was cut from.

Invariants (checked by `Trace.check`): ids are in range and distinct within a row and layer; the version runs cover all
rows once, in order; rows without routes are zero. `from_bytes` verifies a checksum over everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from moerl.errors import TraceError
from moerl.routing import codec as codecs
from moerl.routing import record as records
from moerl.routing.codec import Codec, CodecName
from moerl.routing.layout import Layout, VersionRun, cut_runs, describe, filler_routes, join_runs
from moerl.routing.tokens import MODULUS, hash_tokens
from moerl.routing.validate import route_problem, shape_problem, version_problem

if TYPE_CHECKING:
    import torch

__all__ = ["Codec", "Layout", "Trace", "VersionRun", "describe", "filler_routes", "hash_tokens", "join", "route_problem"]

MAGIC = b"moerl-trace-1\n"


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    layers: tuple[int, ...]
    experts: int
    topk: int
    start: int
    rows: int
    missing: tuple[tuple[int, int], ...]
    tokens_hash: int
    versions: tuple[VersionRun, ...]
    codec: Codec


@dataclass(frozen=True, eq=False)
class Trace:
    """Routes of one sequence, or of some rows of it.

    Attributes:
        ids: uint8|uint16[row, moe_layer, k] expert numbers; the order within k carries no meaning.
        layout: the model it fits.
        tokens_hash: `hash_tokens` of the input tokens of all rows, at their places.
        versions: runs of rows by weight version, counted from this trace's first row, ascending, without gaps.
        start: place in the sequence of the first row.
        valid: bool[row], False where routes are missing or were refused (their ids are zero); None if no row is.
    """

    ids: np.ndarray
    layout: Layout
    tokens_hash: int
    versions: tuple[VersionRun, ...]
    start: int = 0
    valid: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    @classmethod
    def of(cls, ids: np.ndarray, layout: Layout, inputs: np.ndarray, versions: Sequence[VersionRun], start: int = 0) -> "Trace":
        """A checked trace of routes of any integer type, narrowed only after their range is known.

        Args:
            ids: integer[row, moe_layer, k].
            inputs: int[row], the input token of each row.

        Raises:
            TraceError: what doesn't fit.
        """
        if problem := shape_problem(ids[:0].astype(layout.dtype), layout) or route_problem(ids, layout):
            raise TraceError(problem)
        if len(inputs) != len(ids):
            raise TraceError(f"{len(ids)} rows of routes belong to {len(ids)} input tokens, got {len(inputs)}")
        return cls(ids.astype(layout.dtype, copy=False), layout, hash_tokens(inputs, start), tuple(versions), start).check()

    def check(self) -> "Trace":
        """Return self if every invariant holds.

        Raises:
            TraceError: naming the first violated invariant, what was expected and what came.
        """
        self.check_frame()
        if self.valid is None:
            problem = route_problem(self.ids, self.layout, numbers=None if self.start == 0 else self.start + np.arange(self.rows))
        else:
            problem = route_problem(self.ids[self.valid], self.layout, numbers=self.start + np.flatnonzero(self.valid))
        if problem:
            raise TraceError(problem)
        return self

    def check_frame(self) -> None:
        """Check everything but the experts.

        Raises:
            TraceError: naming the first violated invariant.
        """
        problem = shape_problem(self.ids, self.layout) or version_problem(self.versions, self.rows)
        if problem is None and not 0 <= self.start <= self.start + self.rows <= records.MAX_ROWS:
            problem = f"rows {self.start}..{self.start + self.rows} cannot be; a trace lies within rows 0..{records.MAX_ROWS}"
        if problem is None and self.valid is not None:
            if self.valid.shape != (self.rows,) or self.valid.dtype != np.bool_:
                problem = f"validity is {self.valid.dtype}{list(self.valid.shape)}, expected bool[{self.rows}]"
            elif self.ids[~self.valid].any():
                problem = "rows without routes must be zero; use Trace.without to drop rows"
        if problem:
            raise TraceError(problem)

    def check_tokens(self, tokens: np.ndarray) -> "Trace":
        """Return self if it holds all rows of the sequence `tokens` (int[n], n = rows + 1: the last token has no row).

        Raises:
            TraceError: other length or other tokens.
        """
        if len(tokens) != self.rows + 1 or self.start:
            part = f" from row {self.start} on" if self.start else ""
            raise TraceError(f"a trace of {self.rows} rows{part} belongs to {self.rows + 1} tokens{part}, got {len(tokens)}")
        return self.check_inputs(tokens[:-1])

    def check_inputs(self, inputs: np.ndarray) -> "Trace":
        """Return self if its rows belong to `inputs` (int[row]: the input token of each row).

        Raises:
            TraceError: other length or other tokens.
        """
        if len(inputs) != self.rows:
            raise TraceError(f"a trace of {self.rows} rows has {self.rows} input tokens, got {len(inputs)}")
        if (found := hash_tokens(inputs, self.start)) != self.tokens_hash:
            raise TraceError(
                f"the trace belongs to other tokens: its token hash is {self.tokens_hash:016x}, these tokens have {found:016x}; "
                "was the rollout tokenized again, paired with another sample, or moved within its sequence?"
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

    def check_version(self, version: int) -> "Trace":
        """Return self if all its rows come from weights of one promised version.

        Raises:
            TraceError: the first rows of another version.
        """
        if other := [run for run in self.versions if run.version != version]:
            raise TraceError(
                f"all rows were promised from weight version {version}, but rows {self.start + other[0].start}.."
                f"{self.start + other[0].stop} ({len(other)} of {len(self.versions)} runs) come from version {other[0].version}; "
                "did a request live through an update?"
            )
        return self

    def check_complete(self) -> "Trace":
        """Return self if no row is without routes.

        Raises:
            TraceError: how many rows are, and the first.
        """
        if self.valid is not None and not self.valid.all():
            gone = np.flatnonzero(~self.valid)
            raise TraceError(f"{len(gone)} of {self.rows} rows have no routes (first: row {self.start + gone[0]}); they cannot be replayed")
        return self

    def slice(self, first: int, stop: int, inputs: np.ndarray) -> "Trace":
        """Rows `first` to `stop` of this trace; the ids are a view.

        Args:
            inputs: int[row] of this whole trace; they are checked before anything is cut.

        Raises:
            TraceError: other tokens, or rows that it doesn't have.
        """
        if not 0 <= first <= stop <= self.rows:
            raise TraceError(f"rows {first}..{stop} do not lie in a trace of {self.rows} rows")
        self.check_inputs(inputs)
        place = self.start + first
        valid = None if self.valid is None else self.valid[first:stop]
        runs = cut_runs(self.versions, first, stop)
        return Trace(self.ids[first:stop], self.layout, hash_tokens(inputs[first:stop], place), runs, place, valid)

    def select_layers(self, layers: Sequence[int]) -> "Trace":
        """The routes of some model layers, in ascending order; a view if they are neighbours here.

        Raises:
            TraceError: a layer that it doesn't have.
        """
        wanted = tuple(sorted(set(layers)))
        if strange := sorted(set(wanted) - set(self.layout.layers)):
            raise TraceError(f"layers {strange} are not in a trace of {describe(self.layout)}; dense layers have no routes")
        at = [self.layout.layers.index(layer) for layer in wanted]
        neighbours = at == list(range(at[0], at[0] + len(at))) if at else True
        ids = self.ids[:, at[0] if at else 0 : (at[-1] + 1) if at else 0] if neighbours else self.ids[:, at]
        return replace(self, ids=ids, layout=self.layout._replace(layers=wanted))

    def append(self, delta: "Trace") -> "Trace":
        """This trace and the rows that follow it: a new turn, or a request that was resumed.

        Raises:
            TraceError: the delta begins elsewhere than this trace ends, or fits another model.
        """
        delta.check_layout(self.layout)
        end = self.start + self.rows
        if delta.start != end:
            twice = delta.start < end
            why = (
                f"{end - delta.start} rows would come twice. Keep the old ones, whose logprobs came from the same pass, and ask for rows "
                f"from {end} on (routed_experts_start_len)"
                if twice
                else f"{delta.start - end} rows are missing between them"
            )
            raise TraceError(f"the delta begins at row {delta.start}, the trace ends before row {end}: {why}")
        valid = None
        if self.valid is not None or delta.valid is not None:
            valid = np.concatenate([_validity(self), _validity(delta)])
        return Trace(
            np.concatenate([self.ids, delta.ids]),
            self.layout,
            (self.tokens_hash + delta.tokens_hash) % MODULUS,
            join_runs(self.versions, self.rows, delta.versions),
            self.start,
            valid,
        )

    def without(self, rows: np.ndarray) -> "Trace":
        """The same rows, of which some (bool[row]) count as missing: their routes are zero and not replayed."""
        valid = _validity(self) & ~rows
        return replace(self, ids=np.where(valid[:, None, None], self.ids, self.ids.dtype.type(0)), valid=valid)

    def padded(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Routes for `rows` rows: padding behind the trace and rows without routes get distinct, balanced experts.

        Returns:
            (uint8|uint16[rows, moe_layer, k], bool[rows] True where the routes were recorded)

        Raises:
            TraceError: the trace is longer.
        """
        if rows < self.rows:
            raise TraceError(f"a trace of {self.rows} rows does not fit {rows}")
        ids, recorded = filler_routes(rows, self.layout), np.zeros(rows, bool)
        recorded[: self.rows] = _validity(self)
        ids[recorded] = self.ids[recorded[: self.rows]]
        return ids, recorded

    def to_torch(self) -> "torch.Tensor":
        """uint8|uint16[row, moe_layer, k] on the CPU, sharing memory with `ids`; not to be written to."""
        import warnings

        import torch

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")  # ids of a record are read-only
            return torch.from_numpy(self.ids)

    def to_bytes(self, codec: CodecName | Codec = "narrow", *, keep_order: bool = False) -> bytes:
        """One self-describing record; rows without routes take no bytes.

        Args:
            codec: a name, or a `Codec` with the model's group limit.
            keep_order: with a name: keep the slots' order (only "set" drops it).

        Raises:
            TraceError: "set" with routes that are no sets, or a codec that cannot hold this model.
        """
        wanted = codec if isinstance(codec, Codec) else Codec(codec, keep_order)
        codecs.row_bytes(self.layout.experts, self.layout.topk, len(self.layout.layers), wanted)
        ids = self.ids if self.valid is None else self.ids[self.valid]
        rows, used = codecs.encode(ids, self.layout.experts, wanted)
        header = _Header(
            *self.layout,
            start=self.start,
            rows=self.rows,
            missing=records.missing_runs(self.valid),
            tokens_hash=self.tokens_hash,
            versions=self.versions,
            codec=used,
        )
        return records.seal(MAGIC, header, rows)

    @classmethod
    def from_bytes(cls, record: bytes) -> "Trace":
        """Parse and verify a record; ids of the narrow codec are a view of it.

        Raises:
            TraceError: not a trace, cut short, damaged, or of routes that cannot be.
        """
        name = "trace record"
        header, payload = records.open_record(record, MAGIC, _Header, name)
        layout = Layout(header.layers, header.experts, header.topk)
        gone = records.count_missing(header.missing, header.rows, name)
        stored = records.decode_rows(payload, header.rows, header.rows - gone, layout, header.codec, name)
        ids, valid = records.spread_rows(stored, header.rows, header.missing)
        trace = cls(ids, layout, header.tokens_hash, header.versions, header.start, valid)
        if header.codec.name != "set":  # whose decoder yields nothing but valid sets
            return trace.check()
        trace.check_frame()
        return trace


def join(traces: Sequence[Trace]) -> Trace:
    """Traces that follow one another, as one.

    Raises:
        TraceError: none at all, or not in order without gaps.
    """
    if not traces:
        raise TraceError("expected at least one trace to join")
    whole = traces[0]
    for part in traces[1:]:
        whole = whole.append(part)
    return whole


def _validity(trace: Trace) -> np.ndarray:
    return np.ones(trace.rows, bool) if trace.valid is None else trace.valid
