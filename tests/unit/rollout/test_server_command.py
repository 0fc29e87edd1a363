"""The server's command line, environment, ports and process group, without SGLang."""

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from moerl.config.schema import Engine
from moerl.errors import ConfigError, EngineError
from moerl.rollout import server
from moerl.rollout.client import KEEP_ALIVE_S
from moerl.rollout.server import EngineServer, command_line, environment


def arguments(sglang: dict, device: str = "cpu") -> list[str]:
    return command_line("/m", Engine(tp=2), sglang, device=device, port=3000, version=5, seed=9)


def value(args: list[str], flag: str) -> str:
    return args[args.index(flag) + 1]


def test_command_line_on_cpu():
    args = arguments({})
    assert value(args, "--model-path") == "/m"
    assert value(args, "--tp-size") == "2"
    assert value(args, "--weight-version") == "5"
    assert value(args, "--attention-backend") == "torch_native"
    assert value(args, "--random-seed") == "9"
    assert "--enable-return-routed-experts" in args
    assert "--enable-fp32-lm-head" in args
    assert "--sleep-on-idle" in args
    assert "--sleep-on-idle" not in arguments({"sleep_on_idle": False})


def test_cuda_keeps_sglangs_own_backends():
    assert "--sleep-on-idle" not in arguments({}, "cuda")
    assert "--attention-backend" not in arguments({}, "cuda")
    assert "--sampling-backend" not in arguments({}, "cuda")


def test_passthrough_options():
    args = arguments(
        {
            "disable_radix_cache": True,
            "enable_metrics": False,
            "chunked_prefill_size": 64,
            "attention_backend": "x",
            "cuda_graph_bs_decode": [1, 2],
            "json_model_override_args": {"a": 1},
        }
    )
    assert "--disable-radix-cache" in args
    assert "--enable-metrics" not in args
    assert value(args, "--chunked-prefill-size") == "64"
    assert value(args, "--attention-backend") == "x"
    assert args[args.index("--cuda-graph-bs-decode") + 1 :][:2] == ["1", "2"]
    assert value(args, "--json-model-override-args") == '{"a": 1}'


def test_options_that_moerl_owns_are_refused_all_at_once():
    with pytest.raises(ConfigError) as error:
        arguments({"tp_size": 4, "page_size": 1, "model_path": "/x", "enable_return_routed_experts": False})
    assert len(error.value.violations) == 3
    assert "[sglang] tp_size cannot be set: set engine.tp" in error.value.violations


def test_environment_drops_a_launchers_variables(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setattr(server.importlib.metadata, "distributions", visible_plugin)
    env = environment(Engine(threads=2), "cpu")
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "LOCAL_RANK"} & env.keys()
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(server.PACKAGE_ROOT)
    assert env["PYTHONPATH"].endswith("/elsewhere")
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_NCCL_SO_PATH" not in env


def visible_plugin(**filters: object) -> list[object]:
    class Entry:
        group = "sglang.srt.plugins"

    class Distribution:
        entry_points = (Entry(),)

    return [Distribution()]


def test_several_ranks_on_cpu_share_out_the_cores(monkeypatch):
    monkeypatch.setattr(server.importlib.metadata, "distributions", visible_plugin)
    monkeypatch.setattr(server.os, "sched_getaffinity", lambda pid: {4, 5, 6})
    assert environment(Engine(tp=2, threads=1), "cpu")["SGLANG_CPU_OMP_THREADS_BIND"] == "4|5"
    assert environment(Engine(tp=2, threads=2), "cpu")["SGLANG_CPU_OMP_THREADS_BIND"] == "4,5|4,6"
    assert "SGLANG_NCCL_SO_PATH" in environment(Engine(tp=2), "cpu")


def test_an_invisible_plugin_is_found_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "PACKAGE_ROOT", tmp_path)
    with pytest.raises(EngineError, match="setup.py -q egg_info"):
        environment(Engine(), "cpu")


