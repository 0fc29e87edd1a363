"""Where the compiled loops cannot be used, the reason is told; where they can, no error says otherwise."""

from pathlib import Path

import pytest

from moerl.routing import codec, native, packing


@pytest.fixture(autouse=True)
def _forget() -> object:
    native._load.cache_clear()
    yield
    native._load.cache_clear()


def test_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    assert "is not built, which needs a C++ compiler" in native.problem()
    assert codec._engine() is packing


def test_a_file_that_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "_routes.cpython-312.so").write_bytes(b"no library")
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    assert "does not load" in native.problem()


def test_another_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    if why := native.problem():
        pytest.skip(f"the compiled codecs cannot be used: {why}")
    native._load.cache_clear()
    monkeypatch.setattr(native, "_INTERFACE", -1)
    assert "is of another version (1, expected -1)" in native.problem()


def test_the_compiled_loops_are_used_where_they_can_be() -> None:
    assert codec._engine() is (packing if native.problem() else native)
