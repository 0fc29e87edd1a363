"""What the loop does when an engine dies: restarted, given the current weights, and asked again; or the error ends the run."""

from types import SimpleNamespace

import pytest

from moerl.errors import EngineError, ReshardError
from moerl.reshard.direct import Moved
from moerl.reshard.sync import SyncReport
from moerl.train import platform
from moerl.train.progress import Progress

REPORT = SyncReport(
    version=3,
    way="direct",
    attempts=1,
    moved=Moved(wire_nbytes=6, minimum_nbytes=3, buckets=2, changed_share=0.5, received=((6, 3),)),
    seconds={"prepare": 0.0, "transfer": 1.0, "verify": 0.0, "commit": 0.0},
    verified=True,
    engine_versions=[3],
    digest="c",
)


@pytest.fixture
def loop(monkeypatch):
    platform.install("cpu")
    from moerl.train import loop

    monkeypatch.setattr(loop, "agreed", lambda mine: mine)  # one rank
    return loop


class Engines:
    """A source and a weight sync at once. `happens` is what to do at each call, in order: an error to raise, or None."""

    def __init__(self, *happens, revivals=0):
        self.happens, self.revivals, self.calls, self.told = list(happens), revivals, [], []

    def _do(self, what):
        self.calls.append(what)
        if self.happens and (error := self.happens.pop(0)):
            raise error

    def work(self):
        self._do("work")
        return "done"

    def push(self, shards, version):
        self._do(f"push {version}")
        return REPORT

    def announce(self, version):
        self.told.append(f"{version} comes")

    def published(self, version):
        self.told.append(f"{version} is there")

    def revive(self, error):
        self.revivals -= 1
        return self.revivals >= 0


def run_with(engines):
    trainer = SimpleNamespace(shards=list)
    return SimpleNamespace(source=engines, sync=engines, trainer=trainer, progress=Progress(3, 3, 12))


def test_work_is_done_again_after_a_revival_and_a_push(loop):
    engines = Engines(EngineError("it died"), revivals=1)
    assert loop.on_engines(run_with(engines), lambda source: source.work()) == "done"
    assert engines.calls == ["work", "push 3", "work"]


def test_an_error_that_no_death_explains_ends_the_run(loop):
    engines = Engines(EngineError("bad request"))
    with pytest.raises(EngineError, match="bad request"):
        loop.on_engines(run_with(engines), lambda source: source.work())
    assert engines.calls == ["work"]


def test_a_push_that_an_engine_did_not_survive_is_repeated(loop):
    engines = Engines(ReshardError("it died"), revivals=1)
    metrics = loop.push(run_with(engines))
    assert engines.calls == ["push 3", "push 3"]
    assert engines.told == ["3 comes", "3 is there"]
    assert metrics["versions_consistent"]
    assert (metrics["sync_bytes"], metrics["sync_bytes_ratio"], metrics["sync_changed_share"]) == (6, 2.0, 0.5)


def test_an_engine_that_dies_again_during_the_push_after_its_revival(loop):
    engines = Engines(EngineError("it died"), ReshardError("again"), revivals=2)
    assert loop.on_engines(run_with(engines), lambda source: source.work()) == "done"
    assert engines.calls == ["work", "push 3", "push 3", "work"]


def test_a_push_that_fails_with_living_engines_ends_the_run(loop):
    engines = Engines(ReshardError("other bytes"))
    with pytest.raises(ReshardError, match="other bytes"):
        loop.push(run_with(engines))
    assert engines.told == ["3 comes"]


def test_ranks_without_a_source_follow_rank_0(loop, monkeypatch):
    answers = [True, False]
    monkeypatch.setattr(loop, "agreed", lambda mine: answers.pop(0))
    follower = Engines()
    run = run_with(follower)
    run.source = None
    assert loop.on_engines(run, lambda source: source.work()) is None
    assert follower.calls == ["push 3"]
    assert answers == []
