"""How routes travel follows the settings and the model's router."""

import pytest

from moerl.cluster.engines import trace_codec
from moerl.config.schema import Config, Model, Rollout
from moerl.convert.tiny import tiny_config
from moerl.models import deepseek
from moerl.routing.codec import Codec


@pytest.mark.parametrize(
    ("groups", "used", "name", "wanted"),
    [(8, 4, "set", Codec("set", False, 8, 4)), (1, 1, "set", Codec("set")), (8, 4, "narrow", Codec("narrow", False, 8, 4))],
)
def test_the_group_limit_of_the_model_is_used(groups: int, used: int, name: str, wanted: Codec) -> None:
    spec = deepseek.spec(tiny_config() | {"n_group": groups, "topk_group": used})
    assert trace_codec(Config(model=Model(path="m"), rollout=Rollout(trace_codec=name)), spec) == wanted
