"""A whole push over a real gloo group to engines that live in threads, and what happens when one of them misbehaves."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from moerl.errors import EngineError, ReshardError
from moerl.reshard.sync import WeightSync

COMMANDS = ["pause", "begin_update", "receive_bucket", "end_update", "flush_cache", "checksums", "set_version", "version", "resume"]


@pytest.fixture
def make_sync(spec):
    made = []

    def make(link, *, mib=0.02, verify=True, timeout_s=20.0, dtype=torch.bfloat16):
        made.append(WeightSync(spec, dtype=dtype, bucket_mib=mib, verify=verify, timeout_s=timeout_s, link=link))
        return made[-1]

    yield make
    for sync in made:
        sync.close()


def raising(message):
    def trouble(engine):
        raise EngineError(f"{engine.name}: {message}")

    return trouble


@pytest.mark.parametrize(("engines", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_a_push_gives_every_engine_the_weights_and_the_version(make_link, make_sync, tensors, shards_of, engines, tp):
    link = make_link(engines, tp)
    report = make_sync(link).push(shards_of(tensors), 7)
    for engine in link.engines:
        assert set(engine.tensors) == set(tensors)
        assert all(torch.equal(tensor, tensors[name].to(tensor.dtype)) for name, tensor in engine.tensors.items())
        assert list(dict.fromkeys(engine.calls)) == ["init_group", *COMMANDS]
        assert engine.buckets == report.buckets > 3
    assert (report.version, report.engine_versions, report.checksums_ok) == (7, [7] * engines, True)
    assert report.nbytes == sum(tensor.nbytes for tensor in link.engines[0].tensors.values())
    assert len(report.checksum) == 64
    assert set(report.seconds) == {"join", "gather", "transfer", "commit", "verify"}
    assert link.state == "version 7"


def test_one_group_serves_many_pushes_and_follows_the_live_parameters(make_link, make_sync, tensors, shards_of):
    link = make_link()
    sync, shards = make_sync(link), shards_of({name: tensor.clone() for name, tensor in tensors.items()})
    first = sync.push(shards, 1)
    again = sync.push(shards, 2)
    shards[0].tensor.add_(1.0)
    changed = sync.push(shards, 3)
    assert first.checksum == again.checksum != changed.checksum
    assert link.engines[0].calls.count("init_group") == 1


def test_a_replaced_engine_gets_a_new_group(make_link, make_sync, tensors, shards_of):
    link = make_link()
    sync = make_sync(link)
    sync.push(shards_of(tensors), 1)
    link.epoch += 1
    link.engines[0].groups.clear()
    assert sync.push(shards_of(tensors), 2).engine_versions == [2]
    assert link.engines[0].calls.count("init_group") == 2


def test_without_verification_no_checksum_is_asked_for(make_link, make_sync, tensors, shards_of):
    link = make_link()
    report = make_sync(link, verify=False).push(shards_of(tensors), 1)
    assert report.checksums_ok is None
    assert report.checksum == ""
    assert "checksums" not in link.engines[0].calls


def test_a_byte_that_changed_on_the_way_is_found(make_link, make_sync, tensors, shards_of):
    link = make_link(engines=2)

    def corrupt(engine):
        engine.tensors["model.layers.1.mlp.experts.3.up_proj.weight"].view(torch.uint8)[0, 0] ^= 1

    link.engines[1].trouble["flush_cache"] = corrupt
    with pytest.raises(ReshardError, match=r"(?s)1 parameters differ.*engine 1: rank 0: model\.layers\.1\.mlp\.experts\.w13_weight"):
        make_sync(link).push(shards_of(tensors), 1)
    assert link.state == "fenced"
    assert link.engines[0].version_ == 0


def test_an_engine_that_reports_another_version_is_found(make_link, make_sync, tensors, shards_of):
    link = make_link()
    link.engines[0].trouble["version"] = lambda engine: 5
    with pytest.raises(ReshardError, match="should report version 6, but engine 0 reports 5"):
        make_sync(link).push(shards_of(tensors), 6)
    assert link.state == "fenced"


def test_a_refused_bucket_ends_the_push_at_once_and_the_next_one_repairs(make_link, make_sync, tensors, shards_of):
    link = make_link(engines=2)

    def refuse_third(engine):
        if engine.buckets == 2:
            raise EngineError(f"{engine.name}: refused")

    link.engines[1].trouble["receive_bucket"] = refuse_third
    sync, start = make_sync(link), time.monotonic()
    with pytest.raises(ReshardError, match=r"(?s)sending bucket 3 of \d+: engine 1: refused.*2 of \d+ buckets were loaded; not updated"):
        sync.push(shards_of(tensors), 1)
    assert time.monotonic() - start < 15
    assert link.state == "fenced"
    assert all(engine.version_ == 0 and not engine.open for engine in link.engines)
    link.engines[1].trouble.clear()
    assert sync.push(shards_of(tensors), 2).engine_versions == [2, 2]
    assert link.state == "version 2"


def test_an_engine_that_refuses_the_group_does_not_cost_the_deadline(make_link, make_sync, tensors, shards_of):
    link = make_link()
    link.engines[0].trouble["init_group"] = raising("no such address")
    start = time.monotonic()
    with pytest.raises(ReshardError, match="(?s)joining the group.*no such address.*keep their previous weights"):
        make_sync(link).push(shards_of(tensors), 1)
    assert time.monotonic() - start < 5
    assert link.state == "version 0", "nothing was written, so the engines may go on"


@pytest.mark.parametrize("method", ["init_group", "begin_update", "receive_bucket", "checksums"])
def test_an_engine_that_hangs_costs_the_deadline_and_no_more(make_link, make_sync, tensors, shards_of, method):
    link, release = make_link(), threading.Event()
    link.engines[0].trouble[method] = lambda engine: release.wait(30)
    start = time.monotonic()
    with pytest.raises(ReshardError, match=r"weight sync of version 1 failed while .* deadline of 1.5 s"):
        make_sync(link, timeout_s=1.5).push(shards_of(tensors), 1)
    release.set()
    assert time.monotonic() - start < 20


def test_missing_weights_stop_the_push_before_any_engine_is_touched(make_link, make_sync, tensors, shards_of):
    link = make_link()
    with pytest.raises(ReshardError, match="lm_head|output_layer"):
        make_sync(link).push(shards_of(tensors)[:-1], 1)
    assert link.engines[0].calls == []


def test_shards_that_change_shape_later_are_checked_again(make_link, make_sync, tensors, shards_of):
    sync, shards = make_sync(make_link()), shards_of(tensors)
    sync.push(shards, 1)
    shards[-1] = replace(shards[-1], tensor=shards[-1].tensor[:3])
    with pytest.raises(ReshardError, match=r"output_layer\.weight"):
        sync.push(shards, 2)


def test_only_rank_zero_drives(make_sync):
    with pytest.raises(ReshardError, match="only rank 0"):
        make_sync(None)
