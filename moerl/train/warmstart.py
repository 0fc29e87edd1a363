"""Make the tiny model that the quick start improves: random weights, then a minute of supervised training on the same task.

    FAMILIES --write_tiny--> random HF folder --our Megatron trainer, answers as labels--> HF folder at config.model.path

The warm start uses the trainer's own passes, optimizer, loader and exporter, so it exercises them before RL does. In the
end greedy decoding solves most held-out prompts, while an entropy bonus has kept sampling far from certain: that is the room
in which RL learns. The folder is reused as long as the recipe that made it stays the same.
"""

import functools
import json
import tempfile
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from moerl.config.schema import Config
from moerl.convert.tiny import EOS, FAMILIES, VOCABULARY, write_tiny
from moerl.errors import TrainError
from moerl.models import read_spec
from moerl.rollout.sample import Prompt
from moerl.rollout.tasks import load_task
from moerl.routing.layout import Layout
from moerl.routing.replay import RouteReplay
from moerl.routing.shard import Place
from moerl.train import megatron, weights
from moerl.train.assemble import whole_logprobs
from moerl.train.batch import Microbatch, Sequence, cut, equalise, pack
from moerl.train.export import export_hf
from moerl.train.forward import LocalMicrobatch, TokenOutputs, compute_logprobs, forward_backward, localise
from moerl.train.objective import supervised_loss

_STAMP = "warmstart.json"


@dataclass(frozen=True)
class Recipe:
    """How the warm start trains.

    Attributes:
        least_greedy: the warm start fails if fewer held-out answers have every token above probability 1/2 in the end.
        lr_final_ratio: linear decay; without it the experts' changing choices keep accuracy from settling.
        entropy_bonus: at 0.35 the optimum gives the right one of 16 tokens a probability of about 0.75.
        expert_bias_update_rate: step of the router's correction bias. With 64 experts the scores around the eighth lie about
            0.01 apart, so a larger step reshuffles the choice of most tokens every time.
    """

    steps: int = 400
    least_greedy: float = 0.7
    evaluate_every: int = 50
    batch: int = 128
    lr: float = 2e-3
    lr_warmup_steps: int = 30
    lr_final_ratio: float = 0.05
    adam_beta2: float = 0.98
    weight_decay: float = 0.1
    entropy_bonus: float = 0.35
    expert_bias_update_rate: float = 2e-3

    def lr_at(self, step: int) -> float:
        """Learning rate of 1-based `step`: linear warm-up times linear decay."""
        return self.lr * min(1.0, step / self.lr_warmup_steps) * (1.0 + (self.lr_final_ratio - 1.0) * step / self.steps)


def make_tiny(config: Config, recipe: Recipe | None = None, family: str = "deepseek") -> dict[str, Any]:
    """Make (or reuse) the warm-started tiny model at `config.model.path`.

    Returns:
        What the warm start measured: steps, seconds, greedy and sampled accuracy on held-out prompts.

    Raises:
        TrainError: the model learned too little.
    """
    recipe = recipe or Recipe()
    folder, architecture = Path(config.model.path), FAMILIES[family]()
    made_by = {"recipe": asdict(recipe), "architecture": architecture, "task": config.task.model_dump(mode="json"), "seed": config.run.seed}
    key = xxhash.xxh3_64_hexdigest(json.dumps(made_by, sort_keys=True).encode())
    stamp = folder / _STAMP
    if stamp.is_file() and (known := json.loads(stamp.read_text()))["key"] == key:
        return {**known["result"], "cached": True}
    with tempfile.TemporaryDirectory(prefix="moerl-tiny-") as scratch:
        spec = write_tiny(scratch, architecture, seed=config.run.seed)
        task = load_task(config.task, scratch, max_prompt_tokens=config.rollout.max_prompt_tokens, seed=config.run.seed)
        settings = _settings(config, recipe, scratch)
        ranks = megatron.initialise(settings.parallel, settings.train, config.run.seed)
        try:
            model = megatron.build_model(spec, settings, ranks)
            weights.load_hf(model, spec, scratch, ranks)
            result = _fit(model, settings, recipe, task.train, task.heldout, ranks)
            export_hf(folder, Path(scratch), model, spec, ranks, dtype=torch.bfloat16)
        finally:
            megatron.shutdown()
    (folder / _STAMP).write_text(json.dumps({"key": key, "result": result}, indent=2))
    return {**result, "cached": False}


