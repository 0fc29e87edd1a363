"""Rules between the objective's settings: what breaks each, and what does not."""

import pytest

from moerl.config.load import load_config
from moerl.config.schema import Objective
from moerl.errors import ConfigError


def check(*settings: str) -> list[str]:
    try:
        load_config(
            ["--model.path=m", *(f"--{setting}" if setting.startswith("rollout.") else f"--objective.{setting}" for setting in settings)]
        )
    except ConfigError as error:
        return error.violations
    return []


CLIPS = ("clip_low=3e-4", "clip_high=4e-4")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["rollout.group_size=1"], "needs at least 2 completions"),
        (["rollout.group_size=1", "baseline=leave_one_out", "normalize_std=false"], "needs at least 2 completions"),
        (["correction=tis_sequence", "tis_cap=0.5"], "objective.tis_cap 0.5 would cut even equal policies"),
        (["correction=mis", "mis_cap=1"], "objective.mis_cap 1.0 would mask even nearly equal policies"),
        (["correction=mis_sequence", "mis_cap=0.5"], "expected more than 1"),
        (["old_policy=engine"], "set objective.correction = 'none'"),
        (["loss=cispo"], "objective.loss 'cispo' has no effect: with one update per batch"),
        (["loss=gspo", *CLIPS], "objective.loss 'gspo' has no effect: with one update per batch"),
        (["loss=gspo", "epochs_per_batch=2"], "give both for objective.loss 'gspo'"),
        (["loss=gspo", "epochs_per_batch=2", "clip_low=3e-4"], "objective.clip_low 0.0003 and clip_high 0.28 are for the ratios of tokens"),
        (["baseline=leave_one_out"], "set objective.normalize_std = false (RLOO)"),
        (["mis_cap=3"], "objective.mis_cap has no effect with objective.correction = 'tis'"),
        (["correction=mis", "tis_cap=3"], "objective.tis_cap has no effect with objective.correction = 'mis'"),
        (["unbiased_kl=true"], "objective.unbiased_kl has no effect with objective.kl_coef = 0.0"),
        (["opsm_threshold=-0.1"], "objective.opsm_threshold"),
        (["clip_low=1.5"], "objective.clip_low"),
        (["overlong_margin_tokens=-1"], "objective.overlong_margin_tokens: expected a number of at least 0, got -1"),
        (
            ["overlong_margin_tokens=64", "rollout.max_new_tokens=64"],
            "objective.overlong_margin_tokens 64 would punish completions of every length up to rollout.max_new_tokens 64",
        ),
    ],
)
def test_broken_rule(settings: list[str], message: str) -> None:
    (found,) = check(*settings)
    assert message in found


@pytest.mark.parametrize(
    "settings",
    [
        ["loss=gspo", "epochs_per_batch=2", *CLIPS],
        ["loss=gspo", "old_policy=engine", "correction=none", "length_normalization=sequences", *CLIPS],
        ["loss=cispo", "old_policy=engine", "correction=none", "clip_low=1", "clip_high=4"],
        ["baseline=leave_one_out", "normalize_std=false"],
        ["correction=mis_sequence", "mis_cap=4"],
        ["correction=tis_sequence", "tis_cap=1"],
        ["overlong_margin_tokens=63", "rollout.max_new_tokens=64"],
        ["kl_coef=0.01", "unbiased_kl=true", "opsm_threshold=0.1", "length_normalization=constant"],
    ],
)
def test_kept_rule(settings: list[str]) -> None:
    assert check(*settings) == []


def test_every_violation_at_once() -> None:
    assert len(check("loss=gspo", "correction=mis", "mis_cap=0.5", "baseline=leave_one_out")) == 4


def test_an_old_policy_that_is_the_engine_needs_no_pass_of_its_own() -> None:
    settings = ["--model.path=m", "--objective.epochs_per_batch=2", "--objective.correction=none"]
    assert load_config(settings).old_logprobs_mode == "rollout"
    assert load_config([*settings, "--objective.old_policy=engine"]).old_logprobs_mode is None
    proximal = ["--objective.old_policy=engine", "--replay.actor=proximal"]
    assert load_config([*settings, *proximal]).old_logprobs_mode == "off", "the pass chooses the experts that the update replays"


@pytest.mark.parametrize(
    "options",
    [{"loss": "gspo"}, {"correction": "tis_sequence"}, {"correction": "mis_sequence"}, {"opsm_threshold": 0.1},
     {"length_normalization": "sequences"}, {"length_normalization": "constant"}],
)  # fmt: skip
def test_objectives_that_look_at_sequences(options: dict) -> None:
    assert Objective(**options).needs_sequences
    assert not Objective(loss="cispo", correction="mis", kl_coef=0.1).needs_sequences
