"""`moerl bench report`: seconds and memory to report on a recording of the size of DeepSeek-V3, one million rows x 58 layers x top-8.

    synthetic rows --write--> step-000000.parquet (0.4 GB in a temporary folder) --report--> one object

Routes are random; a tenth of the decisions differ, and as many are the same set in another order. Reported beside the seconds: the ratio
to only reading the file in the same process, since machines differ. The peak of memory is that of writing and reporting together.
"""

import json
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moerl.report import capture
from moerl.report.capture import Meta, Rows
from moerl.report.summary import report_run

ROWS = 1_000_000
SAMPLE = 4000
META = Meta(step=0, layers=tuple(range(3, 61)), experts=256, topk=8, trainer_version=0, ep=64, engine_ep=32)
DIFFERING = 0.1
_PART = 50_000


def main(*, as_json: bool = False) -> int:
    """Write, read, report, print; returns the exit status."""
    found = measure(ROWS)
    print(
        f"{found['rows']:,} rows x {len(META.layers)} layers x top-{META.topk}: report {found['report_s']:.1f} s, "
        f"only reading {found['read_s']:.1f} s, ratio {found['ratio']:.1f}; file {found['file_mb']:.0f} MB, "
        f"peak memory {found['peak_mb']:.0f} MB"
    )
    if as_json:
        print(json.dumps(found))
    return 0


def measure(rows: int) -> dict[str, float]:
    """Seconds to read and to report, the file's size, and the peak of this process's memory (of its whole life)."""
    with tempfile.TemporaryDirectory() as run:
        path = capture.write(Path(run) / capture.FOLDER, META, synthetic(rows))
        start = time.perf_counter()
        for _ in capture.read(path):
            pass
        read = time.perf_counter() - start
        start = time.perf_counter()
        report_run(run)
        took = time.perf_counter() - start
        size = path.stat().st_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"rows": rows, "read_s": read, "report_s": took, "ratio": took / read, "file_mb": size / 1e6, "peak_mb": peak}


def synthetic(rows: int, seed: int = 0) -> Iterator[Rows]:
    """Rows in parts: samples of `SAMPLE` positions, the second half generated."""
    rng = np.random.default_rng(seed)
    layers, k = len(META.layers), META.topk
    for start in range(0, rows, _PART):
        number = np.arange(start, min(start + _PART, rows))
        count, position = len(number), number % SAMPLE
        response = position >= SAMPLE // 2
        first = rng.integers(0, META.experts, (count, layers, 1))
        ids = ((first + 31 * np.arange(k)) % META.experts).astype(np.uint8)
        other = ids.copy()
        differs = rng.random((count, layers)) < DIFFERING
        other[differs, k - 1] += 1
        turned = rng.random((count, layers)) < DIFFERING
        other[turned] = other[turned][:, ::-1]  # the same set in another order
        logprob = -rng.exponential(1.0, count)
        noise = 0.01 * rng.standard_normal((3, count))
        given = {
            name: np.where(response, logprob + gap, np.nan)
            for name, gap in zip(("engine", "natural", "replay"), (0 * noise[0], noise[1] + noise[2], noise[2]), strict=True)
        }
        token = rng.zipf(1.2, count) % 100_000
        yield Rows(
            prompt_id=number // SAMPLE // 8,
            sample=number // SAMPLE % 8,
            position=position,
            token=token,
            next_token=np.roll(token, -1),
            response=response,
            version=np.zeros(count),
            reward=np.zeros(count),
            engine_logprob=given["engine"],
            natural_logprob=given["natural"],
            r2_logprob=given["natural"],
            replay_logprob=given["replay"],
            engine_ids=ids,
            trainer_ids=other,
            margin=np.abs(0.02 * rng.standard_normal((count, layers), np.float32)),
            flipped_mass=0.1 * differs,
        )
