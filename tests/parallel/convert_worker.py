"""Run by test_convert_load.py under torchrun with two ranks: a model loaded from the folder and from the checkpoint, in several layouts."""

import json
import os
import sys
from pathlib import Path

import torch

from moerl.config.schema import Config
from moerl.models import read_spec
from moerl.train import megatron, weights

LAYOUTS = {
    "tp2_ep2": {"tp": 2, "ep": 2},
    "tp2_etp2": {"tp": 2, "etp": 2},
    "pp2": {"pp": 2},
    "pp2_vpp2": {"pp": 2, "vpp": 2},
}


def tensors(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(chunk.named_parameters()) | dict(chunk.named_buffers())


def differing(root: Path, family: str, parallel: dict[str, int]) -> list[str]:
    """Names of this rank's weights that are not the same bits."""
    folder, checkpoint = root / family / "hf", root / family / "megatron"
    config = Config(model={"path": str(folder)}, train={"device": "cpu"}, parallel=parallel)
    spec = read_spec(folder)
    ranks = megatron.initialise(config.parallel, config.train, seed=1)
    try:
        from moerl.train import checkpoint as checkpoints

        one, other = (megatron.build_model(spec, config, ranks, trainable=False) for _ in range(2))
        weights.load_hf(one, spec, folder, ranks)
        checkpoints.load_policy(checkpoint, other, folder)
        wrong = []
        for left, right in zip(map(tensors, one), map(tensors, other), strict=True):
            assert len(left) > 5
            assert left.keys() == right.keys()
            wrong += [name for name in left if not torch.equal(left[name], right[name])]
        return wrong
    finally:
        megatron.shutdown()


def main() -> None:
    root, found = Path(sys.argv[1]), {}
    for family in sys.argv[2:]:
        for name, parallel in LAYOUTS.items():
            found[f"{family} {name}"] = differing(root, family, parallel)
    (root / f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
