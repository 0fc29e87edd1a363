"""What a run achieved: `summary.json` from `metrics.jsonl`, and whether that is what the config requires. Reads files only."""

import json
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


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All records of `metrics.jsonl`, in order; of a step that was run again after a resume, the last."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return list({record["step"]: record for record in map(json.loads, lines)}.values())


def summarise(records: Iterable[dict[str, Any]], *, minutes: float) -> dict[str, Any]:
    """Figures of the whole run from its steps' records.

    Returns:
        reward_start and reward_end are means over the first and last tenth of the steps (at least three);
        the mismatch figures are token-weighted means over all steps that measured them; heldout_* are sampled accuracies;
        versions_consistent is None where no weights were pushed.
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
    }
    for when, record in (("start", heldout[0]), ("end", heldout[-1])) if heldout else ():
        found[f"heldout_{when}"] = record["heldout_accuracy"]
        found[f"heldout_greedy_{when}"] = record["heldout_greedy_accuracy"]
    for name, metric in _TOKEN_MEANS.items():
        measured = [(record[metric], record["response_tokens"]) for record in steps if record.get(metric) is not None]
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
