"""Other ways to start the same work: recording alone, torchrun itself, several ranks on both sides, other objectives."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.run_harness import Finished

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TWO = ("--parallel.nproc_per_node", "2")


def recorded(run: Finished) -> tuple[str, str]:
    return "--rollouts", str(run.folder)


def assert_same_losses(run: Finished, reference: Finished) -> None:
    """Layouts differ in the order of float32 sums: the first step agrees to rounding, and Adam lets later ones drift apart a little."""
    assert run.status == 0, run.output[-4000:]
    assert (run.output, run.left) == ("", [])
    mine, theirs = (
        {record["step"]: record for record in one.metrics if record["step"] >= 0 and "loss" in record} for one in (run, reference)
    )
    assert mine.keys() == theirs.keys() == {0, 1, 2, 3}
    for step in mine:
        assert mine[step]["replay_agreement"] == 1.0
        assert mine[step]["natural_flip_share"] == pytest.approx(theirs[step]["natural_flip_share"], abs=0.01)
        for name in ("loss", "grad_norm", "entropy", "reward"):
            limits = {"rel": 1e-5, "abs": 1e-6} if step == 0 else {"rel": 2e-4, "abs": 2e-5}
            assert mine[step][name] == pytest.approx(theirs[step][name], **limits), f"step {step}: {name}"


def test_recording_alone_gives_rollouts_to_train_on(moerl: Callable[..., Finished]) -> None:
    recording = moerl("recording", "--train.steps", "2", command="rollout")
    assert recording.status == 0, recording.output[-4000:]
    assert (recording.output, recording.left) == ("", [])
    assert [record["step"] for record in recording.metrics] == [0, 1]
    trained = moerl("on-recording", *recorded(recording), "--train.steps", "2")
    assert trained.status == 0, trained.output[-4000:]
    steps = [record for record in trained.metrics if record["step"] >= 0]
    assert [record["reward"] for record in steps] == [record["reward"] for record in recording.metrics]
    assert steps[0]["kl_replay"] < 1e-3  # the recording policy is the one that starts to train
    assert all(math.isfinite(record["loss"]) for record in steps)


def test_torchrun_itself_is_as_good(moerl: Callable[..., Finished], live_run: Finished) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "moerl.train"]
    assert_same_losses(moerl("torchrun", *recorded(live_run), command=torchrun), live_run)


def test_tensor_parallel_ranks_give_the_same_losses(moerl: Callable[..., Finished], live_run: Finished) -> None:
    assert_same_losses(moerl("tp2", *recorded(live_run), *TWO, "--parallel.tp", "2"), live_run)


def test_expert_parallel_ranks_give_the_same_losses_also_across_a_resume(moerl: Callable[..., Finished], live_run: Finished) -> None:
    settings = (*recorded(live_run), *TWO, "--parallel.ep", "2")
    half = moerl("ep2", *settings, "--train.steps", "2")
    assert half.status == 0, half.output[-4000:]
    assert_same_losses(moerl("ep2", *settings, "--resume"), live_run)


def test_several_ranks_on_both_sides_keep_versions_consistent(moerl: Callable[..., Finished]) -> None:
    run = moerl("both-sides", *TWO, "--parallel.ep", "2", "--engine.tp", "2", "--train.steps", "2")
    assert run.status == 0, run.output[-4000:]
    assert (run.output, run.left) == ("", [])
    assert run.summary["versions_consistent"]
    assert run.summary["replay_agreement"] == 1.0
    assert [record["engine_versions"] for record in run.metrics if record["step"] >= 0] == [[1], [2]]
    assert {path.name for path in (run.folder / "logs").iterdir()} == {"rank-0.log", "rank-1.log", "engine-0.log"}


def test_the_objectives_options_work_together(moerl: Callable[..., Finished], live_run: Finished) -> None:
    options = ("--objective.kl_coef", "0.1", "--objective.epochs_per_batch", "2", "--objective.correction", "icepop")
    run = moerl("objective", *recorded(live_run), *options)
    assert run.status == 0, run.output[-4000:]
    first, *others = (record for record in run.metrics if record["step"] >= 0)
    plain = next(record for record in live_run.metrics if record["step"] == 0)
    # before the first update the policy is the reference, except that only the policy is forced onto the engine's routes
    assert first["reference_kl"] < 1e-2
    assert first["loss"] - 0.1 * first["reference_kl"] == pytest.approx(plain["loss"], abs=1e-3)
    assert all(record["reference_kl"] > 2 * first["reference_kl"] for record in others)
    assert all(0 <= record["correction_cut_share"] < 1 for record in run.metrics if record["step"] >= 0)
    assert run.summary["replay_agreement"] == 1.0


def test_a_world_that_does_not_factor_is_refused_by_each_way_to_start(moerl: Callable[..., Finished], live_run: Finished) -> None:
    for name, command in (("launcher", "train"), ("trainer", ["-m", "moerl.train"])):
        refused = moerl(f"factor-{name}", *recorded(live_run), "--parallel.tp", "2", command=command)
        assert refused.status == 2
        assert refused.output.startswith("error: ")
        assert "parallel" in refused.output
        assert refused.left == []
        assert not Path(refused.folder).exists()
