"""For all tests: those that share engines or a run stay in one worker where several run side by side (`--dist loadfile`), else a file's.

No property test fails because an example took long: what is slow is measured by `moerl bench`, on a machine that does nothing else.
"""

from pathlib import PurePosixPath

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

settings.register_profile("untimed", deadline=None)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("untimed")

_SHARED = {
    "engines": ("test_interrupted_rollouts", "test_reshard_layouts", "test_sync", "test_sync_faults", "test_sync_running"),
    "runs": ("test_asynchrony", "test_commands", "test_interruptions", "test_train"),
}
"""Files whose tests use the same engines (fixture `fleet`), or runs of the same command line (`start`)."""

_GROUPS = {name: group for group, names in _SHARED.items() for name in names}


class _Grouped(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        name = PurePosixPath(file).stem
        return _GROUPS.get(name, file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    return _Grouped(config, log) if config.getvalue("dist") == "loadfile" else None
