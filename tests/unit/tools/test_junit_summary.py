"""The closing line of a test run that had several parts."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[3] / "tools" / "junit_summary.py"


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("junit_summary", FILE)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def report(folder: Path, name: str, **counts: float) -> None:
    values = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0, "time": 0.5} | counts
    attributes = " ".join(f'{key}="{value}"' for key, value in values.items())
    (folder / name).write_text(f"<testsuites><testsuite {attributes}/></testsuites>")


def test_parts_add_up(tmp_path: Path, module) -> None:
    report(tmp_path, "a.xml", tests=10, failures=1, skipped=2)
    report(tmp_path, "b.xml", tests=5, errors=1)
    ran, line = module.summary(tmp_path)
    assert ran == 13
    assert line.strip("=") == " 1 failed, 11 passed, 2 skipped, 1 errors in 1.00s "


def test_nothing_ran(tmp_path: Path, module) -> None:
    report(tmp_path, "a.xml")
    assert module.summary(tmp_path) == (0, " no tests ran in 0.50s ".center(100, "="))
