"""Named waits: heartbeats, deadlines, stacks, and no stray interruption."""

import asyncio
import logging
import subprocess
import sys
import threading
import time

import pytest

from moerl.errors import WaitTimeout
from moerl.observe.wait import await_named, poll_until, waiting

FAST = {"timeout_s": 0.15, "heartbeat_s": 0.05}


def test_a_wait_that_ends_in_time_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with waiting("nothing", timeout_s=5, heartbeat_s=5):
        pass
    assert caplog.records == []


def test_heartbeats_say_who_waits_for_what(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with waiting("weights", who="rank 3", timeout_s=30, heartbeat_s=0.03):
        time.sleep(0.15)
    beats = [record.message for record in caplog.records]
    assert len(beats) >= 2
    assert beats[0] == "rank 3 has waited 0 s for weights (deadline 30 s)"


def test_deadline_interrupts_python_code_and_dumps_stacks(caplog: pytest.LogCaptureFixture) -> None:
    def a_function_that_waits() -> None:
        while True:
            time.sleep(0.01)

    start = time.monotonic()
    with (
        pytest.raises(WaitTimeout, match=r"rank 0 waited 0\.15 s for a thing, and it did not come"),
        waiting("a thing", who="rank 0", **FAST),
    ):
        a_function_that_waits()
    assert time.monotonic() - start < 5
    assert "a_function_that_waits" in caplog.text


def test_a_block_in_one_blocking_call_fails_when_it_returns() -> None:
    with pytest.raises(WaitTimeout, match="for a long call"), waiting("a long call", **FAST):
        time.sleep(0.4)


def test_the_interruption_reaches_a_thread() -> None:
    caught: list[BaseException] = []

    def body() -> None:
        try:
            with waiting("in a thread", **FAST):
                while True:
                    time.sleep(0.01)
        except WaitTimeout as error:
            caught.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(10)
    assert "in a thread" in str(caught[0])


def test_an_error_of_the_block_passes_through() -> None:
    with pytest.raises(ZeroDivisionError), waiting("x", timeout_s=5, heartbeat_s=1):
        raise ZeroDivisionError
    with pytest.raises(WaitTimeout, match="^inner$"), waiting("outer", timeout_s=5, heartbeat_s=1):
        raise WaitTimeout("inner")


def test_nested_waits_name_the_one_that_expired() -> None:
    with (
        pytest.raises(WaitTimeout, match="for the outer"),
        waiting("the outer", **FAST),
        waiting("the inner", timeout_s=30, heartbeat_s=30),
    ):
        while True:
            time.sleep(0.01)


def test_no_interruption_arrives_after_the_block() -> None:
    for _ in range(30):
        try:
            with waiting("a race", timeout_s=0.01, heartbeat_s=1):
                time.sleep(0.0098)
        except WaitTimeout:
            pass
        sum(range(2000))
    time.sleep(0.05)


def test_hard_deadline_ends_a_process_stuck_in_native_code() -> None:
    code = (
        "import threading, moerl.observe.wait as w; w._INTERRUPT_GRACE_S = 0.2\n"
        "with w.waiting('a collective', timeout_s=0.2, heartbeat_s=1, hard=True):\n"
        "    lock = threading.Lock(); lock.acquire(); lock.acquire()\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 70
    assert "for a collective" in answer.stderr


def test_await_returns_the_result() -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 7

    assert asyncio.run(await_named(answer(), "x", timeout_s=5, heartbeat_s=1)) == 7


def test_await_passes_errors_on() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(await_named(fail(), "x", timeout_s=5, heartbeat_s=1))


def test_await_cancels_at_the_deadline_and_shows_where_it_stood(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cancelled = []

    async def hang_here() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(WaitTimeout, match=r"rank 0 waited 0\.15 s for an engine"):
        asyncio.run(await_named(hang_here(), "an engine", who="rank 0", **FAST))
    assert cancelled == [True]
    assert "hang_here" in caplog.text
    assert "rank 0 has waited 0 s for an engine" in caplog.text


def test_await_that_is_cancelled_from_outside_cancels_its_coroutine() -> None:
    cancelled = []

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(True)

    async def main() -> None:
        task = asyncio.ensure_future(await_named(hang(), "x", timeout_s=60, heartbeat_s=60))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert cancelled == [True]


def test_poll_returns_the_first_true_value() -> None:
    values = iter([0, 0, 5])
    assert poll_until(lambda: next(values), "x", timeout_s=5, heartbeat_s=1, interval_s=0.001) == 5


def test_poll_expires_with_heartbeats_and_stacks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(WaitTimeout, match="waited 0.15 s for a port"):
        poll_until(lambda: False, "a port", interval_s=0.01, **FAST)
    assert "has waited" in caplog.text
    assert "test_poll_expires_with_heartbeats_and_stacks" in caplog.text
