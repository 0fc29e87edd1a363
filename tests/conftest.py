"""Which tests run in the same worker where several run side by side: those that share engines or a run, and else those of a file."""

from pathlib import Path

import pytest

_SHARED = {"fleet": "engines", "start": "runs"}
"""Fixture that starts something once for several files -> the group of the tests that use it."""

_SLOW = ("parallel", "system")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        folder, *_ = item.path.relative_to(here).parts
        if folder in _SLOW:
            shared = [group for fixture, group in _SHARED.items() if fixture in getattr(item, "fixturenames", ())]
            item.add_marker(pytest.mark.xdist_group(shared[0] if shared else item.path.stem))
