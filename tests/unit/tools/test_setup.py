"""tools/setup.sh with a base Python that only pretends: finding it, making, reusing, repairing, two at once.

The pretended interpreter copies itself on `-m venv`, and `-m pip install` records its arguments; nothing is downloaded.
"""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = ("bash", "awk", "cat", "cp", "cut", "date", "df", "dirname", "env", "find", "flock", "grep", "mkdir", "mktemp", "readlink")
COMMANDS += ("mv", "rm", "sha256sum", "sleep", "tail", "touch", "tr", "wc")

PYTHON = """\
#!/bin/bash
# A pretended Python interpreter.
case "$*" in
  "-c import sys, venv"*) exit 0 ;;
  "-c import sys, platform"*) echo "3 12 x86_64" ;;
  "-V") echo "Python 3.12.99" ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip install"*) echo "$*" >>"$PRETEND/pip"; sleep "$(cat "$PRETEND/pip_seconds")"
    case "$*" in *transformer*) exit 1 ;; esac
    exit "$(cat "$PRETEND/pip_status")" ;;
  "setup.py -q egg_info") echo egg_info >>"$PRETEND/egg_info"; mkdir -p moerl.egg-info
    touch moerl.egg-info/entry_points.txt
    printf '%s\\n' torch '[cpu]' gguf '[gpu]' sglang==0.5.23 'transformer-engine[pytorch]>=2.8' '[dev]' ruff >moerl.egg-info/requires.txt ;;
  "setup.py -q build_ext --build-temp "*) echo "$*" >>"$PRETEND/build_ext"
    if [[ -e $PRETEND/compiler_fails ]]; then exit 1; fi
    mkdir -p "$5/moerl/routing"; touch "$5/moerl/routing/_routes.cpython-312.so" ;;
  *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""


@dataclass
class Clone:
    """A copy of what set-up reads, and an environment without any other Python."""

    root: Path
    env: dict[str, str]
    pretend: Path

    def setup(self) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(self.root / "tools" / "setup.sh")]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60, check=False, cwd="/")

    def pips(self) -> list[str]:
        record = self.pretend / "pip"
        return record.read_text().splitlines() if record.exists() else []


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    root = tmp_path / "a clone"
    for name in ("tools/setup.sh", "tools/moerl", "requirements/lock.txt", "setup.py", "csrc/routes.cpp"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "moerl" / "routing").mkdir(parents=True)
    commands, pretend = tmp_path / "bin", tmp_path / "pretend"
    commands.mkdir()
    pretend.mkdir()
    for name in COMMANDS:
        if found := shutil.which(name):
            (commands / name).symlink_to(found)
    (pretend / "pip_status").write_text("0")
    (pretend / "pip_seconds").write_text("0")
    executable(commands / "python3.12", PYTHON)
    (pretend / "gpus").write_text("")
    executable(commands / "ls", '#!/bin/bash\ncat "$PRETEND/gpus"\n')  # the kind of machine is told by its device nodes
    home = tmp_path / "home"
    home.mkdir()
    env = {"PATH": str(commands), "HOME": str(home), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PRETEND": str(pretend)}
    return Clone(root, env, pretend)


def test_makes_one_environment_and_prints_only_its_python(clone: Clone) -> None:
    answer = clone.setup()
    assert answer.returncode == 0, answer.stderr
    python = Path(answer.stdout.removesuffix("\n"))
    assert python.name == "python"
    assert python.is_relative_to(clone.env["XDG_CACHE_HOME"])
    assert "installing" in answer.stderr
    assert "--no-deps" in clone.pips()[0]
    assert (clone.root / "moerl.egg-info" / "entry_points.txt").exists()


def test_the_second_run_is_silent_and_quick(clone: Clone) -> None:
    first = clone.setup()
    start = time.monotonic()
    second = clone.setup()
    assert time.monotonic() - start < 2
    assert (second.stdout, second.stderr) == (first.stdout, "")
    assert len(clone.pips()) == 1


def test_other_requirements_make_another_environment(clone: Clone) -> None:
    first = clone.setup()
    with (clone.root / "requirements" / "lock.txt").open("a") as lock:
        lock.write("another==1\n")
    assert clone.setup().stdout != first.stdout
    assert len(clone.pips()) == 2


def test_a_gpu_brings_its_extra_and_transformer_engine_may_fail(clone: Clone) -> None:
    cpu = clone.setup().stdout
    (clone.pretend / "gpus").write_text("/dev/nvidia0\n")
    answer = clone.setup()
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout not in ("", cpu)
    lock, sglang, engine = clone.pips()[1:]
    assert "--no-deps" in lock
    assert sglang.endswith("sglang==0.5.23")
    assert "-c " in sglang
    assert engine.endswith("--no-build-isolation transformer-engine[pytorch]>=2.8")
    assert "warning: Transformer Engine did not install" in answer.stderr
    constraints = (Path(answer.stdout.strip()).parents[1] / "constraints.txt").read_text()
    assert "torch==" in constraints
    assert "nvidia-" not in constraints


def test_entry_points_are_written_again_when_setup_py_changes(clone: Clone) -> None:
    clone.setup()
    later = time.time() + 10
    os.utime(clone.root / "setup.py", (later, later))
    clone.setup()
    assert len((clone.pretend / "egg_info").read_text().splitlines()) == 2
    assert len(clone.pips()) == 1


def built(clone: Clone) -> list[str]:
    return sorted(path.name for path in (clone.root / "moerl" / "routing").iterdir())


def test_the_route_codecs_are_compiled_once_and_again_when_their_source_changes(clone: Clone) -> None:
    executable(Path(clone.env["PATH"]) / "c++", "#!/bin/bash\n")
    (clone.root / "moerl" / "routing" / "_routes.cpython-311.so").touch()
    os.utime(clone.root / "moerl" / "routing" / "_routes.cpython-311.so", (0, 0))
    assert clone.setup().returncode == 0
    assert built(clone) == ["_routes.cpython-312.so"]
    assert clone.setup().stderr == ""
    later = time.time() + 10
    os.utime(clone.root / "csrc" / "routes.cpp", (later, later))
    assert "compiling csrc/routes.cpp" in clone.setup().stderr
    assert len((clone.pretend / "build_ext").read_text().splitlines()) == 2


def test_without_a_compiler_nothing_is_compiled_and_nothing_said(clone: Clone) -> None:
    clone.setup()
    answer = clone.setup()
    assert (answer.returncode, answer.stderr, built(clone)) == (0, "", [])


def test_a_compiler_that_fails_is_a_warning(clone: Clone) -> None:
    executable(Path(clone.env["PATH"]) / "c++", "#!/bin/bash\n")
    (clone.pretend / "compiler_fails").touch()
    answer = clone.setup()
    assert answer.returncode == 0
    assert "warning: csrc/routes.cpp did not compile" in answer.stderr
    assert built(clone) == []


def test_a_failed_install_says_where_its_log_is_and_is_repaired(clone: Clone) -> None:
    (clone.pretend / "pip_status").write_text("1")
    failed = clone.setup()
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "pip failed; the whole log is " in failed.stderr
    (clone.pretend / "pip_status").write_text("0")
    assert clone.setup().returncode == 0
    assert len(clone.pips()) == 2


def test_of_two_at_once_one_waits(clone: Clone) -> None:
    (clone.pretend / "pip_seconds").write_text("1.5")
    command = ["bash", str(clone.root / "tools" / "setup.sh")]
    both = [subprocess.Popen(command, env=clone.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert answers[0][0] == answers[1][0] != ""
    assert sum("another set-up is making" in err for _, err in answers) == 1
    assert len(clone.pips()) == 1


def test_interrupting_leaves_nothing_that_passes_for_complete(clone: Clone) -> None:
    (clone.pretend / "pip_seconds").write_text("30")
    command = ["bash", str(clone.root / "tools" / "setup.sh")]
    process = subprocess.Popen(command, env=clone.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 20
    while not clone.pips() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what the pretended pip had started
    assert process.returncode == 130
    assert not list(Path(clone.env["XDG_CACHE_HOME"]).glob("moerl/*/.complete"))


def test_a_shim_that_refuses_is_passed_over_for_pyenv(clone: Clone) -> None:
    executable(Path(clone.env["PATH"]) / "python3.12", "#!/bin/bash\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    versions = Path(clone.env["HOME"]) / ".pyenv" / "versions" / "3.12.99" / "bin"
    versions.mkdir(parents=True)
    executable(versions / "python3.12", PYTHON)
    answer = clone.setup()
    assert answer.returncode == 0, answer.stderr


def test_uv_is_asked_last(clone: Clone, tmp_path: Path) -> None:
    (Path(clone.env["PATH"]) / "python3.12").rename(tmp_path / "managed-python")
    executable(Path(clone.env["PATH"]) / "uv", f"#!/bin/bash\n[[ $1 == python && $2 == find ]] && echo '{tmp_path}/managed-python'\n")
    answer = clone.setup()
    assert answer.returncode == 0, answer.stderr


def test_no_python_is_a_clear_message(clone: Clone) -> None:
    (Path(clone.env["PATH"]) / "python3.12").unlink()
    answer = clone.setup()
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.startswith("error: no Python >= 3.12 with venv and pip was found")


def test_command_line_wrapper_runs_from_any_folder_and_through_a_link(clone: Clone, tmp_path: Path) -> None:
    text = PYTHON.replace('*) echo "unexpected', '"-m moerl.cli "*) echo "$PYTHONPATH|$*|$PWD" ;;\n  *) echo "unexpected')
    executable(Path(clone.env["PATH"]) / "python3.12", text)
    (tmp_path / "link").symlink_to(clone.root / "tools" / "moerl")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = ["bash", str(tmp_path / "link"), "config", "show"]
    answer = subprocess.run(command, env=clone.env, capture_output=True, text=True, timeout=60, check=False, cwd=elsewhere)
    assert answer.stdout == f"{clone.root}|-m moerl.cli config show|{elsewhere}\n", answer.stderr
