"""A config shown as TOML reads back equal, and explains itself."""

import tomllib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from moerl.config.load import load_config
from moerl.config.schema import Config
from moerl.config.show import literal, to_toml

VALUES = st.recursive(
    st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_any_value_survives(value: object) -> None:
    assert tomllib.loads(f"x = {literal(value)}")["x"] == value


def test_shown_config_reads_back_equal(tmp_path: Path) -> None:
    settings = ["--model.path=m", "--task.options={a = [1, 2], b = {c = 'x y'}}", "--require.min_reward_gain=0.25"]
    config = load_config([*settings, "--megatron.recompute_granularity=full", "--sglang.log_level=info"])
    for comments in (True, False):
        file = tmp_path / "shown.toml"
        file.write_text(to_toml(config, comments=comments))
        assert load_config(["@", str(file)]) == config


def test_settings_stand_under_their_documentation() -> None:
    text = to_toml(Config(model={"path": "m"}))
    assert "# Completions per prompt: the group that advantages are normalised over.\ngroup_size = 8\n" in text
    assert "# How completions are sampled.\n[rollout]\n" in text
    assert "# min_reward_gain is not set\n" in text
    bounds, buffer = {"min_reward_gain": 0.1, "min_heldout_gain": 0.1}, {"capacity_groups": 99, "group_timeout_s": 9.0}
    assert "#" not in to_toml(Config(model={"path": "m"}, require=bounds, replay={"max_row_lag": 1}, buffer=buffer), comments=False)
