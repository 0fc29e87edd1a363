"""Transports between real processes: what arrives, in which order, in how much memory, and what happens when somebody stops."""

import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moerl.config.schema import Sync
from moerl.errors import ReshardError, WaitTimeout
from moerl.reshard.transport import KINDS, open_transport, problem, shelf
from moerl.reshard.transport.rooms import ROOMS, Turns
from moerl.reshard.transport.shelf import Shelf, attach
from tests.unit.reshard import transport_ranks as ranks
from tests.unit.reshard.transport_ranks import Bucket, Setting, run, values

SIZE = 4096
few_processes = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)

# (kind, machine of each of four ranks): everybody elsewhere, everybody here, and both.
PLACES = {
    "gloo": ("gloo", (0, 1, 2, 3)),
    "gloo-on-one-machine": ("gloo", (0, 0, 0, 0)),
    "shared": ("shared_memory", (0, 0, 0, 0)),
    "mixed": ("shared_memory", (0, 1, 0, 1)),
    "like-nccl": ("like-nccl", (0, 1, 2, 3)),
}
KINDS_OF_TWO = {"gloo": Setting("gloo", (0, 1)), "shared": Setting("shared_memory", (0, 0))}
LIKE_NCCL = Setting("like-nccl", (0, 1))


@pytest.fixture(params=PLACES)
def four(request) -> Setting:
    kind, nodes = PLACES[request.param]
    return Setting(kind, nodes)


@pytest.fixture(params=KINDS_OF_TWO)
def two(request) -> Setting:
    return KINDS_OF_TWO[request.param]


def check(outcomes: list[ranks.Outcome], buckets: list[Bucket]) -> list[dict]:
    """All buckets arrived whole and in order."""
    found = values(outcomes)
    for rank, result in enumerate(found):
        assert result["found"] == [(number, True) for number, bucket in enumerate(buckets) if bucket.receiver == rank]
    return found


class TestContent:
    @few_processes
    @given(sizes=st.lists(st.integers(0, SIZE) | st.just(SIZE), min_size=1, max_size=40))
    def test_buckets_of_all_sizes_arrive_exactly(self, two: Setting, sizes: list[int]) -> None:
        buckets = [Bucket(0, 1, nbytes) for nbytes in sizes]
        sender, receiver = check(run(two, ranks.exchange, buckets), buckets)
        assert (sender["sent"], receiver["sent"]) == ({two.kind: sum(sizes)}, {})

    @pytest.mark.parametrize("fan", ["in", "out"])
    def test_three_to_one_and_one_to_three(self, four: Setting, fan: str) -> None:
        others = [1 + turn % 3 for turn in range(30)]
        buckets = [Bucket(*((other, 0) if fan == "in" else (0, other)), SIZE - 7 * turn) for turn, other in enumerate(others)]
        check(run(four, ranks.exchange, buckets), buckets)

    @few_processes
    @given(data=st.data())
    def test_any_order_of_steps_ends(self, four: Setting, data) -> None:
        """Like a plan: in each step, a rank takes part in at most one transfer; both sides follow the order of the steps."""
        pause = st.sampled_from([0, 0, 0, 0.003])
        buckets = []
        for _ in range(data.draw(st.integers(5, 40))):
            receivers = data.draw(st.permutations([2, 3]))
            senders = data.draw(st.lists(st.sampled_from([0, 1]), unique=True, min_size=1))
            for sender, receiver in zip(senders, receivers, strict=False):
                buckets.append(Bucket(sender, receiver, data.draw(st.integers(0, SIZE)), data.draw(pause), data.draw(pause)))
        check(run(four, ranks.exchange, buckets), buckets)

    def test_a_slow_receiver_loses_nothing(self, two: Setting) -> None:
        buckets = [Bucket(0, 1, SIZE, unpack_s=0.03) for _ in range(12)]
        check(run(two, ranks.exchange, buckets), buckets)

    def test_a_sender_may_close_when_it_has_flushed(self, two: Setting) -> None:
        buckets = [Bucket(0, 1, 1 << 20, unpack_s=0.02) for _ in range(5)]
        check(run(Setting(two.kind, two.nodes, 1 << 20), ranks.exchange, buckets, True), buckets)


