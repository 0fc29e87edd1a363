"""A tiny model, its weights, a naive picture of SGLang's layout, and engines that live in threads of this process."""

import hashlib
import threading
from dataclasses import dataclass, field

import msgspec
import pytest
import torch
import torch.distributed as dist

from moerl.convert.tiny import random_weights, tiny_config
from moerl.errors import EngineError, ReshardError, WaitTimeout
from moerl.models import deepseek
from moerl.models.shard import Shard
from moerl.reshard import group as sync_group
from moerl.reshard import orders
from moerl.reshard.boxes import kinds
from moerl.reshard.deadline import Deadline
from moerl.reshard.engine_boxes import EngineTopology, engine_parameters
from moerl.reshard.node import node_name
from moerl.reshard.plan import decode_plan
from moerl.reshard.receiver import Receiver
from moerl.reshard.transport import open_transport


@pytest.fixture(scope="session")
def spec():
    return deepseek.spec(tiny_config(hidden=32, layers=2, experts=4, topk=2, groups=2, group_topk=1, expert_width=64))


@pytest.fixture(scope="session")
def tensors(spec):
    """HF name -> fp32 tensor; norms and biases are not constant, so that a mix-up shows."""
    generator = torch.Generator().manual_seed(3)
    weights = random_weights(spec, 0.1, seed=3)
    return {name: torch.from_numpy(array) + 0.01 * torch.randn(array.shape, generator=generator) for name, array in weights.items()}


def whole_shards(spec, tensors):
    """The shards of a trainer with one process."""
    return [
        Shard(entry, torch.cat([tensors[name] for name in entry.hf]) if len(entry.hf) > 1 else tensors[entry.hf[0]], 0, 1)
        for entry in spec.entries()
    ]


