"""A small model of two systems that route the same tokens: scores, groups, a correction bias, and noise in either's arithmetic.

A token's hidden state depends on the token and its context; each layer's router scores it. The engine sees the same state up to noise, so
near-ties fall apart as they do between real systems. Logprob gaps grow with the layers that flip.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from moerl.report.capture import Meta, Rows

WIDTH = 24


@dataclass(frozen=True)
class World:
    """Sizes, and what may be wrong. Noise is of the hidden state, relative to its size of 1 per entry.

    Attributes:
        stale_layers: layer index -> how far the engine's bias is from the trainer's there.
        coarse: the trainer's scores are rounded to bfloat16.
        old_samples: share of samples whose prompt rows come from the weights before the last update.
        old_weights: how far those weights are away.
    """

    prompts: int = 16
    group: int = 4
    prompt_tokens: int = 12
    response_tokens: int = 28
    layers: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    experts: int = 64
    topk: int = 8
    groups: int = 8
    group_topk: int = 4
    noise: float = 4e-4
    seed: int = 0
    step: int = 7
    version: int = 11
    stale_layers: tuple[tuple[int, float], ...] = ()
    coarse: bool = False
    old_samples: float = 0.0
    old_weights: float = 0.1

    @property
    def meta(self) -> Meta:
        return Meta(
            step=self.step,
            layers=self.layers,
            experts=self.experts,
            topk=self.topk,
            trainer_version=self.version,
            groups=self.groups,
            group_topk=self.group_topk,
            ep=2,
            engine_ep=4,
            trainer_dtype="bfloat16",
            engine_dtype="bfloat16",
            source="training",
        )


@cache
def record(world: World) -> tuple[Meta, Rows, dict[str, np.ndarray]]:
    """What a capture of this world holds: (meta, rows, biases); not to be written to."""
    rng = np.random.default_rng(world.seed)
    rows = _tokens(world, rng)
    count, layers, experts = len(rows["token"]), len(world.layers), world.experts
    hidden = rng.standard_normal((600, WIDTH))[rows["token"]] + 0.5 * rng.standard_normal((count, WIDTH))
    weights = rng.standard_normal((layers, WIDTH, experts)) * 1.5 / np.sqrt(WIDTH)
    trainer_bias = 0.05 * rng.standard_normal((layers, experts))
    engine_bias = trainer_bias.copy()
    for layer, size in world.stale_layers:
        engine_bias[layer] += size * rng.standard_normal(experts)
    old = np.zeros(count, bool)
    if world.old_samples:
        chosen = rng.random(world.prompts * world.group) < world.old_samples
        old = chosen[rows["prompt_id"] * world.group + rows["sample"]] & ~rows["response"]
    past = weights + world.old_weights * rng.standard_normal(weights.shape) / np.sqrt(WIDTH)
    engine_ids, trainer_ids, margin, mass = [], [], [], []
    for layer in range(layers):
        moved = hidden + 0.3 * layer * np.tanh(hidden)
        noisy = [moved + world.noise * np.sqrt(1 + layer) * rng.standard_normal(moved.shape) for _ in range(2)]
        logits = np.where(old[:, None], noisy[0] @ past[layer], noisy[0] @ weights[layer])
        engine_ids.append(_choose(world, _sigmoid(logits) + engine_bias[layer])[0])
        scores = _sigmoid(noisy[1] @ weights[layer])
        biased = scores + trainer_bias[layer]
        ids, gap = _choose(world, _bfloat16(biased) if world.coarse else biased)
        trainer_ids.append(ids)
        margin.append(gap)
        gates = np.take_along_axis(scores, ids, axis=1)
        missing = (ids[:, :, None] != engine_ids[-1][:, None, :]).all(axis=2)
        mass.append((gates * missing).sum(axis=1) / gates.sum(axis=1))
    sides = {"engine_ids": np.stack(engine_ids, 1), "trainer_ids": np.stack(trainer_ids, 1)}
    sides = {name: ids.astype(world.meta.id_dtype) for name, ids in sides.items()}
    per_layer = {"margin": np.stack(margin, 1).astype(np.float16), "flipped_mass": np.stack(mass, 1).astype(np.float16)}
    flips = (np.sort(sides["engine_ids"]) != np.sort(sides["trainer_ids"])).any(axis=2).sum(axis=1)
    rows["version"] = np.where(old, world.version - 1, world.version)
    rows |= _logprobs(rows["response"], flips, rng)
    return world.meta, Rows(**rows, **sides, **per_layer), {"engine_bias": engine_bias, "trainer_bias": trainer_bias}


def plant(rows: Rows, fault: str, rng: np.random.Generator) -> Rows:
    """Rows with the engine's routes spoilt in one way."""
    ids = rows.engine_ids.copy()
    if fault == "layer":
        ids = np.roll(ids, 1, axis=1)
    elif fault == "position":
        ids = np.roll(ids, 1, axis=0)
    elif fault == "zero":
        ids[rng.random(len(ids)) < 0.02] = 0
    elif fault == "swap":
        order = rng.permutation(int(max(ids.max(), rows.trainer_ids.max())) + 1).astype(ids.dtype)
        ids[:, 2] = order[ids[:, 2]]
    elif fault == "missing":
        ids[:, 4] = 0
    elif fault == "twice":
        ids[5, 1, 0] = ids[5, 1, 1]
    elif fault == "copies":
        ids[100:150] = ids[99]
    else:
        raise ValueError(f"no such fault: {fault}")
    return replace(rows, engine_ids=ids)


