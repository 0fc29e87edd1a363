"""`moerl bench convert`: checkpoint conversion both ways against a plain copy of as many bytes, and the memory it takes.

    a made-up Qwen3-MoE folder --shutil.copytree, fsync--> a copy
                               --hf-to-megatron--> a checkpoint --megatron-to-hf--> a folder

The ways run in turns within each round, all with fsync; told are medians over the rounds of the ratios of their seconds, above 1 where a
conversion is faster than the copy. Sources were written shortly before, so all ways read from memory what fits there. Each conversion
runs in a process of its own with the defaults of `moerl convert`, without `--verify`; its time is without the start of Python. Memory is
the kernel's peak of the process's resident set (VmHWM), libraries included; files are read, not mapped, so no page cache counts.
"""

import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moerl.convert.tiny import tiny_qwen3_config
from moerl.models import ModelSpec, read_spec

ROUNDS = 3
_FILE_BYTES = 256 << 20
_POOL_ELEMENTS = (1 << 25) + 4099


@dataclass(frozen=True)
class Sizes:
    """Of Qwen3-30B-A3B but for its 48 layers: some 1.2 GiB each, and 1.2 GiB of vocabulary."""

    layers: int
    hidden: int = 2048
    experts: int = 128
    expert_width: int = 768
    vocabulary: int = 151936

    @classmethod
    def of(cls, gib: float) -> "Sizes":
        """Of about so many GiB, at least two."""
        return cls(layers=max(1, round((gib - 1.2) / 1.17)))


def main(*, as_json: bool = False, gib: float = 4.0) -> int:
    """Measure and print the result."""
    found = measure(Sizes.of(gib))
    print(
        f"{found['gib']:.2f} GiB; a copy with fsync takes {found['copy_s']:.1f} s ({found['gib'] * 1.073741824 / found['copy_s']:.2f} GB/s)"
    )
    for way, name in (("to_megatron", "hf-to-megatron"), ("to_hf", "megatron-to-hf")):
        print(f"{name}: {found[f'{way}_vs_copy']:.2f} of the copy's speed, at most {found[f'{way}_peak_gib']:.2f} GiB resident")
    if as_json:
        print(json.dumps(found))
    return 0


def measure(sizes: Sizes, *, rounds: int = ROUNDS) -> dict[str, float]:
    """The figures.

    Returns:
        gib: size of the folder. copy_s: median seconds of the copy. to_megatron_vs_copy, to_hf_vs_copy: seconds of the copy by those of
        the conversion. to_megatron_peak_gib, to_hf_peak_gib: largest resident set over the rounds.
    """
    with tempfile.TemporaryDirectory(prefix="moerl-convert-") as scratch:
        root = Path(scratch)
        write_model(root / "hf", sizes)
        nbytes = sum(path.stat().st_size for path in (root / "hf").iterdir())
        seconds, peaks = [], []
        for _ in range(rounds):
            one, peak = _round(root)
            seconds.append(one)
            peaks.append(peak)
        return {
            "gib": nbytes / 2**30,
            "copy_s": statistics.median(one["copy"] for one in seconds),
            **{f"{way}_vs_copy": statistics.median(one["copy"] / one[way] for one in seconds) for way in ("to_megatron", "to_hf")},
            **{f"{way}_peak_gib": max(peak[way] for peak in peaks) / 2**30 for way in ("to_megatron", "to_hf")},
        }


def _round(root: Path) -> tuple[dict[str, float], dict[str, int]]:
    """(seconds by way, peak bytes by conversion)"""
    seconds, peaks = {}, {}
    os.sync()
    seconds["copy"] = _copy(root / "hf", root / "copy")
    shutil.rmtree(root / "copy")
    for way, source, target in (("to_megatron", root / "hf", root / "megatron"), ("to_hf", root / "megatron", root / "back")):
        os.sync()
        seconds[way], peaks[way] = _apart(partial(_convert, way, source, target))
    shutil.rmtree(root / "megatron")
    shutil.rmtree(root / "back")
    return seconds, peaks


def _copy(source: Path, target: Path) -> float:
    start = time.perf_counter()
    shutil.copytree(source, target)
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - start


def _convert(way: str, source: Path, target: Path) -> tuple[float, int]:
    """(seconds, peak of the resident set in bytes) of this process's one conversion."""
    from moerl.convert.command import main as convert

    name = {"to_megatron": "hf-to-megatron", "to_hf": "megatron-to-hf"}[way]
    start = time.perf_counter()
    convert([name, str(source), str(target)])
    seconds = time.perf_counter() - start
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return seconds, int(status["VmHWM"].split()[0]) << 10


def _apart(work: Callable[[], Any]) -> Any:
    """The result of `work` in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work)


def write_model(folder: Path, sizes: Sizes) -> ModelSpec:
    """A folder with made-up bfloat16 weights, in files of some 256 MiB."""
    folder.mkdir()
    config = tiny_qwen3_config(hidden=sizes.hidden, layers=sizes.layers, experts=sizes.experts, heads=32, kv_heads=4, head_dim=128)
    config |= {"moe_intermediate_size": sizes.expert_width, "vocab_size": sizes.vocabulary}
    (folder / "config.json").write_text(json.dumps(config))
    spec, pool = read_spec(folder), torch.randn(_POOL_ELEMENTS, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for number, names in enumerate(_files(spec)):
        tensors = {name: _made_up(pool, shape, at) for at, (name, shape) in enumerate(names.items(), start=97 * number)}
        save_file(tensors, folder / f"part-{number:03d}.safetensors", metadata={"format": "pt"})
    return spec


def _files(spec: ModelSpec) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of each file."""
    held: dict[str, tuple[int, ...]] = {}
    size = 0
    for entry in spec.entries():
        for part, name in enumerate(entry.hf):
            shape = entry.param.part_shape(part)
            nbytes = 2 * torch.Size(shape).numel()
            if held and size + nbytes > _FILE_BYTES:
                yield held
                held, size = {}, 0
            held[name] = shape
            size += nbytes
    yield held


def _made_up(pool: torch.Tensor, shape: tuple[int, ...], number: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    whole = pool.roll(number).repeat(-(-count // len(pool))) if count > len(pool) else pool[number : number + count]
    return (whole[:count] if len(whole) >= count else pool[:count]).reshape(shape).clone()