def reference_layout(spec, tensors, dtype, tp):
    """What SGLang holds on each rank, built in the plainest way: {parameter: tensor} per rank."""
    cast = {name: tensor if "e_score_correction_bias" in name else tensor.to(dtype) for name, tensor in tensors.items()}
    heads, nope, value = (spec.hf_config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    ranks = []
    for rank in range(tp):
        held = {}

        def rows(tensor, rank=rank):
            return tensor.chunk(tp, 0)[rank]

        def columns(tensor, rank=rank):
            return tensor.chunk(tp, 1)[rank]

        padded = -(-spec.vocab_size // 64) * 64
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            whole = torch.zeros(padded, spec.hidden_size, dtype=dtype)
            whole[: spec.vocab_size] = cast[name]
            held[name] = rows(whole)
        held["model.norm.weight"] = cast["model.norm.weight"]
        for layer in range(spec.layers):
            at, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
            for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"):
                held[f"model.layers.{layer}.{norm}.weight"] = cast[f"model.layers.{layer}.{norm}.weight"]
            held[at + "fused_qkv_a_proj_with_mqa.weight"] = torch.cat(
                [cast[at + "q_a_proj.weight"], cast[at + "kv_a_proj_with_mqa.weight"]]
            )
            held[at + "q_b_proj.weight"] = rows(cast[at + "q_b_proj.weight"])
            held[at + "kv_b_proj.weight"] = rows(cast[at + "kv_b_proj.weight"])
            held[at + "o_proj.weight"] = columns(cast[at + "o_proj.weight"])
            by_head = cast[at + "kv_b_proj.weight"].view(heads, nope + value, -1).chunk(tp, 0)[rank]
            held[at + "w_kc"] = by_head[:, :nope]
            held[at + "w_vc"] = by_head[:, nope:].transpose(1, 2)
            dense = layer not in spec.moe_layers
            gated = mlp if dense else mlp + "shared_experts."
            held[gated + "gate_up_proj.weight"] = torch.cat([rows(cast[gated + f"{part}_proj.weight"]) for part in ("gate", "up")])
            held[gated + "down_proj.weight"] = columns(cast[gated + "down_proj.weight"])
            if not dense:
                held[mlp + "gate.weight"] = cast[mlp + "gate.weight"]
                held[mlp + "gate.e_score_correction_bias"] = cast[mlp + "gate.e_score_correction_bias"]
                experts = [mlp + f"experts.{e}." for e in range(spec.experts)]
                held[mlp + "experts.w13_weight"] = torch.stack(
                    [torch.cat([rows(cast[e + "gate_proj.weight"]), rows(cast[e + "up_proj.weight"])]) for e in experts]
                )
                held[mlp + "experts.w2_weight"] = torch.stack([columns(cast[e + "down_proj.weight"]) for e in experts])
        ranks.append(held)
    return ranks


def hash_bytes(tensor):
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


class Replies:
    """Calls running in threads, one per engine."""

    def __init__(self, calls):
        self._results = [None] * len(calls)
        self._errors = [None] * len(calls)
        self._threads = [threading.Thread(target=self._run, args=(i, call), daemon=True) for i, call in enumerate(calls)]
        for thread in self._threads:
            thread.start()

    def _run(self, i, call):
        try:
            self._results[i] = call()
        except (EngineError, ReshardError, RuntimeError) as error:
            self._errors[i] = error

    def check(self):
        for error in self._errors:
            if error is not None:
                raise error

    def failures(self, deadline):
        for thread in self._threads:
            thread.join(max(0, deadline.timeout_s - deadline.elapsed_s))
        return [str(error) for error in self._errors if error is not None]

    def wait(self, deadline):
        for thread in self._threads:
            while thread.is_alive():
                self.check()
                thread.join(min(0.05, deadline.left("a fake engine")))
        self.check()
        return self._results


@dataclass
class FakeEngine:
    """One engine with `tp` ranks, each a receiver of its own; `trouble` maps a method, or an order, to what it does before.

    `tensors` holds what came the compatible way (HF names), `ranks` the parameters of each rank, which the direct way writes.
    """

    name: str
    spec: object
    dtype: torch.dtype
    tp: int
    trouble: dict = field(default_factory=dict)
    calls: list = field(default_factory=list)
    tensors: dict = field(default_factory=dict)
    version_: int = 0
    groups: dict = field(default_factory=dict)
    receivers: list = field(default_factory=list)
    open: bool = False
    closed: bool = False
    paused: bool = False
    buckets: int = 0

    def __post_init__(self):
        topology = EngineTopology(1, self.tp, cpu=True, dtype=str(self.dtype).removeprefix("torch."))
        self.ranks = [
            {name: torch.zeros(each.shape, dtype=getattr(torch, each.dtype)) for name, each in rank.items()}
            for rank in engine_parameters(kinds(self.spec), topology)
        ]

    def call(self, method, arguments):
        order = orders.decode(arguments["order"]) if method == "order" else None
        name = type(order).__name__.lower() if order else method
        self.calls.append(name)
        if order:
            return self.obey(order, self.trouble.get(name))
        if name in self.trouble:
            outcome = self.trouble[name](self)
            if outcome is not None:
                return outcome
        return getattr(self, method)(**arguments)

    def obey(self, order, trouble):
        if isinstance(order, orders.Close):
            self.closed = True
            return "[]"

        def work(rank):
            if trouble is not None:
                trouble(self)
            return getattr(self, type(order).__name__.lower())(order, rank)

        answers = self.on_every_rank(work)
        if isinstance(order, orders.Commit):
            self.version_, self.closed = order.version, False
        return msgspec.json.encode(answers).decode()

    def on_every_rank(self, work):
        """As the real ranks do: whoever fails leaves the group, and all fail."""
        answers, errors = [None] * self.tp, []

        def run(rank):
            try:
                answers[rank] = work(rank)
            except (EngineError, ReshardError, WaitTimeout, RuntimeError) as error:
                errors.append(error)
                self.leave(None, rank)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(self.tp)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise EngineError(f"{self.name}: {errors[0]}")
        return answers

    def describe(self, order, rank):
        looks = {name: orders.Described(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in self.ranks[rank].items()}
        return orders.Description(orders.PROTOCOL, node_name(), looks)

    def join(self, order, rank):
        self.receivers = self.receivers or [None] * self.tp
        deadline, number = Deadline("fake engine", order.timeout_s), order.rank + rank
        store = sync_group.reach_store(order.host, order.port, order.world, deadline)
        group = sync_group.join(store, order.name, order.backend, order.world, deadline, rank=number)
        plan = decode_plan(order.plans[rank])
        transport = open_transport(order.kind, group, number, plan.bucket_bytes, order.nodes)
        self.receivers[rank] = Receiver(plan, transport, self.ranks[rank])

    def receive(self, order, rank):
        assert self.paused
        assert self.closed
        assert self.open
        if (damage := self.trouble.get("take")) is not None:
            damage(self, self.receivers[rank])
        return self.receivers[rank].receive(order.version, order.base, Deadline("fake engine", order.timeout_s))

    def verify(self, order, rank):
        return self.receivers[rank].read_back()

    def commit(self, order, rank):
        if self.receivers and self.receivers[rank] is not None:
            self.receivers[rank].version = order.version

    def leave(self, order, rank):
        if self.receivers and self.receivers[rank] is not None:
            self.receivers[rank].transport.close()
            self.receivers[rank] = None

    def init_group(self, host, port, rank_offset, world_size, name, backend):
        ranks: list = [None] * self.tp

        def join(i):
            store = dist.TCPStore(host, port, world_size, False)
            ranks[i] = sync_group.join(store, name, backend, world_size, Deadline("fake engine", 20), rank=rank_offset + i)

        threads = [threading.Thread(target=join, args=(i,), daemon=True) for i in range(self.tp)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.groups[name] = ranks

    def destroy_group(self, name):
        self.groups.pop(name, None)

    def begin_update(self):
        if self.open:
            raise EngineError(f"{self.name}: a session is already open")
        self.open = True

    def end_update(self):
        self.open = False

    def receive_bucket(self, names, dtypes, shapes, group, version, flush):
        assert version is None
        assert flush is False
        sizes = [torch.Size(shape).numel() * getattr(torch, dtype).itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        received = [torch.empty(sum(sizes), dtype=torch.uint8) for _ in range(self.tp)]
        threads = [
            threading.Thread(target=sync_group.broadcast, args=(member, flat, Deadline("fake engine", 20)), daemon=True)
            for member, flat in zip(self.groups[group], received, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        offset = 0
        for name, dtype, shape, size in zip(names, dtypes, shapes, sizes, strict=True):
            assert offset % getattr(torch, dtype).itemsize == 0, f"{name} is not aligned"
            self.tensors[name] = received[0][offset : offset + size].clone().view(getattr(torch, dtype)).view(shape)
            offset += size
        self.buckets += 1

    def checksums(self):
        layout = reference_layout(self.spec, self.tensors, self.dtype, self.tp)
        return [{name: hash_bytes(tensor) for name, tensor in rank.items()} for rank in layout]

    def version(self):
        return self.version_

    def pause(self, mode):
        assert mode in ("abort", "retract", "in_place")
        self.paused = True

    def resume(self):
        if self.closed:
            raise EngineError(f"{self.name}: closed")
        self.paused = False


class FakeLink:
    """`EngineLink` over fake engines."""

    host, backend = "127.0.0.1", "gloo"

    def __init__(self, engines):
        self.engines, self.tp, self.epoch = engines, engines[0].tp, 0
        self.names = [engine.name for engine in engines]
        self.state = "version 0"

    def start(self, method, arguments):
        return Replies(
            [lambda engine=engine, given=given: engine.call(method, given) for engine, given in zip(self.engines, arguments, strict=True)]
        )

    def fence(self):
        self.state = "fenced"

    def publish(self, version):
        self.state = f"version {version}"


@pytest.fixture
def make_link(spec):
    def make(engines=1, tp=1, dtype=torch.bfloat16):
        return FakeLink([FakeEngine(f"engine {i}", spec, dtype, tp) for i in range(engines)])

    return make


@pytest.fixture
def shards_of(spec):
    """HF tensors -> the shards of a trainer with one process."""
    return lambda tensors: whole_shards(spec, tensors)


@pytest.fixture
def engine_tensors(spec):
    """(HF tensors, dtype, tp) -> what each engine rank must hold, built naively."""
    return lambda tensors, dtype, tp: reference_layout(spec, tensors, dtype, tp)