def _settings(config: Config, recipe: Recipe, path: str) -> Config:
    train = config.train.model_copy(
        update={
            "dtype": "float32",
            "mtp": "passed_through",
            "adam_beta2": recipe.adam_beta2,
            "weight_decay": recipe.weight_decay,
            "expert_bias_update_rate": recipe.expert_bias_update_rate,
        }
    )
    replay = config.replay.model_copy(update={"actor": "off", "expert_bias": "native"})
    return config.model_copy(update={"train": train, "replay": replay, "model": config.model.model_copy(update={"path": path})})


def _fit(
    model: list[torch.nn.Module], settings: Config, recipe: Recipe, train: Seq[Prompt], heldout: Seq[Prompt], ranks: megatron.Ranks
) -> dict[str, Any]:
    spec = read_spec(settings.model.path)
    layout = Layout(spec.moe_layers, spec.experts, spec.topk)
    optimizer, replay = megatron.build_optimizer(model, settings), RouteReplay(model, layout)
    loss = functools.partial(_loss, recipe.entropy_bonus)
    rng, started = np.random.default_rng(settings.run.seed), time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("warm start", total=recipe.steps, state="")
        for step in range(1, recipe.steps + 1):
            chosen = rng.choice(len(train), recipe.batch, replace=len(train) < recipe.batch)
            local = _pack([train[i] for i in chosen], settings, layout, ranks)[1]
            with replay.recorded([rows.real for rows in local]):  # so that padding does not move the routers' biases
                forward_backward(model, local, ranks, loss_fn=loss, temperature=1.0, fp32_head=True)
            megatron.optimizer_step(optimizer, recipe.lr_at(step))
            if step % recipe.evaluate_every == 0 or step == recipe.steps:
                greedy, sampled = accuracy(model, heldout, settings, layout, ranks)
                state = f"step {step}: held-out accuracy {greedy:.2f} greedy, {sampled:.2f} sampled"
                bar.update(task, completed=step, state=state)
                if not console.is_terminal:
                    console.print(f"warm start {state} ({time.monotonic() - started:.0f} s)")
    if greedy < recipe.least_greedy:
        least = recipe.least_greedy
        raise TrainError(f"the warm start reached greedy accuracy {greedy:.2f}, expected at least {least}; try another run.seed")
    return {"steps": recipe.steps, "seconds": round(time.monotonic() - started, 1), "greedy": greedy, "sampled": sampled}


def _loss(entropy_bonus: float, outputs: TokenOutputs, rows: LocalMicrobatch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    return supervised_loss(entropy_bonus, outputs.logprobs, outputs.entropy, rows.loss_mask)


def accuracy(
    model: list[torch.nn.Module], prompts: Seq[Prompt], settings: Config, layout: Layout, ranks: megatron.Ranks
) -> tuple[float, float]:
    """Share of `prompts` that greedy decoding surely answers exactly, and the expected share when sampling at temperature 1.

    Both follow from the answers' own probabilities: an answer whose every token is above 1/2 is the greedy one, and the
    probability of sampling an answer is the product of its tokens'.
    """
    micro, local = _pack(prompts, settings, layout, ranks)
    answers = compute_logprobs(model, local, ranks, temperature=1.0, fp32_head=True)
    sure, probability = [], []
    for logprobs, one in zip(whole_logprobs(answers, local, ranks), micro, strict=True):
        for start, stop in zip(one.cu_seqlens[:-1], one.cu_seqlens[1:], strict=True):
            own = logprobs[start:stop][one.loss_mask[start:stop] > 0]
            if len(own):
                sure.append(bool((own > np.log(0.5)).all()))
                probability.append(float(np.exp(own.sum())))
    return float(np.mean(sure)), float(np.mean(probability))


def _pack(prompts: Seq[Prompt], settings: Config, layout: Layout, ranks: megatron.Ranks) -> tuple[list[Microbatch], list[LocalMicrobatch]]:
    """(whole microbatches of this data-parallel rank, its rows of them)."""
    multiple = ranks.sequence_multiple
    packed = pack(
        [_labelled(prompt) for prompt in prompts],
        tokens_per_microbatch=settings.train.tokens_per_microbatch,
        dp=ranks.dp[1],
        multiple=multiple,
        rounds=ranks.microbatch_multiple,
        layout=layout,
    )[ranks.dp[0]]
    micro = equalise(packed, multiple, layout) if ranks.pp[1] > 1 else packed
    place = Place(ranks.cp, ranks.tp, ())
    return micro, localise([cut(one, place) for one in micro], ranks)


def _labelled(prompt: Prompt) -> Sequence:
    response = [VOCABULARY.index(character) for character in prompt.answer] + [EOS]
    tokens = np.array(prompt.tokens + response, np.int64)
    mask = np.zeros(len(tokens) - 1, np.float32)
    mask[len(prompt.tokens) - 1 :] = 1.0
    return Sequence(tokens, mask, None, {})
