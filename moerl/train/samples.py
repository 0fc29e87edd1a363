"""From scored samples to sequences, with routes that can be trusted: those that are missing or refused are dealt with here.

group --rewards, advantages--> sample --trace verified against tokens, model and versions--> Sequence, and a count of every row's fate
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from moerl.buffer.lag import token_lags
from moerl.config.schema import Replay
from moerl.errors import TraceError, TrainError
from moerl.rollout.mask import place
from moerl.rollout.sample import Group, Sample
from moerl.routing.layout import Layout
from moerl.routing.trace import Trace
from moerl.train.batch import Sequence
from moerl.train.objective import overlong_penalty, uniform_share

log = logging.getLogger(__name__)


def sequences(
    groups: Iterable[Group],
    layout: Layout,
    advantages: Callable[[np.ndarray], np.ndarray],
    replay: Replay,
    *,
    needed: bool = True,
    version: int | None = None,
    max_lag: int | None = None,
) -> tuple[list[Sequence], dict[str, float]]:
    """One `Sequence` per sample, in order; the trace of each is verified against its tokens and the model.

    Args:
        advantages: rewards float32[g] of one group -> advantages float32[g].
        replay: what to do where routes are missing.
        needed: whether some pass replays the engine's routes; if not, missing ones are no one's loss.
        version: of the weights that will be trained; rows older than `replay.max_row_lag` are refused.
        max_lag: tokens that were sampled more versions ago are not trained; None trains all.

    Returns:
        (sequences, shares of all rows: missing_routes_share, refused_routes_share; of the response tokens: masked_share). Where the
        version is given, the column `lag` says how many versions ago each response token was sampled.

    Raises:
        RolloutError: a sampling mask that is not that of its tokens.
        TraceError: routes of another model, or (with `replay.missing = "error"`) a trace that does not belong to its tokens.
        TrainError: rows without routes, with `replay.missing = "error"`.
    """
    replay = replay if needed else replay.model_copy(update={"missing": "native"})
    result, fate = [], Counter()
    for group in groups:
        rewards = np.array([sample.reward for sample in group.samples], np.float32)
        for sample, advantage in zip(group.samples, advantages(rewards), strict=True):
            result.append(_sequence(sample, layout, float(advantage), replay, version, max_lag, fate))
    rows, tokens = max(1, fate["rows"]), max(1, fate["tokens"])
    return result, {
        "missing_routes_share": fate["missing"] / rows,
        "refused_routes_share": fate["refused"] / rows,
        "masked_share": fate["masked"] / tokens,
    }


def punish_overlong(groups: list[Group], limit_tokens: int, margin_tokens: int) -> tuple[list[Group], dict[str, float]]:
    """The groups with the rewards of completions lowered that come within `margin_tokens` of `limit_tokens`, the most there may be.

    Returns:
        (groups; the given ones keep their rewards, overlong_penalty: mean change of a reward, and uniform_shaped_share: share of the
        groups whose rewards are then all the same). With a margin of 0, the given groups and no figures.
    """
    if not margin_tokens:
        return groups, {}
    penalties = [
        overlong_penalty(np.array([len(sample.response_tokens) for sample in group.samples]), limit_tokens, margin_tokens)
        for group in groups
    ]
    shaped = []
    for group, changes in zip(groups, penalties, strict=True):
        samples = [
            msgspec.structs.replace(sample, reward=sample.reward + float(change))
            for sample, change in zip(group.samples, changes, strict=True)
        ]
        shaped.append(msgspec.structs.replace(group, samples=samples))
    uniform = uniform_share(np.array([sample.reward for sample in group.samples]) for group in shaped)
    return shaped, {"overlong_penalty": float(np.concatenate(penalties).mean()), "uniform_shaped_share": uniform}


def _sequence(
    sample: Sample, layout: Layout, advantage: float, replay: Replay, version: int | None, max_lag: int | None, fate: Counter
) -> Sequence:
    tokens, first = sample.tokens, len(sample.prompt_tokens) - 1
    rows = len(tokens) - 1
    mask, engine, lag = (np.zeros(rows, np.float32) for _ in range(3))
    mask[first:], engine[first:] = 1.0, sample.logprob_array
    routes, recorded = _routes(sample, layout, replay, version, fate)
    if version is not None:
        lag[first:] = token_lags(sample.versions, version)
    if max_lag is not None:
        mask[lag > max_lag] = 0.0
    if replay.missing == "mask":
        mask[~recorded] = 0.0
    fate.update(rows=rows, tokens=rows - first, masked=int(rows - first - mask.sum()))
    columns = {"advantages": mask * advantage, "engine_logprobs": engine, "lag": lag}
    kept = place(sample.load_mask(), first, rows) if sample.mask else None
    return Sequence(tokens, mask, routes, columns, None if recorded.all() else recorded, kept)


def _routes(sample: Sample, layout: Layout, replay: Replay, version: int | None, fate: Counter) -> tuple[np.ndarray, np.ndarray]:
    """(ids uint8|uint16[row, moe_layer, k], bool[row] True where they are to be replayed)."""
    rows, name = len(sample.tokens) - 1, f"sample {sample.index} of prompt {sample.prompt_id}"
    trace = _trace(sample, name, layout, replay)
    if trace is None:
        fate["refused" if sample.trace else "missing"] += rows
        return np.zeros((rows, len(layout.layers), layout.topk), layout.dtype), np.zeros(rows, bool)
    recorded = np.ones(rows, bool) if trace.valid is None else trace.valid.copy()
    fate["missing"] += int((~recorded).sum())
    stale = _stale_rows(trace, replay, version)
    fate["refused"] += int((recorded & stale).sum())
    recorded &= ~stale
    if replay.missing == "error" and not recorded.all():
        gone = np.flatnonzero(~recorded)
        raise TrainError(
            f"{name}: {len(gone)} of {rows} rows have no routes that may be replayed ({int(stale.sum())} of them by replay.max_row_lag; "
            f"first: row {gone[0]}); set replay.missing to 'mask' or 'native' to train without them"
        )
    return trace.ids, recorded


def _trace(sample: Sample, name: str, layout: Layout, replay: Replay) -> Trace | None:
    """The sample's trace, or None where there is none to trust."""
    if not sample.trace:
        if replay.missing == "error":
            raise TrainError(f"{name} carries no routes; record them, or set replay.missing to 'native' or 'mask' to train without")
        return None
    try:
        trace = sample.load_trace()
    except TraceError as error:
        if replay.missing == "error":
            raise
        log.warning("the routes of %s are refused: %s", name, error)
        return None
    return trace.check_layout(layout)


def _stale_rows(trace: Trace, replay: Replay, version: int | None) -> np.ndarray:
    """bool[row]: recorded by weights that are too old."""
    stale = np.zeros(trace.rows, bool)
    if replay.max_row_lag is not None and version is not None:
        for run in trace.versions:
            stale[run.start : run.stop] = version - run.version > replay.max_row_lag
    return stale
