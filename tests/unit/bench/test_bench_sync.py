"""The weight-sync benchmark's own parts: what it makes of seconds, what it sends, what Megatron's planner is shown, its output."""

import json
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moerl import cli
from moerl.bench import sync as bench
from moerl.bench import wire
from moerl.bench.sync_link import connect
from moerl.bench.sync_peer import Bucket, receive, send
from moerl.bench.sync_ranks import config_of, make_the_plan
from moerl.bench.sync_refit import GroupedNames, grouped
from moerl.errors import EngineError
from moerl.models import deepseek
from moerl.reshard import group as sync_group
from moerl.reshard.deadline import Deadline
from moerl.reshard.transport.gloo import GlooTransport

MEASURED = bench.Measured(
    minimum_nbytes=1000,
    sender_max_over_mean=1.25,
    buckets=4,
    ways={
        "direct": bench.Timed(1000, [1.0, 2.0, 4.0]),
        "compatible": bench.Timed(1500, [3.0, 4.0, 4.0]),
        "refit": bench.Timed(1000, [1.5, 3.0, 6.0]),
        "transport": bench.Timed(1000, [0.5, 1.6, 3.6]),
        "shared_memory": bench.Timed(1000, [1.0, 1.0, 8.0]),
    },
    paced={
        "direct": bench.Timed(1000, [2.0, 2.0, 2.0]),
        "compatible": bench.Timed(1500, [3.0, 3.0, 4.0]),
        "refit": bench.Timed(1000, [2.5, 2.5, 2.5]),
        "transport": bench.Timed(1000, [1.8, 1.9, 2.2]),
    },
    wire_gbit_per_s=10.0,
    changes=[bench.Changed(1e-7, [0.001], [0.003]), bench.Changed(1e-6, [0.01, 0.03], [0.03, 0.09]), bench.Changed(1e-4, [0.5], [0.6])],
    load_average=0.5,
)


def test_ratios_are_medians_over_the_rounds_and_above_one_where_direct_is_faster() -> None:
    assert bench.figures(MEASURED) == {
        "bytes_ratio": 1.0,
        "vs_compatible": 1.5,
        "vs_mcore_refit": 1.25,
        "vs_raw_transport": 0.95,
        "sender_max_over_mean": 1.25,
        "changed_share": 0.02,
        "loopback_vs_compatible": 2.0,
        "loopback_vs_mcore_refit": 1.5,
        "loopback_vs_raw_transport": 0.8,
        "shared_memory_vs_gloo": 2.0,
        "shared_memory_vs_raw_transport": 1.6,
    }


def test_the_last_line_is_one_json_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []
    monkeypatch.setattr(bench, "measure", lambda settings: asked.append(settings) or MEASURED)
    assert cli.main(["bench", "sync", "--json"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert asked == [bench.Settings()]
    assert json.loads(last) == bench.figures(MEASURED)
    assert any("compatible" in line and "2.00" in line for line in table)
    assert any("1e-06" in line and "2.000 %" in line for line in table)


def test_the_model_that_is_measured_is_large_enough_and_mostly_experts() -> None:
    settings = bench.Settings()
    spec = deepseek.spec(bench.model_config(settings))
    plan = make_the_plan(config_of(settings, Path("unused")), spec)
    summary = plan.summary()
    assert plan.minimum_bytes >= 200e6
    experts = 3 * settings.hidden * settings.expert_width * settings.experts * (settings.layers - 1) * 2
    assert 0.85 < experts / plan.minimum_bytes < 0.95
    assert summary.bytes_ratio == 1
    assert summary.buckets >= 48  # enough for packing, sending and unpacking to overlap
    assert {int(sender) for sender in plan.buckets["sender"]} == {0, 1}


def test_every_message_of_the_bare_transport_arrives() -> None:
    buckets = [Bucket(0, 1000), Bucket(1, 4096), Bucket(0, 1), Bucket(1, 7), Bucket(0, 4096), Bucket(0, 5)]
    deadline = Deadline("a test", 30)
    store = sync_group.open_store("127.0.0.1", 3, deadline)
    taken: list[int] = []

    class Watched(GlooTransport):
        def take(self, deadline):
            header, payload = super().take(deadline)
            taken.append(len(payload))
            assert payload.eq(1).all()
            return header, payload

    def rank(number: int) -> None:
        mine = store if number == 0 else sync_group.reach_store("127.0.0.1", store.port, 3, deadline)
        group = sync_group.join(mine, "test", "gloo", 3, deadline, rank=number)
        if number == 2:
            receive(Watched(group, number, 4096), buckets, deadline)
        else:
            own = [bucket for bucket in buckets if bucket.sender == number]
            send(GlooTransport(group, number, 4096), own, 2, deadline, fill=True)

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert taken == [bucket.nbytes for bucket in buckets]


def test_experts_are_shown_to_megatron_under_the_names_of_grouped_ones() -> None:
    assert grouped("decoder.layers.2.mlp.experts.local_experts.13.linear_fc2.weight") == "decoder.layers.2.mlp.experts.linear_fc2.weight13"
    for name in ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.mlp.shared_experts.linear_fc1.weight"):
        assert grouped(name) == name


def test_the_model_that_is_shown_holds_the_live_tensors() -> None:
    expert = torch.nn.ModuleDict({"linear_fc1": torch.nn.Linear(2, 2, bias=False)})
    model = torch.nn.ModuleDict({"experts": torch.nn.ModuleDict({"local_experts": torch.nn.ModuleList([expert])})})
    model.config, model.pg_collection = object(), object()
    shown = GroupedNames(model)
    ((name, parameter),) = shown.named_parameters()
    assert name == "experts.linear_fc1.weight0"
    assert parameter is expert["linear_fc1"].weight
    assert [name for name, _ in shown.named_modules()] == [name for name, _ in model.named_modules()]
    assert (shown.config, shown.pg_collection) == (model.config, model.pg_collection)


def test_a_paced_connection_is_as_slow_as_it_should_be_until_it_is_not_paced_any_more() -> None:
    nbytes, rate = 8 << 20, 8 << 20
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0] as other,
    ):
        assert wire.pace(rate) >= 2
        assert _seconds(ours, other, nbytes) > 0.8 * nbytes / rate
        assert wire.pace(None) >= 2
        assert _seconds(ours, other, nbytes) < 0.8 * nbytes / rate


def _seconds(ours: socket.socket, other: socket.socket, nbytes: int) -> float:
    taker = threading.Thread(target=lambda: other.recv(nbytes, socket.MSG_WAITALL), daemon=True)
    taker.start()
    start = time.monotonic()
    ours.sendall(bytes(nbytes))
    taker.join(30)
    return time.monotonic() - start


def test_an_engine_that_is_gone_is_an_error_of_the_link() -> None:
    gone = SimpleNamespace(url="http://127.0.0.1:9", engine=SimpleNamespace(tp=1))
    with connect([gone], 5.0) as link:
        assert (link.names, link.tp) == (["http://127.0.0.1:9"], 1)
        replies = link.start("resume", [{}])
        with pytest.raises(EngineError, match="cannot connect"):
            replies.wait(Deadline("a test", 10))
        with pytest.raises(EngineError, match="cannot connect"):
            replies.check()
        (said,) = replies.failures(Deadline("a test", 10))
        assert "cannot connect" in said
