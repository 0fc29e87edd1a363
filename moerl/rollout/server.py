"""The life cycle of one SGLang server: command line, process group, readiness, death, and a stop that leaves nothing behind.

    schema.Engine + [sglang] --command_line--> subprocess (own session, log file) --wait_healthy--> url

Invariants: routes are always recorded and the language-model head always computes in float32, as the trainer's does; a
server is healthy only after a probe request has come back with valid routes and the plugin has shown its mark; the kernel
kills the server when the process that started it dies, and every process of its group is gone after `stop`.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from moerl.config.native import OWNED_SGLANG
from moerl.config.schema import Engine
from moerl.errors import ConfigError, EngineError, RolloutError, TraceError
from moerl.models import read_spec
from moerl.ports import free_port
from moerl.rollout import plugin
from moerl.rollout.check import decode_routes
from moerl.rollout.client import KEEP_ALIVE_S
from moerl.routing.trace import Layout

HOST = "127.0.0.1"
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
LOG_LINES = 30
_POLL_S = 0.2
_PROBE_TOKENS = [0, 1, 0]
_TAKEN = ("address already in use", "EADDRINUSE")

# The kernel's parent-death signal survives exec, so the server needs no wrapper process and no code between fork and exec.
_BOOTSTRAP = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this engine is gone")
os.execv(sys.executable, [sys.executable, "-m", "sglang.launch_server", *sys.argv[2:]])
"""


def command_line(model_path: str, engine: Engine, sglang: dict[str, Any], *, device: str, port: int, version: int, seed: int) -> list[str]:
    """Arguments of `sglang.launch_server`.

    Raises:
        ConfigError: `[sglang]` sets options that moerl owns (all of them are listed).
    """
    if owned := [name for name in sglang if name in OWNED_SGLANG]:
        raise ConfigError([f"[sglang] {name} cannot be set: {OWNED_SGLANG[name]}" for name in owned])
    options: dict[str, Any] = {
        "model_path": model_path,
        "host": HOST,
        "port": port,
        "device": device,
        "dtype": engine.dtype,
        "tp_size": engine.tp,
        "max_running_requests": engine.max_running_requests,
        "max_total_tokens": engine.max_total_tokens,
        "random_seed": seed,
        "weight_version": str(version),
        "enable_return_routed_experts": True,
        "enable_fp32_lm_head": True,
        "skip_server_warmup": True,
        "log_level": "info",
        "log_level_http": "warning",
    }
    if device == "cpu":
        # Else an idle engine keeps a core busy that the trainer could use.
        options |= {"attention_backend": "torch_native", "sampling_backend": "pytorch", "sleep_on_idle": True}
    return [argument for name, value in (options | sglang).items() for argument in _flag(name, value)]


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, dict):
        return [flag, json.dumps(value)]
    if isinstance(value, (list, tuple)):
        return [flag, *(str(item) for item in value)]
    return [flag, str(value)]


