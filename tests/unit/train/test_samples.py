"""What becomes of samples whose routes are missing, damaged, another sample's or too old, under each setting of `replay.missing`."""

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from moerl.config.schema import Replay
from moerl.errors import RolloutError, TraceError, TrainError
from moerl.rollout.mask import of_rows, to_bytes
from moerl.rollout.sample import Group, Sample
from moerl.routing.layout import Layout, VersionRun
from moerl.routing.trace import Trace
from moerl.train.batch import Sequence, pack
from moerl.train.samples import punish_overlong, sequences
from tests.unit.routing.routes import random_ids

LAYOUT = Layout((1, 2), 8, 2)
PROMPT, RESPONSE = [1, 5, 6, 7], [8, 9, 10, 2]
ROWS, FIRST = len(PROMPT) + len(RESPONSE) - 1, len(PROMPT) - 1
"""Rows of a sample, and the row that its first response token was sampled from."""

Change = Callable[[Trace], bytes]


def recorded(seed: int = 0, response: list[int] = RESPONSE) -> Trace:
    """Rows 0-4 come from version 3, the others from version 5."""
    inputs = np.array(PROMPT + response[:-1])
    runs = (VersionRun(3, 0, 5), VersionRun(5, 5, len(inputs)))
    return Trace.of(random_ids(seed, len(inputs), 2, LAYOUT.experts, LAYOUT.topk), LAYOUT, inputs, runs)


def group(*traces: bytes) -> Group:
    """One sample per record; the first has reward 1, the others 0."""
    logprobs = np.array([-0.5, -0.25, -1.0, -2.0], "<f4").tobytes()
    versions = [(3, 0, 2), (5, 2, 4)]
    samples = [
        Sample(7, i, PROMPT, RESPONSE, logprobs, trace, versions, "x", "stop", reward=float(i == 0)) for i, trace in enumerate(traces)
    ]
    return Group(7, "x", samples)


def convert(*traces: bytes, missing: str, layout: Layout = LAYOUT, needed: bool = True, **options) -> tuple[list[Sequence], dict]:
    lag = {"max_row_lag": options.pop("lag")} if "lag" in options else {}
    return sequences([group(*traces)], layout, lambda rewards: 1 + rewards, Replay(missing=missing, **lag), needed=needed, **options)


def damaged(trace: Trace) -> bytes:
    record = bytearray(trace.to_bytes())
    record[-3] ^= 1
    return bytes(record)


def without(*rows: int) -> Change:
    return lambda trace: trace.without(np.isin(np.arange(trace.rows), rows)).to_bytes()


