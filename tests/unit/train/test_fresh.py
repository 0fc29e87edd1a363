"""Which completions are collected for which version, when they are measured, and that the weights come back."""

from types import SimpleNamespace

import pytest
import torch

from moerl.config.schema import Config
from moerl.rollout.sample import Group, Sample
from moerl.train import platform


@pytest.fixture
def fresh():
    platform.install("cpu")
    from moerl.train import fresh

    return fresh


class Chunk(torch.nn.Module):
    def __init__(self, value: float):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), value, dtype=torch.bfloat16))
        self.register_buffer("bias", torch.full((2,), value))


def trainer(max_lag: int = 2, every: int = 1, model: list[Chunk] | None = None) -> SimpleNamespace:
    settings = {"model": {"path": "m"}, "buffer": {"max_lag": max_lag}, "diagnostics": {"mismatch_every_steps": every}}
    return SimpleNamespace(config=Config.model_validate(settings), model=model or [Chunk(1.0)])


def group(*versions: list[int]) -> Group:
    """A group whose completions have tokens of these versions in turn."""
    runs = [[(version, i, i + 1) for i, version in enumerate(each)] for each in versions]
    return Group(0, "a", [Sample(0, i, [1], [2] * len(each), b"", b"", each, "", "stop") for i, each in enumerate(runs)])


def test_completions_that_one_version_sampled_alone_are_collected_until_none_can_come(fresh) -> None:
    one, kept = trainer(max_lag=2), None
    steps = [[group([0], [0])], [group([0], [0, 1], [1])], [group([0], [2])], [group([2], [3])]]
    seen = []
    for step, groups in enumerate(steps):
        kept = fresh.follow(kept, one, groups, step)
        seen.append((kept.version, len(kept.samples), fresh.due(kept, one.config, step)))
        if seen[-1][-1]:
            kept = None
    assert seen == [(0, 2, False), (0, 3, False), (0, 4, True), (3, 1, False)]


@pytest.mark.parametrize(("max_lag", "every", "begins"), [(0, 1, []), (1, 0, []), (1, 3, [0, 3]), (2, 2, [0, 4])])
def test_versions_are_kept_one_at_a_time_and_only_with_a_lag(fresh, max_lag: int, every: int, begins: list[int]) -> None:
    one, kept, found = trainer(max_lag, every), None, []
    for step in range(6):
        before, kept = kept, fresh.follow(kept, one, None, step)
        found += [step] if kept is not None and before is None else []
        kept = None if fresh.due(kept, one.config, step) else kept
    assert found == begins


def test_kept_weights_are_put_back_for_a_while_and_the_live_ones_return_also_after_an_error(fresh) -> None:
    model = [Chunk(1.0), Chunk(2.0)]
    kept = fresh.follow(None, trainer(model=model), None, 0)
    with torch.no_grad():
        for chunk in model:
            chunk.weight += 0.37
            chunk.bias += 0.37
    live = [tensor.clone() for chunk in model for tensor in (chunk.weight, chunk.bias)]
    with pytest.raises(KeyError), fresh._put_back(model, kept.weights):
        assert [tensor[0].item() for chunk in model for tensor in (chunk.weight, chunk.bias)] == [1.0, 1.0, 2.0, 2.0]
        raise KeyError
    assert all(map(torch.equal, live, [tensor for chunk in model for tensor in (chunk.weight, chunk.bias)]))
