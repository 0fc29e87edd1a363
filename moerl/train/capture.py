"""What engine and trainer did with the same samples, token by token, written to `RUN/mismatch/` for the report (`report.capture`).

    rank 0: groups --choose--> samples --share--> parts of every rank, which name the captured rows
    each rank, per microbatch: natural pass, replayed pass --Recorder--> Piece (its rows, its layers)
    pieces of all ranks --joined on rank 0, a microbatch at a time--> Rows --> step-000012.parquet

Natural and replayed are two passes of the same weights: the trainer choosing by itself, and forced onto the engine's experts. Replaying its
own choice would be the natural pass bit by bit, so `r2_logprob` is `natural_logprob` and costs nothing.

Invariants: a sample is captured whole or not at all, and only if the engine's routes of all its rows may be replayed; which ones depends on
the seed, the step and the samples alone, not on the layout; every row and layer comes from exactly one rank. `due`, `Recorder` and `write`
belong to all ranks, `choose` to rank 0.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from moerl.config.schema import Config
from moerl.errors import ReplayError, TraceError
from moerl.models import ModelSpec
from moerl.report import capture as recording
from moerl.rollout.sample import Group, Sample
from moerl.routing import shard
from moerl.routing.compare import differing
from moerl.routing.layout import Layout
from moerl.routing.margin import Near
from moerl.routing.replay import Own, moe_layers
from moerl.train import megatron
from moerl.train.batch import Part
from moerl.train.forward import LocalMicrobatch

Side = Literal["natural", "replay"]


def due(config: Config, step: int) -> bool:
    """Whether `step` is captured."""
    every = config.diagnostics.capture_every_steps
    return every > 0 and step % every == 0


def choose(groups: Sequence[Group], config: Config, *, step: int, version: int | None) -> dict[int, Sample]:
    """Samples to capture, drawn by the seed: number among all samples of the groups -> sample.

    They are taken in a random order until the next one would exceed `diagnostics.capture_tokens`; those without routes for every row, or
    with rows too old to be replayed at `version`, are passed over.
    """
    samples = [sample for group in groups for sample in group.samples]
    limit, rows = config.diagnostics.capture_tokens, 0
    chosen = {}
    for number in np.random.default_rng((config.run.seed, step)).permutation(len(samples)):
        sample = samples[number]
        if not _replayable(sample, config.replay.max_row_lag, version):
            continue
        rows += len(sample.prompt_tokens) + len(sample.response_tokens) - 1
        if limit and rows > limit:
            break
        chosen[int(number)] = sample
    return dict(sorted(chosen.items()))


def _replayable(sample: Sample, max_row_lag: int | None, version: int | None) -> bool:
    if not sample.trace:
        return False
    try:
        trace = sample.load_trace()
    except TraceError:
        return False  # whether that ends the run is decided where the sample is packed
    fresh = version is None or max_row_lag is None or all(version - run.version <= max_row_lag for run in trace.versions)
    return trace.valid is None and fresh


@dataclass(frozen=True)
class Piece:
    """What one rank found of one microbatch. Places are (number of the sequence, position), of captured rows only.

    Attributes:
        indices: which of the layout's MoE layers it holds.
        routed: int64[m, 2] places of the rows that its routers saw.
        ids: uint8|uint16[m, layers here, k] chosen in the natural pass.
        margin, flipped_mass: float16[m, layers here].
        scored: int64[s, 2] places of the rows whose logprobs it alone holds.
        natural, replay: float32[s] logprobs.
    """

    indices: tuple[int, ...]
    routed: np.ndarray
    ids: np.ndarray
    margin: np.ndarray
    flipped_mass: np.ndarray
    scored: np.ndarray
    natural: np.ndarray
    replay: np.ndarray


class Recorder:
    """This rank's share of one capture: told of both passes, it keeps what the captured rows did in them, on the CPU.

    Args:
        holds_logprobs: whether this rank has logprobs that no other has.

    Attributes:
        bias: float32[layer, experts] the routers' correction biases, on rank 0; None elsewhere and without any.
        seconds: spent on the capture alone, so far.
    """

    def __init__(self, parts: Sequence[Part], place: shard.Place, layout: Layout, *, holds_logprobs: bool, bias: np.ndarray | None):
        self.place, self.layout, self.bias, self.seconds = place, layout, bias, 0.0
        self._routed = [_places(part, shard.router_rows(part.cu_seqlens, place.cp, place.tp)) for part in parts]
        local = [_places(part, shard.context_rows(part.cu_seqlens, place.cp)) for part in parts]
        self._scored = [places if holds_logprobs else (rows[:0], at[:0]) for places in local for rows, at in (places,)]
        self._own: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._logprobs: dict[Side, dict[int, np.ndarray]] = {"natural": {}, "replay": {}}
        self._told: set[Side] = set()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Within, time is spent on the capture alone."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    def near(self, local: Sequence[LocalMicrobatch]) -> list[Near]:
        """What a recorded pass must keep of each microbatch beside the chosen experts.

        Raises:
            ReplayError: a microbatch without the engine's routes.
        """
        if gone := [number for number, rows in enumerate(local) if rows.routes is None]:
            raise ReplayError(f"microbatch {gone[0]} carries no routes of the engine, but a capture compares with them")
        found = []
        for rows, (at, _) in zip(local, self._routed, strict=True):
            at = torch.from_numpy(at).to(rows.real.device)
            found.append(Near(at, rows.routes.ids.int()[at]))  # devices don't index 16-bit unsigned integers
        return found

    def routed(self, own: Own) -> None:
        """Keep what the natural pass chose."""
        for number, (at, _) in enumerate(self._routed):
            ids = own.ids(number).cpu().numpy()[at]
            self._own.append((ids, own.margins(number).cpu().numpy(), own.flipped_mass(number).cpu().numpy()))

    def has(self, side: Side) -> bool:
        """Whether it was told of a whole pass; the same on all ranks."""
        return side in self._told

    def scored(self, side: Side, logprobs: Sequence[torch.Tensor]) -> None:
        """Keep what `compute_logprobs` returned: float32[n_local] per microbatch on the last stage, nothing elsewhere."""
        self._told.add(side)
        for number, found in enumerate(logprobs):
            self._keep(side, number, found)

    def replayed(self, number: int, logprobs: torch.Tensor) -> None:
        """Keep float32[n_local] logprobs of microbatch `number` in an update that runs on the engine's experts."""
        self._keep("replay", number, logprobs)

    def _keep(self, side: Side, number: int, logprobs: torch.Tensor) -> None:
        at = torch.from_numpy(self._scored[number][0]).to(logprobs.device)
        self._logprobs[side][number] = logprobs.detach()[at].float().cpu().numpy()

    def pieces(self) -> Iterator[Piece]:
        """What was kept, a microbatch at a time."""
        for number, ((_, routed), (rows, scored)) in enumerate(zip(self._routed, self._scored, strict=True)):
            nothing = np.full(len(rows), np.nan, np.float32)
            natural, replay = (found[number] if len(rows) and number in found else nothing for found in self._logprobs.values())
            yield Piece(self.place.moe_indices, routed, *self._own[number], scored, natural, replay)


