"""What every rank of an engine must hold after an update, and its checksums: the sender's half of the proof.

    HF tensor --pieces--> bytes of the engine's parameters, rank by rank --LayoutChecksums--> {parameter: hash} per rank
                                                        what the engine reports --compare--> differences

Sharding follows SGLang's tensor parallelism (`engine_boxes`): column-parallel weights along dim 0, row-parallel ones along dim 1,
gate before up, q before k before v and each cut by heads, experts stacked, the compressed MLA projections whole on every rank, the
vocabulary padded and cut by rows. The absorbed MLA matrices (`w_kc`, `w_vc`), which the engine derives from `kv_b_proj`, are covered
too: a stale one changes logprobs while all parameters look right.

A hash is the first 8 bytes (big-endian, as 16 hex digits) of SHA-256 over the parameter's contiguous bytes. Hashes are fed
piece by piece in the order of the bytes, so nothing larger than one HF tensor is held.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from moerl.errors import ReshardError
from moerl.models import ModelSpec
from moerl.reshard.boxes import Kind, kinds
from moerl.reshard.bucket import Slot
from moerl.reshard.engine_boxes import CPU_WIDTH_MULTIPLE, EngineSlice, EngineTopology, check_topology, engine_slice, slice_problem

_BUFFERS = ("cos_sin_cache", "cos_cache", "sin_cache", "inv_freq", "freqs_cis")
"""Parts of names of engine buffers that follow from the configuration alone."""


def pieces(spec: ModelSpec, slot: Slot, tensor: torch.Tensor, tp: int) -> Iterator[tuple[int, str, torch.Tensor]]:
    """(rank, engine parameter, next bytes of it) for one whole HF tensor.

    Pieces of one parameter, over all slots in canonical order, are its contiguous bytes from first to last.

    Raises:
        ReshardError: the engine's `tp` does not divide the weight.
    """
    entry, topology = slot.entry, EngineTopology(tp=tp)
    kind = Kind(entry.param, slot.part, (), experts=1)
    if problem := slice_problem(kind, topology):
        raise ReshardError(f"{slot.name} {tuple(tensor.shape)} does not fit the engine: {problem}; choose another engine.tp")
    for rank in range(tp):
        shard = _cut_out(tensor, engine_slice(kind, topology, rank))
        yield rank, entry.engine, shard
        if entry.engine.endswith(".kv_b_proj.weight"):
            attention = entry.engine.removesuffix("kv_b_proj.weight")
            for name, absorbed in zip(("w_kc", "w_vc"), _absorbed(spec, shard), strict=True):
                yield rank, attention + name, absorbed


def _cut_out(tensor: torch.Tensor, held: EngineSlice) -> torch.Tensor:
    """What an engine rank holds of a whole tensor, with rows of zeros where its slice ends beyond it."""
    real = tensor[slice(*held.rows)] if tensor.dim() == 1 else tensor[slice(*held.rows), slice(*held.cols)]
    missing = held.rows[1] - held.rows[0] - real.shape[0]
    return torch.cat((real, real.new_zeros(missing, *real.shape[1:]))) if missing else real


def _absorbed(spec: ModelSpec, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`w_kc` [head, nope, lora] and `w_vc` [head, lora, v] of one rank's `kv_b_proj` [head * (nope + v), lora]."""
    nope, value = spec.hf_config["qk_nope_head_dim"], spec.hf_config["v_head_dim"]
    key, val = shard.unflatten(0, (-1, nope + value)).split((nope, value), dim=1)
    return key, val.transpose(1, 2)


def check_layout(spec: ModelSpec, tp: int, *, cpu: bool) -> None:
    """Refuse models that an engine of `tp` ranks cannot cut, or whose weights it would pad: its layout is not the plain cut then.

    Raises:
        ReshardError: listing the sizes.
    """
    found, multiple = kinds(spec), CPU_WIDTH_MULTIPLE * tp
    gated = {kind.param for kind in found if kind.hf.endswith(".gate_proj.weight")}
    widths = {param.engine.replace("{layer}", "*"): param.shape[0] for param in gated if param.shape[0] % multiple}
    if cpu and widths:
        raise ReshardError(
            f"engines on CPU with engine.tp = {tp} pad gated MLPs to a multiple of {multiple}; choose a model with such widths, or a "
            "smaller engine.tp:\n" + "\n".join(f"  - {name} has width {width}" for name, width in sorted(widths.items()))
        )
    check_topology(spec, found, EngineTopology(tp=tp, cpu=cpu))


class LayoutChecksums:
    """Collects the hashes of all parameters of an engine with `tp` ranks; feed it every HF tensor once, in canonical order."""

    def __init__(self, spec: ModelSpec, tp: int):
        self._spec, self._tp = spec, tp
        self._open: list[dict[str, hashlib._Hash]] = [{} for _ in range(tp)]

    def add(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Count in one HF tensor, on any device, in the dtype that the engine stores."""
        for rank, name, piece in pieces(self._spec, slot, tensor.detach().cpu(), self._tp):
            digest = self._open[rank].setdefault(name, hashlib.sha256())
            digest.update(memoryview(piece.contiguous().view(-1).view(torch.uint8).numpy()))

    def finish(self) -> list[dict[str, str]]:
        """Parameter -> hash, for each engine rank."""
        return [{name: digest.hexdigest()[:16] for name, digest in rank.items()} for rank in self._open]


def compare(expected: Sequence[Mapping[str, str]], reported: Sequence[Mapping[str, str]]) -> list[str]:
    """Every difference between one engine's reported checksums and the expected ones, as sentences; empty if there is none."""
    if len(reported) != len(expected):
        return [f"checksums of {len(expected)} ranks were expected, the engine reported {len(reported)}"]
    problems = []
    for rank, (want, got) in enumerate(zip(expected, reported, strict=True)):
        held = {name: value for name, value in got.items() if not any(part in name for part in _BUFFERS)}
        for name in want.keys() | held.keys():
            if name not in held:
                problems.append(f"rank {rank}: {name} was sent, but the engine reports no such parameter{_hint(name)}")
            elif name not in want:
                problems.append(f"rank {rank}: {name} is in the engine, but nothing that was sent becomes part of it{_hint(name)}")
            elif want[name] != held[name]:
                problems.append(f"rank {rank}: {name} has checksum {held[name]}, expected {want[name]}")
    return sorted(problems)


def _hint(name: str) -> str:
    if name.endswith((".w_kc", ".w_vc")):
        return " (derived by the engine; reported by moerl's SGLang plugin: is it loaded?)"
    if "shared_experts" in name:
        return " (is shared-expert fusion on? set sglang.disable_shared_experts_fusion = true)"
    return ""


def combine(checksums: Sequence[Mapping[str, str]]) -> str:
    """One SHA-256 over all ranks' checksums: equal exactly if every parameter of every rank is."""
    digest = hashlib.sha256()
    for rank, held in enumerate(checksums):
        for name in sorted(held):
            digest.update(f"{rank} {name} {held[name]}\n".encode())
    return digest.hexdigest()
