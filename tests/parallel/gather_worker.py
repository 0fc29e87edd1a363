"""Run by test_gather.py under torchrun with two ranks: each case prints one JSON line per rank."""

import json
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moerl.convert.tiny import random_weights, tiny_config
from moerl.errors import EngineError, ReshardError
from moerl.models import deepseek
from moerl.models.shard import Shard
from moerl.reshard import group as sync_group
from moerl.reshard.deadline import Deadline
from moerl.reshard.gather import gather_hf, plan_gather
from moerl.reshard.sync import WeightSync

SPEC = deepseek.spec(tiny_config(hidden=32, layers=2, experts=4, topk=2, groups=2, group_topk=1, expert_width=64))
WEIGHTS = {name: torch.from_numpy(array) for name, array in random_weights(SPEC, 0.1, seed=5).items()}


def whole(entry):
    return torch.cat([WEIGHTS[name] for name in entry.hf])


def sliced(entry, index, parts):
    """One rank's [part slice; part slice], as Megatron stacks gate and up; the vocabulary padded to 64 rows first."""
    axis = entry.param.tp_axis
    tensors = [WEIGHTS[name] for name in entry.hf]
    if entry.param.layers == "once" and tensors[0].dim() == 2:
        tensors = [torch.cat([tensors[0], torch.full((64 - SPEC.vocab_size, SPEC.hidden_size), torch.nan)])]
    return Shard(entry, torch.cat([tensor.chunk(parts, axis)[index] for tensor in tensors]), index, parts)


def tensor_parallel(rank, *, expert_tensor):
    """TP2: dense weights cut; experts split by EP2, or cut by ETP2."""
    shards = []
    for entry in SPEC.entries():
        if entry.expert is not None and not expert_tensor:
            if entry.expert // (SPEC.experts // 2) == rank:
                shards.append(Shard(entry, whole(entry), 0, 1))
        elif entry.param.tp_axis is None:
            shards.append(Shard(entry, whole(entry), 0, 1))
        else:
            shards.append(sliced(entry, rank, 2))
    return shards


def pipeline(rank):
    """PP2: layer 0 and the embedding on rank 0, the rest on rank 1."""
    first = {entry.megatron for entry in SPEC.entries() if entry.layer == 0 or entry.megatron.startswith("embedding")}
    return [Shard(entry, whole(entry), 0, 1) for entry in SPEC.entries() if (entry.megatron in first) == (rank == 0)]


def compressed_whole(rank):
    """TP2 as Transformer Engine lays it out: the compressed projections are on every rank."""
    return [
        Shard(shard.entry, whole(shard.entry), 0, 1) if "down_proj" in shard.entry.megatron else shard
        for shard in tensor_parallel(rank, expert_tensor=False)
    ]


LAYOUTS = {
    "tp2_ep2": lambda rank: tensor_parallel(rank, expert_tensor=False),
    "tp2_etp2": lambda rank: tensor_parallel(rank, expert_tensor=True),
    "pp2": pipeline,
    "dp2": lambda rank: [Shard(entry, whole(entry), 0, 1) for entry in SPEC.entries()],
    "tp2_compressed_whole": compressed_whole,
}


def bitwise(rank, layout, dtype, mib):
    gathered = dict(gather_hf(LAYOUTS[layout](rank), SPEC, dtype=dtype, bucket_mib=mib))
    if rank:
        return {"tensors": len(gathered)}
    wrong = [
        name
        for name, tensor in WEIGHTS.items()
        if not torch.equal(gathered[name], tensor if "correction_bias" in name else tensor.to(dtype))
    ]
    return {"missing": len(WEIGHTS) - len(gathered), "wrong": wrong}


def missing(rank):
    """Rank 1 lacks one of its experts; both ranks must say so."""
    name = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
    shards = [shard for shard in LAYOUTS["tp2_ep2"](rank) if shard.entry.megatron != name]
    try:
        plan_gather(shards, SPEC)
    except ReshardError as error:
        return {"error": f"{name}: missing" in str(error)}
    return {"error": False}


class Link:
    """One engine that only swallows broadcasts; refuses bucket number `fail_at`."""

    names, tp, host, backend, epoch = ["the engine"], 1, "127.0.0.1", "gloo", 0

    def __init__(self, fail_at=None):
        self.fail_at, self.buckets, self.group, self.tagged = fail_at, 0, None, 0

    def start(self, method, arguments):
        result, error = [None], [None]

        def run():
            try:
                result[0] = getattr(self, method, lambda **_: None)(**arguments[0])
            except EngineError as failure:
                error[0] = failure

        thread = threading.Thread(target=run, daemon=True)
        thread.start()

        class Pending:
            @staticmethod
            def check():
                if error[0] is not None:
                    raise error[0]

            @staticmethod
            def wait(deadline):
                thread.join(deadline.left("the engine"))
                Pending.check()
                return result

        return Pending

    def init_group(self, host, port, rank_offset, world_size, name, backend):
        store = dist.TCPStore(host, port, world_size, False)
        self.group = sync_group.join(store, name, backend, world_size, Deadline("engine", 20), rank=rank_offset)

    def destroy_group(self, name):
        self.group = None

    def receive_bucket(self, names, dtypes, shapes, group, version, flush):
        self.buckets += 1
        if self.buckets == self.fail_at:
            raise EngineError("the engine refused a bucket")
        nbytes = sum(torch.Size(shape).numel() * getattr(torch, dtype).itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
        sync_group.broadcast(self.group, torch.empty(nbytes, dtype=torch.uint8), Deadline("engine", 20))

    def set_version(self, version):
        self.tagged = version

    def version(self):
        return self.tagged

    def fence(self): ...

    def publish(self, version): ...


def push(rank, fail_at):
    link = Link(fail_at) if rank == 0 else None
    sync = WeightSync(SPEC, dtype=torch.bfloat16, bucket_mib=0.01, verify=False, timeout_s=30, link=link)
    try:
        report = sync.push(LAYOUTS["tp2_ep2"](rank), 4)
    except ReshardError as error:
        return {"error": str(error)}
    finally:
        sync.close()
    return {"versions": report.engine_versions, "nbytes": report.nbytes, "buckets": report.buckets}


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    cases = {
        f"{layout} {dtype} {mib}": lambda layout=layout, dtype=dtype, mib=mib: bitwise(rank, layout, getattr(torch, dtype), mib)
        for layout in LAYOUTS
        for dtype, mib in (("float32", 0.01), ("bfloat16", 0.01), ("bfloat16", 100.0))
    }
    cases |= {"missing": lambda: missing(rank), "push": lambda: push(rank, None), "push fails": lambda: push(rank, 3)}
    results = {case: run() for case, run in cases.items()}
    Path(f"{Path.cwd()}/rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
