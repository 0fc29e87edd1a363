"""Log files of a run."""

import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from moerl.observe import logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave logging as it was."""
    root = logging.getLogger()
    levels = {name: logging.getLogger(name).level for name in ("moerl", *logs.QUIET)}
    level = root.level
    yield
    while logs._installed:
        handler = logs._installed.pop()
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)
    logging.captureWarnings(False)


def test_each_rank_writes_its_own_file(tmp_path: Path) -> None:
    path = logs.setup_logging(tmp_path, 3, "info")
    logging.getLogger("moerl.train.loop").info("a line")
    logging.getLogger("moerl.train.loop").debug("not this one")
    assert path == tmp_path / "logs" / "rank-3.log"
    (line,) = path.read_text().splitlines()
    assert line.endswith("INFO    moerl.train.loop: a line")


def test_others_are_quiet_but_their_errors_are_kept(tmp_path: Path) -> None:
    path = logs.setup_logging(tmp_path, "engine-0", "debug")
    logging.getLogger("megatron.core").warning("deprecated")
    logging.getLogger("ray.worker").info("noise")
    logging.getLogger("megatron.core").error("a real error")
    assert path.name == "engine-0.log"
    assert [line.rpartition(": ")[2] for line in path.read_text().splitlines()] == ["a real error"]


def test_a_second_call_moves_to_the_new_file_and_keeps_handlers_of_others(tmp_path: Path) -> None:
    other = logging.NullHandler()
    logging.getLogger().addHandler(other)
    first = logs.setup_logging(tmp_path / "a", 0)
    second = logs.setup_logging(tmp_path / "b", 0)
    logging.getLogger("moerl").info("where?")
    assert "where?" in second.read_text()
    assert first.read_text() == ""
    assert other in logging.getLogger().handlers
    logging.getLogger().removeHandler(other)


def test_errors_also_go_to_stderr_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup_logging(tmp_path, 0, stderr=True)
    logging.getLogger("moerl").warning("only in the file")
    logging.getLogger("moerl").error("seen")
    assert capsys.readouterr().err == "ERROR moerl: seen\n"


def test_python_warnings_stay_off_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logs.setup_logging(tmp_path, 0, stderr=True)
        warnings.warn("deprecated", stacklevel=1)
    assert capsys.readouterr().err == ""


def test_a_crash_leaves_its_stacks_in_the_file(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from moerl.observe.logs import setup_logging;"
        "setup_logging(Path(sys.argv[1]), 0); os.abort()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=60, check=False)
    assert "Fatal Python error: Aborted" in (tmp_path / "logs" / "rank-0.log").read_text()
