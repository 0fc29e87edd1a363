"""A whole push over real groups to engines that live in threads, both ways, and what happens when one of them misbehaves."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from moerl.config.schema import Parallel, Sync
from moerl.errors import EngineError, ReshardError
from moerl.reshard.engine_boxes import EngineTopology
from moerl.reshard.sync import WeightSync

WAYS = ["direct", "compatible"]
TRANSFER = {
    "direct": ["describe", "join", "pause", "close", "begin_update", "receive", "end_update", "verify", "commit", "version", "resume"],
    "compatible": [
        "init_group",
        "pause",
        "close",
        "begin_update",
        "receive_bucket",
        "end_update",
        "checksums",
        "commit",
        "version",
        "resume",
    ],
}


@pytest.fixture
def make_sync(spec):
    made = []

    def make(link, way="direct", *, mib=0.02, timeout_s=20.0, dtype="bfloat16", tp=None, **settings):
        tp = tp or (link.tp if link is not None else 1)
        engine = EngineTopology(len(link.names) if link is not None else 1, tp, dtype=dtype)
        settings = Sync(way=way, bucket_mib=mib, timeout_s=timeout_s, **settings)
        made.append(WeightSync(spec, Parallel(), engine, settings, link))
        return made[-1]

    yield make
    for sync in made:
        sync.close()


def raising(message):
    def trouble(engine):
        raise EngineError(f"{engine.name}: {message}")

    return trouble


def holds(engine, tensors, engine_tensors):
    """Whether each rank of an engine holds its part of the tensors, bit for bit, as a naive picture of the engine's layout has it."""
    expected = engine_tensors(tensors, engine.dtype, engine.tp)
    return all(
        torch.equal(parameter, want[name]) for held, want in zip(engine.ranks, expected, strict=True) for name, parameter in held.items()
    )


def test_a_drafting_engine_that_nobody_can_update_is_named(make_link, make_sync, tensors, shards_of, engine_tensors, caplog):
    """Its draft keeps the bytes that it has; all else arrives."""
    link = make_link(1, 1)
    (rank,) = link.engines[0].ranks
    rank["draft.model.enorm.weight"] = torch.full((32,), 0.5)
    make_sync(link).push(shards_of(tensors), 1)
    assert "engines draft with a layer that the trainer does not hold (train.mtp)" in caplog.text
    assert torch.equal(rank.pop("draft.model.enorm.weight"), torch.full((32,), 0.5))
    assert holds(link.engines[0], tensors, engine_tensors)


