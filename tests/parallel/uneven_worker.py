"""Two gloo ranks: does Megatron's own uneven gather still fail here, and does the platform's work?

Prints "stock failed" or "stock works", then "patched right" or "patched wrong", from rank 0.
"""

import sys

import torch
import torch.distributed as dist

from moerl.config.schema import Parallel, Train
from moerl.train import megatron


def main() -> None:
    which = sys.argv[1]
    ranks = megatron.initialise(Parallel(tp=2, timeout_s=20), Train(device="cpu"), seed=1)
    from megatron.core.tensor_parallel import mappings

    group, sizes = dist.group.WORLD, [1, 3]
    mine = torch.full((sizes[ranks.rank], 2), float(ranks.rank + 1))
    if which == "stock":
        try:
            mappings._gather_along_first_dim.__wrapped__(mine, group, sizes)
        except RuntimeError:
            print("stock failed", flush=True)
        else:
            print("stock works", flush=True)
        return
    whole = mappings._gather_along_first_dim(mine, group, sizes)
    summed = mappings._reduce_scatter_along_first_dim(torch.arange(4.0)[:, None] * (ranks.rank + 1), group, sizes)
    first = sum(sizes[: ranks.rank])
    right = torch.equal(whole[:, 0], torch.tensor([1.0, 2.0, 2.0, 2.0]))
    right &= torch.equal(summed[:, 0], 3 * torch.arange(4.0)[first : first + sizes[ranks.rank]])
    print("patched right" if right else f"patched wrong: {whole} {summed}", flush=True)
    megatron.shutdown()


if __name__ == "__main__":
    main()