def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind((server.HOST, 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        engine = EngineServer("/m", Engine(device="cpu"), {}, port=port, log_path=tmp_path / "log", seed=1)
        with pytest.raises(EngineError, match=f"port {port} on 127.0.0.1 is already in use"):
            engine.start()


def stand_in(tmp_path, monkeypatch, code: str, **engine: object) -> EngineServer:
    """An EngineServer whose process runs `code` instead of SGLang, through the same bootstrap's place."""
    monkeypatch.setattr(server, "_BOOTSTRAP", code)
    monkeypatch.setattr(server.importlib.metadata, "distributions", visible_plugin)
    return EngineServer("/m", Engine(device="cpu", **engine), {}, log_path=tmp_path / "engine.log", seed=1)


def test_a_crash_at_start_shows_exit_code_and_log(tmp_path, monkeypatch):
    engine = stand_in(tmp_path, monkeypatch, "import sys; print('loading'); print('no such layer', file=sys.stderr); sys.exit(3)")
    engine.log_path.write_text("from an earlier life\n")
    engine.start()
    with pytest.raises(EngineError, match=r"exited with code 3(?s:.)*no such layer") as error:
        engine.wait_healthy()
    assert "earlier life" not in str(error.value)


@pytest.mark.parametrize(("last_words", "taken"), [("[Errno 98] ... address already in use", True), ("no such layer", False)])
def test_a_port_that_was_taken_meanwhile_is_told_from_other_ends(tmp_path, monkeypatch, last_words, taken):
    engine = stand_in(tmp_path, monkeypatch, f"print({last_words!r}); print('bye\\n' * 40); raise SystemExit(1)")
    engine.start()
    with pytest.raises(EngineError, match="exited with code 1"):
        engine.wait_healthy()
    assert engine.met_a_taken_port() == taken
    engine.stop()


def test_an_engine_that_runs_has_its_ports_whatever_it_logs(tmp_path, monkeypatch):
    engine = stand_in(tmp_path, monkeypatch, "print('address already in use', flush=True); import time; time.sleep(60)")
    engine.start()
    try:
        deadline = time.monotonic() + 30
        while not engine._log() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert engine._log() == ["address already in use"]
        assert not engine.met_a_taken_port()
    finally:
        engine.stop(0.1)


@pytest.mark.parametrize("answer", [{"internal_states": [{"moerl": 1, "moerl_process_group": 1}]}, {}, ["something else"]])
def test_another_server_at_its_port_is_not_taken_for_it(tmp_path, monkeypatch, answer):
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

    with http.server.ThreadingHTTPServer((server.HOST, 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        monkeypatch.setattr(server, "free_port", lambda host: other.server_port)
        engine = stand_in(tmp_path, monkeypatch, "import time; time.sleep(60)", start_timeout_s=1.0)
        engine.start()
        try:
            assert engine._request("/health", None, time.monotonic() + 5) == answer, "what the test needs"
            with pytest.raises(EngineError, match="did not become healthy"):
                engine.wait_healthy()
        finally:
            engine.stop(0.1)
            other.shutdown()


def test_an_engine_that_never_answers_meets_its_deadline(tmp_path, monkeypatch):
    engine = stand_in(tmp_path, monkeypatch, "print('thinking', flush=True); import time; time.sleep(60)", start_timeout_s=0.5)
    engine.start()
    try:
        with pytest.raises(EngineError, match=r"not become healthy within 0.5 s(?s:.)*thinking"):
            engine.wait_healthy()
    finally:
        engine.stop(0.1)
    assert not engine.alive()


def test_stop_ends_the_whole_group_even_if_it_ignores_sigterm(tmp_path, monkeypatch):
    code = (
        "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN); "
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)']); "
        "print('child', child.pid, flush=True); time.sleep(60)"
    )
    engine = stand_in(tmp_path, monkeypatch, code)
    engine.start()
    deadline = time.monotonic() + 10
    while "child" not in engine.log_path.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(server._group_members(engine.process.pid)) == 2
    scratch = engine._scratch
    assert scratch.is_dir()
    engine.stop(0.3)
    assert not scratch.exists()
    assert server._group_members(engine.process.pid) == []
    assert not engine.alive()
    engine.stop(0.3)


def test_a_killed_engine_says_by_which_signal(tmp_path, monkeypatch):
    engine = stand_in(tmp_path, monkeypatch, "import time; time.sleep(60)")
    engine.start()
    os.kill(engine.process.pid, signal.SIGKILL)
    engine.process.wait(5)
    assert "was killed by SIGKILL" in str(engine.died())
    engine.stop()


def test_the_server_dies_with_the_process_that_started_it(tmp_path):
    """The real bootstrap, with a sleeping stand-in for `python -m sglang.launch_server`."""
    bootstrap = server._BOOTSTRAP.replace('"-m", "sglang.launch_server"', '"-c", "import time; time.sleep(60)"')
    assert bootstrap != server._BOOTSTRAP
    parent = (
        "import os, subprocess, sys; "
        f"child = subprocess.Popen([sys.executable, '-c', {bootstrap!r}, str(os.getpid())], start_new_session=True); "
        "print(child.pid, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    time.sleep(0.5)
    assert server._group_members(child) == [child]
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 5
    while server._group_members(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server._group_members(child) == []


def info(**changes: object) -> dict:
    state = {server.plugin.MARK: server.plugin.VERSION}
    return {"enable_return_routed_experts": True, "internal_states": [state], "version": "0.5.23", "disable_radix_cache": True} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_return_routed_experts": False}, "runs without --enable-return-routed-experts"),
        ({"internal_states": [{}]}, "runs without moerl's plugin .marks .None., expected 1"),
        ({"internal_states": [{"moerl": 1}, {"moerl": 0}]}, "runs without moerl's plugin"),
        ({"disable_radix_cache": False}, "disable_radix_cache = True has no effect"),
    ],
)
def test_a_server_that_does_not_do_what_it_was_told_is_refused(tmp_path, changes, message):
    engine = EngineServer("/m", Engine(device="cpu"), {"disable_radix_cache": True}, port=1, log_path=tmp_path / "log", seed=1)
    engine._check_info(info())
    with pytest.raises(EngineError, match=message):
        engine._check_info(info(**changes))


def test_the_server_keeps_idle_connections_longer_than_the_client() -> None:
    assert int(environment(Engine(), "cpu")["SGLANG_TIMEOUT_KEEP_ALIVE"]) > KEEP_ALIVE_S
