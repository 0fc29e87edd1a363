"""Ray's life cycle: what is left behind (nothing), and which devices engines get."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from moerl.cluster import runtime
from moerl.cluster.runtime import PACKAGE_ROOT, engine_gpus, ray_running
from moerl.errors import ConfigError


@pytest.mark.parametrize(
    ("visible", "ranks", "needed", "left"),
    [(["0", "1", "2", "3"], 2, 2, ["2", "3"]), (["4", "5"], 1, 1, ["5"]), ([], 0, 0, []), (["0", "1", "2"], 1, 1, ["1"])],
)
def test_engines_get_the_devices_after_the_trainers(visible, ranks, needed, left):
    assert engine_gpus(visible, ranks, needed) == left


def test_too_few_devices_name_the_settings():
    with pytest.raises(ConfigError, match=r"2 GPUs are needed for engines .* besides 3 .* shows 4"):
        engine_gpus(["0", "1", "2", "3"], 3, 2)


def test_a_local_ray_leaves_no_folder_and_no_variable_behind_and_signals_alone():
    code = """
        import os, ray, signal
        from moerl.cluster.runtime import ray_running
        before = dict(os.environ)
        received = []
        signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
        with ray_running(None) as runtime:
            assert runtime.local and runtime.host == "127.0.0.1"
            folder = os.path.dirname(ray._private.worker._global_node.get_session_dir_path())
            assert folder.startswith("/tmp/moerl-ray-"), folder
            os.kill(os.getpid(), signal.SIGTERM)
            nice = ray.remote(num_cpus=0)(lambda: os.nice(0))
            assert ray.get(nice.remote()) == os.nice(0), "engines get as much of a core as this process"
        assert received == [signal.SIGTERM]
        # Ray itself adds variables of its own; those that were given to it must be as before.
        for name in ("PYTHONPATH", "RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness", "CUDA_VISIBLE_DEVICES"):
            assert os.environ.get(name) == before.get(name), name
        assert not ray.is_initialized()
        print(folder)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip().splitlines()[-1]).exists()


def test_folders_of_killed_processes_are_removed_and_others_are_kept(tmp_path, monkeypatch):
    ended = subprocess.Popen(["true"])
    ended.wait()
    stale, ours, foreign = (tmp_path / f"moerl-ray-{name}" for name in (f"{ended.pid}-a", f"{os.getpid()}-b", "other"))
    for folder in (stale, ours, foreign):
        (folder / "session").mkdir(parents=True)
    monkeypatch.setattr(runtime, "_FOLDER", str(tmp_path))
    runtime._sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([ours.name, foreign.name])


def test_an_address_without_a_cluster_is_a_setting_error():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"no Ray cluster answers at RAY_ADDRESS = '{address}'"), ray_running(address):
            pass
