"""Recordings: what is written is read, in any parts; what does not fit is refused, all of it at once."""

from dataclasses import fields, replace

import numpy as np
import pytest

from moerl.errors import ReportError
from moerl.report import capture
from moerl.report.capture import Meta, Rows
from tests.unit.report.router_model import World, record

SMALL = World(prompts=3, group=2, layers=(1, 2), experts=16, topk=4, groups=4, group_topk=2)


def same(a: Rows, b: Rows) -> None:
    for entry in fields(Rows):
        one, other = getattr(a, entry.name), getattr(b, entry.name)
        assert (one is None) == (other is None), entry.name
        if one is not None:
            np.testing.assert_array_equal(one.astype(other.dtype), other, err_msg=entry.name)


@pytest.mark.parametrize("experts", [16, 512])
@pytest.mark.parametrize("one_sided", [False, True])
def test_what_is_written_is_read(tmp_path, monkeypatch, experts: int, one_sided: bool) -> None:
    monkeypatch.setattr(capture, "ROW_GROUP", 64)
    meta, rows, biases = record(replace(SMALL, experts=experts))
    if one_sided:
        rows = replace(rows, trainer_ids=None, margin=None, flipped_mass=None)
    parts = [rows.take(slice(start, start + 50)) for start in range(0, len(rows), 50)]
    path = capture.write(tmp_path, meta, iter(parts), biases)
    assert capture.list_steps(tmp_path) == {7: path}
    assert capture.read_meta(path) == meta
    assert capture.count_rows(path) == len(rows)
    read = list(capture.read(path, 40))
    assert max(map(len, read)) <= 40
    same(rows, capture.concatenate(read))
    assert read[0].engine_ids.dtype == (np.uint8 if experts == 16 else np.uint16)
    for name, bias in capture.read_biases(path).items():
        np.testing.assert_array_equal(bias, biases[name].astype(np.float32))


def test_writing_again_replaces_biases_too(tmp_path) -> None:
    meta, rows, biases = record(SMALL)
    capture.write(tmp_path, meta, rows, biases)
    path = capture.write(tmp_path, meta, rows.take(slice(0, 5)))
    assert capture.count_rows(path) == 5
    assert capture.read_biases(path) == {}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [path.name]


def test_all_that_does_not_fit_is_said_at_once_and_nothing_is_left(tmp_path) -> None:
    meta, rows, _ = record(SMALL)
    wrong = replace(rows, token=rows.token[:3], margin=rows.margin[:, :1], engine_ids=np.full(rows.engine_ids.shape, 16, np.uint8))
    with pytest.raises(ReportError) as error:
        capture.write(tmp_path, meta, wrong)
    for part in ("token: expected shape", "margin: expected shape", "engine_ids: expected ids 0..15, got 16..16"):
        assert part in str(error.value)
    with pytest.raises(ReportError, match="engine_bias: expected shape"):
        capture.write(tmp_path, meta, rows, {"engine_bias": np.zeros((1, 16))})
    with pytest.raises(ReportError, match="trainer_ids is not in all of them"):
        capture.write(tmp_path, meta, iter([rows, replace(rows, trainer_ids=None)]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": (3, 2)}, "ascending"),
        ({"topk": 17}, "topk <= experts"),
        ({"groups": 3}, "divide"),
        ({"engine_ep": 0}, "ranks"),
        ({"schema": 2}, "schema 2"),
    ],
)
def test_meta_is_checked(tmp_path, change: dict, message: str) -> None:
    meta, rows, _ = record(SMALL)
    with pytest.raises(ReportError, match=message):
        capture.write(tmp_path, replace(meta, **change), rows)


def test_other_and_damaged_files_are_told_apart(tmp_path) -> None:
    meta, rows, _ = record(SMALL)
    path = capture.write(tmp_path, meta, rows)
    with pytest.raises(ReportError, match="does not exist"):
        capture.read_meta(tmp_path / "step-000001.parquet")
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ReportError, match="is not a Parquet file"):
        capture.read_meta(path)
    middle = len(raw) // 3
    path.write_bytes(raw[:middle] + bytes(200) + raw[middle + 200 :])
    with pytest.raises(ReportError, match="damaged"):
        list(capture.read(path))
    assert capture.list_steps(tmp_path / "nowhere") == {}
    assert Meta(step=0, layers=(0,), experts=257, topk=2).id_dtype == np.uint16
