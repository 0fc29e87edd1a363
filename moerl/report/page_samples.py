"""Samples to look into: a few of each of some steps, with the gap and the flips of every token, small enough to stand in the page.

    RUN/mismatch/step-*.parquet  --choose-->  {"steps": [{"step", "samples": [...]}], ...}

Steps are spread over the run. Of a step only the first rows are read, so that a large recording takes no longer than a small one; of
the samples there, those that are off most are taken, and the one in the middle.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moerl.report import capture
from moerl.report.text import decoder
from moerl.routing.compare import differing

MOST_STEPS = 24
MOST_SAMPLES = 6
"""Per step."""
MOST_TOKENS = 4000
"""Of all samples together; each brings up to 200 bytes into the page."""
MOST_TOKENS_OF_ONE = 400
MOST_LAYERS = 8
"""Per token, of those that flip."""

Texts = Callable[[Sequence[int]], list[str]]


def choose(run: Path) -> dict[str, Any] | None:
    """Samples of a run folder, or of its folder of recordings, as the page's script reads them; None if nothing is recorded.

    Returns:
        {"layers": MoE layers, "steps": [{"step", "samples": [sample]}]}. A sample has prompt, sample, reward, version, length (tokens),
        flipped_share (of its rows), natural and replay (mean |d|), largest, before and after (tokens left out at both ends), and one
        entry per token that is shown in tokens (text), response, positions, engine (logprob), gap and replayed (d), flips (how many layers
        flip), layers (the first of them) and margins (theirs). All but the text are of the row that predicts the token, so the very
        first token has none.
    """
    steps = capture.list_steps(run / capture.FOLDER) or capture.list_steps(run)
    if not steps:
        return None
    names = list(steps)
    wanted = sorted({names[round(at)] for at in np.linspace(0, len(names) - 1, min(MOST_STEPS, len(names)))})
    found, meta = [], capture.read_meta(steps[wanted[-1]])
    for step in wanted:
        samples = _of_step(steps[step], MOST_TOKENS // len(wanted))
        if samples:
            found.append({"step": step, "samples": samples})
    return {"layers": list(meta.layers), "steps": found} if found else None


def _of_step(path: Path, most_tokens: int) -> list[dict[str, Any]]:
    """The samples of a step to show, the worst first."""
    meta = capture.read_meta(path)
    rows = next(capture.read(path), None)
    if rows is None or not len(rows):
        return []
    texts = texts_of(meta.model, path.parent.parent)
    starts, ends = _bounds(rows)
    gaps = np.abs(_shown(rows))
    means = np.array([_mean(gaps[a:b]) for a, b in zip(starts, ends, strict=True)], np.float64)  # None becomes NaN
    order = np.argsort(-np.nan_to_num(means, nan=-1.0), kind="stable")
    middle = order[len(order) // 2]
    chosen, left = [], most_tokens
    for index in dict.fromkeys([*order[: MOST_SAMPLES - 1].tolist(), int(middle)]):
        part = rows.take(slice(starts[index], ends[index]))
        length = min(len(part) + 1, MOST_TOKENS_OF_ONE, max(100, most_tokens // 3))  # so that there are several
        if chosen and length > left:
            continue
        left -= length
        chosen.append(_sample(part, meta, texts, length))
    return chosen


def _bounds(rows: capture.Rows) -> tuple[np.ndarray, np.ndarray]:
    """Where samples start and end. A last one that may go on in the next row group is left out."""
    follows = (np.diff(rows.prompt_id) == 0) & (np.diff(rows.sample) == 0) & (np.diff(rows.position) > 0)
    starts = np.flatnonzero(np.r_[True, ~follows])
    ends = np.r_[starts[1:], len(rows)]
    if len(rows) == capture.ROW_GROUP and len(starts) > 1:
        return starts[:-1], ends[:-1]
    return starts, ends


def _shown(rows: capture.Rows) -> np.ndarray:
    """The gap that the page shades: the natural one, or where that was not measured the one under replay."""
    natural = rows.differences("natural")
    return natural if np.isfinite(natural).any() else rows.differences("replay")


def _sample(rows: capture.Rows, meta: capture.Meta, texts: Texts, length: int) -> dict[str, Any]:
    """One sample, of which `length` tokens around the worst one are shown."""
    shown = _shown(rows)
    flipped = None if rows.trainer_ids is None else differing(rows.engine_ids, rows.trainer_ids)
    tokens = [int(rows.token[0]), *rows.next_token.tolist()]
    known = np.abs(shown)[np.isfinite(shown)]
    worst = int(np.nanargmax(np.abs(shown))) + 1 if len(known) else 0
    first = max(0, min(worst - length // 2, len(tokens) - length))
    columns = {
        "response": [0, *rows.response.astype(int).tolist()],
        "positions": [int(rows.position[0]), *(rows.position + 1).tolist()],
        "engine": _rounded([np.nan, *rows.engine_logprob]),
        "gap": _rounded([np.nan, *shown]),
        "replayed": _rounded([np.nan, *rows.differences("replay")]),
        "flips": [None, *([None] * len(rows) if flipped is None else flipped.sum(axis=1).tolist())],
        "layers": [None, *_layers(meta, flipped, len(rows))],
        "margins": [None, *_margins(rows, flipped)],
    }
    return {
        "prompt": int(rows.prompt_id[0]),
        "sample": int(rows.sample[0]),
        "reward": float(rows.reward[0]),
        "version": None if rows.version[-1] < 0 else int(rows.version[-1]),
        "length": len(tokens),
        "flipped_share": None if flipped is None else float(flipped.any(axis=1).mean()),
        "natural": _mean(np.abs(rows.differences("natural"))),
        "replay": _mean(np.abs(rows.differences("replay"))),
        "largest": float(known.max()) if len(known) else None,
        "before": first,
        "after": len(tokens) - first - length,
        "tokens": texts(tokens[first : first + length]),
        **{name: column[first : first + length] for name, column in columns.items()},
    }


def _layers(meta: capture.Meta, flipped: np.ndarray | None, rows: int) -> list[list[int] | None]:
    """The first layers that flip in each row."""
    layers = np.array(meta.layers)
    return [None] * rows if flipped is None else [layers[flips][:MOST_LAYERS].tolist() for flips in flipped]


def _margins(rows: capture.Rows, flipped: np.ndarray | None) -> list[list[float | None] | None]:
    """The margins of each row's flips."""
    if flipped is None or rows.margin is None:
        return [None] * len(rows)
    return [_rounded(margin[flips][:MOST_LAYERS], 2) for margin, flips in zip(rows.margin.astype(np.float64), flipped, strict=True)]


def texts_of(model: str, run: Path) -> Texts:
    """Token ids -> a text each, by the tokenizer in the model's folder or the run's; where there is none, their numbers."""
    decode = decoder(model, run)
    if decode is None:
        return lambda ids: [f"⟨{one}⟩" for one in ids]

    def texts(ids: Sequence[int]) -> list[str]:
        # Beside the token before it, because alone a token may lose its leading space.
        found = [decode(ids[:1])]
        for before, one in itertools.pairwise(ids):
            head, both = decode([before]), decode([before, one])
            found.append(both.removeprefix(head) if both.startswith(head) else decode([one]))
        return found

    return texts


def _mean(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _rounded(values: Iterable[float], digits: int = 3) -> list[float | None]:
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values]
