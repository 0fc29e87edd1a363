"""Which prompts a step trains on: a seeded shuffle per epoch, addressed by position so that a resumed run continues exactly."""

from collections.abc import Sequence

import numpy as np

from moerl.rollout.sample import Prompt


def take(prompts: Sequence[Prompt], *, position: int, count: int, seed: int) -> list[Prompt]:
    """Prompts number `position` to `position + count` of the endless, epoch-wise shuffled stream."""
    result: list[Prompt] = []
    while len(result) < count:
        epoch, offset = divmod(position + len(result), len(prompts))
        order = np.random.default_rng([seed, epoch]).permutation(len(prompts))
        result += [prompts[i] for i in order[offset : offset + count - len(result)]]
    return result
