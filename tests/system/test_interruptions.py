"""Whole runs that meet trouble: engines that die or don't start, Ctrl-C, ranks that are killed, rewards that hang or raise.

Whatever happens, the run says what it was in one message, ends in bounded time, and leaves no process behind.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.system.run_harness import Finished, Started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Start = Callable[..., AbstractContextManager[Started]]

MANY = ("--train.steps", "400", "--checkpoint.export_hf", "false")
"""More steps than a test waits for."""
TWO = ("--parallel.nproc_per_node", "2", "--parallel.ep", "2")
"""Rank 1 has no engine: it waits for rank 0, in native code, whatever happens there."""


def engine_server(started: Started) -> int:
    """Process id of the engine's server, which leads its process group."""
    (pid,) = (pid for pid, title in started.processes().items() if "sglang.launch_server" in title and os.getpgid(pid) == pid)
    return pid


def assert_one_clear_error(finished: Finished, *words: str, status: int = 1) -> None:
    assert finished.status == status, finished.output[-4000:]
    for word in words:
        assert word in finished.output
    log = finished.folder / "logs" / ("rank-0.log" if (finished.folder / "logs" / "rank-0.log").exists() else "rollout.log")
    # indented lines are quoted from an engine's log
    printed, logged = ([line for line in text.splitlines() if not line.startswith("  ")] for text in (finished.output, log.read_text()))
    assert [line.startswith("error: ") for line in printed] == [True], printed
    assert not [line for line in logged if "Traceback" in line or "Warning" in line]
    assert finished.left == []


def test_a_killed_engine_is_restarted_and_the_run_finishes(start: Start) -> None:
    with start("revived", "--observe.console", "true", "--train.steps", "12", "--rollout.group_size", "8") as started:
        started.wait_for(lambda: 1 in started.steps(), "step 1")
        os.killpg(engine_server(started), signal.SIGKILL)
        finished = started.finish(400)
    assert finished.status == 0, finished.output[-4000:]
    assert "an engine died and was restarted" in finished.output
    assert "restart 1 of 1" in (finished.folder / "logs" / "rank-0.log").read_text()
    assert finished.summary["steps"] == 12
    assert finished.summary["versions_consistent"]
    assert [record["engine_versions"] for record in finished.metrics if record["step"] >= 0] == [[i + 1] for i in range(12)]
    assert finished.left == []


def test_an_engine_that_may_not_be_restarted_ends_the_run_with_its_log(start: Start) -> None:
    with start("ended", "--engine.max_restarts", "0", *MANY, *TWO) as started:
        started.wait_for(lambda: 0 in started.steps(), "step 0")
        os.killpg(engine_server(started), signal.SIGKILL)
        finished = started.finish(120)
    assert_one_clear_error(finished, "engine 0 is dead", "engine.max_restarts = 0", "engine-0.log", "Prefill batch")


def test_ctrl_c_stops_everything_and_the_run_can_be_resumed(start: Start, moerl: Callable[..., Finished]) -> None:
    with start("interrupted", *MANY, *TWO, "--checkpoint.every_steps", "2") as started:
        started.wait_for(lambda: 2 in started.steps(), "step 2")
        started.process.send_signal(signal.SIGINT)
        interrupted = started.finish(120)
    assert interrupted.status == 130, interrupted.output[-4000:]
    assert interrupted.output.splitlines() == ["interrupted"]
    assert interrupted.left == []
    checkpoint = sorted(path.name for path in (interrupted.folder / "checkpoints").glob("step-*"))[-1]
    done = int(checkpoint.removeprefix("step-"))
    resumed = moerl("interrupted", *TWO, "--rollouts", str(interrupted.folder), "--resume", "--train.steps", str(done))
    assert resumed.status == 0, resumed.output[-4000:]
    assert [record["step"] for record in resumed.metrics] == list(range(-1, done))


def test_a_killed_rank_is_named_and_takes_everything_with_it(start: Start, live_run: Finished) -> None:
    slow = ("--rollouts", str(live_run.folder), "--objective.epochs_per_batch", "200")
    with start("killed", *slow, *TWO) as started:
        started.wait_for(lambda: (started.folder / "logs" / "rank-1.log").exists(), "the start of training")
        ranks = [pid for pid, title in started.processes().items() if "-u -m moerl.train @" in title]
        assert len(ranks) == 2
        (second,) = (pid for pid in ranks if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
        os.kill(second, signal.SIGKILL)
        finished = started.finish(120)
    assert_one_clear_error(finished, "trainer rank 1 was killed by SIGKILL")


def test_the_sudden_death_of_what_drives_the_engines_takes_them_with_it(start: Start) -> None:
    """`moerl rollout` drives them itself: nobody is left to clean up, so this is the kernel's doing."""
    with start("sudden", *MANY, command="rollout") as started:
        started.wait_for(lambda: 0 in started.steps(), "step 0")
        assert any("sglang" in title for title in started.processes().values())
        started.process.kill()
        started.process.wait(10)
        deadline = time.monotonic() + 60
        # two helpers of Ray look for its death only now and then
        while left := [title for title in started.processes().values() if "Agent" not in title]:
            assert time.monotonic() < deadline, left
            started.reap()
            time.sleep(0.1)


REWARDS = """
import time

def hangs(completion, answer, finish_reason):
    time.sleep(3600)

def raises(completion, answer, finish_reason):
    raise KeyError("no such unit")
"""


@pytest.mark.parametrize(
    ("command", "function", "words"),
    [
        ("train", "hangs", ("8 groups in a row failed", "failed for prompt ", "no answer within 3 s (task.reward_timeout_s)")),
        ("rollout", "raises", ("reward foreign_rewards:raises, prompt ", "KeyError: 'no such unit'")),
    ],
)
def test_a_reward_in_trouble_names_the_prompt(
    moerl: Callable[..., Finished], tmp_path: Path, command: str, function: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "foreign_rewards.py").write_text(REWARDS)
    reward = ("--task.reward", f"foreign_rewards:{function}", "--task.reward_timeout_s", "3", "--diagnostics.evaluate", "false")
    reward = (*reward, "--task.reward_retries", "0")
    finished = moerl(f"reward-{function}", *reward, command=command, modules=tmp_path)
    assert_one_clear_error(finished, *words)


def test_a_reward_that_cannot_be_found_is_an_error_before_the_engine_starts(moerl: Callable[..., Finished]) -> None:
    finished = moerl("reward-missing", "--task.reward", "foreign_rewards:missing")
    assert_one_clear_error(finished, "cannot import 'foreign_rewards'", "PYTHONPATH")
    assert not (finished.folder / "logs" / "engine-0.log").exists()


def test_an_engine_that_cannot_start_shows_its_log(moerl: Callable[..., Finished]) -> None:
    finished = moerl("unstartable", "--sglang.kv_cache_dtype", "nonsense")
    assert_one_clear_error(finished, "the engine on port", "exited with code", "engine-0.log", "invalid choice: 'nonsense'")
