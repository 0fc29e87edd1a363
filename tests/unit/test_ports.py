"""Ports that are still free when a server gets there."""

import random
import socket
from pathlib import Path

import pytest

from moerl import ports
from moerl.ports import free_port

HOST = "127.0.0.1"


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Say from which port on the system gives some to connections."""

    def say(text: str) -> None:
        (tmp_path / "range").write_text(text)

    monkeypatch.setattr(ports, "_SYSTEMS", tmp_path / "range")
    return say


def test_it_is_free_and_not_one_of_the_systems(system) -> None:
    system("21000\t60999\n")
    for _ in range(20):
        port = free_port()
        assert 20_000 <= port < 21_000
        with socket.socket() as server:
            server.bind((HOST, port))


def test_one_that_is_in_use_is_not_chosen(system, monkeypatch: pytest.MonkeyPatch) -> None:
    system("32768 60999")
    first = free_port()
    monkeypatch.setattr(ports, "_RANGE", range(first, first + 2))
    monkeypatch.setattr(ports, "_TRIES", 2)
    with socket.socket() as server:
        server.bind((HOST, first))
        server.listen(1)
        assert {free_port() for _ in range(20)} == {first + 1}


@pytest.mark.parametrize("said", ["1024 65535", None])
def test_where_none_can_be_had_the_system_chooses(system, monkeypatch: pytest.MonkeyPatch, said: str | None) -> None:
    if said is None:
        monkeypatch.setattr(ports, "_RANGE", range(40_000, 40_100))  # no file: Linux's default holds
    else:
        system(said)
    asked = []
    monkeypatch.setattr(ports, "_bound", lambda host, port: asked.append(port) or 50_000)
    assert free_port() == 50_000
    assert asked == [0]


def test_seeds_do_not_decide(system) -> None:
    system("32768 60999")
    found = set()
    for _ in range(8):
        random.seed(1)
        found.add(free_port())
    assert len(found) > 1
