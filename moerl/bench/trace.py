"""`moerl bench trace`: bytes and time per token of the routing codecs, for the published shapes of four models.

    routes --to_bytes--> record --from_bytes--> routes            (checksum and all checks included)
    routes --int32, base64--> text --base64, numpy--> routes      (SGLang's wire form; nothing is checked)

Both ways run in turns within each round, on the same random routes, and medians over the rounds are compared. Bytes are those of
a row of routes; what a record adds once (header and checksum) is stated apart. The bounds are log2 of the number of sets: of all,
and of those that a group-limited router can choose.
"""

import base64
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moerl.routing import native
from moerl.routing.codec import Codec, row_bytes
from moerl.routing.trace import Layout, Trace, VersionRun, hash_tokens

ROWS = 2048
ROUNDS = 15


@dataclass(frozen=True)
class Shape:
    """Routing of a published model: decoder layers, of which the first `dense` are dense; group limit if `groups`."""

    layers: int
    dense: int
    experts: int
    topk: int
    groups: int = 0
    group_topk: int = 0

    @property
    def layout(self) -> Layout:
        return Layout(tuple(range(self.dense, self.layers)), self.experts, self.topk)


SHAPES = {
    "Qwen3-30B-A3B": Shape(48, 0, 128, 8),
    "DeepSeek-V3": Shape(61, 3, 256, 8, 8, 4),
    "Kimi-K2": Shape(61, 1, 384, 8),
    "Qwen3-Next": Shape(48, 0, 512, 10),
}


def main(*, as_json: bool = False) -> int:
    """Measure all shapes and print the result."""
    found = {name: measure(shape) for name, shape in SHAPES.items()}
    _print_table(found)
    if as_json:
        print(json.dumps({"models": found, "compiled": not native.problem()}))
    return 0


def measure(shape: Shape, *, rows: int = ROWS, rounds: int = ROUNDS) -> dict[str, float]:
    """The figures of one model.

    Returns:
        *_bytes: per token. bound_bytes: of any set; reachable_bound_bytes: of sets within the group limit.
        record_bytes: what one narrow record adds to its rows.
        *_speedup: time of base64 and numpy over time of the codec, of encoding, of decoding, and of both (no further word).
        narrow_vs_memcpy: time of encoding and decoding over two plain copies of the same ids.
    """
    layout = shape.layout
    ids = random_routes(shape, rows, np.random.default_rng(0))
    trace = Trace(ids, layout, hash_tokens(np.arange(rows)), (VersionRun(0, 0, rows),))
    wire = np.zeros((rows, shape.layers, shape.topk), "<i4")
    wire[:, shape.dense :] = ids
    text = base64.b64encode(wire.tobytes()).decode()
    codecs = {
        name: Codec(name, False, *((shape.groups, shape.group_topk) if name == "set" else ())) for name in ("narrow", "packed", "set")
    }
    records = {name: trace.to_bytes(codec) for name, codec in codecs.items()}
    times = _medians(
        {
            "memcpy": ids.copy,
            "base64 encode": lambda: base64.b64encode(wire.tobytes()).decode(),
            "base64 decode": lambda: _from_wire(text, shape),
            **{f"{name} encode": lambda codec=codec: trace.to_bytes(codec) for name, codec in codecs.items()},
            **{f"{name} decode": lambda record=record: Trace.from_bytes(record) for name, record in records.items()},
        },
        rounds,
    )
    found = {f"{name}_bytes": row_bytes(shape.experts, shape.topk, len(layout.layers), codec) for name, codec in codecs.items()}
    found |= {
        "sglang_bytes": len(text) / rows,
        "bound_bytes": len(layout.layers) * math.log2(math.comb(shape.experts, shape.topk)) / 8,
        "reachable_bound_bytes": len(layout.layers) * math.log2(reachable_sets(shape)) / 8,
        "record_bytes": len(records["narrow"]) - ids.nbytes,
    }
    slow = times["base64 encode"], times["base64 decode"]
    for name in codecs:
        fast = times[f"{name} encode"], times[f"{name} decode"]
        found[f"{name}_encode_speedup"], found[f"{name}_decode_speedup"] = slow[0] / fast[0], slow[1] / fast[1]
        found[f"{name}_speedup"] = sum(slow) / sum(fast)
    found["narrow_vs_memcpy"] = (times["narrow encode"] + times["narrow decode"]) / (2 * times["memcpy"])
    return {name: round(value, 2) for name, value in found.items()}


def reachable_sets(shape: Shape) -> int:
    """Sets of experts that touch at most `group_topk` groups; all sets without a limit."""
    if not shape.groups:
        return math.comb(shape.experts, shape.topk)
    size = shape.experts // shape.groups
    total = 0
    for used in range(1, shape.group_topk + 1):
        # Inclusion and exclusion: sets that touch each of `used` groups.
        touching = sum((-1) ** gone * math.comb(used, gone) * math.comb((used - gone) * size, shape.topk) for gone in range(used))
        total += math.comb(shape.groups, used) * touching
    return total


def random_routes(shape: Shape, rows: int, rng: np.random.Generator) -> np.ndarray:
    """uint8|uint16[rows, moe_layer, k]: distinct experts in random order, within the group limit."""
    layout = shape.layout
    ids = np.empty((rows, len(layout.layers), shape.topk), layout.dtype)
    for layer in range(len(layout.layers)):
        scores = rng.random((rows, shape.experts), np.float32)
        if shape.groups:
            allowed = rng.random((rows, shape.groups)).argsort(axis=1) < shape.group_topk
            scores[~np.repeat(allowed, shape.experts // shape.groups, axis=1)] = 2.0
        ids[:, layer] = np.argpartition(scores, shape.topk, axis=1)[:, : shape.topk]
    return ids


def _from_wire(text: str, shape: Shape) -> np.ndarray:
    ids = np.frombuffer(base64.b64decode(text), "<i4").reshape(-1, shape.layers, shape.topk)
    return ids[:, shape.dense :].astype(shape.layout.dtype)


def _medians(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, run in turns; the first round only warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def _print_table(found: dict[str, dict[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = {
        "SGLang B": "sglang_bytes", "narrow B": "narrow_bytes", "packed B": "packed_bytes", "set B": "set_bytes", "bound B": "bound_bytes",
        "reachable B": "reachable_bound_bytes", "narrow x": "narrow_speedup", "packed x": "packed_speedup", "set x": "set_speedup",
        "set decode x": "set_decode_speedup", "memcpy": "narrow_vs_memcpy",
    }  # fmt: skip
    title = "routing codecs: bytes per token, and how many times faster than base64 + numpy"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("model")
    for head in columns:
        table.add_column(head, justify="right")
    for model, row in found.items():
        table.add_row(model, *(f"{row[name]:.0f}" if name.endswith("bytes") else f"{row[name]:.1f}" for name in columns.values()))
    console = Console(highlight=False, width=140)
    console.print(table)
    compiled = f"no, {native.problem()}" if native.problem() else "yes"
    console.print(f"\nmemcpy: time of narrow's encoding and decoding over two plain copies. Compiled: {compiled}", soft_wrap=True)
