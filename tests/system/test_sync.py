"""Weight sync into real SGLang servers on CPU: the result is that of a server that loaded the new weights from disk."""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moerl.config.schema import Engine
from moerl.convert.tiny import tiny_config, write_tiny
from moerl.errors import EngineError, ReshardError
from moerl.models import read_spec
from moerl.models.shard import Shard
from moerl.reshard import group as sync_group
from moerl.reshard.sync import WeightSync
from moerl.rollout.client import EngineClient
from moerl.rollout.server import EngineServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = [[3 + i, 13, 4 + i, 14, 5 + i, 15] for i in range(6)]


class ClientLink:
    """The simplest `EngineLink`: clients in an event loop of their own thread."""

    host, backend, epoch = "127.0.0.1", "gloo", 0

    def __init__(self, servers):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.clients = [self.run(EngineClient(server.url, 60, 120).__aenter__()) for server in servers]
        self.names, self.tp, self.state = [server.url for server in servers], servers[0].engine.tp, None
        self.before = {}

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(120)

    def start(self, method, arguments):
        if method in self.before:
            self.before[method]()
        calls = [
            asyncio.run_coroutine_threadsafe(getattr(client, method)(**given), self._loop)
            for client, given in zip(self.clients, arguments, strict=True)
        ]

        class Pending:
            @staticmethod
            def check():
                for call in calls:
                    if call.done():
                        call.result()

            @staticmethod
            def wait(deadline):
                return [call.result(deadline.left("an engine")) for call in calls]

        return Pending

    def fence(self):
        self.state = "fenced"

    def publish(self, version):
        self.state = version

    def close(self):
        for client in self.clients:
            self.run(client.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints that differ in every tensor."""
    config = tiny_config(hidden=64, layers=3, experts=16, topk=4, groups=4, group_topk=2, initializer_range=0.1)
    folders = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp(f"weights-{seed}")
        write_tiny(folder, config, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        weights = load_file(folder / "model.safetensors")
        moved = {name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) for name, tensor in weights.items()}
        save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
        folders.append(folder)
    return folders


@pytest.fixture(scope="module")
def spec(folders):
    return read_spec(folders[0])


@pytest.fixture(scope="module")
def servers(folders, tmp_path_factory):
    """An engine on the old weights, one on the new weights, and one of two ranks on the old weights."""
    logs = tmp_path_factory.mktemp("logs")

    def server(folder, name, tp=1):
        engine = Engine(device="cpu", dtype="float32", tp=tp, max_running_requests=8, max_total_tokens=4096)
        return EngineServer(folder, engine, {}, log_path=logs / f"{name}.log", seed=1)

    made = [server(folders[0], "old"), server(folders[1], "new"), server(folders[0], "two-ranks", tp=2)]
    try:
        for one in made:
            one.start()
        for one in made:
            one.wait_healthy()
        yield made
    finally:
        for one in made:
            one.stop()


@pytest.fixture
def link(servers):
    link = ClientLink(servers[:1])
    yield link
    link.close()


@pytest.fixture
def new(servers):
    link = ClientLink(servers[1:2])
    yield link
    link.close()


@pytest.fixture
def two_ranks(servers):
    link = ClientLink(servers[2:])
    yield link
    link.close()


def shards(spec, folder: Path):
    weights = load_file(folder / "model.safetensors")
    return [Shard(entry, torch.cat([weights[name] for name in entry.hf]), 0, 1) for entry in spec.entries()]


def make_sync(spec, link, timeout_s=120.0):
    return WeightSync(spec, dtype=torch.float32, bucket_mib=0.3, verify=True, timeout_s=timeout_s, link=link)


def greedy(link):
    """(tokens, logprobs, encoded routes) of each prompt."""
    replies = link.run(
        link.clients[0].generate_many(
            PROMPTS, rids=[f"{time.monotonic()}.{i}" for i in range(6)], max_new_tokens=12, temperature=0, routes=True
        )
    )
    return [
        (reply["output_ids"], [pair[0] for pair in reply["meta_info"]["output_token_logprobs"]], reply["meta_info"]["routed_experts"])
        for reply in replies
    ]


def test_after_a_push_the_engine_equals_one_that_loaded_the_weights_from_disk(spec, folders, link, new):
    old_answers = greedy(link)  # also fills the prefix cache with the old policy's keys and values
    sync = make_sync(spec, link)
    try:
        report = sync.push(shards(spec, folders[1]), 5)
    finally:
        sync.close()
    assert (report.engine_versions, report.checksums_ok, link.state) == ([5], True, 5)
    assert report.buckets > 5
    assert link.run(link.clients[0].version()) == 5
    assert link.run(link.clients[0].checksums()) == new.run(new.clients[0].checksums())
    answers, wanted = greedy(link), greedy(new)
    assert answers != old_answers
    assert [tokens for tokens, _, _ in answers] == [tokens for tokens, _, _ in wanted]
    assert [routes for _, _, routes in answers] == [routes for _, _, routes in wanted]
    for (_, ours, _), (_, theirs, _) in zip(answers, wanted, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)


def test_one_group_serves_push_after_push(spec, folders, link):
    sync = make_sync(spec, link)
    try:
        reports = [sync.push(shards(spec, folders[i % 2]), 10 + i) for i in range(4)]
    finally:
        sync.close()
    assert reports[0].checksum == reports[2].checksum != reports[1].checksum == reports[3].checksum


def test_a_corrupted_byte_is_caught_and_the_next_push_repairs_it(spec, folders, link, monkeypatch):
    sync, sent = make_sync(spec, link), []
    broadcast = sync_group.broadcast

    def corrupting(group, tensor, deadline, interrupt=None):
        sent.append(tensor.nbytes)
        if len(sent) == 3:
            tensor = tensor.clone()
            tensor[tensor.numel() // 2] ^= 1
        broadcast(group, tensor, deadline, interrupt)

    before = link.run(link.clients[0].version())
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sync_group, "broadcast", corrupting)
            with pytest.raises(ReshardError, match=r"(?s)1 parameters differ from what was sent.*model\.layers"):
                sync.push(shards(spec, folders[0]), 20)
        assert link.state == "fenced"
        assert link.run(link.clients[0].version()) == before
        assert sync.push(shards(spec, folders[0]), 21).checksums_ok
    finally:
        sync.close()
    assert link.state == 21
    assert greedy(link)


def test_two_ranks_get_their_own_parts(spec, folders, two_ranks, new):
    sync = make_sync(spec, two_ranks)
    try:
        report = sync.push(shards(spec, folders[1]), 3)
    finally:
        sync.close()
    assert report.engine_versions == [3]
    ranks = two_ranks.run(two_ranks.clients[0].checksums())
    assert len(ranks) == 2
    name = "model.layers.1.mlp.experts.w13_weight"
    assert ranks[0][name] != ranks[1][name]
    for (tokens, ours, _), (wanted, theirs, _) in zip(greedy(two_ranks), greedy(new), strict=True):
        assert tokens == wanted
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_an_engine_that_dies_in_the_middle_is_an_error_before_the_deadline(spec, folders, two_ranks, servers):
    """Last in this module: it costs the engine of two ranks."""
    buckets = []

    def kill_at_third():
        buckets.append(None)
        if len(buckets) == 3:
            os.killpg(servers[2].process.pid, signal.SIGKILL)

    two_ranks.before["receive_bucket"] = kill_at_third
    sync, start = make_sync(spec, two_ranks, timeout_s=60.0), time.monotonic()
    with pytest.raises(ReshardError, match=r"sending bucket 3 of \d+") as caught:
        sync.push(shards(spec, folders[0]), 4)
    assert time.monotonic() - start < 60
    assert isinstance(caught.value.__cause__, EngineError | ReshardError)
    assert two_ranks.state == "fenced"
    sync.close()