def environment(engine: Engine, device: str) -> dict[str, str]:
    """The server's environment: this process's, without a launcher's rank variables, with the plugin's import path.

    Raises:
        EngineError: the plugin's entry point is not visible from the package root.
    """
    found = importlib.metadata.distributions(name="moerl", path=[str(PACKAGE_ROOT)])
    if not any(entry.group == "sglang.srt.plugins" for distribution in found for entry in distribution.entry_points):
        raise EngineError(
            f"SGLang would not find moerl's plugin: {PACKAGE_ROOT} has no moerl.egg-info with the entry point group "
            f"sglang.srt.plugins; run `{sys.executable} setup.py -q egg_info` there"
        )
    # A torchrun worker's variables would make torch in the engine join the trainer's rendezvous.
    launcher = ("TORCHELASTIC_", "ROLE_", "GROUP_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    paths = [str(PACKAGE_ROOT)]
    if importlib.util.find_spec("sgl_kernel") is None:
        paths.append(str(Path(__file__).parent / "shims"))
    if inherited := env.get("PYTHONPATH"):
        paths.append(inherited)
    env |= {
        "PYTHONPATH": os.pathsep.join(paths),
        # A health request must not generate: it would wait behind a pause and count as a request during an update.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "SGLANG_TIMEOUT_KEEP_ALIVE": str(int(4 * KEEP_ALIVE_S)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        threads = str(engine.threads)
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if engine.tp > 1:
            # The CUDA build of torch makes SGLang load NCCL for several ranks, which fails without a driver.
            env |= {"SGLANG_CPU_OMP_THREADS_BIND": _core_lists(engine), "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so"}
    return env


def _core_lists(engine: Engine) -> str:
    """One list of cores per rank, "0,1|2,3"; ranks share cores when there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    picks = [[cores[(rank * engine.threads + i) % len(cores)] for i in range(engine.threads)] for rank in range(engine.tp)]
    return "|".join(",".join(str(core) for core in sorted(set(pick))) for pick in picks)


def resolve_device(device: str) -> str:
    """`auto` becomes `cuda` where this process sees a GPU, else `cpu`."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class EngineServer:
    """One SGLang server as a subprocess.

    `start` must be called from a thread that lives as long as the server should: the kernel kills the server when that
    thread ends. `stop` may be called at any time, also repeatedly.

    Args:
        model_path: Hugging Face folder.
        sglang: the `[sglang]` table (field names of SGLang's ServerArgs).
        port: None picks a free one at each start.
        log_path: receives stdout and stderr of all the server's processes; appended to.
        version: weight version of the folder's weights.
        seed: of the engine's sampler.
    """

    def __init__(
        self,
        model_path: str | Path,
        engine: Engine,
        sglang: dict[str, Any],
        *,
        port: int | None = None,
        log_path: Path,
        version: int = 0,
        seed: int,
    ):
        self.model_path = str(model_path)
        self.engine = engine
        self.sglang = sglang
        self.log_path = Path(log_path)
        self.version = version
        self.seed = seed
        self.device = resolve_device(engine.device)
        self.process: subprocess.Popen[bytes] | None = None
        self._wanted = self._port = port
        self._log_start = 0
        self._scratch: Path | None = None

    @property
    def url(self) -> str:
        if self._port is None:
            raise EngineError("this engine has no address yet: call start() first")
        return f"http://{HOST}:{self._port}"

    def start(self) -> None:
        """Spawn the server; returns at once.

        Raises:
            EngineError: the port is taken, the plugin is not visible, or a server is already running here.
            ConfigError: `[sglang]` holds options that moerl owns.
        """
        if self.alive():
            raise EngineError(f"the engine at {self.url} is already running; stop it first")
        port = free_port(HOST) if self._wanted is None else _check_free(self._wanted)
        arguments = command_line(
            self.model_path, self.engine, self.sglang, device=self.device, port=port, version=self.version, seed=self.seed
        )
        env = environment(self.engine, self.device)
        self._port = port
        # SGLang leaves its sockets behind in the temporary folder: it gets one of its own, removed by stop().
        self._remove_scratch()
        self._scratch = Path(tempfile.mkdtemp(prefix="moerl-engine-"))
        env["TMPDIR"] = str(self._scratch)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    def wait_healthy(self) -> None:
        """Block until the server answers, records routes and runs the plugin; deadline `engine.start_timeout_s` from now.

        Raises:
            EngineError: the server exited (with its exit code and last log lines), is not ready in time, does not record
                routes, or runs without the plugin.
        """
        deadline = time.monotonic() + self.engine.start_timeout_s
        while (info := self._info(deadline)) is None:
            if not self.alive():
                raise self.died()
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the engine at {self.url} did not become healthy within {self.engine.start_timeout_s:g} s "
                    f"(engine.start_timeout_s); the end of its log {self.log_path}:\n{self._log_tail()}"
                )
            time.sleep(_POLL_S)
        self._check_info(info)
        self._check_probe(deadline)

    def alive(self) -> bool:
        """Whether the server's main process runs."""
        return self.process is not None and self.process.poll() is None

    def met_a_taken_port(self) -> bool:
        """Whether a server that is not alive gave up since somebody else listened on one of its ports.

        Each is chosen when it is free, and taken when the server gets there, some seconds later.
        """
        return not self.alive() and any(words in line for line in self._log() for words in _TAKEN)

    def died(self) -> EngineError:
        """An error (to raise) with the exit code and the last lines of the log of a server that is not alive."""
        code = None if self.process is None else self.process.poll()
        if code is None:
            state = "was not started" if self.process is None else "is still running"
        elif code < 0:
            state = f"was killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                state += " (SGLang does this to itself when one of its processes fails, the kernel for lack of memory)"
        else:
            state = f"exited with code {code}"
        return EngineError(f"the engine on port {self._port} {state}; the end of its log {self.log_path}:\n{self._log_tail()}")

    def stop(self, grace_s: float = 2.0) -> None:
        """End the server and every process of its group: SIGTERM, then SIGKILL to what is left after `grace_s` seconds.

        Raises:
            EngineError: a process survived SIGKILL.
        """
        if self.process is None:
            return
        group = self.process.pid
        # The main process alone goes first: Python's resource tracker then sees its end, removes semaphores and leaves.
        steps = ((os.killpg, signal.SIGTERM, grace_s), (os.kill, signal.SIGKILL, 1.0), (os.killpg, signal.SIGKILL, 10.0))
        left = self._left(group)
        for send, signal_, wait_s in steps:
            deadline = time.monotonic() + wait_s
            if left:
                _signal(send, group, signal_)
            while (left := self._left(group)) and time.monotonic() < deadline:
                time.sleep(0.05)
        if left:
            raise EngineError(f"processes {left} of the engine on port {self._port} survived SIGKILL")
        self._remove_scratch()

    def _remove_scratch(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _left(self, group: int) -> list[int]:
        self.process.poll()
        return _group_members(group)

    def _info(self, deadline: float) -> dict[str, Any] | None:
        """What the server says of itself; None if it does not answer, or another does that took its port."""
        soon = min(deadline, time.monotonic() + 5)
        try:
            self._request("/health", None, soon)
            info = self._request("/server_info", None, soon)
        except EngineError:
            return None
        states = info.get("internal_states") if isinstance(info, dict) else None
        mine = states and all(state.get(plugin.GROUP, self.process.pid) == self.process.pid for state in states)
        return info if mine else None

    def _request(self, path: str, body: dict[str, Any] | None, deadline: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        try:
            with _opener().open(request, timeout=max(0.1, deadline - time.monotonic())) as response:
                text, is_json = response.read(), "json" in response.headers.get_content_type()
        except (OSError, urllib.error.URLError) as error:
            if path != "/health" and not self.alive():
                raise self.died() from error
            raise EngineError(f"{self.url}{path} failed while the engine was starting: {error}") from error
        return json.loads(text) if is_json else None

    def _check_info(self, info: dict[str, Any]) -> None:
        if not info["enable_return_routed_experts"]:
            raise EngineError(f"the engine at {self.url} runs without --enable-return-routed-experts: it cannot record routes")
        marks = [state.get(plugin.MARK) for state in info["internal_states"]]
        if any(mark != plugin.VERSION for mark in marks):
            raise EngineError(
                f"the engine at {self.url} runs without moerl's plugin (marks {marks}, expected {plugin.VERSION}); SGLANG_PLUGINS may "
                f"exclude it, or it failed to load: look for 'plugin' in {self.log_path}"
            )
        for name, value in self.sglang.items():
            if isinstance(value, bool) and name in info and info[name] is not None and bool(info[name]) != value:
                raise EngineError(f"[sglang] {name} = {value} has no effect: SGLang {info['version']} resolved it to {info[name]}")

    def _check_probe(self, deadline: float) -> None:
        """One greedy token with routes, so that an engine that cannot record them is found before the first step."""
        sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": _PROBE_TOKENS, "sampling_params": sampling, "return_routed_experts": True}
        reply = self._request("/generate", body, deadline)
        spec = read_spec(self.model_path)
        layout = Layout(spec.moe_layers, spec.experts, spec.topk)
        try:
            decode_routes(reply["meta_info"], rows=len(_PROBE_TOKENS), layout=layout, layers=spec.layers)
        except (RolloutError, TraceError) as error:
            raise EngineError(f"the engine at {self.url} does not record routes properly: {error}") from error
        self._request("/flush_cache", {}, deadline)

    def _log(self) -> list[str]:
        """What this server logged last."""
        with self.log_path.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 65536))
            return log.read().decode(errors="replace").splitlines()

    def _log_tail(self) -> str:
        if not self.log_path.exists():
            return "  (no log)"
        return "\n".join("  " + line[:400] for line in self._log()[-LOG_LINES:]) or "  (empty)"


@cache
def _opener() -> urllib.request.OpenerDirector:
    """Uses no proxy. One for all requests, since making one prepares TLS as well."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _check_free(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError as error:
            raise EngineError(
                f"port {port} on {HOST} is already in use ({error.strerror}); stop what listens there or choose another"
            ) from error
    return port


def _signal(send: Callable[[int, int], None], target: int, signal_: signal.Signals) -> None:
    """`send` is os.kill or os.killpg; a target that is already gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        send(target, signal_)


def _group_members(group: int) -> list[int]:
    """Ids of the processes in a process group that still run; zombies that nobody has reaped do not count."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name) state ppid pgrp …; the name may contain anything, so split after its last parenthesis.
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(pgrp) == group and state not in "ZX":
            members.append(int(stat.parent.name))
    return sorted(members)