def _tokens(world: World, rng: np.random.Generator) -> dict[str, np.ndarray]:
    length = world.prompt_tokens + world.response_tokens
    samples = world.prompts * world.group
    tokens = rng.zipf(1.3, (samples, length)) % 600
    prompts = rng.integers(0, 600, (world.prompts, world.prompt_tokens))
    tokens[:, : world.prompt_tokens] = np.repeat(prompts, world.group, axis=0)
    shape = (samples, length - 1)
    position = np.broadcast_to(np.arange(length - 1), shape)
    reward = np.repeat(rng.integers(0, 2, samples), length - 1)
    return {
        "prompt_id": np.repeat(np.arange(samples) // world.group, length - 1),
        "sample": np.repeat(np.arange(samples) % world.group, length - 1),
        "position": position.ravel(),
        "token": tokens[:, :-1].ravel(),
        "next_token": tokens[:, 1:].ravel(),
        "response": (position >= world.prompt_tokens - 1).ravel(),
        "reward": reward.astype(np.float32),
    }


def _logprobs(response: np.ndarray, flips: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    count = len(response)
    engine = -rng.gamma(1.0, 0.8, count)
    rounding = 2e-3 * rng.standard_normal(count)
    gap = 2e-2 * np.sqrt(flips) * rng.standard_normal(count)
    found = {"engine": engine, "replay": engine + rounding, "natural": engine + rounding + gap}
    found["r2"] = found["natural"]
    return {f"{name}_logprob": np.where(response, value, np.nan).astype(np.float32) for name, value in found.items()}


def _choose(world: World, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ids int[n, k], best first; margin float[n]) of scores float[n, experts], limited to groups by the sum of their best two."""
    by_group = scores.reshape(len(scores), world.groups, -1)
    best = np.sort(by_group, axis=2)[:, :, -2:].sum(axis=2)
    kept = np.argsort(-best, axis=1, kind="stable")[:, : world.group_topk]
    allowed = np.zeros(best.shape, bool)
    np.put_along_axis(allowed, kept, True, axis=1)
    limited = np.where(np.repeat(allowed, world.experts // world.groups, axis=1), scores, -np.inf)
    order = np.argsort(-limited, axis=1, kind="stable")
    ordered = np.take_along_axis(limited, order[:, : world.topk + 1], axis=1)
    return order[:, : world.topk], ordered[:, -2] - ordered[:, -1]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
