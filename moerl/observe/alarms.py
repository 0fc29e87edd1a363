"""Figures of a step that a person should act on, in plain words: what they mean, and which setting to change.

    a step's metrics + config  --alarms-->  {kind: sentence}  --due-->  the sentences to show now

Pure functions. A figure that was not measured raises no alarm. The thresholds of the two figures whose tolerable size depends on the
task are settings of `[observe]`; those of the others, below, are where a figure stops being what a step usually looks like.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from moerl.config.schema import Config

MOST = 0.5
"""Share of a step's time from which on a part waits for most of it."""
MASKED = 0.1
"""Share of response tokens that may be left out of the loss."""

Metrics = Mapping[str, Any]

_REFUSED = {
    "late": 'they were still running when due; raise buffer.max_lag, or set buffer.policy to "wait" or "mask"',
    "timeout": "they ran too long; raise buffer.group_timeout_s, or lower rollout.max_new_tokens",
    "failed": "too many of their completions failed, see the log for why; raise buffer.sample_retries, or lower buffer.min_group",
    "reward": "their reward failed, see the log for why; raise task.reward_timeout_s or task.reward_retries",
}
"""Reason for which a group is refused (uniform ones are refused on request) -> what it means and what to change."""


def alarms(metrics: Metrics, config: Config) -> dict[str, str]:
    """What is wrong with a step: kind of alarm -> one sentence.

    Args:
        metrics: all figures of the step, as they are logged; the seconds of its phases are `time/…`.
    """
    figures = defaultdict(float, {name: value for name, value in metrics.items() if value is not None})  # 0 alarms nobody
    return {kind: sentence for check in _CHECKS for kind, sentence in check(figures, config)}


def due(found: Mapping[str, str], step: int, shown: Mapping[str, int], every_steps: int) -> dict[str, str]:
    """Those of the alarms of a step that are to be shown: each kind at once, and then again after `every_steps`.

    Args:
        shown: kind -> step at which it was last shown.
        every_steps: 0 shows none.
    """
    return {kind: text for kind, text in found.items() if every_steps and (kind not in shown or step - shown[kind] >= every_steps)}


def _sample_size(metrics: Metrics, config: Config) -> Iterator[tuple[str, str]]:
    names = [name for name in metrics if name in ("ess_replay", "ess_trained") or name.startswith("ess_lag")]
    lowest = min(names, key=lambda name: metrics[name], default="")
    if lowest and metrics[lowest] < config.observe.alarm_min_ess:
        lag = lowest.removeprefix("ess_lag") if lowest.startswith("ess_lag") else None
        whose = "the step's tokens" if lag is None else f"tokens of lag {lag}"
        yield (
            "ess",
            f"{lowest} {metrics[lowest]:.2f}: as samples of the trained policy, {whose} are worth only that share of their number, since "
            f"the engines' policy was another; {_nearer(config)} (observe.alarm_min_ess {config.observe.alarm_min_ess:g})",
        )


def _divergence(metrics: Metrics, config: Config) -> Iterator[tuple[str, str]]:
    limit = config.observe.alarm_max_kl
    for name in ("kl_replay", "kl_trained"):
        if limit and name in metrics and metrics[name] > limit:
            yield (
                "kl",
                f"{name} {metrics[name]:.2g} nats per token: the trainer's policy is far from the one that sampled; {_nearer(config)} "
                f"(observe.alarm_max_kl {limit:g})",
            )


def _nearer(config: Config) -> str:
    """What brings the policies of engine and trainer nearer to each other."""
    ways = []
    if config.replay.actor == "off":
        ways.append('set replay.actor = "rollout"')
    if config.buffer.max_lag:
        ways.append(f"lower buffer.max_lag {config.buffer.max_lag} or train.lr")
    return ", or ".join(ways) or "look for what the two compute differently: engine.dtype and train.dtype, [sglang] and [megatron]"


