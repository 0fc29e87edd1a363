"""What an engine's rank says of its parameters when it is asked for some of them."""

import msgspec
import numpy as np
import torch

from moerl.reshard import orders
from moerl.reshard.plugin import Rank


def test_a_rank_says_what_it_holds_as_float32_and_leaves_out_what_it_does_not(monkeypatch):
    rank, bias = Rank(None), torch.randn(8)
    monkeypatch.setattr(rank, "_parameters", lambda: {"a.bias": bias, "b.bias": bias.bfloat16(), "c.bias": bias})
    order = orders.decode(orders.encode(orders.Read(["b.bias", "a.bias", "d.bias"])))
    text = msgspec.json.encode([msgspec.to_builtins(rank.obey(order))]).decode()  # as all ranks' answers travel
    (found,) = orders.answers(text, orders.Values)
    held = {name: np.frombuffer(value, "<f4") for name, value in found.values.items()}
    assert {name: value.tolist() for name, value in held.items()} == {"a.bias": bias.tolist(), "b.bias": bias.bfloat16().tolist()}
