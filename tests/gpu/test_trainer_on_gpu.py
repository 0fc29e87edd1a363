"""The CUDA path against the CPU-tested behaviour: the same model, the same tokens, the same routes.

Run on a machine with an NVIDIA GPU: `bash tools/test.sh tests/gpu`. Each test runs in a process of its own, because the CPU
patches of `moerl.train.platform` may be active in this one.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moerl.convert.tiny import tiny_config, write_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.backends.cuda.is_built() or not torch.cuda.is_available(), reason="no NVIDIA GPU is visible to torch"),
]

WORKER = """
import json, sys
import numpy as np
from moerl.config.schema import Config
from moerl.models import read_spec
from moerl.train import megatron, platform

device, dtype, folder = sys.argv[1:]
platform.install(device)
from moerl.train import trainer
from moerl.train.batch import Sequence, cut, pack
from moerl.train.forward import compute_logprobs, localise

config = Config.model_validate({"model": {"path": folder}, "train": {"dtype": dtype, "device": device}})
spec = read_spec(folder)
ranks = megatron.initialise(config.parallel, config.train, 1)
built = trainer.build(config, spec, ranks)
rng = np.random.default_rng(0)
items = []
for _ in range(16):
    tokens = rng.integers(3, 16, rng.integers(5, 40))
    routes = rng.random((len(tokens) - 1, len(spec.moe_layers), spec.experts)).argsort(-1)[..., : spec.topk].astype(np.uint8)
    mask = np.ones(len(tokens) - 1, np.float32)
    items.append(Sequence(tokens, mask, routes, {"advantages": mask, "engine_logprobs": -2 * mask}))
micro = pack(items, tokens_per_microbatch=1024, dp=1, layout=built.layout)[0]
parts = [cut(one, built.place) for one in micro]
local = localise(parts, ranks)
with built.replay.forced([rows.routes for rows in local]):
    answers = compute_logprobs(built.model, local, ranks, **built.passes)
from contextlib import nullcontext
metrics = trainer.train_step(built, parts, 0, lambda name: nullcontext())
print(json.dumps({"logprobs": answers[0].tolist(), "agreement": metrics["replay_agreement"], "loss": metrics["loss"]}))
megatron.shutdown()
"""


def run(device: str, dtype: str, folder: Path) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", WORKER, device, dtype, str(folder)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "model"
    write_tiny(path, tiny_config())
    return path


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_replayed_logprobs_are_those_of_the_cpu(folder: Path, dtype: str, tolerance: float) -> None:
    cpu, gpu = run("cpu", "float32", folder), run("cuda", dtype, folder)
    assert gpu["agreement"] == 1.0
    assert gpu["logprobs"] == pytest.approx(cpu["logprobs"], abs=tolerance)
    assert gpu["loss"] == pytest.approx(cpu["loss"], abs=tolerance)


def test_checksums_do_not_depend_on_the_device() -> None:
    from moerl.rollout.plugin import hash_tensor

    tensor = torch.randn(64, 33).to(torch.bfloat16)
    assert hash_tensor(tensor.cuda()) == hash_tensor(tensor)
