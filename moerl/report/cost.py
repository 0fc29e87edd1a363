"""What differing experts cost: logprob differences by how many layers of a token's row differ, and the worst tokens and samples."""

import heapq
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from moerl.report.capture import MODES, Meta
from moerl.report.chunk import Chunk
from moerl.report.gap import Gap, column
from moerl.report.stats import finite, share
from moerl.report.text import Decode
from moerl.routing.compare import k3

BUCKETS = (0, 1, 2, 3, 5, 9, 17, 33)
WORST_TOKENS = 20
WORST_SAMPLES = 10
_LEAST_TOKENS = 4
_BEFORE = 12
_SHOWN = 64
_FIGURES = ("tokens", "abs", "k3", "replayed", "replay_abs", "replay_k3")


class Cost:
    """Sums over chunks, and a heap of the worst tokens."""

    def __init__(self, meta: Meta) -> None:
        self.meta = meta
        layers = len(meta.layers)
        self.by_count = np.zeros((layers + 1, len(_FIGURES)))
        self.by_first = np.zeros((layers + 1, len(_FIGURES)))  # the last entry: no layer differs
        self.worst: list[tuple[float, int, dict[str, Any]]] = []
        self._seen = 0

    def add(self, chunk: Chunk) -> None:
        """Count a chunk."""
        if not len(chunk):
            return
        natural, replay = chunk.measured["natural"], chunk.measured["replay"]
        if chunk.flipped is not None:
            layers = len(self.meta.layers)
            first = np.where(chunk.flips > 0, chunk.flipped.argmax(axis=1), layers)
            figures = (
                natural,
                np.abs(chunk.d["natural"]),
                k3(chunk.d["natural"]),
                replay,
                np.abs(chunk.d["replay"]),
                k3(chunk.d["replay"]),
            )
            for i, figure in enumerate(figures):
                self.by_count[:, i] += np.bincount(chunk.flips, figure, layers + 1)
                self.by_first[:, i] += np.bincount(first, figure, layers + 1)
        self._tokens(chunk, "natural" if natural.any() else "replay")

    def _tokens(self, chunk: Chunk, mode: str) -> None:
        size = np.abs(chunk.d[mode])
        for i in np.argsort(size)[-WORST_TOKENS:]:
            if chunk.measured[mode][i] and (len(self.worst) < WORST_TOKENS or size[i] > self.worst[0][0]):
                self._seen += 1  # so that no two entries tie, and the dictionaries are never compared
                entry = (float(size[i]), self._seen, self._token(chunk, int(i)))
                if len(self.worst) < WORST_TOKENS:
                    heapq.heappush(self.worst, entry)
                else:
                    heapq.heapreplace(self.worst, entry)

    def _token(self, chunk: Chunk, i: int) -> dict[str, Any]:
        rows = chunk.rows
        layers = np.flatnonzero(chunk.flipped[i]) if chunk.flipped is not None else []
        return {
            "step": chunk.meta.step,
            **{name: int(getattr(rows, name)[i]) for name in ("prompt_id", "sample", "position", "version", "token", "next_token")},
            **{f"{side}_logprob": finite(getattr(rows, f"{side}_logprob")[i]) for side in ("engine", *MODES)},
            "flipped_layers": [self.meta.layers[j] for j in layers],
        }

    def result(self, gap: Gap) -> dict[str, Any]:
        """`cost` of the report, without texts (see `add_texts`)."""
        tokens, kl = self.by_count[:, 0].sum(), self.by_count[:, 2].sum()
        buckets = []
        ends = (*BUCKETS[1:], len(self.by_count))
        for low, high in zip(BUCKETS, ends, strict=True):
            found = self.by_count[low:high].sum(axis=0)
            if found[0] or found[3]:
                end = min(high, len(self.by_count)) - 1
                buckets.append(
                    {
                        "from": low,
                        "to": end,
                        "tokens": int(found[0]),
                        "token_share": share(found[0], tokens),
                        "abs_diff": share(found[1], found[0]),
                        "kl": share(found[2], found[0]),
                        "kl_share": share(found[2], kl),
                        "replay_abs_diff": share(found[4], found[3]),
                        "replay_kl": share(found[5], found[3]),
                    }
                )
        by_first = [
            {"layer": layer, "tokens": int(found[0]), "abs_diff": share(found[1], found[0]), "kl": share(found[2], found[0])}
            for layer, found in zip((*self.meta.layers, None), self.by_first, strict=True)
        ]
        worst = [token for _, _, token in sorted(self.worst, key=lambda entry: (-entry[0], entry[1]))]
        return {"by_flipped_layers": buckets, "by_first_layer": by_first, "worst_tokens": worst, "worst_samples": worst_samples(gap)}


