"""What raises an alarm and what does not, what it says, and how often it is shown."""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.config.schema import Buffer, Config, Observe, Replay, Rollout, Section, Sync, Task, Train
from moerl.config.schema import Engine as EngineSettings
from moerl.observe.alarms import alarms, due

STEP = {
    "reward": 0.5, "uniform_groups_share": 0.25, "masked_share": 0.0, "missing_routes_share": 0.0, "ess_replay": 0.97, "ess_lag0": 0.98,
    "ess_lag2": 0.9, "kl_replay": 1e-4, "sync_attempts": 1, "sync_way": "direct", "time/rollout": 1.0, "time/forward_backward": 3.0,
    "buffer/lag_highest": 2.0, "buffer/engines_paced_share": 0.1, "buffer/refused_groups": 0.0,
}  # fmt: skip
"""A step with nothing to complain about, at a max lag of 2."""

WAITS = {"time/rollout": 9.0}


def config(**sections: dict[str, Any]) -> Config:
    return Config(**{"model": {"path": "m"}, "buffer": {"max_lag": 2}, **sections})


@pytest.mark.parametrize(
    ("change", "sections", "kind", "says"),
    [
        ({"ess_replay": 0.4}, {}, "ess", "ess_replay 0.40.*the step's tokens are worth only.*lower buffer.max_lag 2"),
        ({"ess_replay": 0.4, "ess_lag2": 0.3}, {}, "ess", "ess_lag2 0.30.*tokens of lag 2 are worth only"),
        ({"ess_trained": 0.4}, {"replay": {"actor": "off"}}, "ess", 'ess_trained 0.40.*set replay.actor = "rollout", or lower'),
        ({"ess_replay": 0.9}, {"observe": {"alarm_min_ess": 0.95}}, "ess", "observe.alarm_min_ess 0.95"),
        ({"kl_replay": 0.2}, {}, "kl", "kl_replay 0.2 nats per token.*observe.alarm_max_kl 0.1"),
        ({"kl_replay": 0.2}, {"buffer": {"max_lag": 0}}, "kl", "compute differently: engine.dtype and train.dtype"),
        ({"kl_trained": 0.2}, {"replay": {"actor": "off"}}, "kl", "kl_trained 0.2 nats"),
        (WAITS, {}, "trainer_waits", "waits for groups 75 % of the step, and their lag is already 2.*engine.count"),
        ({"buffer/engines_paced_share": 0.8}, {}, "engines_paced", "80 % of the engines' slots.*raise buffer.max_lag"),
        (
            {"buffer/engines_paced_share": 0.8},
            {"buffer": {"max_lag": 2, "capacity_groups": 20}},
            "engines_paced",
            "raise buffer.capacity_groups or buffer.max_lag",
        ),
        (
            {"buffer/engines_paced_share": 0.8, "buffer/trainer_busy_share": 0.9},
            {"engine": {"count": 2}},
            "engines_paced",
            "use fewer engines",
        ),
        ({"buffer/refused_late": 3.0}, {}, "refused_late", r"3 group\(s\) were refused.*buffer.policy"),
        ({"buffer/refused_reward": 1.0}, {}, "refused_reward", "task.reward_timeout_s"),
        ({"uniform_groups_share": 1.0}, {}, "equal_rewards", r"equal rewards \(mean 0.5\): it teaches nothing.*dynamic_sampling"),
        ({"uniform_shaped_share": 1.0}, {}, "equal_rewards", "it teaches nothing"),
        ({"masked_share": 0.3}, {"replay": {"missing": "mask"}}, "masked", "30 % of the response tokens.*missing_routes_share"),
        ({"masked_share": 0.3}, {"buffer": {"max_lag": 2, "policy": "mask"}}, "masked", "older than buffer.max_lag 2 allows"),
        ({"sync_attempts": 3, "sync_way": "compatible"}, {}, "sync_attempts", r"only at attempt 3 \(compatible\).*sync.timeout_s"),
    ],
)  # fmt: skip
def test_alarm(change: dict[str, Any], sections: dict[str, Any], kind: str, says: str) -> None:
    found = alarms({**STEP, **change}, config(**sections))
    assert list(found) == [kind]
    assert re.search(says, found[kind])


