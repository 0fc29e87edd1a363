"""What a Hugging Face folder holds, judged against its own config.json before anything is converted.

    folder --survey--> Survey: every tensor has one role; a weight that is missing, surplus, misshapen or unreadable is an error

All problems are told at once.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moerl.convert.folder import Stored, read_folder, some
from moerl.convert.quantised import Weight, weight, weight_block
from moerl.errors import ModelError
from moerl.models import Entry, Known, ModelSpec, classify, read_spec

Mtp = Literal["keep", "drop"]


@dataclass(frozen=True)
class Survey:
    """A folder that fits its config.

    Attributes:
        stored: every tensor of it.
        known: what each is.
        weights: HF name -> how it is read; all but scales and ignorable buffers.
        mtp: of the weights for multi-token prediction: "keep" or "drop", as asked for, "absent" where config.json announces some that
            the folder lacks, "none" where it announces none.
    """

    folder: Path
    spec: ModelSpec
    stored: Mapping[str, Stored]
    known: Mapping[str, Known]
    weights: Mapping[str, Weight]
    mtp: Literal["keep", "drop", "absent", "none"]

    @property
    def copies(self) -> dict[str, str]:
        """HF tensor that only repeats another -> that one, without those that are dropped."""
        dropped = self.spec.mtp_copies() if self.mtp == "drop" else {}
        return {name: known.of for name, known in self.known.items() if known.role == "copy" and name not in dropped}

    @property
    def counts(self) -> Counter[str]:
        """Tensors by role."""
        return Counter(known.role for known in self.known.values())

    def entries(self) -> Iterator[Entry]:
        """What is converted."""
        yield from self.spec.entries()
        if self.mtp == "keep":
            yield from self.spec.mtp_entries()


def survey(folder: Path, mtp: Mtp) -> Survey:
    """Read a folder's headers and compare them with its config.

    Raises:
        ModelError: see the module's description.
    """
    spec = read_spec(folder)
    stored = read_folder(folder)
    known = classify(spec, stored)
    scales = {name: one for name, one in stored.items() if known[name].role == "scale"}
    block = weight_block(spec.hf_config)
    weights, problems = {}, []
    for name, one in stored.items():
        if known[name].role in ("parameter", "mtp", "copy"):
            found, problem = weight(one, scales, name, block)
            expected = _shape(spec, known[name])
            if found is None:
                problems.append(problem)
            elif expected is not None and one.shape != expected:
                problems.append(f"{name}: shape {list(one.shape)}, expected {list(expected)}")
            else:
                weights[name] = found
    problems += [f"{name}: {known[name].of} is missing" for name in scales if known[name].of not in stored]
    missing = [name for entry in spec.entries() for name in entry.hf if name not in stored]
    ahead = [name for entry in spec.mtp_entries() for name in entry.hf]
    has = [name for name in ahead if name in stored]
    if has and len(has) < len(ahead):
        missing += [name for name in ahead if name not in stored]
    unknown = [name for name, one in known.items() if one.role == "unknown"]
    problems += [f"{len(missing)} tensors are missing: {some(missing)}"] if missing else []
    problems += [f"{len(unknown)} tensors are unknown: {some(unknown)}"] if unknown else []
    if problems:
        shown = problems[:40] + ([f"and {len(problems) - 40} more"] if len(problems) > 40 else [])
        raise ModelError(f"{folder} does not fit its own config.json ({spec.family}):\n" + "\n".join(f"  - {one}" for one in shown))
    return Survey(folder, spec, stored, known, weights, "none" if not ahead else mtp if has else "absent")


def _shape(spec: ModelSpec, known: Known) -> tuple[int, ...] | None:
    if known.entry is not None:
        return known.entry.param.part_shape(known.part)
    return (spec.vocab_size, spec.hidden_size) if known.role == "copy" else None
