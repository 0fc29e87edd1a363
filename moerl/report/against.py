"""Two recordings of the same tokens, row by row: two engines, two precisions, two dispatchers, two versions of the weights.

Rows are joined by (prompt_id, sample, position, token) within a step; what only one has is counted. The first recording's ids then
stand where the engine's do, the second's where the trainer's do, so every figure of the report reads as "from A to B".

    side "engine":  A.engine_ids,  A.engine_logprob   against   B.engine_ids,  B.engine_logprob     (two engines)
    side "trainer": A.trainer_ids, A.natural_logprob  against   B.trainer_ids, B.natural_logprob    (two trainers, with margins)

A's rows stream; of B one step is held.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moerl.errors import ReportError
from moerl.report import capture
from moerl.report.capture import Meta, Rows
from moerl.report.chunk import ROWS
from moerl.report.cost import add_texts
from moerl.report.stats import finite
from moerl.report.summary import Analysis, recordings
from moerl.report.text import decoder
from moerl.routing.compare import common

Side = Literal["engine", "trainer"]
_KEY = ("prompt_id", "sample", "position")


@dataclass
class Joined:
    """What the join found: rows of both, rows of one only, rows whose token differs, and how far margins are apart.

    Attributes:
        moved: count, sum and sum of squares of the differences of margins, where both sides chose the same experts.
    """

    common_rows: int = 0
    only_a: int = 0
    only_b: int = 0
    other_token: int = 0
    moved: np.ndarray = field(default_factory=lambda: np.zeros(3))


def report_against(a: str | Path, b: str | Path, side: Side = "engine") -> dict[str, Any]:
    """The report of run folder `a` against `b`, with texts where a's tokenizer is at hand.

    Raises:
        ReportError: nothing in common, other layouts, or a side that was not recorded.
    """
    pairs = _pairs(recordings(a), recordings(b), a, b)
    metas = [capture.read_meta(path) for path, _ in pairs]
    _compare(metas[0], capture.read_meta(pairs[0][1]), a, b)
    analysis, joined = Analysis([_meta(meta) for meta in metas]), Joined()
    for meta, (first, second) in zip(analysis.metas, pairs, strict=True):
        analysis.add_step(meta, join(first, second, side, joined), _biases(first, second, side))
    if not joined.common_rows:
        raise ReportError(
            f"{a} and {b} have no row in common: of {joined.only_a + joined.other_token} and {joined.only_b} rows none agrees in "
            f"prompt_id, sample, position and token ({joined.other_token} differ in the token only). Record both on the same tokens"
        )
    report = analysis.result(f"{a} against {b}", kind="against", sides=(f"{a} ({side})", f"{b} ({side})"))
    report["against"] = {
        "a": str(a),
        "b": str(b),
        "side": side,
        **{name: getattr(joined, name) for name in ("common_rows", "only_a", "only_b", "other_token")},
        "score_error": _spread(joined.moved),
    }
    add_texts(report["cost"], {meta.step: first for meta, (first, _) in zip(metas, pairs, strict=True)}, decoder(metas[0].model, a))
    return report


def join(first: Path, second: Path, side: Side, joined: Joined) -> Iterator[Rows]:
    """Common rows of two recordings, A's in the engine's place and B's in the trainer's; counts the others in `joined`."""
    other = capture.concatenate(capture.read(second))
    keys = _keys(other)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    used = 0
    for rows in capture.read(first, ROWS):
        wanted = _keys(rows)
        place = np.minimum(np.searchsorted(ordered, wanted), max(0, len(ordered) - 1))
        found = ordered[place] == wanted if len(ordered) else np.zeros(len(wanted), bool)
        theirs = order[place] if len(ordered) else place
        same = found.copy()
        same[found] = other.token[theirs[found]] == rows.token[found]
        joined.common_rows += int(same.sum())
        joined.only_a += int((~found).sum())
        joined.other_token += int((found & ~same).sum())
        used += int(found.sum())
        if same.any():
            yield _pair(rows.take(same), other.take(theirs[same]), side, joined, (first, second))
    joined.only_b += len(other) - used


def _keys(rows: Rows) -> np.ndarray:
    """One sortable value per row."""
    keys = np.empty(len(rows), [(name, np.int64) for name in _KEY])
    for name in _KEY:
        keys[name] = getattr(rows, name)
    return keys


def _pair(a: Rows, b: Rows, side: Side, joined: Joined, paths: tuple[Path, Path]) -> Rows:
    ids = [getattr(rows, f"{side}_ids") for rows in (a, b)]
    for found, path in zip(ids, paths, strict=True):
        if found is None:
            raise ReportError(f"{path} holds no ids of a trainer; compare its engine's with --side engine")
    logprobs = [rows.engine_logprob if side == "engine" else rows.natural_logprob for rows in (a, b)]
    after = a.next_token == b.next_token  # the last common token may be followed by another
    nothing = np.full(len(a), np.nan, np.float32)
    margins = side == "trainer" and a.margin is not None and b.margin is not None
    if margins:
        same = common(ids[0], ids[1]) == ids[0].shape[2]
        apart = (a.margin.astype(np.float64) - b.margin)[same]
        joined.moved += len(apart), apart.sum(), (apart**2).sum()
    return replace(
        a,
        response=a.response & b.response & after,
        engine_logprob=logprobs[0],
        natural_logprob=logprobs[1],
        r2_logprob=nothing,
        replay_logprob=nothing,
        engine_ids=ids[0],
        trainer_ids=ids[1],
        margin=b.margin if margins else None,
        flipped_mass=None,
    )


def _spread(moved: np.ndarray) -> float | None:
    """Standard deviation of the differences of margins: the error of a difference of scores, measured."""
    count, total, squares = moved
    return finite(np.sqrt(max(0.0, squares / count - (total / count) ** 2))) if count > 1 else None


def _meta(meta: Meta) -> Meta:
    """A's, without what would be said of a trainer: there is none between two engines."""
    return replace(meta, trainer_version=-1, router_dtype="")


def _biases(first: Path, second: Path, side: Side) -> dict[str, np.ndarray]:
    name = f"{side}_bias"
    found = [capture.read_biases(path) for path in (first, second)]
    return {"engine_bias": found[0][name], "trainer_bias": found[1][name]} if all(name in one for one in found) else {}


def _pairs(a: dict[int, Path], b: dict[int, Path], run_a: str | Path, run_b: str | Path) -> list[tuple[Path, Path]]:
    """Recordings of the same step; where each has one step only, these."""
    steps = sorted(set(a) & set(b))
    if steps:
        return [(a[step], b[step]) for step in steps]
    if len(a) == len(b) == 1:
        return [(*a.values(), *b.values())]
    raise ReportError(f"{run_a} and {run_b} have no step in common: {_steps(a)} and {_steps(b)}")


def _steps(files: dict[int, Path]) -> str:
    return "steps " + ", ".join(map(str, list(files)[:10])) + (" …" if len(files) > 10 else "")


def _compare(a: Meta, b: Meta, run_a: str | Path, run_b: str | Path) -> None:
    differ = [
        f"{name}: {getattr(a, name)} in {run_a}, {getattr(b, name)} in {run_b}"
        for name in ("layers", "experts", "topk")
        if getattr(a, name) != getattr(b, name)
    ]
    if differ:
        raise ReportError("the recordings are of different models" + "".join(f"\n  - {one}" for one in differ))
