"""A recording of what engine and trainer did with the same tokens: one Parquet file per step under `RUN/mismatch/`.

A row is an *input row* of a sample: row i is the routing used when token i was the input, and it predicts token i+1. Rows of a
sample stand together, in the order of their positions. Per-layer columns are stored as fixed-size binary (little-endian arrays),
because Parquet's lists take twenty times as long to read.

    column                        type                       meaning
    prompt_id, sample, position   int64, int32, int32        which row; `sample` counts within the prompt's group
    token, next_token             int32, int32
    response                      bool                       next_token was generated, so logprobs may be there
    version                       int32                      weight version that computed the row in the engine; -1 if unknown
    reward                        float32                    of the sample; null if unknown
    engine_logprob                float32                    of next_token; null where not a response or not measured
    natural_logprob                                          the trainer choosing by itself
    r2_logprob                                               the trainer replaying its own recorded choice
    replay_logprob                                           the trainer forced onto the engine's experts (R3)
    engine_ids, trainer_ids       uint8|uint16[layer, k]     trainer: its natural choice; a recording of one side has none
    margin                        float16[layer]             trainer: k-th minus (k+1)-th selection score
    flipped_mass                  float16[layer]             gate weight that the trainer gives to experts the engine did not choose

Beside it, where correction biases are known, `step-000012.safetensors` holds `engine_bias` and `trainer_bias`, float32[layer, experts].
A file appears under its name complete or not at all. numpy, pyarrow and safetensors only.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from moerl.errors import ReportError

FOLDER = "mismatch"
SCHEMA = 1
ROW_GROUP = 65536
_KEY = b"moerl"
_NAME = re.compile(r"step-(\d{6,})\.parquet")
BIASES = ("engine_bias", "trainer_bias")

SCALARS = {
    "prompt_id": np.int64,
    "sample": np.int32,
    "position": np.int32,
    "token": np.int32,
    "next_token": np.int32,
    "response": np.bool_,
    "version": np.int32,
    "reward": np.float32,
    "engine_logprob": np.float32,
    "natural_logprob": np.float32,
    "r2_logprob": np.float32,
    "replay_logprob": np.float32,
}
MODES = ("natural", "r2", "replay")


@dataclass(frozen=True)
class Meta:
    """What the rows of a file belong to.

    Attributes:
        step: training step. trainer_version: weight version of the trainer when it scored the rows; -1 if there was no trainer.
        layers: 0-based numbers of the MoE layers, ascending; the ids' layer axis follows them.
        experts, topk: per MoE layer and per token.
        groups, group_topk: group-limited selection: experts come from `group_topk` of `groups` groups; 1 and 1 if there is no limit.
        ep, engine_ep: expert-parallel ranks of trainer and engine.
        trainer_dtype, engine_dtype, router_dtype: names such as "bfloat16"; empty if unknown. router_dtype is the trainer's router.
        source: "training", "recompute", "import:sglang" and so on.
        model: folder of the model, for its tokenizer; empty if unknown.
    """

    step: int
    layers: tuple[int, ...]
    experts: int
    topk: int
    trainer_version: int = -1
    groups: int = 1
    group_topk: int = 1
    ep: int = 1
    engine_ep: int = 1
    trainer_dtype: str = ""
    engine_dtype: str = ""
    router_dtype: str = ""
    source: str = "training"
    model: str = ""
    schema: int = SCHEMA

    @property
    def id_dtype(self) -> np.dtype:
        """uint8 for up to 256 experts, otherwise uint16."""
        return np.dtype("<u1" if self.experts <= 256 else "<u2")

    def problems(self) -> list[str]:
        """What is wrong with it, one sentence each."""
        found = []
        if self.schema != SCHEMA:
            found.append(f"schema {self.schema}: this moerl reads and writes schema {SCHEMA}")
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or min(self.layers) < 0:
            found.append(f"layers: expected ascending distinct layer numbers from 0, got {list(self.layers)}")
        if not 1 <= self.topk <= self.experts <= 65536:
            found.append(f"expected 1 <= topk <= experts <= 65536, got topk {self.topk}, experts {self.experts}")
        if self.groups < 1 or self.experts % self.groups or not 1 <= self.group_topk <= self.groups:
            found.append(
                f"groups must divide experts and hold group_topk: got {self.groups} and {self.group_topk} of {self.experts} experts"
            )
        if min(self.ep, self.engine_ep) < 1:
            found.append(f"ep and engine_ep count ranks, from 1: got {self.ep} and {self.engine_ep}")
        return found


@dataclass(frozen=True)
class Rows:
    """Columns of some rows, each an array of n entries; see the module for their meaning.

    Logprobs and reward are NaN where there is none. ids are integer[n, layer, k], margin and flipped_mass float[n, layer]; None
    where the recording has no such column.
    """

    prompt_id: np.ndarray
    sample: np.ndarray
    position: np.ndarray
    token: np.ndarray
    next_token: np.ndarray
    response: np.ndarray
    version: np.ndarray
    reward: np.ndarray
    engine_logprob: np.ndarray
    natural_logprob: np.ndarray
    r2_logprob: np.ndarray
    replay_logprob: np.ndarray
    engine_ids: np.ndarray
    trainer_ids: np.ndarray | None = None
    margin: np.ndarray | None = None
    flipped_mass: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.engine_ids)

    def take(self, which: np.ndarray | slice) -> "Rows":
        """The rows that an index, a mask or a slice names."""
        columns = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return Rows(**{name: None if column is None else column[which] for name, column in columns.items()})

    def differences(self, mode: str) -> np.ndarray:
        """d = trainer logprob - engine logprob in a mode (natural, r2, replay): float64[n], NaN where either is missing."""
        return getattr(self, f"{mode}_logprob").astype(np.float64) - self.engine_logprob


def concatenate(parts: Iterable[Rows]) -> Rows:
    """All rows in order. A column that any part lacks is left out of the whole."""
    parts = list(parts)
    if not parts:
        raise ReportError("expected at least one part to concatenate, got none")
    columns = {entry.name: [getattr(part, entry.name) for part in parts] for entry in fields(Rows)}
    return Rows(**{name: None if any(one is None for one in found) else np.concatenate(found) for name, found in columns.items()})


def without(rows: Rows, *names: str) -> Rows:
    """The rows without some of the optional columns."""
    return replace(rows, **dict.fromkeys(names))


def write(folder: str | Path, meta: Meta, rows: Rows | Iterable[Rows], biases: Mapping[str, np.ndarray] | None = None) -> Path:
    """Write the recording of a step into `RUN/mismatch`; one that is there is replaced.

    Args:
        rows: all rows, or an iterator of parts, of which at most one row group is held.
        biases: `engine_bias`, `trainer_bias`: float[layer, experts], either or both.

    Returns:
        path of the Parquet file.

    Raises:
        ReportError: columns that do not fit each other or `meta`, all of them.
    """
    folder = Path(folder)
    _raise(f"the recording of step {meta.step} cannot be written", meta.problems() + _bias_problems(meta, biases or {}))
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, meta.step)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    parts = iter([rows] if isinstance(rows, Rows) else rows)
    try:
        _write_rows(temporary, meta, parts)
        _write_biases(path.with_suffix(".safetensors"), biases)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def list_steps(folder: str | Path) -> dict[int, Path]:
    """Step -> file of the recordings in a folder `RUN/mismatch`, ascending; empty if the folder does not exist."""
    folder = Path(folder)
    if not folder.is_dir():
        return {}
    return dict(sorted((int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))))


def read_meta(path: str | Path) -> Meta:
    """What a recording belongs to.

    Raises:
        ReportError: missing, not a recording, or of another schema.
    """
    return _meta(Path(path), _open(Path(path)))


def count_rows(path: str | Path) -> int:
    """Rows of a recording, from its footer."""
    return _open(Path(path)).metadata.num_rows


def read(path: str | Path, rows_at_a_time: int = ROW_GROUP) -> Iterator[Rows]:
    """The rows of a recording in order, at most `rows_at_a_time` together (a row group's end may make it fewer).

    Raises:
        ReportError: missing, damaged, or not a recording.
    """
    path = Path(path)
    file = _open(path)
    meta = _meta(path, file)
    try:
        for batch in file.iter_batches(batch_size=rows_at_a_time):
            yield _from_batch(meta, batch)
    except (pa.ArrowException, OSError) as error:
        raise ReportError(f"{path} is damaged: {error}; record the step again") from error


def read_biases(path: str | Path) -> dict[str, np.ndarray]:
    """Correction biases of a recording: float32[layer, experts] by side (`engine_bias`, `trainer_bias`); empty if not recorded."""
    beside = Path(path).with_suffix(".safetensors")
    if not beside.is_file():
        return {}
    try:
        found = load_file(beside)
    except SafetensorError as error:
        raise ReportError(f"{beside} is damaged: {error}; record the step again") from error
    _raise(f"{beside} does not fit {Path(path).name}", _bias_problems(read_meta(path), found))
    return found


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.parquet"


def _open(path: Path) -> pq.ParquetFile:
    if not path.is_file():
        raise ReportError(f"{path} does not exist; expected a recording such as RUN/{FOLDER}/step-000001.parquet")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ReportError(f"{path} is not a Parquet file: {error}") from error


def _meta(path: Path, file: pq.ParquetFile) -> Meta:
    found = file.schema_arrow.metadata or {}
    if _KEY not in found:
        raise ReportError(f"{path} is not a recording of routes: its metadata has no key {_KEY.decode()!r}")
    try:
        meta = msgspec.json.decode(found[_KEY], type=Meta)
    except msgspec.MsgspecError as error:
        raise ReportError(f"{path}: its metadata cannot be read: {error}") from error
    missing = [name for name in (*SCALARS, "engine_ids") if name not in file.schema_arrow.names]
    _raise(f"{path} cannot be read", meta.problems() + [f"column {name} is missing" for name in missing])
    return meta


def _write_rows(temporary: Path, meta: Meta, parts: Iterator[Rows]) -> None:
    first = next(parts, None)
    if first is None:
        raise ReportError(f"the recording of step {meta.step} has no rows at all; expected at least one part, which may be empty")
    table = _to_table(meta, first)
    schema = table.schema.with_metadata({_KEY: msgspec.json.encode(asdict(meta))})
    dictionary = ["prompt_id", "sample", "version", "reward"]
    with pq.ParquetWriter(temporary, schema, compression="zstd", use_dictionary=dictionary) as writer:
        held, count = [table], len(first)
        for part in parts:
            table = _to_table(meta, part)
            if table.schema != held[0].schema:
                lacking = sorted(set(schema.names) ^ set(table.schema.names))
                raise ReportError(f"parts of step {meta.step} have different columns: {', '.join(lacking)} is not in all of them")
            held.append(table)
            count += len(part)
            if count >= ROW_GROUP:
                whole = pa.concat_tables(held)
                full = count - count % ROW_GROUP
                writer.write_table(whole.slice(0, full).replace_schema_metadata(schema.metadata), row_group_size=ROW_GROUP)
                held, count = [whole.slice(full)], count - full
        writer.write_table(pa.concat_tables(held).replace_schema_metadata(schema.metadata), row_group_size=ROW_GROUP)
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())


def _write_biases(path: Path, biases: Mapping[str, np.ndarray] | None) -> None:
    if not biases:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    save_file({name: np.ascontiguousarray(bias, np.float32) for name, bias in biases.items()}, temporary)
    os.replace(temporary, path)


def _to_table(meta: Meta, rows: Rows) -> pa.Table:
    _raise(f"rows of step {meta.step} do not fit", _row_problems(meta, rows))
    columns: dict[str, Any] = {}
    for name, dtype in SCALARS.items():
        values = np.asarray(getattr(rows, name)).astype(dtype, copy=False)
        columns[name] = pa.array(values, from_pandas=True) if dtype is np.float32 else pa.array(values)
    for name, dtype in _layered(meta).items():
        if (column := getattr(rows, name)) is not None:
            columns[name] = _binary(np.ascontiguousarray(column, dtype))
    return pa.table(columns)


def _layered(meta: Meta) -> dict[str, np.dtype]:
    half = np.dtype("<f2")
    return {"engine_ids": meta.id_dtype, "trainer_ids": meta.id_dtype, "margin": half, "flipped_mass": half}


def _shape(meta: Meta, name: str) -> tuple[int, ...]:
    return (len(meta.layers), meta.topk) if name.endswith("_ids") else (len(meta.layers),)


def _binary(column: np.ndarray) -> pa.Array:
    width = column[:1].nbytes if len(column) else int(np.prod(column.shape[1:])) * column.itemsize
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(column), [None, pa.py_buffer(column)])


def _from_batch(meta: Meta, batch: pa.RecordBatch) -> Rows:
    columns: dict[str, np.ndarray] = {}
    for name in SCALARS:
        columns[name] = batch.column(name).to_numpy(zero_copy_only=False).astype(SCALARS[name], copy=False)
    for name, dtype in _layered(meta).items():
        if name not in batch.schema.names:
            continue
        column, shape = batch.column(name), _shape(meta, name)
        width = int(np.prod(shape)) * dtype.itemsize
        if column.type != pa.binary(width) or column.null_count:
            raise ReportError(f"column {name}: expected {width} bytes in every row, got {column.type} with {column.null_count} nulls")
        raw = np.frombuffer(column.buffers()[1], np.uint8)[column.offset * width : (column.offset + len(column)) * width]
        columns[name] = raw.view(dtype).reshape(len(column), *shape)
    return Rows(**columns)


def _row_problems(meta: Meta, rows: Rows) -> list[str]:
    found = []
    count = len(rows.engine_ids)
    for name in SCALARS:
        if np.shape(getattr(rows, name)) != (count,):
            found.append(f"{name}: expected shape {(count,)} as engine_ids has {count} rows, got {np.shape(getattr(rows, name))}")
    for name in _layered(meta):
        column = getattr(rows, name)
        if column is None:
            continue
        expected = (count, *_shape(meta, name))
        if column.shape != expected:
            found.append(f"{name}: expected shape {expected} (rows, then {len(meta.layers)} MoE layers), got {column.shape}")
        elif name.endswith("_ids") and count and (column.min() < 0 or column.max() >= meta.experts):
            found.append(f"{name}: expected ids 0..{meta.experts - 1}, got {column.min()}..{column.max()}")
    return found


def _bias_problems(meta: Meta, biases: Mapping[str, np.ndarray]) -> list[str]:
    expected = (len(meta.layers), meta.experts)
    found = [f"unknown bias {name!r}; expected {' or '.join(BIASES)}" for name in biases if name not in BIASES]
    for name, bias in biases.items():
        if bias.shape != expected:
            found.append(f"{name}: expected shape {expected} (layers, experts), got {bias.shape}")
    return found


def _raise(head: str, problems: list[str]) -> None:
    if problems:
        raise ReportError(head + "".join(f"\n  - {problem}" for problem in problems))