def _places(part: Part, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int64[m] which of a rank's rows are captured, int64[m, 2] their places), from int64[n] those rows' numbers in the microbatch."""
    at = np.flatnonzero(part.captured[rows] >= 0)
    rows = rows[at]
    starts = part.cu_seqlens[np.searchsorted(part.cu_seqlens, rows, side="right") - 1]
    return at, np.stack([part.captured[rows], rows - starts], axis=1)


def write(
    folder: Path,
    recorder: Recorder,
    samples: Mapping[int, Sample] | None,
    meta: recording.Meta,
    biases: Mapping[str, np.ndarray],
) -> dict[str, object]:
    """Join the pieces of all ranks and write them to `folder`; collective.

    Args:
        samples: what `choose` chose, on rank 0; None elsewhere. Without any, nothing is written.
        biases: `engine_bias`, `trainer_bias`, float32[layer, experts], where known; of rank 0.

    Returns:
        On rank 0, of the captured rows: capture_rows, tokens_with_flip (share of the rows that the trainer routes otherwise in some layer),
        flip_share_by_layer (a list).
    """
    flips = np.zeros(len(recorder.layout.layers), np.int64)
    count = flipped = 0

    def counted() -> Iterator[recording.Rows]:
        nonlocal count, flipped
        for rows in _joined(recorder, samples):
            differ = differing(rows.engine_ids, rows.trainer_ids)
            flips[:] += differ.sum(axis=0)
            count, flipped = count + len(rows), flipped + int(differ.any(axis=1).sum())
            yield rows

    if samples:
        recording.write(folder, meta, counted(), biases)
        return {"capture_rows": count, "tokens_with_flip": flipped / count, "flip_share_by_layer": (flips / count).tolist()}
    for _ in _joined(recorder, samples):
        pass
    return {} if samples is None else {"capture_rows": 0}


def _joined(recorder: Recorder, samples: Mapping[int, Sample] | None) -> Iterator[recording.Rows]:
    """Rows of a microbatch of every replica at a time, on rank 0; collective, and to be exhausted on all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    missing = set(samples or ())
    for piece in recorder.pieces():
        pieces: list[Piece | None] | None = [piece]
        if world > 1:
            pieces = [None] * world if rank == 0 else None
            dist.gather_object(piece, pieces)
        if rank == 0:
            here = np.unique(np.concatenate([one.scored[:, 0] for one in pieces]))
            missing -= set(here.tolist())
            yield assemble(pieces, {int(number): samples[int(number)] for number in here}, recorder.layout)
    if missing:
        raise ReplayError(
            f"samples {sorted(missing)[:8]} were to be captured, but no rank had their rows; do the ranks agree on the samples?"
        )


def assemble(pieces: Sequence[Piece], samples: Mapping[int, Sample], layout: Layout) -> recording.Rows:
    """All rows of some samples from what the ranks hold of them.

    Returns:
        the samples in order of their numbers, each with all its rows.

    Raises:
        ReplayError: some row or layer is held by no rank, or by two.
    """
    lengths = [len(sample.prompt_tokens) + len(sample.response_tokens) - 1 for sample in samples.values()]
    starts = dict(zip(samples, np.cumsum([0, *lengths])[:-1].tolist(), strict=True))
    total, layers = sum(lengths), len(layout.layers)
    held, held_scores = np.zeros((total, layers), np.int64), np.zeros(total, np.int64)
    ids = np.zeros((total, layers, layout.topk), layout.dtype)
    margin, mass = (np.full((total, layers), np.nan, np.float16) for _ in range(2))
    natural, replay = (np.full(total, np.nan, np.float32) for _ in range(2))

    def rows_of(places: np.ndarray) -> np.ndarray:
        return np.array([starts[number] for number in places[:, 0].tolist()], np.int64) + places[:, 1]

    for piece in pieces:
        where = np.ix_(rows_of(piece.routed), piece.indices)
        held[where] += 1
        ids[where], margin[where], mass[where] = piece.ids, piece.margin, piece.flipped_mass
        scored = rows_of(piece.scored)
        held_scores[scored] += 1
        natural[scored], replay[scored] = piece.natural, piece.replay
    if (held != 1).any() or (held_scores != 1).any():
        raise ReplayError(
            f"every captured row and layer must be held by one rank, but {int((held != 1).sum())} of {held.size} routes and "
            f"{int((held_scores != 1).sum())} of {total} logprobs are not; do the ranks agree on the parallel sizes?"
        )
    return recording.Rows(
        **_engine_columns(list(samples.values()), natural, replay, layout), trainer_ids=ids, margin=margin, flipped_mass=mass
    )


def _engine_columns(samples: Sequence[Sample], natural: np.ndarray, replay: np.ndarray, layout: Layout) -> dict[str, np.ndarray]:
    """The columns that need no layers, and the engine's experts; logprobs are kept where the next token was generated."""
    columns: dict[str, list[np.ndarray]] = {}
    for sample in samples:
        tokens, trace, first = sample.tokens, sample.load_trace(), len(sample.prompt_tokens) - 1
        rows = len(tokens) - 1
        position, logprob = np.arange(rows), np.full(rows, np.nan, np.float32)
        logprob[first:] = sample.logprob_array
        found = {
            "prompt_id": np.full(rows, sample.prompt_id, np.int64),
            "sample": np.full(rows, sample.index, np.int32),
            "position": position.astype(np.int32),
            "token": tokens[:-1].astype(np.int32),
            "next_token": tokens[1:].astype(np.int32),
            "response": position >= first,
            "version": np.concatenate([np.full(run.stop - run.start, run.version, np.int32) for run in trace.versions]),
            "reward": np.full(rows, sample.reward, np.float32),
            "engine_logprob": logprob,
            "engine_ids": trace.ids,
        }
        for name, column in found.items():
            columns.setdefault(name, []).append(column)
    empty = {"engine_ids": np.zeros((0, len(layout.layers), layout.topk), layout.dtype)}
    whole = {name: np.concatenate(column) for name, column in columns.items()}
    if not samples:
        whole = {name: np.zeros(0, dtype) for name, dtype in recording.SCALARS.items()} | empty
    natural, replay = (np.where(whole["response"], one, np.float32(np.nan)) for one in (natural, replay))
    return whole | {"natural_logprob": natural, "r2_logprob": natural, "replay_logprob": replay}


def describe(config: Config, spec: ModelSpec, model: Sequence[torch.nn.Module], *, step: int, version: int, source: str) -> recording.Meta:
    """What the rows of a step belong to.

    Args:
        version: of the trainer's weights, -1 if unknown.
        source: "training" or "recompute".
    """
    groups, open_groups = spec.megatron.get("moe_router_num_groups"), spec.megatron.get("moe_router_group_topk")
    limited = bool(groups and open_groups)
    return recording.Meta(
        step=step,
        trainer_version=version,
        layers=spec.moe_layers,
        experts=spec.experts,
        topk=spec.topk,
        groups=groups if limited else 1,
        group_topk=open_groups if limited else 1,
        ep=config.parallel.ep,
        engine_ep=config.sglang.get("ep_size", 1),
        trainer_dtype=config.train.dtype,
        engine_dtype=config.engine.dtype,
        router_dtype={"fp32": "float32", "fp64": "float64", None: config.train.dtype}[megatron.unwrap(model[0]).config.moe_router_dtype],
        source=source,
        model=config.model.path,
    )


def trainer_biases(model: Sequence[torch.nn.Module], layout: Layout) -> np.ndarray | None:
    """float32[layer, experts] correction biases of the routers of all ranks, on rank 0; None elsewhere and without any. Collective."""
    mine = {
        layout.layers.index(layer.layer_number - 1): router.expert_bias.detach().float().cpu().numpy()
        for layer, router in moe_layers(model)
        if router.expert_bias is not None
    }
    everyone: list[dict[int, np.ndarray] | None] | None = [mine]
    if dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, everyone)
    whole = {index: bias for found in everyone or () for index, bias in found.items()}
    return np.stack([whole[index] for index in range(len(layout.layers))]) if len(whole) == len(layout.layers) else None


def bias_names(spec: ModelSpec) -> list[str]:
    """The engine's names of the correction biases, in layer order; empty for models without."""
    return [entry.engine for entry in spec.entries() if re.fullmatch(r"decoder\.layers\.\d+\.mlp\.router\.expert_bias", entry.megatron)]
