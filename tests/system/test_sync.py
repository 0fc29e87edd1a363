"""Weight sync into real SGLang servers on CPU: the result is that of a server that loaded the new weights from disk."""

import pytest

from moerl.errors import ReshardError
from moerl.reshard import group as sync_group
from tests.system.sync_harness import ClientLink, difference, make_sync, same, whole_shards

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OLD, NEW = 0, 1
WAYS = [("direct", "gloo"), ("direct", "shared_memory"), ("compatible", "auto")]


@pytest.fixture
def opened(fleet):
    """(family, tp) -> an engine and a link to it."""
    links = []

    def open_link(family, tp):
        (engine,) = fleet.get(family, (tp, 0))
        links.append(ClientLink([engine.server.url], tp))
        return engine, links[-1]

    yield open_link
    for link in links:
        link.close()


@pytest.mark.parametrize("family", ["deepseek", "qwen3"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("way", "transport"), WAYS)
def test_after_a_push_the_engine_equals_one_that_loaded_the_weights_from_disk(fleet, opened, family, tp, way, transport):
    engine, link = opened(family, tp)
    spec, folders = fleet.spec(family), fleet.checkpoints(family)
    sync = make_sync(spec, link, way=way, transport=transport)
    old, new = fleet.version(), fleet.version()
    try:
        first = sync.push(whole_shards(spec, folders[OLD]), old)
        assert link.each("checksums")[0] != engine.checksums
        assert difference(link.answers(old), engine.answers) > 0.1
        report = sync.push(whole_shards(spec, folders[NEW]), new)
    finally:
        sync.close()
    assert link.each("version") == report.engine_versions == [new] == [link.state]
    assert (report.way, report.attempts, report.verified) == (way, 1, True)
    assert report.digest != first.digest
    assert report.moved.buckets > 5
    assert link.each("checksums") == [engine.checksums]
    answers = link.answers(new)
    print(f"{family} tp={tp} {way} {transport}: logprobs differ by {difference(answers, engine.answers)} from those of the disk's;")
    print(f"  received {report.moved.received}, parameters {engine.parameter_nbytes}")
    assert same(answers, engine.answers)
    if way == "direct":
        assert report.moved.received == tuple((nbytes, nbytes) for nbytes in engine.parameter_nbytes)
        assert report.moved.travelled == {transport: report.moved.wire_nbytes}


@pytest.mark.parametrize(("way", "transport"), WAYS)
def test_one_group_serves_push_after_push(fleet, opened, way, transport):
    _, link = opened("deepseek", 1)
    spec, folders = fleet.spec("deepseek"), fleet.checkpoints("deepseek")
    sync, calls = make_sync(spec, link, way=way, transport=transport, delta=way == "direct"), []
    link.before |= {name: lambda: calls.append(None) for name in ("Join", "init_group")}
    try:
        reports = [sync.push(whole_shards(spec, folders[i % 2]), fleet.version()) for i in range(4)]
        again = sync.push(whole_shards(spec, folders[1]), fleet.version())
    finally:
        sync.close()
    assert len(calls) == 1
    assert reports[0].digest == reports[2].digest != reports[1].digest == reports[3].digest == again.digest
    if way == "direct":
        assert (again.moved.wire_nbytes, again.moved.changed_share) == (0, 0.0)


def test_a_corrupted_byte_of_the_compatible_way_is_caught_and_the_next_push_repairs_it(fleet, opened, monkeypatch):
    engine, link = opened("deepseek", 1)
    spec, folders = fleet.spec("deepseek"), fleet.checkpoints("deepseek")
    sync, sent = make_sync(spec, link, way="compatible"), []
    broadcast = sync_group.broadcast

    def corrupting(group, tensor, deadline, interrupt=None):
        sent.append(tensor.nbytes)
        if len(sent) == 3:
            tensor = tensor.clone()
            tensor[tensor.numel() // 2] ^= 1
        broadcast(group, tensor, deadline, interrupt)

    before = link.each("version")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sync_group, "broadcast", corrupting)
            with pytest.raises(ReshardError, match=r"(?s)1 parameters differ from what was sent.*model\.layers"):
                sync.push(whole_shards(spec, folders[NEW]), fleet.version())
        assert link.state == "fenced"
        assert link.each("version") == before
        new = fleet.version()
        assert sync.push(whole_shards(spec, folders[NEW]), new).verified
    finally:
        sync.close()
    assert link.each("checksums") == [engine.checksums]
    assert same(link.answers(new), engine.answers)
