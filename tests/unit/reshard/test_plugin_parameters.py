"""Which parameters an engine's rank reports: those of the model that is served, and those that a drafting model has to itself."""

from types import SimpleNamespace

import torch

from moerl.reshard.plugin import Rank


class Target(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.norm = torch.nn.Embedding(4, 2), torch.nn.LayerNorm(2, bias=False)


def manager(*runners: tuple[str, torch.nn.Module]) -> SimpleNamespace:
    found = [(role, SimpleNamespace(model=model)) for role, model in runners]
    return SimpleNamespace(_select_runners=lambda selector: found)


def test_what_a_drafting_model_shares_is_reported_once():
    target, draft = Target(), Target()
    draft.embed_tokens.weight = target.embed_tokens.weight
    found = Rank(manager(("target", target), ("draft", draft)))._parameters()
    assert set(found) == {"embed_tokens.weight", "norm.weight", "draft.norm.weight"}
    assert found["draft.norm.weight"].data_ptr() == draft.norm.weight.data_ptr()


def test_tied_weights_of_the_served_model_keep_both_names():
    target = Target()
    target.head = torch.nn.Linear(2, 4, bias=False)
    target.head.weight = torch.nn.Parameter(target.embed_tokens.weight.data)
    assert set(Rank(manager(("target", target)))._parameters()) == {"embed_tokens.weight", "norm.weight", "head.weight"}