@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
@pytest.mark.parametrize(("engines", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_the_direct_way_gives_every_rank_its_own_bytes(make_link, make_sync, tensors, shards_of, engine_tensors, engines, tp, transport):
    link = make_link(engines, tp)
    report = make_sync(link, transport=transport).push(shards_of(tensors), 7)
    for engine in link.engines:
        assert holds(engine, tensors, engine_tensors)
        assert list(dict.fromkeys(engine.calls)) == TRANSFER["direct"]
        assert (engine.closed, engine.paused, engine.open) == (False, False, False)
    assert (report.version, report.engine_versions, report.verified, report.way) == (7, [7] * engines, True, "direct")
    assert report.moved.wire_nbytes == report.moved.minimum_nbytes
    assert report.moved.received == tuple((nbytes, nbytes) for nbytes, _ in report.moved.received)
    assert len(report.moved.received) == engines * tp
    assert report.moved.buckets > 3
    assert len(report.digest) == 64
    assert link.state == "version 7"


@pytest.mark.parametrize(("engines", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_the_compatible_way_gives_every_engine_all_weights(make_link, make_sync, tensors, shards_of, engines, tp):
    link = make_link(engines, tp)
    report = make_sync(link, "compatible").push(shards_of(tensors), 7)
    for engine in link.engines:
        assert set(engine.tensors) == set(tensors)
        assert all(torch.equal(tensor, tensors[name].to(tensor.dtype)) for name, tensor in engine.tensors.items())
        assert list(dict.fromkeys(engine.calls)) == TRANSFER["compatible"]
        assert engine.buckets == report.moved.buckets > 3
    assert (report.version, report.engine_versions, report.verified, report.way) == (7, [7] * engines, True, "compatible")
    assert report.moved.wire_nbytes == engines * tp * sum(tensor.nbytes for tensor in link.engines[0].tensors.values())
    assert len(report.digest) == 64
    assert set(report.seconds) == {"prepare", "transfer", "verify", "commit"}
    assert link.state == "version 7"


@pytest.mark.parametrize("way", WAYS)
def test_one_group_serves_many_pushes_and_follows_the_live_parameters(make_link, make_sync, tensors, shards_of, way):
    link = make_link()
    sync, shards = make_sync(link, way), shards_of({name: tensor.clone() for name, tensor in tensors.items()})
    first = sync.push(shards, 1)
    again = sync.push(shards, 2)
    shards[0].tensor.add_(1.0)
    changed = sync.push(shards, 3)
    assert first.digest == again.digest != changed.digest
    assert link.engines[0].calls.count(TRANSFER[way][0]) == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_replaced_engine_gets_a_new_group(make_link, make_sync, tensors, shards_of, way):
    link = make_link()
    sync = make_sync(link, way)
    sync.push(shards_of(tensors), 1)
    link.epoch += 1
    link.engines[0].groups.clear()
    assert sync.push(shards_of(tensors), 2).engine_versions == [2]
    assert link.engines[0].calls.count(TRANSFER[way][0]) == 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("verify", "verified"), [("never", [False] * 4), ("every", [True] * 4), (3, [True, False, False, True])])
def test_what_is_verified_is_a_setting(make_link, make_sync, tensors, shards_of, way, verify, verified):
    sync = make_sync(make_link(), way, verify=verify)
    reports = [sync.push(shards_of(tensors), version) for version in range(4)]
    assert [report.verified for report in reports] == verified
    assert len({report.digest for report in reports}) == 1


def test_only_changes_travel(make_link, make_sync, tensors, shards_of, engine_tensors):
    link = make_link(2, 2)
    sync, mine = make_sync(link, delta=True), {name: tensor.to(torch.bfloat16).float() for name, tensor in tensors.items()}
    first = sync.push(shards_of(mine), 1)
    unchanged = sync.push(shards_of(mine), 2)
    mine["model.layers.0.self_attn.o_proj.weight"][3, 5] += 1.0
    changed = sync.push(shards_of(mine), 3)
    assert first.moved.changed_share is None
    assert (unchanged.moved.wire_nbytes, unchanged.moved.changed_share) == (0, 0.0)
    assert changed.moved.wire_nbytes == 2 * 6, "one position and one value, to one rank of each of the two engines"
    assert first.digest == unchanged.digest != changed.digest
    assert all(holds(engine, mine, engine_tensors) for engine in link.engines)


def test_changes_are_refused_by_an_engine_that_missed_a_version_and_everything_is_sent_instead(
    make_link, make_sync, tensors, shards_of, engine_tensors
):
    link = make_link(2)
    sync = make_sync(link, delta=True)
    sync.push(shards_of(tensors), 1)
    link.engines[1].receivers[0].version = 0
    moved = {name: tensor + 1 for name, tensor in tensors.items()}
    report = sync.push(shards_of(moved), 2)
    assert (report.attempts, report.way, report.moved.changed_share) == (2, "direct", None)
    assert all(holds(engine, moved, engine_tensors) for engine in link.engines)


def test_a_base_that_is_not_what_was_sent_is_found_before_anything_is_written(make_link, make_sync, tensors, shards_of, engine_tensors):
    link = make_link()
    sync = make_sync(link, delta=True)
    sync.push(shards_of(tensors), 1)
    link.engines[0].ranks[0]["model.layers.1.mlp.experts.w13_weight"].view(torch.uint8)[0, 0, 0] ^= 1
    report = sync.push(shards_of(tensors), 2)
    assert report.attempts == 2
    assert holds(link.engines[0], tensors, engine_tensors)


def damage(receivers, times=1):
    """Flip a bit of what arrives, `times` times."""
    left = [times]

    def trouble(engine, receiver):
        take = receiver.transport.take

        def damaged(deadline):
            header, payload = take(deadline)
            if left[0] and payload.numel():
                payload[len(payload) // 2] ^= 4
                left[0] -= 1
            return header, payload

        receiver.transport.take = damaged

    return trouble


def test_a_bit_that_flips_on_the_way_is_never_written(make_link, make_sync, tensors, shards_of):
    link = make_link(engines=2)
    link.engines[1].trouble["take"] = damage(link.engines[1], times=100)
    with pytest.raises(
        ReshardError, match=r"(?s)engine 1: bucket \d+ of version 1 from trainer rank 0 is damaged.*nothing of it was written"
    ):
        make_sync(link).push(shards_of(tensors), 1)
    assert not any(parameter.any() for parameter in link.engines[1].ranks[0].values())
    assert link.state == "fenced"
    assert [engine.closed for engine in link.engines] == [True, True]
    assert [engine.version_ for engine in link.engines] == [0, 0]


def test_one_bad_transfer_is_repeated_in_a_new_group(make_link, make_sync, tensors, shards_of, engine_tensors):
    link = make_link(engines=2)
    link.engines[1].trouble["take"] = damage(link.engines[1])
    report = make_sync(link).push(shards_of(tensors), 1)
    assert (report.attempts, report.way) == (2, "direct")
    assert all(holds(engine, tensors, engine_tensors) for engine in link.engines)
    assert link.engines[0].calls.count("join") == 2


def test_the_compatible_way_is_the_last_resort(make_link, make_sync, tensors, shards_of):
    link = make_link()
    link.engines[0].trouble["receive"] = raising("no room")
    report = make_sync(link, "auto").push(shards_of(tensors), 1)
    assert (report.attempts, report.way) == (3, "compatible")
    assert link.engines[0].closed is False
    assert link.state == "version 1"


@pytest.mark.parametrize("what", ["receive", "verify", "end_update", "commit"])
def test_a_failure_after_the_first_write_leaves_all_engines_closed(make_link, make_sync, tensors, shards_of, what):
    link = make_link(engines=2)
    link.engines[1].trouble[what] = raising("refused")
    start = time.monotonic()
    with pytest.raises(ReshardError, match=r"(?s)engine 1: refused.*closed until a complete version arrives"):
        make_sync(link).push(shards_of(tensors), 1)
    assert time.monotonic() - start < 15
    assert link.state == "fenced"
    assert link.engines[1].closed
    assert all(engine.paused for engine in link.engines)
    link.engines[1].trouble.clear()
    link.engines[1].open = False  # a session that could not be closed must not be in the way of what is tested here
    assert make_sync(link).push(shards_of(tensors), 2).engine_versions == [2, 2]
    assert link.state == "version 2"
    assert not any(engine.closed or engine.paused for engine in link.engines)


def test_weights_that_changed_in_the_engine_are_found(make_link, make_sync, tensors, shards_of):
    link = make_link(engines=2)

    def corrupt(engine):
        engine.ranks[0]["model.layers.1.mlp.experts.w13_weight"].view(torch.uint8)[0, 0, 0] ^= 1

    link.engines[1].trouble["verify"] = corrupt
    with pytest.raises(ReshardError, match=r"1 buckets are not in the engines as they were sent:\n  - engine rank 1: bucket \d+"):
        make_sync(link).push(shards_of(tensors), 1)
    assert link.state == "fenced"


def test_the_compatible_way_finds_weights_that_changed_in_the_engine(make_link, make_sync, tensors, shards_of):
    link = make_link(engines=2)

    def corrupt(engine):
        engine.tensors["model.layers.1.mlp.experts.3.up_proj.weight"].view(torch.uint8)[0, 0] ^= 1

    link.engines[1].trouble["checksums"] = corrupt
    with pytest.raises(ReshardError, match=r"(?s)1 parameters differ.*engine 1: rank 0: model\.layers\.1\.mlp\.experts\.w13_weight"):
        make_sync(link, "compatible").push(shards_of(tensors), 1)
    assert link.state == "fenced"
    assert link.engines[0].version_ == 0


def test_an_engine_with_other_parameters_is_refused_with_all_differences(make_link, make_sync, tensors, shards_of):
    link = make_link()
    held = link.engines[0].ranks[0]
    held["model.layers.0.mlp.gate_up_proj.weight"] = torch.zeros(3, 4)
    held["model.surprise"] = torch.zeros(1)
    del held["model.norm.weight"]
    with pytest.raises(
        ReshardError, match=r"(?s)3 parameters.*model\.norm\.weight is missing.*model\.surprise.*gate_up_proj.*Nothing was written"
    ):
        make_sync(link).push(shards_of(tensors), 1)
    assert "pause" not in link.engines[0].calls


def test_an_engine_that_came_back_with_another_topology_is_refused(make_link, make_sync, tensors, shards_of):
    link = make_link(tp=2)
    with pytest.raises(ReshardError, match="the engine reports parameters of 2 ranks, the plan is for 1"):
        make_sync(link, tp=1).push(shards_of(tensors), 1)


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_reports_another_version_is_found(make_link, make_sync, tensors, shards_of, way):
    link = make_link()
    link.engines[0].trouble["version"] = lambda engine: 5
    with pytest.raises(ReshardError, match="should report version 6, but engine 0 reports 5"):
        make_sync(link, way).push(shards_of(tensors), 6)
    assert link.state == "fenced"


def test_a_refused_bucket_ends_the_compatible_way_at_once_and_the_next_push_repairs(make_link, make_sync, tensors, shards_of):
    link = make_link(engines=2)

    def refuse_third(engine):
        if engine.buckets == 2:
            raise EngineError(f"{engine.name}: refused")

    link.engines[1].trouble["receive_bucket"] = refuse_third
    sync, start = make_sync(link, "compatible"), time.monotonic()
    with pytest.raises(ReshardError, match=r"(?s)bucket 3 of \d+: engine 1: refused; not updated: \d+ weights from"):
        sync.push(shards_of(tensors), 1)
    assert time.monotonic() - start < 15
    assert link.state == "fenced"
    assert all(engine.version_ == 0 and engine.closed and not engine.open for engine in link.engines)
    link.engines[1].trouble.clear()
    assert sync.push(shards_of(tensors), 2).engine_versions == [2, 2]
    assert link.state == "version 2"


@pytest.mark.parametrize(("way", "method"), [("direct", "join"), ("compatible", "init_group")])
def test_an_engine_that_refuses_the_group_does_not_cost_the_deadline(make_link, make_sync, tensors, shards_of, way, method):
    link = make_link()
    link.engines[0].trouble[method] = raising("no such address")
    start = time.monotonic()
    with pytest.raises(ReshardError, match="(?s)joining the engines.*no such address.*keep their previous weights"):
        make_sync(link, way).push(shards_of(tensors), 1)
    assert time.monotonic() - start < 5
    assert link.state == "version 0", "nothing was written, so the engines may go on"


@pytest.mark.parametrize(
    ("way", "method"),
    [(way, method) for way, calls in TRANSFER.items() for method in calls if method not in ("pause", "version", "resume", "close")],
)
def test_an_engine_that_hangs_costs_the_deadline_and_no_more(make_link, make_sync, tensors, shards_of, way, method):
    link, release = make_link(), threading.Event()

    def hang(engine):
        release.wait(30)
        raise EngineError(f"{engine.name}: too late")

    link.engines[0].trouble[method] = hang
    start = time.monotonic()
    with pytest.raises(ReshardError, match=r"weight sync of version 1 failed while"):
        make_sync(link, way, timeout_s=1.5).push(shards_of(tensors), 1)
    release.set()
    assert time.monotonic() - start < 25


@pytest.mark.parametrize("way", WAYS)
def test_missing_weights_stop_the_push_before_any_engine_is_touched(make_link, make_sync, tensors, shards_of, way):
    link = make_link()
    with pytest.raises(ReshardError, match="lm_head|output_layer"):
        make_sync(link, way).push(shards_of(tensors)[:-1], 1)
    assert "pause" not in link.engines[0].calls


@pytest.mark.parametrize("way", WAYS)
def test_shards_that_change_shape_later_are_checked_again(make_link, make_sync, tensors, shards_of, way):
    sync, shards = make_sync(make_link(), way), shards_of(tensors)
    sync.push(shards, 1)
    shards[-1] = replace(shards[-1], tensor=shards[-1].tensor[:3])
    with pytest.raises(ReshardError, match=r"output_layer\.weight"):
        sync.push(shards, 2)


@pytest.mark.parametrize("interrupt", ["abort", "retract", "in_place"])
def test_the_interrupt_is_a_setting(make_link, make_sync, tensors, shards_of, interrupt):
    link, modes = make_link(), []
    pause = link.engines[0].pause
    link.engines[0].pause = lambda mode: (modes.append(mode), pause(mode))[1]
    make_sync(link, interrupt=interrupt).push(shards_of(tensors), 1)
    assert modes == [interrupt]


def test_only_rank_zero_drives(make_sync):
    with pytest.raises(ReshardError, match="only rank 0"):
        WeightSync(None, Parallel(), EngineTopology(), Sync(), None)
