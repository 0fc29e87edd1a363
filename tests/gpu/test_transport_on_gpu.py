"""Buckets over NCCL between two processes with a GPU each: the cases of the other transports, and the checksum of buckets on a GPU."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moerl.errors import ReshardError, WaitTimeout
from moerl.reshard.checksum import checksum, position_sum
from moerl.reshard.transport.rooms import ROOMS
from tests.unit.reshard import transport_ranks as ranks
from tests.unit.reshard.transport_ranks import Bucket, Setting, run, values

SIZE = 1 << 20
TWO = Setting("auto", (0, 0), SIZE, backend="nccl", timeout_s=60)

pytestmark = pytest.mark.gpu
one_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"NCCL wants a GPU for each rank: two are needed, {torch.cuda.device_count()} are here"
)


def check(outcomes: list[ranks.Outcome], buckets: list[Bucket]) -> list[dict]:
    """All buckets arrived whole and in order."""
    found = values(outcomes)
    assert found[1]["found"] == [(number, True) for number in range(len(buckets))]
    return found


@two_gpus
class TestTwoRanks:
    @settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(sizes=st.lists(st.integers(0, SIZE) | st.just(SIZE), min_size=1, max_size=40))
    def test_buckets_of_all_sizes_arrive_exactly(self, sizes: list[int]) -> None:
        buckets = [Bucket(0, 1, nbytes) for nbytes in sizes]
        for result in check(run(TWO, ranks.exchange, buckets), buckets):
            assert len(result["places"]) <= ROOMS

    def test_a_slow_receiver_loses_nothing(self) -> None:
        buckets = [Bucket(0, 1, SIZE, unpack_s=0.03) for _ in range(12)]
        check(run(TWO, ranks.exchange, buckets), buckets)

    def test_rooms_are_not_written_while_they_are_used(self) -> None:
        """Unpacking that is still queued on the device must keep the next bucket out of its room."""
        assert all(values(run(TWO, ranks.unpack_late, 20))[1])

    @pytest.mark.parametrize("side", ["room", "flush", "take"])
    def test_a_deadline_names_the_peer(self, side: str) -> None:
        waiting = 1 if side == "take" else 0
        setting = Setting("auto", (0, 0), SIZE, backend="nccl", timeout_s=2)
        outcome = run(setting, ranks.wait_for, waiting, 1 - waiting, side)[waiting]
        assert isinstance(outcome.error, WaitTimeout)
        assert f"rank {1 - waiting} to" in str(outcome.error)

    @pytest.mark.parametrize("leaver", [0, 1], ids=["sender", "receiver"])
    def test_who_closes_tells_the_other(self, leaver: int) -> None:
        outcomes = run(TWO, ranks.leave, leaver, "close")
        left = outcomes[1 - leaver]
        assert isinstance(left.error, ReshardError)
        when, message = str(left.error).split("|", 1)
        assert f"rank {leaver}" in message
        assert float(when) - outcomes[leaver].value < 5


@one_gpu
@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 4097, (8 << 20) + 5])
def test_a_gpu_sums_like_a_cpu(nbytes: int) -> None:
    bucket = ranks.content(7, nbytes)
    assert checksum(bucket.cuda()) == position_sum(bucket)


@one_gpu
def test_a_gpu_sees_every_flipped_bit() -> None:
    bucket = ranks.content(7, 64).cuda()
    found = {checksum(bucket)}
    for bit in range(8 * 64):
        bucket[bit // 8] ^= 1 << bit % 8
        found.add(checksum(bucket))
        bucket[bit // 8] ^= 1 << bit % 8
    assert len(found) == 1 + 8 * 64