@pytest.mark.parametrize(
    ("change", "sections"),
    [
        ({}, {}),
        ({"ess_replay": 0.01, "kl_replay": 9.0}, {"observe": {"alarm_min_ess": 0.0, "alarm_max_kl": 0.0}}),
        ({"ess_replay": None, "kl_replay": None}, {}),
        ({**WAITS, "buffer/lag_highest": 0.0}, {"buffer": {"max_lag": 0}}),
        ({**WAITS, "buffer/lag_highest": 1.0}, {}),
        ({**WAITS, "buffer/lag_highest": 0.0, "buffer/engines_paced_share": 0.9}, {"buffer": {"max_lag": 0}}),
        ({"buffer/engines_paced_share": 0.9, "buffer/trainer_busy_share": 0.9}, {}),
        ({"buffer/refused_uniform": 7.0, "buffer/refused_groups": 7.0}, {"buffer": {"dynamic_sampling": True}}),
        ({"uniform_groups_share": 1.0, "uniform_shaped_share": 0.5}, {}),
        ({"masked_share": 0.05}, {"replay": {"missing": "mask"}}),
    ],
)
def test_nothing_to_complain_about(change: dict[str, Any], sections: dict[str, Any]) -> None:
    assert alarms({**STEP, **change}, config(**sections)) == {}


def test_a_step_that_measured_nothing_raises_no_alarm() -> None:
    assert alarms({"heldout_accuracy": 0.1}, config()) == {}


def test_several_alarms_at_once() -> None:
    found = alarms({**STEP, "ess_replay": 0.1, "kl_replay": 1.0, "uniform_groups_share": 1.0, "sync_attempts": 2}, config())
    assert list(found) == ["ess", "kl", "equal_rewards", "sync_attempts"]


def _named(sentence: str) -> Iterator[tuple[type[Section], str]]:
    sections = {
        "buffer": Buffer, "engine": EngineSettings, "observe": Observe, "replay": Replay, "rollout": Rollout, "sync": Sync, "task": Task,
        "train": Train,
    }  # fmt: skip
    for section, name in re.findall(r"\b([a-z]+)\.([a-z_]+)", sentence):
        yield sections[section], name


def test_every_setting_that_an_alarm_names_exists() -> None:
    refused = {f"buffer/refused_{reason}": 1.0 for reason in ("late", "timeout", "failed", "reward")}
    bad = {**STEP, **refused, "ess_replay": 0.0, "kl_replay": 9.0, "uniform_groups_share": 1.0, "masked_share": 1.0, "sync_attempts": 2}
    masks = {"replay": {"missing": "mask", "actor": "off"}, "buffer": {"max_lag": 2, "policy": "mask", "capacity_groups": 16}}
    texts = [
        *alarms({**bad, **WAITS}, config(**masks)).values(),
        *alarms({**bad, "buffer/engines_paced_share": 1.0}, config(buffer={"max_lag": 2, "capacity_groups": 16})).values(),
        *alarms(bad, config(buffer={"max_lag": 0})).values(),
    ]
    named = [pair for text in texts for pair in _named(text)]
    assert len(set(named)) > 20
    assert [f"{section.__name__}.{name}" for section, name in named if name not in section.model_fields] == []


@given(st.lists(st.sets(st.sampled_from("abc")), max_size=40), st.integers(1, 5))
def test_an_alarm_is_shown_at_once_and_then_every_so_many_steps(found: list[set[str]], every: int) -> None:
    shown: dict[str, int] = {}
    history: dict[str, list[int]] = {kind: [] for kind in "abc"}
    for step, kinds in enumerate(found):
        for kind in due(dict.fromkeys(sorted(kinds), "text"), step, shown, every):
            shown[kind] = step
            history[kind].append(step)
    for kind, steps in history.items():
        raised = [step for step, kinds in enumerate(found) if kind in kinds]
        assert steps[:1] == raised[:1]
        assert all(after - before >= every for before, after in pairwise(steps))
        assert all(any(0 <= step - last < every for last in steps) for step in raised)


def test_alarms_can_be_counted_without_being_shown() -> None:
    assert due({"ess": "text"}, 3, {}, 0) == {}
