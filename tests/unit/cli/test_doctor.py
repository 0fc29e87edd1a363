"""The doctor: real findings on this machine, and what it says of gaps."""

import importlib.metadata
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from packaging.requirements import Requirement

from moerl import doctor


def finding(name: str) -> doctor.Finding:
    return next(found for found in doctor.examine() if found.name == name)


def test_pinned_packages_are_listed_with_their_versions() -> None:
    for name in ("torch", "megatron-core", "transformers", "sglang"):
        assert finding(name).found == importlib.metadata.version(name)


def test_plugin_is_visible() -> None:
    assert finding("SGLang plugin") == doctor.Finding("SGLang plugin", "ok", "moerl.rollout.plugin:register")


def test_route_codecs_that_are_not_compiled_cost_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding("compiled route codecs").status in ("ok", "optional")
    monkeypatch.setattr(doctor.native, "problem", lambda: "_routes.so is not built")
    found = finding("compiled route codecs")
    assert (found.status, found.found) == ("optional", "numpy")
    assert found.why.startswith("_routes.so is not built; ")
    assert "same result" in found.why


def test_json_and_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = doctor.Finding("a", "ok", "1"), doctor.Finding("b", "missing", "not installed", "expected ==2", "install b")
    monkeypatch.setattr(doctor, "examine", lambda: [good, replace(bad, status="optional")])
    assert doctor.main(["--json"]) == 0
    monkeypatch.setattr(doctor, "examine", lambda: [good, bad])
    capsys.readouterr()
    assert doctor.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)[1]["why"] == "expected ==2"
    assert doctor.main([]) == 1
    shown = capsys.readouterr().out
    assert "to fix: install b" in shown


def test_absent_and_wrong_versions_say_what_was_expected() -> None:
    absent = doctor._package(Requirement("no-such-package-of-ours>=2"), required=True)
    assert (absent.status, absent.found, absent.why) == ("missing", "not installed", "expected >=2")
    assert "-r" in absent.fix
    wrong = doctor._package(Requirement("pytest==0.1"), required=False)
    assert (wrong.status, wrong.why) == ("optional", "expected ==0.1")
    assert wrong.fix == f"{sys.executable} -m pip install 'pytest==0.1'"


def test_missing_metadata_of_moerl_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    (only,) = doctor._packages(gpu=False)
    assert only.status == "missing"
    assert only.fix.endswith("tools/setup.sh")


def test_cpu_set_counts_on_a_machine_without_gpu_only() -> None:
    cpu = {found.name for found in doctor._packages(gpu=False)}
    gpu = {found.name for found in doctor._packages(gpu=True)}
    assert "xgrammar" in cpu - gpu
    assert "transformer-engine" in gpu - cpu
    assert "sglang" in cpu & gpu


def test_probe_gives_the_reason_of_a_failure() -> None:
    assert doctor._probe("x", "print('1.2')", "fix").found == "1.2"
    broken = doctor._probe("x", "import no_such_module_of_ours", "fix", optional="slower")
    assert (broken.status, broken.fix) == ("optional", "fix")
    assert broken.why == "ModuleNotFoundError: No module named 'no_such_module_of_ours'; slower"


def test_probe_that_hangs_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PROBE_TIMEOUT_S", 0.2)
    assert doctor._probe("x", "import time; time.sleep(30)", "fix").found == "no answer"


def test_gpus_are_listed_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/bin/nvidia-smi")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, "H200, 143771 MiB\n", ""))
    assert doctor._gpus() == ["H200, 143771 MiB"]
    monkeypatch.setattr(doctor.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 9, "", "no driver"))
    assert doctor._gpus() == []


def test_memory_is_plausible() -> None:
    total, free = doctor._memory()
    assert 0 < free <= total
