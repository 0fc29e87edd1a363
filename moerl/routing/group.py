"""One record for all samples of a prompt, with the prompt's rows stored once.

    traces of a group --pack_group--> bytes --unpack_group--> the same traces

What is shared is found in the data, not assumed: a prompt's row is stored once for every sample whose routes equal it, and by
itself for the others, as when an engine computed the prompt twice in other company and a near tie fell otherwise. So sharing is
lossless whatever the samples are; wrong advice about the prompt's length costs bytes only.

    rows of the record:  common rows of the prompt | own rows of sample 0 | own rows of sample 1 | …
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from moerl.errors import TraceError
from moerl.routing import codec as codecs
from moerl.routing import record as records
from moerl.routing.codec import Codec, CodecName
from moerl.routing.layout import Layout, VersionRun
from moerl.routing.trace import MAGIC as TRACE_MAGIC
from moerl.routing.trace import Trace
from moerl.routing.validate import route_problem

MAGIC = b"moerl-group-1\n"
_NAME = "group record"

Runs = tuple[tuple[int, int], ...]


class _Part(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One sample. `own` are runs of rows below the common ones that are stored by the sample itself."""

    rows: int
    start: int
    missing: Runs
    own: Runs
    tokens_hash: int
    versions: tuple[VersionRun, ...]


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    layers: tuple[int, ...]
    experts: int
    topk: int
    codec: Codec
    common: int
    common_missing: Runs
    samples: tuple[_Part, ...]


def pack_group(traces: Sequence[Trace], prompt_rows: int, codec: CodecName | Codec = "narrow", *, keep_order: bool = False) -> bytes:
    """One record of traces that begin with the same prompt.

    Args:
        traces: of one layout, at least one.
        prompt_rows: rows that may be alike, counted from each trace's first.
        codec, keep_order: as in `Trace.to_bytes`.

    Raises:
        TraceError: no traces, or of several models.
    """
    if not traces:
        raise TraceError("expected at least one trace in a group")
    layout = traces[0].layout
    for trace in traces:
        trace.check_layout(layout)
    wanted = codec if isinstance(codec, Codec) else Codec(codec, keep_order)
    common, filled = _common_rows(traces, min(prompt_rows, *(trace.rows for trace in traces)) if prompt_rows > 0 else 0)
    parts, blocks = [], [common[filled]]
    for trace in traces:
        recorded = np.ones(trace.rows, bool) if trace.valid is None else trace.valid
        equal = np.zeros(trace.rows, bool)
        equal[: len(common)] = (trace.ids[: len(common)] == common).all(axis=(1, 2)) & filled
        own = recorded & ~equal
        own[len(common) :] = recorded[len(common) :]
        blocks.append(trace.ids[own])
        runs = records.missing_runs(~own[: len(common)])
        parts.append(_Part(trace.rows, trace.start, records.missing_runs(trace.valid), runs, trace.tokens_hash, trace.versions))
    rows, used = codecs.encode(np.concatenate(blocks), layout.experts, wanted)
    return records.seal(MAGIC, _Header(*layout, used, len(common), records.missing_runs(filled), tuple(parts)), rows)


def unpack_group(record: bytes) -> list[Trace]:
    """The traces of a record, checked.

    Raises:
        TraceError: not such a record, cut short, damaged, or of routes that cannot be.
    """
    header, payload = records.open_record(record, MAGIC, _Header, _NAME)
    layout = Layout(header.layers, header.experts, header.topk)
    filled = header.common - records.count_missing(header.common_missing, header.common, _NAME)
    total = _plausible_rows(header)
    masks = [_own_rows(part, header.common) for part in header.samples]
    counts = [int(own.sum()) for own, _ in masks]
    stored = records.decode_rows(payload, total, filled + sum(counts), layout, header.codec, _NAME)
    if header.codec.name != "set" and (problem := route_problem(stored, layout)):
        raise TraceError(f"{_NAME}: {problem}")
    common, _ = records.spread_rows(stored[:filled], header.common, header.common_missing)
    traces, at = [], filled
    for part, (own, valid), count in zip(header.samples, masks, counts, strict=True):
        ids = np.zeros((part.rows, *stored.shape[1:]), stored.dtype)
        ids[: header.common] = common
        ids[own] = stored[at : at + count]
        at += count
        if part.missing:
            ids[~valid] = 0
        trace = Trace(ids, layout, part.tokens_hash, part.versions, part.start, valid if part.missing else None)
        trace.check_frame()
        traces.append(trace)
    return traces


class _CodecOnly(msgspec.Struct):
    codec: Codec


def codec_of(record: bytes) -> Codec:
    """How the routes of a trace or group record are written.

    Raises:
        TraceError: neither of both, or damaged.
    """
    magic = MAGIC if record[: len(MAGIC)] == MAGIC else TRACE_MAGIC
    return records.open_record(record, magic, _CodecOnly, _NAME if magic is MAGIC else "trace record")[0].codec


def _common_rows(traces: Sequence[Trace], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids[rows, layer, k], bool[rows] False where no sample has routes) of the first sample that has them."""
    common, filled = traces[0].ids[:rows].copy(), np.zeros(rows, bool)
    for trace in traces:
        recorded = np.ones(rows, bool) if trace.valid is None else trace.valid[:rows]
        new = recorded & ~filled
        common[new] = trace.ids[:rows][new]
        filled |= recorded
        if filled.all():
            break
    return common, filled


def _plausible_rows(header: _Header) -> int:
    """All rows of a group; raises if their numbers cannot be, before anything of that size is made."""
    total = header.common + sum(part.rows for part in header.samples)
    if total > records.MAX_ROWS or not all(0 <= header.common <= part.rows for part in header.samples):
        raise TraceError(f"the {_NAME} claims {header.common} common rows and {total} in all; at most {records.MAX_ROWS} are read")
    for part in header.samples:
        records.count_missing(part.missing, part.rows, _NAME)
        records.count_missing(part.own, header.common, _NAME)
    return total


def _own_rows(part: _Part, common: int) -> tuple[np.ndarray, np.ndarray]:
    """(bool[rows] stored by the sample itself, bool[rows] with routes)."""
    valid, own = np.ones(part.rows, bool), np.zeros(part.rows, bool)
    for start, stop in part.missing:
        valid[start:stop] = False
    own[common:] = valid[common:]
    for start, stop in part.own:
        own[start:stop] = True
    return own, valid
