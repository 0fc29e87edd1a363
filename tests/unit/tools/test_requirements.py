"""The lock against the package definition."""

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

LOCK = Path(__file__).resolve().parents[3] / "requirements" / "lock.txt"


def locked() -> dict[str, str]:
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in (line.split("==") for line in lines)}


def wanted() -> list[Requirement]:
    """What the package and its extras cpu and dev ask for."""
    found = [Requirement(line) for line in importlib.metadata.requires("moerl") or []]
    return [line for line in found if line.marker is None or re.search('"(cpu|dev)"', str(line.marker))]


def test_the_lock_holds_names_and_versions_only() -> None:
    for line in LOCK.read_text().splitlines():
        assert re.fullmatch(r"#.*|[A-Za-z0-9_.-]+==[A-Za-z0-9_.!+]+", line), line


@pytest.mark.parametrize("requirement", wanted(), ids=lambda requirement: requirement.name)
def test_requirement_is_locked_within_its_range(requirement: Requirement) -> None:
    version = locked()[re.sub(r"[-_.]+", "-", requirement.name).lower()]
    assert requirement.specifier.contains(version, prereleases=True)


@pytest.mark.parametrize("name", ["torch", "megatron-core", "transformers", "sglang"])
def test_upstream_is_pinned_exactly(name: str) -> None:
    pins = [Requirement(line) for line in importlib.metadata.requires("moerl") or []]
    (pin,) = [line for line in pins if line.name == name]
    assert str(pin.specifier) == f"=={locked()[name]}"
