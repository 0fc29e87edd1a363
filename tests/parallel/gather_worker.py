"""Run by test_gather.py under torchrun with two ranks: each case prints one JSON line per rank."""

import json
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from moerl.config.schema import Parallel, Sync
from moerl.convert.tiny import random_weights, tiny_config, tiny_qwen3_config
from moerl.errors import EngineError, ReshardError
from moerl.models import deepseek, qwen3
from moerl.models.shard import Shard
from moerl.reshard import group as sync_group
from moerl.reshard import orders
from moerl.reshard.deadline import Deadline
from moerl.reshard.engine_boxes import EngineTopology
from moerl.reshard.gather import gather_hf, plan_gather
from moerl.reshard.sync import WeightSync

FAMILIES = {
    "deepseek": deepseek.spec(
        tiny_config(hidden=32, layers=2, experts=4, topk=2, groups=2, group_topk=1, expert_width=64) | {"vocab_size": 17}
    ),
    "qwen3": qwen3.spec(
        tiny_qwen3_config(hidden=32, layers=2, experts=4, topk=2, heads=12, kv_heads=4, head_dim=4, expert_width=64) | {"vocab_size": 17}
    ),
}
SPEC = FAMILIES["deepseek"]
WEIGHTS = {
    family: {name: torch.from_numpy(array) for name, array in random_weights(spec, 0.1, seed=5).items()}
    for family, spec in FAMILIES.items()
}


def shard(spec, entry, index=0, parts=1):
    """One rank's [slice; slice], as Megatron stacks gate and up; q, k, v of each key-value head together; the vocabulary as if padded."""
    tensors, axis = [WEIGHTS[spec.family][name] for name in entry.hf], entry.param.tp_axis or 0
    if entry.param.head_rows:
        groups = spec.hf_config["num_key_value_heads"]
        tensors = [torch.cat([tensor.view(groups, -1, spec.hidden_size) for tensor in tensors], dim=1)]
    held = torch.cat([tensor.split(-(-tensor.shape[axis] // parts), axis)[index] for tensor in tensors])
    return Shard(entry, held.reshape(-1, spec.hidden_size) if entry.param.head_rows else held, index, parts)


def tensor_parallel(spec, rank, *, expert_tensor):
    """TP2: dense weights cut; experts split by EP2, or cut by ETP2."""
    shards = []
    for entry in spec.entries():
        if entry.expert is not None and not expert_tensor:
            if entry.expert // (spec.experts // 2) == rank:
                shards.append(shard(spec, entry))
        elif entry.param.tp_axis is None:
            shards.append(shard(spec, entry))
        else:
            shards.append(shard(spec, entry, rank, 2))
    return shards


def pipeline(spec, rank):
    """PP2: layer 0 and the embedding on rank 0, the rest on rank 1."""
    first = {entry.megatron for entry in spec.entries() if entry.layer == 0 or entry.megatron.startswith("embedding")}
    return [shard(spec, entry) for entry in spec.entries() if (entry.megatron in first) == (rank == 0)]


def compressed_whole(spec, rank):
    """TP2 as Transformer Engine lays it out: the compressed projections are on every rank."""
    return [
        shard(spec, held.entry) if "down_proj" in held.entry.megatron else held for held in tensor_parallel(spec, rank, expert_tensor=False)
    ]


LAYOUTS = {
    "tp2_ep2": lambda spec, rank: tensor_parallel(spec, rank, expert_tensor=False),
    "tp2_etp2": lambda spec, rank: tensor_parallel(spec, rank, expert_tensor=True),
    "pp2": pipeline,
    "dp2": lambda spec, rank: [shard(spec, entry) for entry in spec.entries()],
    "tp2_compressed_whole": compressed_whole,
}


def bitwise(rank, family, layout, dtype, mib):
    spec, weights = FAMILIES[family], WEIGHTS[family]
    gathered = dict(gather_hf(LAYOUTS[layout](spec, rank), spec, dtype=dtype, bucket_mib=mib))
    if rank:
        return {"tensors": len(gathered)}
    wrong = [
        name
        for name, tensor in weights.items()
        if not torch.equal(gathered[name], tensor if "correction_bias" in name else tensor.to(dtype))
    ]
    return {"missing": len(weights) - len(gathered), "wrong": wrong}


def missing(rank):
    """Rank 1 lacks one of its experts; both ranks must say so."""
    name = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
    shards = [held for held in LAYOUTS["tp2_ep2"](SPEC, rank) if held.entry.megatron != name]
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

            @staticmethod
            def failures(deadline):
                thread.join(deadline.timeout_s)
                return [] if error[0] is None else [str(error[0])]

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

    def order(self, order, load_format, timeout_s):
        said = orders.decode(order)
        if isinstance(said, orders.Commit):
            self.tagged = said.version

    def version(self):
        return self.tagged

    def fence(self): ...

    def publish(self, version): ...


def push(rank, fail_at):
    link = Link(fail_at) if rank == 0 else None
    settings = Sync(way="compatible", bucket_mib=0.01, verify="never", timeout_s=30.0)
    sync = WeightSync(SPEC, Parallel(tp=2, ep=2), EngineTopology(), settings, link)
    try:
        report = sync.push(LAYOUTS["tp2_ep2"](SPEC, rank), 4)
    except ReshardError as error:
        return {"error": str(error)}
    finally:
        sync.close()
    return {"versions": report.engine_versions, "nbytes": report.moved.wire_nbytes, "buckets": report.moved.buckets}


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    cases = {
        f"{family} {layout} {dtype} {mib}": partial(bitwise, rank, family, layout, getattr(torch, dtype), mib)
        for family in FAMILIES
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
