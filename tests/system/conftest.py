"""A tiny model, the command line, and one short run that is shared by the tests that look at what it left."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from moerl.convert.tiny import tiny_config, write_tiny
from tests.system.run_harness import ROOT, SETTINGS, Finished, Started, running
from tests.system.sync_harness import Fleet


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny(folder, tiny_config(layers=3, experts=16, topk=4, groups=4, group_topk=2), seed=1)
    return folder


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[..., AbstractContextManager[Started]]:
    """Start a command on the tiny model: name of the run folder, then further arguments. To be used with `with`.

    `command` is a command of moerl, or how to start a trainer directly: what stands between `python` and `@ FILE`.
    """
    root = tmp_path_factory.mktemp("runs")
    config = root / "tiny.toml"
    config.write_text(SETTINGS.format(model=tiny_model))

    def start(
        name: str, *arguments: str, command: str | list[str] = "train", modules: Path | None = None
    ) -> AbstractContextManager[Started]:
        module = ["-m", "moerl.cli", command] if isinstance(command, str) else command
        argv = [*module, "@", str(config), "--run.dir", str(root / name), *arguments]
        path = str(ROOT) if modules is None else f"{ROOT}:{modules}"
        return running(argv, root / name, python_path=path, output=root / f"{name}.out")

    return start


@pytest.fixture(scope="session")
def moerl(start: Callable[..., AbstractContextManager[Started]]) -> Callable[..., Finished]:
    """Run a command to its end; arguments as for `start`."""

    def run(name: str, *arguments: str, timeout_s: float = 400.0, **options: object) -> Finished:
        with start(name, *arguments, **options) as started:
            return started.finish(timeout_s)

    return run


@pytest.fixture(scope="session")
def live_run(moerl: Callable[..., Finished]) -> Finished:
    """Four steps with a real engine, checkpoints after steps 2 and 4, captures of steps 0 and 2."""
    finished = moerl("live", "--diagnostics.capture_every_steps", "2")
    assert finished.status == 0, finished.output[-4000:]
    return finished


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Engines for weight sync, shared by all modules that push into some."""
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    yield fleet
    fleet.stop()
