"""A converted checkpoint of every family is one model to Megatron, to transformers and to SGLang.

    folder --moerl convert--> checkpoint --> Megatron: greedy tokens, logits          (families_worker.py)
                                   `--moerl convert--> folder again --> transformers: the same tokens and logits
                                                                  `--> a real SGLang engine: the same tokens and logprobs

Models are published configs scaled down, with float32 weights, in float32 everywhere. Multi-token prediction, where the published config
has it, travels along and takes no part. No greedy choice is anywhere near a tie, so equal tokens are no matter of rounding.
"""

import asyncio
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from moerl.config.schema import Engine
from moerl.convert import command
from moerl.convert.tiny import write_tiny
from moerl.rollout.client import EngineClient
from moerl.rollout.server import EngineServer
from tests.torchrun import launch
from tests.unit.models import tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first test waits for all conversions and all of Megatron's passes

MODELS = {"deepseek_v3": 0.18, "deepseek_v2": 0.1, "deepseek_v2_lite": 0.18, "qwen3": 0.25, "glm4": 0.2}
"""Model -> standard deviation of its weights: with less, continuations repeat themselves; with more, layers amplify rounding."""
VOCABULARY = 90
"""Not a multiple of 64, to which SGLang pads."""
TOKENS = 12
PROMPTS = [[(31 * i + 17 * j * j + 5 * j) % VOCABULARY for j in range(length)] for i, length in enumerate((4, 11, 30))]
LIMIT = 4e-5
"""Of logits and logprobs."""
MARGIN = 1e-3
"""The least that the likeliest token is ahead of the second, in logits."""


class Found(NamedTuple):
    """Attributes:
    folder: the Hugging Face folder that came back.
    sequences: prompts with Megatron's greedy continuations.
    logits: Megatron's, float32[token, vocabulary] of each sequence.
    moved: kind of weight -> the most that a logit changes where its rows are shifted by one.
    """

    folder: Path
    sequences: list[list[int]]
    logits: tuple[torch.Tensor, ...]
    moved: dict[str, float]


def write_model(folder: Path, model: str, std: float, seed: int) -> None:
    """A scaled-down published model whose norms and router biases matter too."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = tiny.config(model)
    named = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]], "torch_dtype": "float32"}
    spec = write_tiny(folder, config | named | {"vocab_size": VOCABULARY, "initializer_range": std}, seed=seed)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and name not in spec.mtp_copies():
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    root = tmp_path_factory.mktemp("families")
    for seed, (model, std) in enumerate(MODELS.items()):
        folder, checkpoint, back = (root / model / name for name in ("hf", "megatron", "back"))
        write_model(folder, model, std, seed)
        assert command.main(["hf-to-megatron", str(folder), str(checkpoint), "--verify"]) == 0
        assert command.main(["megatron-to-hf", str(checkpoint), str(back), "--verify"]) == 0
    arguments = [json.dumps(each) for each in (list(MODELS), PROMPTS, TOKENS)]
    done = launch(1, Path(__file__).with_name("families_worker.py"), str(root), *arguments, timeout_s=400)
    assert done.returncode == 0, done.stdout[-4000:]
    return {model: Found(root / model / "back", **torch.load(root / model / "found.pt")) for model in MODELS}


@pytest.mark.parametrize("model", MODELS)
def test_no_choice_is_near_a_tie_and_no_weight_without_effect(found: dict[str, Found], model: str) -> None:
    """What the other tests rest on."""
    made = [logits[len(prompt) - 1 : -1] for logits, prompt in zip(found[model].logits, PROMPTS, strict=True)]
    first, second = torch.cat(made).topk(2).values.T
    assert len(first) == TOKENS * len(PROMPTS)
    assert (first - second).min() > MARGIN
    assert len({token for sequence, prompt in zip(found[model].sequences, PROMPTS, strict=True) for token in sequence[len(prompt) :]}) > 9
    assert len(found[model].moved) > 10
    assert not {name: change for name, change in found[model].moved.items() if change < 100 * LIMIT}


@pytest.mark.parametrize("model", MODELS)
def test_transformers_computes_and_continues_alike(found: dict[str, Found], model: str) -> None:
    from transformers import AutoModelForCausalLM, GenerationConfig

    reference, report = AutoModelForCausalLM.from_pretrained(
        found[model].folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not [name for kind in ("missing_keys", "mismatched_keys") for name in report[kind]]
    ahead = f"model.layers.{reference.config.num_hidden_layers}."
    assert all(name.startswith(ahead) for name in report["unexpected_keys"]), "transformers leaves out multi-token prediction only"
    # In place of the folder's, which stops at the end of a text.
    reference.generation_config = GenerationConfig(do_sample=False, max_new_tokens=TOKENS, pad_token_id=0)
    for prompt, sequence, logits in zip(PROMPTS, found[model].sequences, found[model].logits, strict=True):
        with torch.no_grad():
            assert (reference(torch.tensor([sequence])).logits[0] - logits).abs().max() < LIMIT
            made = reference.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64))
            assert made[0].tolist() == sequence


async def served(engine: EngineServer) -> list[dict[str, Any]]:
    """Greedy continuations of the prompts, with logprobs of all tokens."""
    body = {
        "input_ids": PROMPTS,
        "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    async with EngineClient(engine.url, 60, 120) as client:
        return await client._post("/generate", body, 120)


@pytest.mark.parametrize("model", MODELS)
def test_sglang_continues_alike(found: dict[str, Found], model: str, tmp_path: Path) -> None:
    settings = Engine(device="cpu", dtype="float32", max_running_requests=4, max_total_tokens=1024)
    engine = EngineServer(found[model].folder, settings, {}, log_path=tmp_path / "engine.log", seed=1)
    engine.start()
    try:
        engine.wait_healthy()
        replies = asyncio.run(served(engine))
    finally:
        engine.stop()
    for prompt, reply, sequence, logits in zip(PROMPTS, replies, found[model].sequences, found[model].logits, strict=True):
        assert prompt + reply["output_ids"] == sequence
        scored = reply["meta_info"]["input_token_logprobs"][1:] + reply["meta_info"]["output_token_logprobs"]
        expected = logits[:-1].log_softmax(-1).gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        assert (torch.tensor([logprob for logprob, _, _ in scored]) - expected).abs().max() < LIMIT