class TestMemory:
    def test_four_buckets_on_each_side(self, two: Setting) -> None:
        buckets = [Bucket(0, 1, SIZE)] * 10
        for result in check(run(two, ranks.exchange, buckets), buckets):
            assert len(result["places"]) == ROOMS == 4

    def test_they_are_twice_the_memory_that_is_set(self) -> None:
        assert ROOMS * Sync(bucket_mib=3.0).bucket_bytes == 2 * 3 * 2**20

    def test_nothing_piles_up(self, two: Setting) -> None:
        size, slack = 4 << 20, 4 << 20
        own = 0 if two.kind == "shared_memory" else ROOMS * size
        for used in values(run(Setting(two.kind, two.nodes, size), ranks.weigh, 12)):
            assert own / 2 <= used < own + slack

    def test_the_memory_that_is_shared_has_no_name(self) -> None:
        buckets = [Bucket(0, 1, SIZE)] * 4
        for result in check(run(KINDS_OF_TWO["shared"], ranks.exchange, buckets), buckets):
            assert "/memfd:moerl-buckets (deleted)" in result["maps"]
            assert "/dev/shm/" not in result["maps"]

    def test_nothing_is_left_behind_after_a_kill(self) -> None:
        before = set(os.listdir("/dev/shm"))
        outcomes = run(KINDS_OF_TWO["shared"], ranks.leave, 0, "kill")
        assert outcomes[0].exitcode == -9
        mine = {name for name in set(os.listdir("/dev/shm")) - before if "moerl" in name}
        assert not mine


class TestFallbacks:
    def test_a_receiver_that_cannot_map_gets_its_buckets_over_gloo(self) -> None:
        buckets = [Bucket(0, 2 + turn % 2, SIZE - turn, unpack_s=0.002) for turn in range(16)]
        setting = Setting("shared_memory", (0, 0, 0, 0))
        sender, _, blind, sighted = check(run(setting, ranks.exchange_without, buckets, 2), buckets)
        assert list(sender["fallbacks"]) == [2]
        assert sender["fallbacks"][2] == "rank 2 cannot map the memory of rank 0: Stale file handle"
        assert list(blind["fallbacks"]) == [0]
        assert "cannot map the memory of rank 0" in blind["fallbacks"][0]
        assert sighted["fallbacks"] == {}
        assert sender["sent"] == {
            "gloo": sum(bucket.nbytes for bucket in buckets if bucket.receiver == 2),
            "shared_memory": sum(bucket.nbytes for bucket in buckets if bucket.receiver == 3),
        }
        assert "memfd" not in blind["maps"].replace(_own_shelf(blind["maps"]), "")

    def test_several_buckets_in_a_row_to_a_receiver_that_cannot_map(self) -> None:
        buckets = [Bucket(0, 2 if turn % 8 < 5 else 3, SIZE - turn, unpack_s=0.002) for turn in range(24)]
        found = check(run(Setting("shared_memory", (0, 0, 0, 0)), ranks.exchange_without, buckets, 2), buckets)
        assert found[0]["sent"]["gloo"] == sum(bucket.nbytes for bucket in buckets if bucket.receiver == 2)

    def test_a_sender_without_shared_memory_says_so(self) -> None:
        buckets = [Bucket(0, 1, SIZE - turn) for turn in range(8)]
        setting = Setting("shared_memory", (0, 0))
        sender, receiver = check(run(setting, ranks.exchange_with_little_memory, buckets, 0), buckets)
        assert list(sender["fallbacks"]) == [0]
        assert "this rank cannot allocate" in sender["fallbacks"][0]
        assert receiver["fallbacks"] == {}

    def test_a_rank_of_another_kind(self) -> None:
        buckets = [Bucket(0, 1, SIZE - turn) for turn in range(8)]
        _, receiver = check(run(Setting("shared_memory", (0, 0)), ranks.exchange_with_gloo, buckets, 1), buckets)
        assert receiver["fallbacks"] == {}  # who may share memory, does
        check(run(Setting("shared_memory", (0, 0)), ranks.exchange_with_gloo, buckets, 0), buckets)


