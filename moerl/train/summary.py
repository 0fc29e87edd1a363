"""Figures for people: a step's line, what the run achieved (`summary.json` and the closing table, from `metrics.jsonl`), and whether that
is what the config requires. Reads files only.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from moerl.config.schema import Require
from moerl.errors import TrainError

# summary field -> metric that is averaged over steps, weighted by the step's response tokens
_TOKEN_MEANS = {
    "natural_flip_share": "natural_flip_share",
    "replay_agreement": "replay_agreement",
    "kl_natural": "kl_natural",
    "kl_replay": "kl_replay",
    "abs_diff_natural": "abs_diff_natural",
    "abs_diff_replay": "abs_diff_replay",
    "extreme_share_natural": "extreme_share_natural",
    "extreme_share_replay": "extreme_share_replay",
    "wide_share_natural": "wide_share_natural",
    "wide_share_replay": "wide_share_replay",
    "ess": "ess_replay",
}

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
        the mismatch figures are token-weighted means over all steps that measured them, busy shares are means over time;
        heldout_* are sampled accuracies; versions_consistent is None where no weights were pushed; sync_ways counts the pushes by
        the way they took, and alarms the steps with any. Figures of the buffer are there where engines generated.
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
    }
    for when, record in (("start", heldout[0]), ("end", heldout[-1])) if heldout else ():
        found[f"heldout_{when}"] = record["heldout_accuracy"]
        found[f"heldout_greedy_{when}"] = record["heldout_greedy_accuracy"]
    if generated := [record for record in steps if "buffer/lag_highest" in record]:
        found["lag_highest"] = max(record["buffer/lag_highest"] for record in generated)
        found["groups_refused"] = sum(record["buffer/refused_groups"] for record in generated)
        found["tokens_wasted"] = sum(record["buffer/wasted_tokens"] for record in generated)
    weighings = ((_TOKEN_MEANS, lambda record: record["response_tokens"]), (_TIME_MEANS, _step_s), (_STEP_MEANS, lambda record: 1))
    for means, weight in weighings:
        for name, metric in means.items():
            measured = [(record[metric], weight(record)) for record in steps if record.get(metric) is not None]
            if measured:
                values, weights = np.array(measured, float).T
                found[name] = float(np.average(values, weights=weights))
    return found


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
        ahead: generation may run ahead: also show the highest lag, and the busy shares of engines and trainer.
    """
    shown = {
        "reward": "reward",
        "held-out": "heldout_accuracy",
        "flips": "natural_flip_share",
        "agree": "replay_agreement",
        "kl natural": "kl_natural",
        "kl replay": "kl_replay",
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
    if "ess" in found:
        rows["effective sample size"] = found["ess"]
    rows |= _generation_rows(found)
    if found["versions_consistent"] is not None:
        rows["engine versions and checksums"] = "as pushed after every step" if found["versions_consistent"] else "INCONSISTENT"
    if found["alarms"]:
        rows["alarms"] = f"in {found['alarms']} of {found['steps']} steps"
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
