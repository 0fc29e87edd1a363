"""`moerl doctor`: what is installed, what is missing, why, and the command that fixes it.

Versions come from package metadata, the machine from the kernel. Only what metadata cannot tell (does CUDA answer, does a
compiled package load) is asked, in a process of its own with a deadline. Exit status 1 if something required is missing.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from moerl.errors import ConfigError
from moerl.routing import native

ROOT = Path(__file__).resolve().parents[1]
SETUP = f"bash {ROOT / 'tools' / 'setup.sh'}"
REINSTALL = f"{sys.executable} -m pip install --no-deps -r {ROOT / 'requirements' / 'lock.txt'}"
_PROBE_TIMEOUT_S = 120.0
_GIB = 1 << 30

Status = Literal["ok", "optional", "missing"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        status: "missing" is something that moerl cannot do without; "optional" is absent and costs what `why` says.
        found: what there is.
        why: the reason of a gap, empty if there is none.
        fix: the command that closes it.
    """

    name: str
    status: Status
    found: str
    why: str = ""
    fix: str = ""


def main(argv: list[str]) -> int:
    """Print the report, as a table or with `--json`.

    Raises:
        ConfigError: another argument.
    """
    if unknown := [word for word in argv if word != "--json"]:
        raise ConfigError(f"moerl doctor: expected no argument or --json, got {' '.join(unknown)}")
    findings = examine()
    if argv:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print_table(findings)
    return int(any(finding.status == "missing" for finding in findings))


def examine() -> list[Finding]:
    """All findings, in the order of the report."""
    gpus = _gpus()
    python = Finding("Python", "ok", f"{platform.python_version()} ({sys.executable})")
    return [python, *_packages(bool(gpus)), _plugin(), _routes(), *_devices(gpus), *_machine()]


def _packages(gpu: bool) -> Iterator[Finding]:
    """One line per exact pin and per gap; the rest counted in one."""
    try:
        lines = importlib.metadata.requires("moerl") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("moerl", "missing", "no metadata", "the entry points were not written into the clone", SETUP)
        return
    fine = 0
    for line in lines:
        requirement = Requirement(line)
        extra = next((name for name in ("cpu", "gpu", "dev", "sinks") if requirement.marker and f'"{name}"' in str(requirement.marker)), "")
        if extra == ("cpu" if gpu else "gpu") and requirement.name != "sglang":
            continue
        finding = _package(requirement, required=extra not in ("dev", "sinks"))
        if finding.status == "ok" and "==" not in str(requirement.specifier):
            fine += 1
        else:
            yield finding
    yield Finding("other packages", "ok", f"{fine} in their ranges")


def _package(requirement: Requirement, *, required: bool) -> Finding:
    gap: Status = "missing" if required else "optional"
    fix = REINSTALL if required else f"{sys.executable} -m pip install '{requirement.name}{requirement.specifier}'"
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(requirement.name, gap, "not installed", f"expected {requirement.specifier or 'any version'}", fix)
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding(requirement.name, gap, version, f"expected {requirement.specifier}", fix)
    return Finding(requirement.name, "ok", version)


def _plugin() -> Finding:
    found = [entry.value for entry in importlib.metadata.entry_points(group="sglang.srt.plugins") if entry.name == "moerl"]
    if not found:
        why = "SGLang would start without moerl's plugin: no entry point of the group sglang.srt.plugins is visible"
        return Finding("SGLang plugin", "missing", "not visible", why, SETUP)
    return Finding("SGLang plugin", "ok", found[0])


def _routes() -> Finding:
    if why := native.problem():
        cost = "routes are coded with numpy, with the same result and ten times slower or more"
        return Finding("compiled route codecs", "optional", "numpy", f"{why}; {cost}", SETUP)
    return Finding("compiled route codecs", "ok", "csrc/routes.cpp")


