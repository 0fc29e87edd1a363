"""Fixtures of the rollout room: a tiny model folder and a prompt."""

from pathlib import Path

import pytest

from moerl.convert.tiny import tiny_config, write_tiny
from moerl.models import read_spec
from moerl.rollout.sample import Prompt
from moerl.routing.trace import Layout
from tests.unit.rollout.fakes import LAYERS, LAYOUT


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-rollout")
    write_tiny(folder, tiny_config(hidden=32, layers=LAYERS, experts=8, topk=2, groups=1, group_topk=1, expert_width=16))
    spec = read_spec(folder)
    assert Layout(spec.moe_layers, spec.experts, spec.topk) == LAYOUT
    assert spec.layers == LAYERS
    return folder


@pytest.fixture
def prompt() -> Prompt:
    return Prompt(id=7, text="4+3=", tokens=[7, 13, 6, 15], answer="7")
