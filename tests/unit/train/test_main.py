"""How a trainer rank ends: one message, from the rank whose error is the cause, and the right exit status."""

import importlib

import pytest

from moerl.errors import ConfigError, EngineError


@pytest.fixture
def end_with(monkeypatch, capsys):
    """(error, rank) -> (exit status, what was printed, seconds that the rank held back its message)."""
    module = importlib.import_module("moerl.train.__main__")
    held = []
    monkeypatch.setattr(module.time, "sleep", held.append)

    def end(error, rank):
        def prepare(*_, **__):
            raise error

        held.clear()
        monkeypatch.setattr(module, "prepare", prepare)
        monkeypatch.setenv("RANK", str(rank))
        return module.main([]), capsys.readouterr().err, sum(held)

    return end


def test_rank_0_says_at_once_what_was_wrong(end_with):
    status, printed, held = end_with(EngineError("engine 0 is dead"), 0)
    assert (status, printed, held) == (1, "error: engine 0 is dead\n", 0)


def test_another_rank_waits_whether_it_is_only_a_consequence(end_with):
    status, printed, held = end_with(EngineError("lost rank 0"), 1)
    assert (status, printed) == (1, "error: trainer rank 1: lost rank 0\n")
    assert held > 0


def test_a_wrong_setting_has_its_own_status(end_with):
    status, printed, _ = end_with(ConfigError("train.steps is 0"), 0)
    assert status == 2
    assert "train.steps is 0" in printed


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unexpected_error_leaves_its_traceback_in_the_log(end_with, caplog, rank):
    status, printed, held = end_with(RuntimeError("Connection closed by peer"), rank)
    assert status == 1
    assert printed == (
        f"error: trainer rank {rank} failed unexpectedly, the traceback is in logs/rank-{rank}.log of the run folder: "
        "RuntimeError: Connection closed by peer\n"
    )
    assert held > 0
    assert any(record.exc_info for record in caplog.records)


def test_an_interruption_is_silent(end_with):
    assert end_with(KeyboardInterrupt(), 0) == (130, "", 0)