def test_complete_routes_are_taken_whole_under_every_setting():
    for missing in ("error", "native", "mask"):
        (first, second), shares = convert(recorded().to_bytes(), recorded(1).to_bytes(), missing=missing)
        np.testing.assert_array_equal(first.routes, recorded().ids)
        np.testing.assert_array_equal(second.routes, recorded(1).ids)
        assert first.recorded is None
        assert first.tokens.tolist() == PROMPT + RESPONSE
        assert first.loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1]
        assert first.columns["advantages"].tolist() == [0, 0, 0, 2, 2, 2, 2]
        assert second.columns["advantages"].tolist() == [0, 0, 0, 1, 1, 1, 1]
        assert first.columns["engine_logprobs"].tolist() == [0, 0, 0, -0.5, -0.25, -1, -2]
        assert shares == {"missing_routes_share": 0, "refused_routes_share": 0, "masked_share": 0}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda trace: b"", TrainError, "sample 1 of prompt 7 carries no routes.*replay.missing"),
        (damaged, TraceError, "checksum|damaged"),
        (lambda trace: recorded(response=[8, 9, 11, 2]).to_bytes(), TraceError, "other tokens"),
        (lambda trace: trace.to_bytes()[:-9], TraceError, "cut short|bytes"),
        (without(1, 4), TrainError, r"sample 1 of prompt 7: 2 of 7 rows have no routes.*first: row 1\).*'mask' or 'native'"),
    ],
    ids=["none", "damaged", "other_tokens", "cut_short", "some_rows"],
)
def test_error_ends_the_run(change: Change, error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        convert(recorded().to_bytes(), change(recorded()), missing="error")


WHOLE = [
    pytest.param(lambda trace: b"", "missing_routes_share", id="none"),
    pytest.param(damaged, "refused_routes_share", id="damaged"),
    pytest.param(lambda trace: recorded(response=[8, 9, 11, 2]).to_bytes(), "refused_routes_share", id="other_tokens"),
]


@pytest.mark.parametrize(("change", "share"), WHOLE)
def test_native_keeps_the_tokens_and_lets_them_choose(change: Change, share: str):
    (good, bad), shares = convert(recorded().to_bytes(), change(recorded()), missing="native")
    assert good.recorded is None
    assert not bad.recorded.any()
    assert not bad.routes.any()
    assert bad.routes.shape == (ROWS, 2, 2)
    assert bad.loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert bad.columns["advantages"].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert shares == {"missing_routes_share": 0, "refused_routes_share": 0, "masked_share": 0} | {share: 0.5}


@pytest.mark.parametrize(("change", "share"), WHOLE)
def test_mask_takes_the_tokens_out_of_the_loss(change: Change, share: str):
    (good, bad), shares = convert(recorded().to_bytes(), change(recorded()), missing="mask")
    assert good.loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert not bad.recorded.any()
    assert not bad.loss_mask.any()
    assert not bad.columns["advantages"].any()
    assert shares == {"missing_routes_share": 0, "refused_routes_share": 0, "masked_share": 0.5} | {share: 0.5}


def test_a_refusal_names_its_sample_in_the_log(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "moerl.train.samples"):
        convert(recorded().to_bytes(), damaged(recorded()), missing="native")
    assert "the routes of sample 1 of prompt 7 are refused" in caplog.text


@pytest.mark.parametrize("missing", ["native", "mask"])
def test_only_the_rows_without_routes_are_dealt_with(missing: str):
    """Row 1 belongs to the prompt and is in no loss; row 4 predicts the second response token."""
    (one,), shares = convert(without(1, 4)(recorded()), missing=missing)
    assert np.flatnonzero(~one.recorded).tolist() == [1, 4]
    np.testing.assert_array_equal(one.routes[one.recorded], recorded().ids[one.recorded])
    masks = missing == "mask"
    assert one.loss_mask.tolist() == [0, 0, 0, 1, 0 if masks else 1, 1, 1]
    assert one.columns["advantages"].tolist() == [0, 0, 0, 2, 0 if masks else 2, 2, 2]
    assert one.columns["engine_logprobs"].tolist() == [0, 0, 0, -0.5, -0.25, -1, -2]
    assert shares == {"missing_routes_share": 2 / ROWS, "refused_routes_share": 0, "masked_share": 1 / 4 if masks else 0}


@pytest.mark.parametrize(("lag", "version", "stale"), [(0, 5, 5), (1, 5, 5), (2, 5, 0), (2, 6, 5), (0, 6, 7), (3, 6, 0)])
def test_rows_of_too_old_weights_are_refused(lag: int, version: int, stale: int):
    """Rows 0-4 come from version 3, the others from version 5."""
    (one,), shares = convert(recorded().to_bytes(), missing="mask", lag=lag, version=version)
    known = np.ones(ROWS, bool) if one.recorded is None else one.recorded
    assert known.tolist() == [False] * stale + [True] * (ROWS - stale)
    masked = max(0, stale - FIRST)
    assert one.loss_mask.tolist() == [0] * (FIRST + masked) + [1] * (len(RESPONSE) - masked)
    assert shares == {"missing_routes_share": 0, "refused_routes_share": stale / ROWS, "masked_share": masked / len(RESPONSE)}


@pytest.mark.parametrize(("max_lag", "version", "trained"), [(None, 9, 4), (2, 5, 4), (1, 5, 2), (0, 5, 2), (0, 6, 0), (3, 6, 4)])
def test_tokens_that_are_too_old_are_not_trained(max_lag: int | None, version: int, trained: int):
    """Response tokens 0-1 come from version 3, the others from version 5. Their routes are replayed all the same."""
    (one,), shares = convert(recorded().to_bytes(), missing="error", max_lag=max_lag, version=version)
    assert one.loss_mask.tolist() == [0] * (ROWS - trained) + [1] * trained
    assert one.columns["lag"].tolist() == [0] * FIRST + [version - 3] * 2 + [version - 5] * 2
    assert one.recorded is None
    assert shares == {"missing_routes_share": 0, "refused_routes_share": 0, "masked_share": 1 - trained / len(RESPONSE)}


def test_a_token_from_the_future_is_refused():
    with pytest.raises(RolloutError, match="tokens of version 5 cannot be trained at version 4, which is older"):
        convert(recorded().to_bytes(), missing="error", version=4)


def test_old_rows_end_the_run_where_missing_is_an_error():
    with pytest.raises(TrainError, match=r"5 of 7 rows have no routes that may be replayed \(5 of them by replay.max_row_lag"):
        convert(recorded().to_bytes(), missing="error", lag=1, version=5)


def test_any_version_is_fine_without_a_limit():
    (one,), _ = convert(recorded().to_bytes(), missing="error", version=1000)
    assert one.recorded is None


def test_a_row_both_missing_and_old_counts_once():
    (one,), shares = convert(without(0, 6)(recorded()), missing="native", lag=1, version=5)
    assert np.flatnonzero(one.recorded).tolist() == [5]
    assert shares == {"missing_routes_share": 2 / ROWS, "refused_routes_share": 4 / ROWS, "masked_share": 0}


@pytest.mark.parametrize("change", [lambda trace: b"", damaged, without(1, 4)], ids=["none", "damaged", "some_rows"])
@pytest.mark.parametrize("missing", ["error", "mask"])
def test_routes_that_no_pass_replays_are_no_ones_loss(change: Change, missing: str):
    (one,), shares = convert(change(recorded()), missing=missing, needed=False)
    assert one.loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert shares["masked_share"] == 0
    assert shares["missing_routes_share"] + shares["refused_routes_share"] > 0


@pytest.mark.parametrize("missing", ["error", "native", "mask"])
@pytest.mark.parametrize("needed", [True, False])
@pytest.mark.parametrize("change", [{"layers": (0, 1)}, {"experts": 16}])
def test_routes_of_another_model_are_always_an_error(missing: str, needed: bool, change: dict):
    foreign = replace(recorded(), layout=LAYOUT._replace(**change)).to_bytes()
    with pytest.raises(TraceError, match="recorded from another model"):
        convert(foreign, missing=missing, needed=needed)


def test_rows_without_routes_reach_the_microbatch_unforced():
    items, _ = convert(without(1, 4)(recorded()), b"", missing="native")
    (micro,) = pack(items, tokens_per_microbatch=32, dp=1, multiple=8, layout=LAYOUT)[0]
    known = ~np.isin(np.arange(ROWS), [1, 4])
    assert micro.forced.tolist() == [*known, True, *[False] * ROWS, True], "padding is always forced"
    np.testing.assert_array_equal(micro.routes[:ROWS][known], recorded().ids[known])
    filled = np.sort(micro.routes[~micro.forced | ~micro.real], axis=-1)
    assert (filled[..., 1:] != filled[..., :-1]).all(), "rows that nobody recorded still hold distinct experts"


def answers(*lengths: int, reward: float = 0.5) -> Group:
    """Answers of these lengths with equal rewards."""
    return Group(7, "x", [Sample(7, i, PROMPT, [2] * length, b"", b"", [], "x", "stop", reward=reward) for i, length in enumerate(lengths)])


def test_overlong_answers_lose_reward() -> None:
    groups = [answers(3, 8, 10), answers(10, 10, 10)]
    shaped, figures = punish_overlong(groups, limit_tokens=10, margin_tokens=4)
    assert [[sample.reward for sample in group.samples] for group in shaped] == [[0.5, 0.0, -0.5], [-0.5] * 3]
    assert figures == {"overlong_penalty": pytest.approx(-4.5 / 6), "uniform_shaped_share": 0.5}
    assert {sample.reward for group in groups for sample in group.samples} == {0.5}, "the metrics' rewards are those of the task"
    assert [sample.response_tokens for sample in shaped[0].samples] == [sample.response_tokens for sample in groups[0].samples]


def test_without_a_margin_no_answer_is_overlong() -> None:
    groups = [answers(3, 10)]
    assert punish_overlong(groups, limit_tokens=10, margin_tokens=0) == (groups, {})


def test_a_sampling_mask_is_that_of_the_response_labels():
    """The prompt's labels stay unrestricted; a sample without a mask has none."""
    one = group(recorded().to_bytes(), recorded().to_bytes())
    rows = [[token, token + 1] for token in RESPONSE]
    one.samples[1].mask = to_bytes(of_rows(rows))
    items, _ = sequences([one], LAYOUT, lambda rewards: rewards, Replay())
    assert items[0].sampling_mask is None
    mask = items[1].sampling_mask
    assert mask.lengths.tolist() == [0] * (len(PROMPT) - 1) + [2] * len(RESPONSE)
    assert mask.ids.reshape(-1, 2).tolist() == rows
    one.samples[1].mask = to_bytes(of_rows(rows[::-1]))
    with pytest.raises(RolloutError, match="the sampling mask is not that of its tokens"):
        sequences([one], LAYOUT, lambda rewards: rewards, Replay())