def _gpus() -> list[str]:
    """`name, memory` of each NVIDIA GPU; empty without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return []
    return answer.stdout.strip().splitlines() if answer.returncode == 0 else []


def _devices(gpus: list[str]) -> Iterator[Finding]:
    if not gpus:
        yield Finding("GPU", "optional", "none", "nvidia-smi shows no GPU; moerl runs on the CPU: right, and slow")
        yield Finding("Transformer Engine", "optional", "not used", "it needs CUDA; Megatron's local layers are used")
        yield Finding("sgl_kernel", "optional", "not used", "it exists for CUDA only; SGLang runs on torch operations")
        return
    yield Finding("GPU", "ok", f"{len(gpus)} x {gpus[0]}")
    yield _probe("CUDA in torch", "import torch; assert torch.cuda.is_available(); print(torch.version.cuda)", "nvidia-smi")
    yield _probe("sgl_kernel", "import sgl_kernel; print(sgl_kernel.__version__)", f"{sys.executable} -m pip install sglang==0.5.23")
    fix = f"{sys.executable} -m pip install --no-build-isolation 'transformer-engine[pytorch]'"
    code = "import transformer_engine.pytorch, transformer_engine as te; print(te.__version__)"
    yield _probe("Transformer Engine", code, fix, optional="without it Megatron's slower local layers are used")


def _probe(name: str, code: str, fix: str, *, optional: str = "") -> Finding:
    """Run a line of Python in a process of its own; its last line of output is the version, or the reason of the failure."""
    gap: Status = "optional" if optional else "missing"
    try:
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Finding(name, gap, "no answer", f"loading it took more than {_PROBE_TIMEOUT_S:.0f} s", fix)
    text = (answer.stdout if answer.returncode == 0 else answer.stderr).strip().splitlines()
    last = text[-1] if text else f"exit status {answer.returncode}"
    if answer.returncode == 0:
        return Finding(name, "ok", last)
    return Finding(name, gap, "does not load", "; ".join(filter(None, (last, optional))), fix)


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield Finding("cores", "ok", str(cores)) if cores > 1 else Finding("cores", "optional", "1", "engine and trainer share it")
    total, free = _memory()
    yield _room("memory", free, 6, f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free", "the quick start needs about 6 GiB")
    shm = shutil.disk_usage("/dev/shm")
    yield _room("/dev/shm", shm.free, 1, f"{shm.free / _GIB:.1f} GiB free", "Ray and gloo use it; in a container, start with --shm-size=8g")
    disk = shutil.disk_usage(Path.cwd())
    yield _room("disk", disk.free, 5, f"{disk.free / _GIB:.1f} GiB free here", "checkpoints and rollouts of a run go below run.dir")
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            yield Finding("loopback port", "ok", "available")
    except OSError as error:
        yield Finding("loopback port", "missing", "none", f"engines listen on 127.0.0.1, and binding a port there failed: {error}")


def _room(name: str, free: int, needed_gib: int, found: str, why: str) -> Finding:
    return Finding(name, "ok", found) if free >= needed_gib * _GIB else Finding(name, "optional", found, why)


def _memory() -> tuple[int, int]:
    """(total, available) bytes; a container's limit counts where it is smaller."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        total, free = min(total, int(text)), min(free, int(text) - int(used.read_text()))
    return total, free


def _print_table(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("", "what", "found", "why"):
        table.add_column(title, overflow="fold")
    marks = {"ok": "[green]ok[/]", "optional": "[yellow]--[/]", "missing": "[bold red]!![/]"}
    for finding in findings:
        table.add_row(marks[finding.status], finding.name, finding.found, finding.why)
    console = Console(highlight=False)
    console.print(table)
    for fix in dict.fromkeys(finding.fix for finding in findings if finding.fix and finding.status == "missing"):
        console.print(f"\nto fix: {fix}", soft_wrap=True)
    for finding in findings:
        if finding.fix and finding.status == "optional":
            console.print(f"\n{finding.name}, if you want it: {finding.fix}", soft_wrap=True, markup=False)
