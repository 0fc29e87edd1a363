"""One torchrun rank: one training step on given sequences, and what routes that are one row off would have done.

    torchrun --nproc-per-node N turns_worker.py MODEL_FOLDER SEQUENCES OUT SIZES        SIZES = pp=2,ep=2

SEQUENCES is a pickled list of `moerl.train.batch.Sequence`. Rank 0 writes the step's metrics to OUT as JSON, and those of the control
with `_shifted` behind their names.
"""

import json
import pickle
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moerl.config.schema import Config
from moerl.models import read_spec
from moerl.train import megatron
from moerl.train.batch import Part, Sequence, cut, equalise, pack
from moerl.train.forward import localise
from moerl.train.trainer import Trainer, build, measure, train_step

TOKENS = 2048
"""Per microbatch."""


def settings(model: str, sizes: dict[str, int], **replay: str) -> Config:
    train = {"dtype": "float32", "device": "cpu", "tokens_per_microbatch": TOKENS}
    return Config.model_validate({"model": {"path": model}, "train": train, "parallel": {**sizes, "timeout_s": 100.0}, "replay": replay})


def parts(trainer: Trainer, items: list[Sequence]) -> list[Part]:
    """This rank's share of the sequences, packed as in a run."""
    multiple = trainer.ranks.sequence_multiple
    micro = pack(items, tokens_per_microbatch=TOKENS, dp=trainer.ranks.dp[1], multiple=multiple, layout=trainer.layout)
    return [cut(one, trainer.place) for one in equalise(micro[trainer.ranks.dp[0]], multiple, trainer.layout)]


def shifted_gap(trainer: Trainer, config: Config, items: list[Sequence]) -> dict[str, float]:
    """The gap to the engine's logprobs when every row gets the routes of the row before it."""
    wrong = [replace(item, routes=np.roll(item.routes, 1, axis=0)) for item in items]
    found = measure(replace(trainer, config=config), localise(parts(trainer, wrong), trainer.ranks))
    return {name.replace("_forced", "_shifted"): value for name, value in found.items()}


def main() -> None:
    model, sequences, out, pairs = sys.argv[1:]
    sizes = {name: int(value) for name, value in (pair.split("=") for pair in pairs.split(","))}
    items = pickle.loads(Path(sequences).read_bytes())
    config = settings(model, sizes)
    ranks = megatron.initialise(config.parallel, config.train, seed=1)
    try:
        trainer = build(config, read_spec(model), ranks)
        metrics: dict[str, Any] = shifted_gap(trainer, settings(model, sizes, evaluation="rollout"), items)
        metrics |= train_step(trainer, parts(trainer, items), 0, lambda name: nullcontext())
        if ranks.rank == 0:
            Path(out).write_text(json.dumps(metrics))
    finally:
        megatron.shutdown()


if __name__ == "__main__":
    main()
