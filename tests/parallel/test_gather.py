"""Gathering and pushing from two ranks: made-up shards of every layout come together bitwise; failures reach both ranks.

All cases share one torchrun, because starting it costs more than all of them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("gather_worker.py")
ROOT = WORKER.parents[2]
LAYOUTS = ["tp2_ep2", "tp2_etp2", "pp2", "dp2", "tp2_compressed_whole"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Results of both ranks, by case."""
    folder = tmp_path_factory.mktemp("gather")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(WORKER)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("family", ["deepseek", "qwen3"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", ["float32 0.01", "bfloat16 0.01", "bfloat16 100.0"])
def test_shards_come_together_bitwise_on_rank_zero(ranks, family, layout, size):
    first, second = (rank[f"{family} {layout} {size}"] for rank in ranks)
    assert first == {"missing": 0, "wrong": []}
    assert second == {"tensors": 0}


def test_a_weight_that_one_rank_lacks_is_reported_by_both(ranks):
    assert [rank["missing"] for rank in ranks] == [{"error": True}] * 2


def test_both_ranks_get_the_report(ranks):
    assert ranks[0]["push"] == ranks[1]["push"]
    assert ranks[0]["push"]["versions"] == [4]
    assert ranks[0]["push"]["buckets"] > 3


def test_a_failed_push_raises_the_same_error_on_both_ranks(ranks):
    errors = [rank["push fails"]["error"] for rank in ranks]
    assert errors[0] == errors[1]
    assert "the engine refused a bucket" in errors[0]
    assert "bucket 3 of " in errors[0]