class TestWaits:
    @pytest.mark.parametrize("side", ["room", "flush", "take"])
    def test_a_deadline_names_the_peer(self, two: Setting, side: str) -> None:
        setting = Setting(two.kind, two.nodes, timeout_s=0.4)
        waiting = 1 if side == "take" else 0
        outcome = run(setting, ranks.wait_for, waiting, 1 - waiting, side)[waiting]
        assert isinstance(outcome.error, WaitTimeout)
        assert f"rank {1 - waiting} to" in str(outcome.error)
        assert 0.4 <= outcome.seconds < 3

    @pytest.mark.parametrize("how", ["close", "kill"])
    @pytest.mark.parametrize("leaver", [0, 1], ids=["sender", "receiver"])
    @pytest.mark.parametrize("size", [SIZE, 32 << 20], ids=["4K", "32M"])
    def test_the_other_side_fails_at_once(self, two: Setting, leaver: int, how: str, size: int) -> None:
        outcomes = run(Setting(two.kind, two.nodes, size), ranks.leave, leaver, how)
        gone, left = outcomes[leaver], outcomes[1 - leaver]
        assert isinstance(left.error, ReshardError)
        when, message = str(left.error).split("|", 1)
        assert f"the connection to rank {leaver} is broken" in message
        assert left.seconds < 5
        if how == "close":
            assert float(when) - gone.value < 1
        else:
            assert gone.exitcode == -9

    def test_close_ends_a_wait_of_another_thread(self, two: Setting) -> None:
        outcome = run(two, ranks.interrupt)[1]
        assert isinstance(outcome.error, ReshardError)
        assert outcome.seconds < 2


class TestLikeNccl:
    """What a fake of NCCL can show of its transport, besides the tests of four ranks above."""

    @few_processes
    @given(sizes=st.lists(st.integers(0, SIZE), min_size=1, max_size=40))
    def test_buckets_of_all_sizes_arrive_exactly(self, sizes: list[int]) -> None:
        buckets = [Bucket(0, 1, nbytes) for nbytes in sizes]
        for result in check(run(LIKE_NCCL, ranks.exchange, buckets), buckets):
            assert len(result["places"]) <= ROOMS

    def test_a_slow_receiver_loses_nothing(self) -> None:
        buckets = [Bucket(0, 1, SIZE, unpack_s=0.03) for _ in range(12)]
        check(run(LIKE_NCCL, ranks.exchange, buckets), buckets)

    @pytest.mark.parametrize("side", ["room", "flush", "take"])
    def test_a_deadline_names_the_peer(self, side: str) -> None:
        waiting = 1 if side == "take" else 0
        outcome = run(Setting("like-nccl", (0, 1), timeout_s=0.4), ranks.wait_for, waiting, 1 - waiting, side)[waiting]
        assert isinstance(outcome.error, WaitTimeout)
        assert f"rank {1 - waiting} to" in str(outcome.error)
        assert 0.4 <= outcome.seconds < 3

    @pytest.mark.parametrize("leaver", [0, 1], ids=["sender", "receiver"])
    def test_who_closes_tells_the_others(self, leaver: int) -> None:
        outcomes = run(LIKE_NCCL, ranks.leave, leaver, "close")
        left = outcomes[1 - leaver]
        assert isinstance(left.error, ReshardError)
        when, message = str(left.error).split("|", 1)
        assert f"rank {leaver}" in message
        assert float(when) - outcomes[leaver].value < 1


