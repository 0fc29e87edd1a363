"""The benchmark's recording is one that the report accepts."""

import numpy as np

from moerl.bench.report import META, SAMPLE, measure, synthetic
from moerl.routing.compare import differing, repeated


def test_a_small_recording_is_measured() -> None:
    found = measure(300)
    assert found["rows"] == 300
    assert min(found["report_s"], found["read_s"], found["file_mb"], found["peak_mb"]) > 0


def test_routes_are_sets_of_which_a_tenth_differ() -> None:
    (rows,) = synthetic(2000)
    assert META.problems() == []
    assert not repeated(rows.engine_ids).any()
    assert not repeated(rows.trainer_ids).any()
    assert 0.09 < differing(rows.engine_ids, rows.trainer_ids).mean() < 0.11
    assert np.array_equal(rows.response, rows.position >= SAMPLE // 2)
