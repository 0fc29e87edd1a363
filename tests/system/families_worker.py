"""Run by test_families_served.py: greedy continuations by Megatron, of models that it loads from converted checkpoints.

    ROOT/MODEL/hf, ROOT/MODEL/megatron, PROMPTS --> ROOT/MODEL/found.pt

A continuation is made by whole passes over growing prompts, packed side by side: nothing is cached between tokens.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from moerl.config.schema import Config
from moerl.models import read_spec
from moerl.train import megatron


def logits(model: torch.nn.Module, sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
    """float32[token, vocabulary] of each sequence, from one packed pass through Megatron's model and its own head."""
    from moerl.train.packing import pack

    lengths = [len(sequence) for sequence in sequences]
    ends = np.array([0, *accumulate(lengths)], np.int32)
    rows = {
        "input_ids": torch.cat([torch.tensor(sequence) for sequence in sequences])[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
    }
    packing = pack(ends, rank=0, size=1, microbatch=0, device=torch.device("cpu"))
    with torch.no_grad():
        return model(**rows, attention_mask=None, packed_seq_params=packing)[0].split(lengths)


def continued(model: torch.nn.Module, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """The prompts, each with that many more tokens, always the likeliest."""
    sequences = list(prompts)
    for _ in range(tokens):
        sequences = [[*one, int(row[-1].argmax())] for one, row in zip(sequences, logits(model, sequences), strict=True)]
    return sequences


def kinds(model: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """Name without numbers of layers and experts -> weights, and the biases that only choose experts."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, torch.nn.Parameter) or name.endswith("expert_bias"):
            found.setdefault(re.sub(r"\.\d+\.", ".", name), []).append(tensor.detach())
    return found


def moved(model: torch.nn.Module, sequences: Sequence[list[int]], before: torch.Tensor) -> Iterator[tuple[str, float]]:
    """By kind of weight: the most that a logit changes where all weights of the kind have their rows shifted by one."""
    for name, tensors in kinds(model).items():
        kept = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor.copy_(tensor.roll(1, 0))
        yield name, float((torch.cat(logits(model, sequences)) - before).abs().max())
        for tensor, values in zip(tensors, kept, strict=True):
            tensor.copy_(values)


def main() -> None:
    root, models, prompts, tokens = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
    settings = {model: Config(model={"path": str(root / model / "hf")}, train={"device": "cpu", "dtype": "float32"}) for model in models}
    first = settings[models[0]]
    ranks = megatron.initialise(first.parallel, first.train, seed=1)
    from moerl.train import checkpoint as checkpoints

    for model, config in settings.items():
        folder = root / model / "hf"
        built = megatron.build_model(read_spec(folder), config, ranks, trainable=False)
        checkpoints.load_policy(root / model / "megatron", built, folder)
        sequences = continued(built[0], prompts, tokens)
        found = logits(built[0], sequences)
        shifted = dict(moved(built[0], sequences, torch.cat(found)))
        torch.save({"sequences": sequences, "logits": found, "moved": shifted}, root / model / "found.pt")
    megatron.shutdown()


if __name__ == "__main__":
    main()
