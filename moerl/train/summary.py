"""Figures for people: a step's line, what the run achieved (`summary.json` and the closing table, from `metrics.jsonl`), and whether that
is what the config requires. Reads files only.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moerl.config.schema import Require
from moerl.errors import TrainError

# summary field -> metric that is averaged over steps, weighted by the step's response tokens
_TOKEN_MEANS = {"replay_agreement": "replay_agreement", "ess": "ess_replay"}

# the same, of figures of the gap between engine and trainer: in a run with a lag, of those without staleness (`fresh`)
_GAP_MEANS = (
    "natural_flip_share",
    *(f"{name}_{side}" for name in ("kl", "abs_diff", "extreme_share", "wide_share") for side in ("natural", "replay")),
)

# the same, weighted by the step's seconds
_TIME_MEANS = {
    "engines_busy_share": "buffer/engines_busy_share",
    "trainer_busy_share": "buffer/trainer_busy_share",
}

# the same, every step alike: all train as many groups, and update all weights
_STEP_MEANS = {"lag_mean": "buffer/lag_mean", "sync_changed_share": "sync_changed_share"}


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All records of `metrics.jsonl`, in order; of a step that was run again after a resume, the last."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return list({record["step"]: record for record in map(json.loads, lines)}.values())


def summarise(records: Iterable[dict[str, Any]], *, minutes: float) -> dict[str, Any]:
    """Figures of the whole run from its steps' records.

    Returns:
        reward_start and reward_end are means over the first and last tenth of the steps (at least three);
        the mismatch figures are token-weighted means over all steps that measured them, in a run with a lag of tokens under the weights
        that sampled them (mismatch_tokens of them); kl_by_lag, in a run with a lag, is the KL under replay of trained tokens by their
        lag, staleness included; busy shares are means over time;
        heldout_* are sampled accuracies; versions_consistent is None where no weights were pushed; sync_ways counts the pushes by
        the way they took, alarms the steps with any, alarm_kinds those of each kind. Figures of the buffer are there where engines
        generated.
    """
    records = list(records)
    steps = [record for record in records if "reward" in record]
    rewards = np.array([record["reward"] for record in steps], float)
    window = max(1, min(len(rewards), max(3, round(len(rewards) / 10))))
    heldout = [record for record in records if "heldout_accuracy" in record]
    synced = [record["versions_consistent"] for record in records if "versions_consistent" in record]
    found: dict[str, Any] = {
        "steps": len(steps),
        "minutes": round(minutes, 2),
        "reward_start": float(rewards[:window].mean()) if len(rewards) else None,
        "reward_end": float(rewards[-window:].mean()) if len(rewards) else None,
        "versions_consistent": all(synced) if synced else None,
        "sync_ways": dict(Counter(record["sync_way"] for record in records if "sync_way" in record).most_common()),
        "alarms": sum(bool(record.get("alarms")) for record in steps),
        "alarm_kinds": dict(Counter(name.removeprefix("alarm/") for record in steps for name in record if name.startswith("alarm/"))),
    }
    for when, record in (("start", heldout[0]), ("end", heldout[-1])) if heldout else ():
        found[f"heldout_{when}"] = record["heldout_accuracy"]
        found[f"heldout_greedy_{when}"] = record["heldout_greedy_accuracy"]
    if generated := [record for record in steps if "buffer/lag_highest" in record]:
        found["lag_highest"] = max(record["buffer/lag_highest"] for record in generated)
        found["groups_refused"] = sum(record["buffer/refused_groups"] for record in generated)
        found["tokens_wasted"] = sum(record["buffer/wasted_tokens"] for record in generated)
    by_lag = _kl_by_lag(steps)
    if by_lag:
        found["kl_by_lag"] = by_lag
    fresh, of = ("fresh/", "fresh/tokens") if by_lag else ("", "response_tokens")
    weighings = (
        (_TOKEN_MEANS, lambda record: record["response_tokens"]),
        ({name: f"{fresh}{name}" for name in _GAP_MEANS}, lambda record: record[of]),
        (_TIME_MEANS, _step_s),
        (_STEP_MEANS, lambda record: 1),
    )
    for means, weight in weighings:
        for name, metric in means.items():
            measured = [(record[metric], weight(record)) for record in steps if record.get(metric) is not None]
            if measured:
                found[name] = _mean(measured)
    if "kl_natural" in found:
        found["mismatch_tokens"] = sum(record[of] for record in steps if record.get(f"{fresh}kl_natural") is not None)
    return found


def _kl_by_lag(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Lag -> KL of tokens of that lag; empty where nothing was stale."""
    seen = sorted({int(name.removeprefix("kl_lag")) for record in steps for name in record if name.startswith("kl_lag")})
    if not any(seen):
        return {}
    measured = {
        lag: [
            (record[f"kl_lag{lag}"], record[f"token_share_lag{lag}"] * record["response_tokens"])
            for record in steps
            if record.get(f"kl_lag{lag}") is not None
        ]
        for lag in seen
    }
    return {str(lag): _mean(pairs) for lag, pairs in measured.items() if pairs}


def _mean(measured: Sequence[tuple[float, float]]) -> float:
    """Of (value, weight)."""
    values, weights = np.array(measured, float).T
    return float(np.average(values, weights=weights))


