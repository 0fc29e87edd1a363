"""Ray's life cycle, seen from the driver (trainer rank 0): join a cluster, or start a small local one and remove it again.

A local Ray has no dashboard, a small object store (groups of rollouts are a few megabytes) and as few idle workers as
possible: its actors supervise processes and score answers, they do not compete for cores. Every actor therefore asks for
zero CPUs; only GPUs are counted.

Invariant: what `ray_running` started is gone when it ends, also after Ctrl-C, including its files. If this process is killed,
the kernel ends Ray and all actors with it (two helper processes of Ray notice within two minutes); the next run removes the files.
"""

import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

from moerl.errors import ConfigError

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_OBJECT_STORE_BYTES = 200 * 2**20
_CONNECT_TIMEOUT_S = 10.0
_FOLDER, _PREFIX = "/tmp", "moerl-ray-"


@dataclass(frozen=True)
class Runtime:
    """Attributes:
    host: address of this process as actors reach it.
    local: whether Ray runs only for this process.
    """

    host: str
    local: bool


@contextmanager
def ray_running(address: str | None, *, gpus: Sequence[str] = ()) -> Iterator[Runtime]:
    """Connect to Ray for the duration of the block.

    Args:
        address: of a running cluster ("host:port", "auto"); None starts a local Ray.
        gpus: local Ray only: the devices that engines may use, as in CUDA_VISIBLE_DEVICES (see `engine_gpus`).

    Raises:
        ConfigError: no cluster answers at `address`.
    """
    if address:
        yield from _joined(address)
    else:
        yield from _local(gpus)


def _joined(address: str) -> Iterator[Runtime]:
    _check_reachable(address)
    try:
        with _own_sigterm():
            ray.init(
                address=address,
                logging_level=logging.ERROR,
                log_to_driver=False,
                runtime_env={"env_vars": {"PYTHONPATH": _python_path()}},
            )
    except (ConnectionError, TimeoutError, ValueError) as error:
        raise ConfigError(f"no Ray cluster answers at RAY_ADDRESS = {address!r} ({error}); unset it to start a local Ray") from error
    try:
        yield Runtime(ray.util.get_node_ip_address(), local=False)
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes, silently."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        # "auto" and other names are looked up by Ray.
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(f"no Ray cluster answers at RAY_ADDRESS = {address!r} ({error}); unset it to start a local Ray") from error


def _local(gpus: Sequence[str]) -> Iterator[Runtime]:
    _sweep()
    # Ray's sockets live below this folder, and their paths may not exceed 107 characters.
    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_FOLDER)
    variables = {"PYTHONPATH": _python_path(), "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    # Engines inherit it. Ray's own default, 15, would leave them next to nothing of a core that a trainer or another process wants as well.
    variables["RAY_worker_niceness"] = "0"
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        with _environment(variables), _own_sigterm():
            ray.init(
                address="local",
                num_cpus=1,
                num_gpus=len(gpus),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                logging_level=logging.ERROR,
                log_to_driver=False,
                _temp_dir=folder,
            )
        yield Runtime("127.0.0.1", local=True)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """Remove the folders of processes that were killed before they could do it themselves."""
    for folder in Path(_FOLDER).glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def engine_gpus(visible: Sequence[str], trainer_ranks: int, needed: int) -> list[str]:
    """The devices of this machine that are left for engines: the trainer's ranks take the first ones.

    Args:
        visible: all devices, as in CUDA_VISIBLE_DEVICES.
        needed: engine.count * engine.tp.

    Raises:
        ConfigError: too few devices are left.
    """
    left = list(visible[trainer_ranks:])
    if len(left) < needed:
        raise ConfigError(
            f"{needed} GPUs are needed for engines (engine.count x engine.tp) besides {trainer_ranks} for trainer ranks, but this machine "
            f"shows {len(visible)}; lower engine.count, engine.tp or the number of ranks, or join a cluster with RAY_ADDRESS"
        )
    return left[:needed]


def _python_path() -> str:
    paths = [str(PACKAGE_ROOT)]
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    return os.pathsep.join(paths)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Put this process's SIGTERM handler back. Ray's own prints a stack and ends the process before anything is stopped in order."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables that processes started inside the block inherit; this process's own are restored after it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