class TestOpening:
    @pytest.mark.parametrize(
        ("kind", "nodes", "name"),
        [("auto", (0, 1), "gloo"), ("auto", (0, 0), "shared_memory"), ("gloo", (0, 0), "gloo"), ("shared_memory", (0, 1), "gloo")],
    )
    def test_what_is_opened(self, kind: str, nodes: tuple[int, int], name: str) -> None:
        assert values(run(Setting(kind, nodes), ranks.only_open)) == [name, name]

    def test_sizes_must_agree(self, two: Setting) -> None:
        outcomes = run(two, ranks.open_of_size)
        assert outcomes[0].error is None
        assert "buckets of 4097 bytes, but others of the group test have 4096" in str(outcomes[1].error)

    @pytest.mark.parametrize(("device", "usable"), [("cpu", {"gloo", "shared_memory"}), ("cuda", {"nccl"})])
    def test_problems(self, device: str, usable: set[str]) -> None:
        group = SimpleNamespace(device=torch.device(device))
        assert {kind for kind in KINDS if not problem(kind, group)} == usable
        for kind in {*KINDS, "pigeon"} - usable:
            with pytest.raises(ReshardError, match=f"'{kind}' cannot be used: .*(use|there are) "):
                open_transport(kind, group, 0, SIZE, (0, 0))


class TestShelf:
    def test_it_is_attached_by_its_offer(self) -> None:
        owned = Shelf(8192)
        owned.memory.copy_(ranks.content(1, 8192))
        attached = attach(owned.offer, 8192)
        assert torch.equal(attached, ranks.content(1, 8192))
        owned.memory[5] ^= 1
        assert attached[5] == owned.memory[5]
        owned.close()
        with pytest.raises(OSError, match="No such file"):
            attach(owned.offer, 8192)
        assert attached[5] == owned.memory[5]

    @pytest.mark.parametrize("word", range(5))
    def test_another_file_is_not_taken_for_it(self, word: int) -> None:
        owned = Shelf(8192)
        offer = list(owned.offer)
        offer[word] += 1 << 20 if word < 2 else 1
        with pytest.raises(OSError, match=r"Stale file handle|another file|No such file"):
            attach(offer, 8192)
        with pytest.raises(OSError, match="another file"):
            attach(owned.offer, 4096)
        owned.close()

    def test_memory_that_is_not_to_be_had(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = set(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(shelf, "os", ranks.NoMemory())
        with pytest.raises(OSError, match="No space left"):
            Shelf(8192)
        assert set(os.listdir("/proc/self/fd")) == before


class TestTurns:
    def turns(self) -> Turns:
        return Turns(rank=1, world=3, bucket_bytes=SIZE)

    @pytest.mark.parametrize("peer", [1, -1, 3])
    def test_peers(self, peer: int) -> None:
        for call in (self.turns().open, self.turns().expect):
            with pytest.raises(ReshardError, match=f"cannot exchange buckets with rank {peer}"):
                call(peer)

    def test_sending_out_of_turn(self) -> None:
        turns, header = self.turns(), (0, 0, 0, 0)
        with pytest.raises(ReshardError, match="opened for nobody"):
            turns.send(0, header, 1)
        turns.open(2)
        with pytest.raises(ReshardError, match="opened for rank 2"):
            turns.send(0, header, 1)
        with pytest.raises(ReshardError, match="4 words, not 1"):
            turns.send(2, (0,), 1)
        for nbytes in (-1, SIZE + 1):
            with pytest.raises(ReshardError, match=f"0 to {SIZE} bytes, not {nbytes}"):
                turns.send(2, header, nbytes)
        assert turns.send(2, header, SIZE) == 0
        with pytest.raises(ReshardError, match="opened for nobody"):
            turns.send(2, header, 1)
        assert turns.open(0) == turns.open(2) == 1

    def test_receiving_out_of_turn(self) -> None:
        turns = self.turns()
        with pytest.raises(ReshardError, match="no bucket is expected"):
            turns.take()
        with pytest.raises(ReshardError, match="no bucket is taken"):
            turns.done()
        assert [turns.expect(peer) for peer in (0, 2, 2, 0)] == [0, 1, 2, 3]
        with pytest.raises(ReshardError, match="4 buckets are expected already"):
            turns.expect(0)
        assert turns.take() == 0
        turns.hold()
        with pytest.raises(ReshardError, match="not done"):
            turns.take()
        with pytest.raises(ReshardError, match="4 buckets are expected already"):
            turns.expect(0)
        assert turns.done() == 0
        assert turns.expect(0) == 0
        assert turns.take() == 1


def _own_shelf(maps: str) -> str:
    return next(line for line in maps.splitlines() if "memfd" in line)
