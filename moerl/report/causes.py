"""Why decisions flip: how near a tie they were, what error of the scores that implies, and whether experts lose in one direction.

Rounding moves scores a little and both ways, so it overturns near-ties and gives no expert an advantage. A wrong bias, swapped experts
or other weights overturn clear decisions, and in one direction.
"""

from typing import Any

import numpy as np

from moerl.report.capture import Meta
from moerl.report.chunk import Chunk
from moerl.report.stats import expected_flips, finite, half_bins, implied_error, log_edges, median_of, middles_of, share

EDGES = log_edges(1e-7, 1.0, 16)
MIDDLES = middles_of(EDGES)
_BINS = half_bins(EDGES)
_MASS_EDGES = np.linspace(0, 1, 51)
_WORST_EXPERTS = 12
_PAIRS_PER_CHUNK = 20000
_SAME, _FLIPPED, _GROUP = range(3)


class Causes:
    """Sums over chunks: a histogram of margins per layer, and flows between experts."""

    def __init__(self, meta: Meta) -> None:
        self.meta = meta
        layers, experts = len(meta.layers), meta.experts
        self.margins = np.zeros((layers, 3, len(MIDDLES)), np.int64)
        self.has_margins = False
        self.ties = np.zeros(layers, np.int64)
        self.flips = np.zeros((layers, 2), np.int64)  # all flips, those in which the groups differ
        self.mass = np.zeros((layers, 2))  # flips, sum of the mass on experts that the engine lacks
        self.mass_counts = np.zeros(len(_MASS_EDGES) - 1, np.int64)
        self.flow = np.zeros((2, 2, layers, experts), np.int64)  # [prompt, response][gained, lost]
        self.swaps = np.zeros((layers, experts, experts), np.int32)  # trainer-only expert, engine-only expert
        self.swap_lost = np.zeros((layers, experts), np.int64)  # how often an expert was trainer-only, of the flips looked at

    def add(self, chunk: Chunk) -> None:
        """Count a chunk that has both sides."""
        if chunk.flipped is None or not len(chunk):
            return
        layers = len(self.meta.layers)
        grouped = self._group_flips(chunk)
        self.flips[:, 0] += np.bincount(chunk.flip_layer, minlength=layers)
        self.flips[:, 1] += np.bincount(chunk.flip_layer[grouped], minlength=layers)
        self._margins(chunk, grouped)
        if chunk.rows.flipped_mass is not None and len(chunk.flip_row):
            mass = chunk.rows.flipped_mass[chunk.flip_row, chunk.flip_layer].astype(np.float64)
            known = np.isfinite(mass)
            self.mass[:, 0] += np.bincount(chunk.flip_layer[known], minlength=layers)
            self.mass[:, 1] += np.bincount(chunk.flip_layer[known], mass[known], layers)
            self.mass_counts += np.histogram(np.clip(mass[known], 0, 1), _MASS_EDGES)[0]
        self._flows(chunk)

    def _group_flips(self, chunk: Chunk) -> np.ndarray:
        """bool[m]: both sides together use more groups than one side may, so the groups must differ."""
        meta = self.meta
        if meta.group_topk == meta.groups or meta.groups > 64 or not len(chunk.flip_row):
            return np.zeros(len(chunk.flip_row), bool)
        size = meta.experts // meta.groups
        bits = np.uint64(1) << np.arange(meta.groups, dtype=np.uint64)
        used = [np.bitwise_or.reduce(bits[side // size], axis=1) for side in (chunk.one_side, chunk.other_side)]
        return np.bitwise_count(used[0] | used[1]) > meta.group_topk

    def _margins(self, chunk: Chunk, grouped: np.ndarray) -> None:
        margin = chunk.rows.margin
        if margin is None:
            return
        self.has_margins = True
        bins = _BINS[np.ascontiguousarray(margin, np.float16).view(np.uint16)]
        self.ties += np.count_nonzero(margin == 0, axis=0)
        for layer in range(bins.shape[1]):
            self.margins[layer, _SAME] += np.bincount(bins[:, layer], minlength=len(MIDDLES))
        flipped = bins[chunk.flip_row, chunk.flip_layer].astype(np.int64) + len(MIDDLES) * chunk.flip_layer
        for kind, which in ((_FLIPPED, ~grouped), (_GROUP, grouped)):
            found = np.bincount(flipped[which], minlength=len(MIDDLES) * bins.shape[1]).reshape(bins.shape[1], -1)
            self.margins[:, kind] += found
            self.margins[:, _SAME] -= found

    def _flows(self, chunk: Chunk) -> None:
        layers, experts = self.flow.shape[2:]
        response = chunk.rows.response[chunk.flip_row]
        for direction, (ids, only) in enumerate(((chunk.one_side, chunk.one_only), (chunk.other_side, chunk.other_only))):
            flat = (ids + (experts * chunk.flip_layer)[:, None])[only]
            kind = np.broadcast_to(response[:, None], only.shape)[only]
            for value in (0, 1):
                counts = np.bincount(flat[kind == bool(value)], minlength=layers * experts)
                self.flow[value, direction] += counts.reshape(layers, experts)
        some = slice(None, None, max(1, -(-len(chunk.flip_row) // _PAIRS_PER_CHUNK)))
        lost, gained, layer = (side[some] for side in (chunk.other_side, chunk.one_side, chunk.flip_layer))
        flat = (layer[:, None] * experts + lost)[chunk.other_only[some]]
        self.swap_lost += np.bincount(flat, minlength=layers * experts).reshape(layers, experts)
        pairs = chunk.other_only[some][:, :, None] & chunk.one_only[some][:, None, :]
        where, a, b = np.nonzero(pairs)
        np.add.at(self.swaps.reshape(-1), (layer[where] * experts + lost[where, a]) * experts + gained[where, b], 1)

    def flows(self) -> np.ndarray:
        """int64[gained or lost, layer, expert], of generated tokens: prompts repeat the same decisions in every sample of a group."""
        return self.flow[1] if self.flow[1].any() else self.flow[0]

    def result(self, one_load: np.ndarray, bias: list[dict[str, Any]], bias_by_layer: dict[int, float]) -> dict[str, Any] | None:
        """`causes` of the report, without the matches of layers and positions; None where nothing has two sides.

        Args:
            one_load: int64[layer, expert]: how often the engine chose each. bias, bias_by_layer: see `bias_differences`.
        """
        if self.has_margins or self.flips.any():
            return {
                "margin": self._margin_result() if self.has_margins else None,
                "by_layer": [self._layer(i, layer, bias_by_layer) for i, layer in enumerate(self.meta.layers)],
                "flipped_mass": self._mass_result(),
                "group_share": share(self.flips[:, 1].sum(), self.flips[:, 0].sum()) if self.meta.group_topk < self.meta.groups else None,
                "bias": bias,
                "experts": self._experts(one_load),
            }
        return None

    def _layer(self, i: int, layer: int, bias: dict[int, float]) -> dict[str, Any]:
        same, flipped, group = self.margins[i]
        every = same + flipped + group
        median = median_of(every, MIDDLES)
        flips, grouped = self.flips[i]  # of groups: their margin says nothing, as it is that between experts of the chosen groups
        far = share(flipped[median < MIDDLES].sum(), flipped.sum()) if median is not None else None
        return {
            "layer": layer,
            "score_error": implied_error(every, flipped.sum(), MIDDLES) if self.has_margins else None,
            "median_margin": median,
            "median_margin_flipped": median_of(flipped + group, MIDDLES),
            "ties": share(self.ties[i], every.sum()),
            "far_flip_share": far,
            "group_share": share(grouped, flips) if self.meta.group_topk < self.meta.groups else None,
            "flipped_mass": share(self.mass[i, 1], self.mass[i, 0]),
            "direction": self._direction(i),
            "bias_diff": bias.get(layer),
        }

    def _direction(self, i: int) -> float | None:
        """0: every expert gains as often as it loses, up to chance; 1: each only gains or only loses."""
        gained, lost = self.flows()[:, i].astype(np.float64)
        total = (gained + lost).sum()
        if not total:
            return None
        by_chance = np.sqrt(2 * (gained + lost) / np.pi)
        return float(np.maximum(np.abs(gained - lost) - by_chance, 0).sum() / total)

    def _margin_result(self) -> dict[str, Any]:
        same, flipped = self.margins[:, _SAME].sum(0), self.margins[:, _FLIPPED].sum(0) + self.margins[:, _GROUP].sum(0)
        every, total = same + flipped, (same + flipped).sum()
        expected = np.zeros(len(MIDDLES))
        for found in self.margins:
            sigma = implied_error(found.sum(0), found[_FLIPPED].sum(), MIDDLES)
            if sigma:
                expected += expected_flips(found.sum(0), sigma, MIDDLES)
        used = np.flatnonzero(every[1:])
        low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
        bins = range(low + 1, high + 1)
        return {
            "edges": EDGES[low : high + 1].tolist(),
            "same": [share(same[i], total) for i in bins],
            "flipped": [share(flipped[i], total) for i in bins],
            "flip_share": [share(flipped[i], every[i]) for i in bins],
            "expected": [share(expected[i], every[i]) for i in bins],
        }

    def _mass_result(self) -> dict[str, Any] | None:
        flips, mass = self.mass.sum(axis=0)
        if not flips:
            return None
        return {"edges": _MASS_EDGES.tolist(), "share": (self.mass_counts / flips).tolist(), "mean": finite(mass / flips)}

    def _experts(self, one_load: np.ndarray) -> list[dict[str, Any]]:
        gained, lost = self.flow.sum(axis=0)
        net = np.abs(self.flows()[0] - self.flows()[1])
        worst = np.argsort(net, axis=None)[::-1][:_WORST_EXPERTS]
        found = []
        for layer, expert in zip(*np.unravel_index(worst, net.shape), strict=True):
            if net[layer, expert]:
                up, down, chosen = (int(part[layer, expert]) for part in (gained, lost, one_load))
                entry = {"layer": self.meta.layers[layer], "expert": int(expert), "engine": chosen, "trainer": chosen - up + down}
                found.append({**entry, "gained": up, "lost": down})
        return found

    def swapped(self, one_load: np.ndarray, least: int = 20) -> list[tuple[int, int, int, float]]:
        """Experts of the trainer in whose place the engine has another, nearly always: (model layer, expert, in its place, how often)."""
        gained, lost = self.flow.sum(axis=0)
        chosen = np.maximum(one_load - gained + lost, 1)
        found = []
        for i, layer in enumerate(self.meta.layers):
            place = self.swaps[i].argmax(axis=1)
            times = self.swaps[i][np.arange(len(place)), place]
            sure = (times >= least) & (times >= 0.8 * self.swap_lost[i]) & (lost[i] >= 0.5 * chosen[i])
            found += [(layer, int(e), int(place[e]), float(times[e] / self.swap_lost[i][e])) for e in np.flatnonzero(sure)]
        return found


def bias_differences(meta: Meta, biases: dict[str, np.ndarray], engine_version: int | None) -> list[dict[str, Any]]:
    """Per layer, how far the two sides' correction biases are apart; what all experts of a layer share changes no choice and is left out.

    Returns:
        `{step, engine_version, trainer_version, layer, max_diff, expert}` per layer; empty where a side's bias is not recorded.
    """
    if len(biases) < 2:
        return []
    apart = biases["engine_bias"].astype(np.float64) - biases["trainer_bias"]
    apart -= np.median(apart, axis=1, keepdims=True)
    worst = np.abs(apart).argmax(axis=1)
    return [
        {
            "step": meta.step,
            "engine_version": engine_version,
            "trainer_version": meta.trainer_version,
            "layer": layer,
            "max_diff": float(abs(apart[i, worst[i]])),
            "expert": int(worst[i]),
        }
        for i, layer in enumerate(meta.layers)
    ]
