"""SGLang's own models of tiny folders, built and filled by its own loader, in a process of its own (importing it changes the environment).

`engines` runs `python -m tests.unit.models.by_sglang ANSWER FOLDER…`; a folder that ends in `:draft` becomes its NextN draft model.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from moerl.rollout import server

ROOT = Path(__file__).resolve().parents[3]
SHIMS = Path(server.__file__).parent / "shims"


def engines(folder: Path, jobs: list[str]) -> list[dict[str, torch.Tensor]]:
    """Parameter -> tensor for each job, from one process, which takes some seconds to start."""
    answer = folder / "answer.pt"
    paths = os.pathsep.join((str(ROOT), str(SHIMS)))
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.models.by_sglang", str(answer), *jobs]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(answer)


def main(answer: str, *jobs: str) -> None:
    from sglang.srt import runtime_context
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import init_dp_gathered_buffer, initialize_dp_attention
    from sglang.srt.model_loader.loader import _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.server_args import ServerArgs

    found = []
    for job in jobs:
        folder, _, draft = job.partition(":")
        options = {"attention_backend": "torch_native", "disable_shared_experts_fusion": True}
        settings = ServerArgs(model_path=folder, device="cpu", dtype="bfloat16", **options)
        runtime_context.publish(settings, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))
        if not found:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                method = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
            parallel_state.init_distributed_environment(1, 0, distributed_init_method=method, local_rank=0, backend="gloo")
            parallel_state.initialize_model_parallel()
        config = ModelConfig.from_server_args(settings, is_draft_model=bool(draft))
        initialize_dp_attention(settings)
        init_dp_gathered_buffer(config)
        with set_default_torch_dtype(config.dtype), torch.device("cpu"):
            model = _initialize_model(config, LoadConfig())
        for parameter in model.parameters():
            parameter.data.zero_()
        model.load_weights(load_file(Path(folder) / "model.safetensors").items())
        found.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    torch.save(found, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