def worst_samples(gap: Gap) -> list[dict[str, Any]]:
    """The samples with the largest mean k3, of those with a few tokens."""
    found = []
    for meta, keys, sums, rewards in gap.steps:
        names = ("natural_tokens", "natural_abs", "natural_k3", "replay_tokens", "replay_k3", "rows", "flips")
        tokens, absolute, kl, replayed, replay_kl, rows, flips = column(sums, names).T
        mean = np.where(tokens >= _LEAST_TOKENS, kl / np.maximum(tokens, 1), -1)
        for i in np.argsort(mean)[::-1][:WORST_SAMPLES]:
            if mean[i] >= 0:
                found.append(
                    {
                        "step": meta.step,
                        "prompt_id": int(keys[i, 0]),
                        "sample": int(keys[i, 1]),
                        "reward": finite(rewards[i]),
                        "tokens": int(tokens[i]),
                        "abs_diff": share(absolute[i], tokens[i]),
                        "kl": float(mean[i]),
                        "replay_kl": share(replay_kl[i], replayed[i]),
                        "flip_share": share(flips[i], rows[i] * len(meta.layers)),
                    }
                )
    return sorted(found, key=lambda entry: -entry["kl"])[:WORST_SAMPLES]


def add_texts(cost: dict[str, Any], files: dict[int, Path], decode: Decode | None) -> None:
    """Put texts (None without a tokenizer) and response ids to the worst tokens and samples, from a second look at their tokens.

    Args:
        files: recording by step.
    """
    entries = [*cost["worst_tokens"], *cost["worst_samples"]]
    tokens = {
        step: _tokens(files[step], (entry for entry in entries if entry["step"] == step)) for step in {one["step"] for one in entries}
    }
    for entry in cost["worst_tokens"]:
        position, ids, _ = tokens[entry["step"]][entry["prompt_id"], entry["sample"]]
        end = int(np.searchsorted(position, entry["position"], side="right"))
        entry["text"] = decode([entry["next_token"]]) if decode else None
        entry["before"] = decode(ids[max(0, end - _BEFORE) : end]) if decode else None
    for entry in cost["worst_samples"]:
        _, _, response = tokens[entry["step"]][entry["prompt_id"], entry["sample"]]
        entry["token_ids"] = [int(one) for one in response[:_SHOWN]]
        entry["text"] = decode(response[:_SHOWN]) if decode else None


def _tokens(path: Path, entries: Iterable[dict[str, Any]]) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(prompt_id, sample) -> positions, input tokens there, generated tokens; of the prompts that the entries name."""
    prompts = sorted({entry["prompt_id"] for entry in entries})
    names = ["prompt_id", "sample", "position", "token", "next_token", "response"]
    table = pq.read_table(path, columns=names, filters=[("prompt_id", "in", prompts)])
    prompt, sample, position, token, following, response = (table[name].to_numpy() for name in names)
    found = {}
    for key in {(int(a), int(b)) for a, b in zip(prompt, sample, strict=True)}:
        which = np.flatnonzero((prompt == key[0]) & (sample == key[1]))
        which = which[np.argsort(position[which], kind="stable")]
        found[key] = position[which], token[which], following[which][response[which]]
    return found
