"""The weight-sync benchmark from end to end on a very small model: every way really moves the weights, and only seconds are small."""

import pytest

from moerl.bench import sync as bench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = bench.Settings(
    hidden=64,
    layers=3,
    experts=16,
    expert_width=32,
    bucket_mib=0.1,
    rounds=2,
    sequences=2,
    tokens_per_sequence=16,
    warmup_steps=3,
    lrs=(1e-7, 1e-6, 1e-4),
    steps_per_lr=1,
)


def test_all_ways_are_measured_side_by_side() -> None:
    measured = bench.measure(SMALL)
    assert {name: len(way.seconds) for name, way in measured.ways.items()} == dict.fromkeys(
        ("direct", "compatible", "refit", "transport", "shared_memory"), 2
    )
    assert {name: len(way.seconds) for name, way in measured.paced.items()} == dict.fromkeys(
        ("direct", "compatible", "refit", "transport"), 2
    )
    assert all(seconds > 0 for way in measured.ways.values() for seconds in way.seconds)
    nbytes = {name: way.wire_nbytes for name, way in measured.ways.items()}
    assert {nbytes["direct"], nbytes["shared_memory"], nbytes["transport"], nbytes["refit"]} == {measured.minimum_nbytes}
    assert nbytes["compatible"] > 1.3 * measured.minimum_nbytes
    assert bench.figures(measured)["bytes_ratio"] == 1
    assert measured.buckets >= 6
    shares = [share for change in measured.changes for share in change.changed_share]
    assert 0 < shares[0] < shares[1] < shares[2] < 1
    assert all(0 < share < 1 for change in measured.changes for share in change.wire_share)
