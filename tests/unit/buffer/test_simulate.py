"""The simulator against times worked out by hand, against its own bound, and what pacing gains where a few completions are very long."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.bench.loop import LONG_TAIL
from moerl.buffer.simulate import Cluster, Outcome, _Engine, simulate
from moerl.config.schema import Buffer
from moerl.errors import ConfigError


def with_buffer(cluster: Cluster, **changes) -> Cluster:
    return replace(cluster, buffer=Buffer(**changes))


def dropped(outcome: Outcome) -> float:
    return outcome.figures["buffer/refused_groups"] + outcome.figures["buffer/wasted_tokens"]


@pytest.mark.parametrize(
    ("changes", "side"),
    [
        ({"train_s_per_token": 4e-5}, "generation"),
        ({}, "both"),
        ({"train_s_per_token": 1.1e-4}, "training"),
        ({"predictable": 0.0}, "both"),
    ],
)
def test_long_tail_runs_at_the_bound_with_nothing_dropped(changes: dict[str, float], side: str) -> None:
    """The 95th percentile is 8 times the median, and the share counts the ramp and every sync pause against us."""
    cluster = replace(LONG_TAIL, **changes)
    paced, synchronous = simulate(with_buffer(cluster, max_lag=4)), simulate(cluster)
    balance = paced.training_s / paced.generation_s
    assert {"generation": balance < 0.7, "both": 0.9 < balance < 1.1, "training": balance > 1.2}[side]
    assert paced.share >= 0.95
    assert dropped(paced) == 0
    assert paced.figures["buffer/lag_highest"] <= 4
    assert synchronous.share < 0.45
    assert synchronous.figures["buffer/lag_highest"] == 0


def test_more_lag_helps_until_the_longest_completion_fits() -> None:
    cluster = replace(LONG_TAIL, steps=50)
    shares = [simulate(with_buffer(cluster, max_lag=lag)).share for lag in (0, 1, 2, 4)]
    assert shares[0] < shares[1] < shares[2] < shares[3]


def test_equal_lengths_without_lag_take_what_one_works_out_by_hand() -> None:
    cluster = Cluster(
        engines=2,
        slots=4,
        prompts_per_step=4,
        group_size=2,
        length_median=100,
        length_p95=100,
        steps=3,
        prompt_tokens=10,
        prompt_s_per_token=0.5,
        decode_base_s=0.1,
        decode_per_running_s=0.05,
        train_s_per_token=0.01,
        train_fixed_s=7,
        sync_pause_s=3,
    )
    generate = 2 * 10 * 0.5 + 100 * (0.1 + 4 * 0.05)
    train = 7 + 8 * 110 * 0.01
    outcome = simulate(cluster)
    assert outcome.elapsed_s == pytest.approx(3 * (generate + train) + 2 * 3)
    assert outcome.generation_s == pytest.approx(3 * generate)
    assert outcome.training_s == pytest.approx(3 * train)
    assert outcome.tokens == 3 * 800
    assert outcome.share == pytest.approx(3 * generate / outcome.elapsed_s)


def test_an_engine_speeds_up_as_it_empties_and_stands_still_when_stalled() -> None:
    engine = _Engine(Cluster(slots=2, decode_base_s=1.0, decode_per_running_s=1.0))
    engine.queue.extend([(0, 0, 2), (0, 1, 4), (1, 0, 1)])
    assert engine.fill() == 2
    assert engine.next_end_s() == 2 * 3.0
    engine.advance(6.0)
    engine.running.pop(0)  # the first, of two tokens
    assert engine.next_end_s() == 6 + 2 * 2.0
    engine.advance(8.0)
    assert engine.held_tokens() == 3
    engine.stall(5.0)
    assert engine.next_end_s() == 8 + 5 + 2.0
    engine.advance(14.0)
    assert engine.cut(0) == [3]
    assert engine.fill() == 1
    assert engine.next_end_s() == 14 + 2.0


clusters = st.builds(
    Cluster,
    engines=st.integers(1, 3),
    slots=st.integers(1, 8),
    prompts_per_step=st.integers(1, 6),
    group_size=st.integers(2, 4),
    steps=st.integers(1, 6),
    prompts=st.integers(6, 20),
    length_median=st.floats(5, 50),
    length_p95=st.floats(50, 500),
    max_new_tokens=st.just(400),
    predictable=st.floats(0, 1),
    train_s_per_token=st.floats(0, 1e-2),
    prompt_tokens=st.integers(0, 50),
    uniform_share=st.floats(0, 0.6),
    interrupt=st.sampled_from(["in_place", "resume", "drain"]),
    seed=st.integers(0, 99),
    buffer=st.builds(
        Buffer,
        max_lag=st.integers(0, 4),
        policy=st.sampled_from(["wait", "mask", "refuse"]),
        oversample=st.integers(0, 2),
        dynamic_sampling=st.booleans(),
        max_resamples_per_step=st.integers(1, 5),
        group_timeout_s=st.none() | st.floats(1, 60),
    ),
)


@given(clusters)
@settings(max_examples=60, deadline=None)
def test_any_cluster_finishes_within_its_bound_and_its_lag(cluster: Cluster) -> None:
    try:
        outcome = simulate(cluster)
    except ConfigError:
        if cluster.buffer.group_timeout_s is None:
            raise
        return  # no group ends in time
    figures = outcome.figures
    assert outcome.steps == cluster.steps
    assert 0 < outcome.share <= 1 + 1e-9
    assert -1e-9 <= figures["buffer/engines_busy_share"] <= 1 + 1e-9
    assert cluster.buffer.policy == "mask" or figures["buffer/lag_highest"] <= cluster.buffer.max_lag
    by_lag = [value for name, value in figures.items() if name.removeprefix("buffer/lag_").isdigit()]
    assert sum(by_lag) == cluster.steps * cluster.prompts_per_step
    assert simulate(cluster) == outcome


def test_prompts_that_never_end_in_time_are_an_error_that_names_the_setting() -> None:
    cluster = Cluster(length_median=1000, length_p95=1000, prompts_per_step=4, steps=3)
    assert simulate(with_buffer(cluster, group_timeout_s=100.0)).steps == 3
    with pytest.raises(ConfigError, match="buffer.group_timeout_s 1 is too short: 40[0-9] groups ran longer"):
        simulate(with_buffer(cluster, group_timeout_s=1.0))


def test_dropping_stragglers_drops_long_ones_and_says_so() -> None:
    cluster = replace(LONG_TAIL, prompts_per_step=32, steps=40)
    figures = simulate(with_buffer(cluster, max_lag=1, policy="refuse")).figures
    assert figures["buffer/refused_late"] > 20
    assert figures["buffer/wasted_late_tokens"] > 0
    assert figures["buffer/length_refused"] > 1.3 * figures["buffer/length_trained"]


def test_masked_stragglers_are_trained_beyond_the_lag_and_nobody_waits_for_them() -> None:
    cluster = replace(LONG_TAIL, prompts_per_step=32, steps=40)
    figures = simulate(with_buffer(cluster, max_lag=1, policy="mask")).figures
    assert figures["buffer/lag_highest"] > 1
    assert figures["buffer/trainer_waits_for_due_s"] == 0
    assert simulate(with_buffer(cluster, max_lag=1)).figures["buffer/trainer_waits_for_due_s"] > 0


def test_draining_engines_before_each_sync_gives_the_gain_away() -> None:
    cluster = with_buffer(replace(LONG_TAIL, steps=40), max_lag=4)
    assert simulate(replace(cluster, interrupt="drain")).share < 0.7 * simulate(cluster).share


def test_longest_first_helps_where_lengths_are_predictable() -> None:
    cluster = replace(LONG_TAIL, predictable=0.95, prompts=256, steps=40)
    assert simulate(with_buffer(cluster, longest_first=True)).share > 1.05 * simulate(with_buffer(cluster, longest_first=False)).share


def test_waste_is_counted() -> None:
    cluster = replace(LONG_TAIL, steps=10, uniform_share=0.3)
    figures = simulate(with_buffer(cluster, max_lag=2, oversample=1, dynamic_sampling=True, max_resamples_per_step=1000)).figures
    assert figures["buffer/wasted_oversampled_tokens"] > 0
    assert figures["buffer/uniform_trained"] == 0
    refused = figures["buffer/refused_uniform"]
    assert 0.2 < refused / (refused + 10 * 128) < 0.4


def test_recorded_lengths_replace_the_distribution() -> None:
    cluster = Cluster(recorded=((7, 7), (9,)), prompts_per_step=4, group_size=2, prompts=4, steps=4)
    outcome = simulate(cluster)
    assert outcome.tokens == 4 * (2 * 2 * 7 + 2 * 2 * 9)


def test_a_cluster_that_cannot_be_is_refused_with_all_reasons() -> None:
    with pytest.raises(ConfigError) as caught:
        Cluster(engines=0, length_median=9, length_p95=3, predictable=2, sync_pause_s=-1, interrupt="never")
    assert len(caught.value.violations) == 5
