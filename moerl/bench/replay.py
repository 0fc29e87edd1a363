"""`moerl bench replay`: what replay adds to a training step, as a ratio within one run.

    the model's own choice --recorded--> routes;   step without replay | step forced onto these routes, in turns

A step is forward, backward and optimizer over packed microbatches of a tiny DeepSeek-V3, with a learning rate of zero, so that both
kinds of step run the same experts on the same rows and differ in nothing but replay. Seconds are those of this process on a CPU,
where other processes would disturb the clock on the wall, and those on the wall with a GPU.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from moerl.config.schema import Config

ROUNDS = 16
SEQUENCES, LENGTH, MICROBATCHES = 32, 64, 2


@dataclass(frozen=True)
class Found:
    """Attributes:
    overhead: median over the rounds of (seconds with replay) / (seconds without), each round's pair measured side by side.
    agreement: share of decisions that used exactly the routes they were forced onto.
    spread: 10th and 90th percentile of the ratios.
    step_s: median seconds of a step without replay.
    """

    overhead: float
    agreement: float
    spread: tuple[float, float]
    step_s: float
    tokens: int


def main(*, as_json: bool = False) -> int:
    """Measure and print the result."""
    found = measure()
    low, high = found.spread
    print(f"training step without replay   {found.step_s:.3f} s, {found.tokens} tokens in {MICROBATCHES} microbatches")
    spread = f"median of {ROUNDS} pairs; 10th to 90th percentile {low:.3f} to {high:.3f}"
    print(f"with replay                    x {found.overhead:.3f} ({spread})")
    print(f"decisions that followed        {100 * found.agreement:.2f} %")
    if as_json:
        print(json.dumps({"overhead": round(found.overhead, 4), "agreement": found.agreement}))
    return 0


def measure(*, rounds: int = ROUNDS) -> Found:
    """Run the pairs in this process, which becomes a Megatron process on the CPU or its first GPU."""
    from moerl.convert.tiny import tiny_config, write_tiny
    from moerl.train import platform

    platform.quiet()
    platform.install(platform.pick_device("auto"))
    from moerl.train import megatron, trainer
    from moerl.train.batch import cut, pack
    from moerl.train.forward import compute_logprobs, forward_backward, localise

    with tempfile.TemporaryDirectory(prefix="moerl-bench-") as folder:
        spec = write_tiny(folder, tiny_config())
        config = Config.model_validate({"model": {"path": folder}, "train": {"dtype": "bfloat16"}})
        ranks = megatron.initialise(config.parallel, config.train, 1)
        try:
            built = trainer.build(config, spec, ranks)
            budget = SEQUENCES * LENGTH // MICROBATCHES
            micro = pack(_sequences(spec.vocab_size), tokens_per_microbatch=budget, dp=1, layout=built.layout)[0]
            local = localise([cut(one, built.place) for one in micro], ranks)
            with built.replay.recorded([rows.real for rows in local]) as own:
                compute_logprobs(built.model, local, ranks, **built.passes)
            routes = own.routes()

            clock = time.process_time if ranks.device == "cpu" else time.perf_counter

            def step(forced: bool) -> float:
                start = clock()
                with built.replay.forced(routes) if forced else nullcontext():
                    forward_backward(built.model, local, ranks, loss_fn=_loss, **built.passes)
                megatron.optimizer_step(built.optimizer, 0.0)
                return clock() - start  # the gradient's norm has waited for the device

            return _pairs(step, built, rounds, sum(one.size for one in micro))
        finally:
            megatron.shutdown()


def _pairs(step: Callable[[bool], float], built: Any, rounds: int, tokens: int) -> Found:
    """Pairs in alternating order, after one that only warms up."""
    plain, ratios = [], []
    for number in range(-1, rounds):
        order = (False, True) if number % 2 else (True, False)
        seconds = {forced: step(forced) for forced in order}
        if number >= 0:
            plain.append(seconds[False])
            ratios.append(seconds[True] / seconds[False])
    followed = built.replay.agreement
    low, high = (float(value) for value in np.quantile(ratios, (0.1, 0.9)))
    share = followed.agreeing / followed.total
    return Found(statistics.median(ratios), share, (low, high), statistics.median(plain), tokens)


def _sequences(vocab: int) -> list[Any]:
    from moerl.train.batch import Sequence

    rng = np.random.default_rng(0)
    mask = np.ones(LENGTH, np.float32)
    return [Sequence(rng.integers(0, vocab, LENGTH + 1), mask, None, {}) for _ in range(SEQUENCES)]


def _loss(outputs: Any, rows: Any) -> tuple[Any, Any, dict[str, Any]]:
    total = -(outputs.logprobs * rows.loss_mask).sum()
    return total, rows.loss_mask.sum(), {}