def check_requirements(summary: dict[str, Any], require: Require) -> None:
    """Raise TrainError naming everything the run had to achieve and did not."""
    failed = []
    for name, least in (("reward", require.min_reward_gain), ("heldout", require.min_heldout_gain)):
        if least is not None and f"{name}_start" not in summary:
            failed.append(f"{name} was not measured, but require.min_{name}_gain asks for at least {least:+.3f}; leave it out")
        elif least is not None:
            before, after = summary[f"{name}_start"], summary[f"{name}_end"]
            if after - before < least:
                failed.append(f"{name} went from {before:.3f} to {after:.3f}; require.min_{name}_gain asks for at least {least:+.3f}")
    if summary["versions_consistent"] is False:
        failed.append("an engine served another weight version than the trainer had pushed, or other bytes")
    if failed:
        raise TrainError("the run did not achieve what its config requires:\n" + "\n".join(f"  - {line}" for line in failed))


def headline(metrics: dict[str, Any], *, ahead: bool = False) -> dict[str, Any]:
    """The few figures of a step worth a line on the console.

    Args:
        ahead: generation may run ahead: also show the highest lag, and the busy shares of engines and trainer. Flips and KL are then those
            without staleness, in the steps that measured them, and `kl stale` is the KL under replay of what is trained.
    """
    fresh = "fresh/" if ahead else ""
    shown = {
        "reward": "reward",
        "held-out": "heldout_accuracy",
        "flips": f"{fresh}natural_flip_share",
        "agree": "replay_agreement",
        "kl natural": f"{fresh}kl_natural",
        "kl replay": f"{fresh}kl_replay",
        **({"kl stale": "kl_replay"} if ahead else {}),
        "ess": "ess_replay",
        "loss": "loss",
        "version": "version",
    }
    line = {name: metrics[metric] for name, metric in shown.items() if metrics.get(metric) is not None}
    if metrics.get("weights_checksum"):
        line["version"] = f"{metrics['version']} ({metrics['weights_checksum'][:8]})"
    if ahead and "buffer/lag_highest" in metrics:
        line["lag"] = int(metrics["buffer/lag_highest"])
        line["busy"] = f"{metrics['buffer/engines_busy_share']:.2f}/{metrics['buffer/trainer_busy_share']:.2f}"
    return {**line, "s": _step_s(metrics)}


def closing_rows(found: dict[str, Any]) -> dict[str, Any]:
    """The summary as rows of a table."""

    def span(before: str, after: str) -> str:
        return f"{found[before]:.3f} -> {found[after]:.3f}"

    def pair(name: str, scale: float = 1.0, form: str = ".1e", unit: str = "") -> str:
        natural, replayed = (scale * found[f"{name}_{side}"] for side in ("natural", "replay"))
        return f"{natural:{form}}{unit} natural, {replayed:{form}}{unit} replayed"

    stale = found.get("kl_by_lag")
    rows: dict[str, Any] = {"steps": f"{found['steps']} in {found['minutes']:.1f} min"}
    if found["reward_start"] is not None:
        rows["reward"] = span("reward_start", "reward_end")
    if "heldout_start" in found:
        rows["held-out accuracy, sampled"] = span("heldout_start", "heldout_end")
        rows["held-out accuracy, greedy"] = span("heldout_greedy_start", "heldout_greedy_end")
    if "natural_flip_share" in found:
        rows["routes the trainer would change"] = f"{100 * found['natural_flip_share']:.1f} % of (token, layer) decisions"
    if "replay_agreement" in found:
        rows["routes agreeing under replay"] = f"{100 * found['replay_agreement']:.2f} %"
    if "kl_replay" in found and "kl_natural" in found:
        ratio = found["kl_natural"] / max(found["kl_replay"], 1e-12)
        rows["KL(engine || trainer), k3"] = f"{pair('kl')} (1/{ratio:.0f})"
        rows["mean |logprob difference|"] = pair("abs_diff")
        rows["tokens, ratio outside 1/2..2"] = pair("extreme_share", 100, ".2f", " %")
        rows["tokens, ratio outside 1/1.2..1.2"] = pair("wide_share", 100, ".2f", " %")
        rows["tokens measured"] = f"{found['mismatch_tokens']:,.0f}" + (", under the weights that sampled them" if stale else "")
    if stale:
        rows["KL with staleness, by lag"] = ", ".join(f"{lag}: {kl:.1e}" for lag, kl in stale.items()) + " replayed"
    if "ess" in found:
        rows["effective sample size"] = found["ess"]
    rows |= _generation_rows(found)
    if found["versions_consistent"] is not None:
        rows["engine versions and checksums"] = "as pushed after every step" if found["versions_consistent"] else "INCONSISTENT"
    if found["alarms"]:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(found["alarm_kinds"].items(), key=lambda one: -one[1]))
        rows["alarms"] = f"in {found['alarms']} of {found['steps']} steps: {kinds}"
    return rows


def _generation_rows(found: dict[str, Any]) -> dict[str, str]:
    """What ran beside training, and how the engines got their weights."""
    rows = {}
    if found.get("lag_highest"):
        rows["lag, mean and highest"] = f"{found['lag_mean']:.2f}, {found['lag_highest']:.0f}"
    if "engines_busy_share" in found:
        rows["engines busy, trainer busy"] = f"{100 * found['engines_busy_share']:.0f} %, {100 * found['trainer_busy_share']:.0f} %"
        rows["groups refused, tokens wasted"] = f"{found['groups_refused']:,.0f}, {found['tokens_wasted']:,.0f}"
    if "sync_changed_share" in found:
        rows["weights changed per update"] = f"{100 * found['sync_changed_share']:.2f} %"
    if found["sync_ways"]:
        rows["how weights travelled"] = ", ".join(f"{count} x {way}" for way, count in found["sync_ways"].items())
    return rows


def _step_s(record: dict[str, Any]) -> float:
    """Seconds of a step."""
    return sum(seconds for name, seconds in record.items() if name.startswith("time/"))