def _starved_trainer(metrics: Metrics, config: Config) -> Iterator[tuple[str, str]]:
    """The trainer waits for groups although generation may not run further ahead."""
    max_lag, waits = config.buffer.max_lag, _rollout_share(metrics)
    if max_lag and metrics["buffer/lag_highest"] >= max_lag and waits > MOST:
        yield (
            "trainer_waits",
            f"the trainer waits for groups {100 * waits:.0f} % of the step, and their lag is already {max_lag}, the most that "
            "buffer.max_lag allows: generation is the slower side; add engines (engine.count) or lower rollout.max_new_tokens, or, where "
            "few long completions hold up the others (buffer/trainer_waits_for_due_s), raise buffer.max_lag",
        )


def _paced_engines(metrics: Metrics, config: Config) -> Iterator[tuple[str, str]]:
    """Engines have free slots because nothing more may be admitted, though not because the trainer has yet to get its groups.

    With a single engine and a busy trainer there is nothing that could be moved from one to the other.
    """
    max_lag, paced = config.buffer.max_lag, metrics["buffer/engines_paced_share"]
    movable = config.engine.count > 1 or metrics["buffer/trainer_busy_share"] <= MOST
    if max_lag and paced > MOST and _rollout_share(metrics) <= MOST and movable:
        limits = "buffer.max_lag" if config.buffer.capacity_groups is None else "buffer.capacity_groups or buffer.max_lag"
        yield (
            "engines_paced",
            f"{100 * paced:.0f} % of the engines' slots are free because no further group may be admitted: training is the slower side, or "
            f"engine.count x engine.max_running_requests is more than the buffer admits; give the trainer more ranks, use fewer engines "
            f"or slots, or raise {limits}",
        )


def _rollout_share(metrics: Metrics) -> float:
    """Share of the step's time in which rank 0 waits for groups."""
    step_s = sum(seconds for name, seconds in metrics.items() if name.startswith("time/"))
    return metrics["time/rollout"] / step_s if step_s else 0.0


def _refused_groups(metrics: Metrics, config: Config) -> Iterator[tuple[str, str]]:
    for reason, meaning in _REFUSED.items():
        if count := metrics[f"buffer/refused_{reason}"]:
            yield f"refused_{reason}", f"{count:.0f} group(s) were refused and are not trained: {meaning}"


def _equal_rewards(metrics: Metrics, config: Config) -> Iterator[tuple[str, str]]:
    uniform = metrics["uniform_shaped_share" if "uniform_shaped_share" in metrics else "uniform_groups_share"]
    if uniform == 1:
        way = "" if config.buffer.dynamic_sampling else ", or set buffer.dynamic_sampling = true to replace such groups"
        yield (
            "equal_rewards",
            f"every group of this step has equal rewards (mean {metrics['reward']:g}): it teaches nothing; change how hard the task is "
            f"(task.options), raise rollout.group_size or rollout.temperature, check task.reward{way}",
        )


def _masked_tokens(metrics: Metrics, config: Config) -> Iterator[tuple[str, str]]:
    if (masked := metrics["masked_share"]) > MASKED:
        causes = []
        if config.replay.missing == "mask":
            causes.append("their routes are missing (see missing_routes_share) or refused (raise replay.max_row_lag)")
        if config.buffer.policy == "mask" and config.buffer.max_lag:
            causes.append(f"they are older than buffer.max_lag {config.buffer.max_lag} allows (raise it)")
        because = f": {', or '.join(causes)}" if causes else ""
        yield "masked", f"{100 * masked:.0f} % of the response tokens are left out of the loss{because}"


def _repeated_sync(metrics: Metrics, config: Config) -> Iterator[tuple[str, str]]:
    if (attempts := metrics["sync_attempts"]) > 1:
        yield (
            "sync_attempts",
            f"the weights reached the engines only at attempt {attempts} ({metrics['sync_way']}); the log says what failed before. "
            'If that goes on, raise sync.timeout_s where it was too slow, or set sync.way = "compatible"',
        )


_CHECKS = (
    _sample_size,
    _divergence,
    _starved_trainer,
    _paced_engines,
    _refused_groups,
    _equal_rewards,
    _masked_tokens,
    _repeated_sync,
)
