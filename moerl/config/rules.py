"""Rules between settings. Each says which settings it reads, what must hold, and what to change.

A rule is a function from a `Check` to problems; all of them run, and a problem that reads a setting whose own value is
already wrong is dropped, since the rule then judged a default.
"""

import difflib
import re
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from moerl.config.guards import mtp_problems, replay_problems
from moerl.config.rule import Check, Problem
from moerl.config.rules_parallel import launched, parallel_sizes, waits
from moerl.config.schema import Config

if TYPE_CHECKING:
    from moerl.models import ModelSpec

REWARDS = ("math_verify", "exact_integer")
"""Rewards that have a short name; any other is `package.module:function`."""
TIS, MIS = ("tis", "tis_sequence"), ("mis", "mis_sequence")
"""Corrections that read `tis_cap` and `mis_cap`."""
MASK_TOKENS = 4096
"""SGLang's own `sampling_mask_max_tokens`: how many kept tokens of a position it reports at most."""


def rule_problems(
    config: Config, given: dict[str, int], wrong: set[str], world: int | None = None, started: int | None = None
) -> list[str]:
    """All cross-field violations as sentences.

    Args:
        given: dotted path -> index of the source that set it last.
        wrong: dotted paths whose own value is invalid.
        world: number of trainer ranks; `parallel.nodes` x `parallel.nproc_per_node` where None.
        started: number of trainer ranks that a launcher has started; None where none has.
    """
    check = Check(config, given, world or config.parallel.world, started)
    return [problem.text for rule in RULES for problem in rule(check) if wrong.isdisjoint(problem.reads)]


def model_problems(config: Config, spec: "ModelSpec") -> list[str]:
    """Settings that do not fit the model: sizes that must divide its layers, heads and experts."""
    parallel, hf = config.parallel, spec.hf_config
    problems = []
    stages = parallel.pp * parallel.vpp
    if spec.layers < stages:
        problems.append(
            f"parallel: the model has {spec.layers} layers, fewer than pp {parallel.pp} x vpp {parallel.vpp} = {stages} stages; "
            "lower pp or vpp"
        )
    if spec.experts % parallel.ep:
        problems.append(f"parallel.ep: the model's {spec.experts} experts cannot be split over {parallel.ep} ranks; choose a divisor")
    checkpoint = config.model.megatron_checkpoint
    if checkpoint and not (Path(checkpoint) / "metadata.json").is_file():
        problems.append(
            f"model.megatron_checkpoint: {checkpoint} is no Megatron distributed checkpoint, it has no metadata.json; make one with "
            f"`moerl convert hf-to-megatron {config.model.path} {checkpoint}`, or leave the setting out"
        )
    if config.train.builds_mtp and not spec.mtp_layers:
        problems.append(
            f"train.mtp: {config.train.mtp!r} asks for a layer for multi-token prediction, but {config.model.path}/config.json announces "
            "none; leave the setting out, or choose a checkpoint that has one"
        )
    heads = hf["num_attention_heads"]
    for name, size in (("parallel.tp", parallel.tp), ("engine.tp", config.engine.tp)):
        if heads % size:
            problems.append(f"{name}: the model's {heads} attention heads cannot be split over {size} ranks; choose a divisor")
    return problems


def sampling(check: Check) -> Iterator[Problem]:
    rollout, task = check.config.rollout, check.config.task
    if rollout.group_size < 2:
        yield Problem(
            ("rollout.group_size",),
            f"rollout.group_size {rollout.group_size}: advantages are normalised over a prompt's group, so it needs at least 2 completions",
        )
    if rollout.prompts_per_step > task.prompts:
        yield Problem(
            ("rollout.prompts_per_step", "task.prompts"),
            f"rollout.prompts_per_step {rollout.prompts_per_step} is more than the {task.prompts} prompts there are (task.prompts)",
        )


def truncation(check: Check) -> Iterator[Problem]:
    """SGLang reports which tokens it kept only for a finite top-k, and only so many of them."""
    rollout = check.config.rollout
    limit = check.config.sglang.get("sampling_mask_max_tokens", MASK_TOKENS)
    if rollout.top_p < 1 and rollout.top_k == -1:
        yield Problem(
            ("rollout.top_p", "rollout.top_k"),
            f"rollout.top_p {rollout.top_p:g} needs a finite rollout.top_k as well, from 2 to {limit}: without one SGLang does not report "
            "which tokens it kept, and the trainer could not be put on the same ones; a large top_k leaves the choice to top_p",
        )
    if rollout.top_k in (0, 1):
        yield Problem(
            ("rollout.top_k",),
            f"rollout.top_k {rollout.top_k} leaves no choice, and a group's completions could not differ: expected -1 or at least 2",
        )
    if isinstance(limit, int) and rollout.top_k > limit:
        yield Problem(
            ("rollout.top_k",),
            f"rollout.top_k {rollout.top_k} is more than the {limit} tokens of a position that SGLang reports as kept: lower it, or raise "
            "sglang.sampling_mask_max_tokens",
        )


def token_budgets(check: Check) -> Iterator[Problem]:
    config = check.config
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    reads = ("rollout.max_prompt_tokens", "rollout.max_new_tokens")
    rollout = config.rollout
    sentence = f"rollout.max_prompt_tokens {rollout.max_prompt_tokens} + rollout.max_new_tokens {rollout.max_new_tokens} = {longest} tokens"
    if config.engine.max_total_tokens < longest:
        yield Problem(
            (*reads, "engine.max_total_tokens"),
            f"engine.max_total_tokens {config.engine.max_total_tokens} cannot hold one sequence: {sentence}",
        )
    if config.train.tokens_per_microbatch < longest:
        yield Problem(
            (*reads, "train.tokens_per_microbatch"),
            f"train.tokens_per_microbatch {config.train.tokens_per_microbatch} cannot hold one sequence: {sentence}",
        )
    if config.diagnostics.capture_every_steps and 0 < config.diagnostics.capture_tokens < longest:
        yield Problem(
            (*reads, "diagnostics.capture_every_steps", "diagnostics.capture_tokens"),
            f"diagnostics.capture_tokens {config.diagnostics.capture_tokens} may not hold one whole sample: {sentence}; raise it, or set 0",
        )
    margin = config.objective.overlong_margin_tokens
    if margin >= rollout.max_new_tokens:
        yield Problem(
            ("objective.overlong_margin_tokens", "rollout.max_new_tokens"),
            f"objective.overlong_margin_tokens {margin} would punish completions of every length up to rollout.max_new_tokens "
            f"{rollout.max_new_tokens}: lower it below that, or set it to 0",
        )


def task(check: Check) -> Iterator[Problem]:
    task = check.config.task
    if task.kind == "jsonl" and not task.path:
        yield Problem(
            ("task.kind", "task.path"), 'task.path is required with task.kind = "jsonl": the file with one {"prompt", "answer"} per line'
        )
    fields = [name for _, name, _, _ in _template_fields(task.prompt_template) if name is not None]
    if fields != ["prompt"]:
        yield Problem(
            ("task.prompt_template",),
            f"task.prompt_template must hold {{prompt}} once and no other field (write literal braces twice), got {task.prompt_template!r}",
        )
    try:
        re.compile(task.strip_question)
    except re.error as error:
        yield Problem(("task.strip_question",), f"task.strip_question is not a regular expression: {error}; got {task.strip_question!r}")
    if task.reward not in REWARDS and not re.fullmatch(r"[\w.]+:\w+", task.reward):
        near = difflib.get_close_matches(task.reward, REWARDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        yield Problem(("task.reward",), f"task.reward: expected {', '.join(REWARDS)} or package.module:function, got {task.reward!r}{hint}")


def correction(check: Check) -> Iterator[Problem]:
    objective = check.config.objective
    low, high = objective.icepop_low, objective.icepop_high
    if objective.correction == "icepop" and not low < 1 < high:
        yield Problem(
            ("objective.correction", "objective.icepop_low", "objective.icepop_high"),
            f"objective.icepop_low {low} and icepop_high {high} must lie below and above 1, the ratio of two equal policies",
        )
    if objective.correction in TIS and objective.tis_cap < 1:
        yield Problem(
            ("objective.correction", "objective.tis_cap"),
            f"objective.tis_cap {objective.tis_cap} would cut even equal policies, whose weight is 1; expected at least 1",
        )
    if objective.correction in MIS and objective.mis_cap <= 1:
        yield Problem(
            ("objective.correction", "objective.mis_cap"),
            f"objective.mis_cap {objective.mis_cap} would mask even nearly equal policies, whose weight is about 1; expected more than 1",
        )
    if objective.old_policy == "engine" and objective.correction != "none":
        yield Problem(
            ("objective.old_policy", "objective.correction"),
            f"objective.correction {objective.correction!r} weighs the old policy against the engine, but objective.old_policy 'engine' "
            "makes them one; set objective.correction = 'none', or old_policy = 'trainer'",
        )


def losses(check: Check) -> Iterator[Problem]:
    """A loss must differ from the default where another was asked for, and be clipped where its ratios lie."""
    objective = check.config.objective
    if objective.loss != "ppo" and objective.old_policy == "trainer" and objective.epochs_per_batch == 1:
        yield Problem(
            ("objective.loss", "objective.old_policy", "objective.epochs_per_batch"),
            f"objective.loss {objective.loss!r} has no effect: with one update per batch the old policy is the live one, every ratio is 1, "
            "and all losses have one gradient; set objective.old_policy = 'engine', or epochs_per_batch above 1",
        )
    clips = ("objective.clip_low", "objective.clip_high")
    if objective.loss == "gspo" and not all(clip in check.given for clip in clips):
        yield Problem(
            ("objective.loss", *clips),
            f"objective.clip_low {objective.clip_low} and clip_high {objective.clip_high} are for the ratios of tokens; those of whole "
            "sequences lie much nearer to 1: give both for objective.loss 'gspo' (its authors use 3e-4 and 4e-4)",
        )
    if objective.baseline == "leave_one_out" and objective.normalize_std:
        yield Problem(
            ("objective.baseline", "objective.normalize_std"),
            "objective.baseline 'leave_one_out' only scales advantages that are divided by their standard deviation; "
            "set objective.normalize_std = false (RLOO), or baseline = 'mean'",
        )


def buffering(check: Check) -> Iterator[Problem]:
    """A step's groups must fit into the buffer, and what it lets through must be allowed in training."""
    config = check.config
    buffer, rollout = config.buffer, config.rollout
    if buffer.capacity_groups is not None and buffer.capacity_groups < rollout.prompts_per_step:
        yield Problem(
            ("buffer.capacity_groups", "rollout.prompts_per_step"),
            f"buffer.capacity_groups {buffer.capacity_groups} cannot hold the {rollout.prompts_per_step} groups of one step "
            "(rollout.prompts_per_step): raise it to at least that, or leave it out",
        )
    if buffer.min_group > rollout.group_size >= 2:
        yield Problem(
            ("buffer.min_group", "rollout.group_size"),
            f"buffer.min_group {buffer.min_group} is more than the {rollout.group_size} completions of a group (rollout.group_size): "
            "no group would be enough; lower it",
        )
    oldest = config.replay.max_row_lag
    if config.replays_rollout and oldest is not None and oldest < buffer.max_lag:
        yield Problem(
            ("buffer.max_lag", "replay.max_row_lag", "replay.actor", "replay.old_logprobs", "replay.reference", "replay.evaluation"),
            f"replay.max_row_lag {oldest} would refuse the routes of groups that buffer.max_lag {buffer.max_lag} lets in: raise it to at "
            "least buffer.max_lag, or leave it out",
        )


def capturing(check: Check) -> Iterator[Problem]:
    """With a lag a capture is made where the weights that sampled are put back, which is when mismatch is measured."""
    config = check.config
    every, measured = config.diagnostics.capture_every_steps, config.diagnostics.mismatch_every_steps
    if config.buffer.max_lag and every and (not measured or every % measured):
        yield Problem(
            ("diagnostics.capture_every_steps", "diagnostics.mismatch_every_steps", "buffer.max_lag"),
            f"diagnostics.capture_every_steps {every} must be a multiple of diagnostics.mismatch_every_steps, which is {measured}: with "
            f"buffer.max_lag {config.buffer.max_lag} the weights that sampled are kept only where mismatch is measured",
        )


def evaluation(check: Check) -> Iterator[Problem]:
    config = check.config
    heldout, evaluate = config.task.heldout_prompts, config.diagnostics.evaluate
    if config.require.min_heldout_gain is not None and not (evaluate and heldout):
        yield Problem(
            ("require.min_heldout_gain", "task.heldout_prompts", "diagnostics.evaluate"),
            "require.min_heldout_gain needs an evaluation: set diagnostics.evaluate = true and task.heldout_prompts above 0",
        )
    elif evaluate and not heldout:
        yield Problem(
            ("task.heldout_prompts", "diagnostics.evaluate"),
            "task.heldout_prompts 0 leaves nothing to evaluate: set it above 0, or diagnostics.evaluate = false",
        )


def replay_guards(check: Check) -> Iterator[Problem]:
    """Native options that would make Megatron ignore or bend recorded routes, in whole or for some tokens."""
    config = check.config
    if not config.replays:
        return
    measured = ("diagnostics.mismatch_every_steps", "diagnostics.capture_every_steps")
    reads = ("replay.actor", "replay.reference", "replay.expert_bias", "replay.aux_loss", *measured)
    for sentence in replay_problems(config.megatron):
        yield Problem(
            (f"megatron.{sentence.split()[0]}", *reads),
            f"megatron.{sentence} (or let no pass replay or count routes: replay.actor and replay.reference 'off', replay.expert_bias and "
            "replay.aux_loss 'frozen', diagnostics.mismatch_every_steps and diagnostics.capture_every_steps 0)",
        )


def multi_token_prediction(check: Check) -> Iterator[Problem]:
    """Native options under which a layer for multi-token prediction would be run otherwise than by us."""
    config = check.config
    for sentence in mtp_problems(config.megatron) if config.train.builds_mtp else ():
        yield Problem(
            (f"megatron.{sentence.split()[0]}", "train.mtp"),
            f"megatron.{sentence} (or leave train.mtp out, which passes the layer through)",
        )


def replay_modes(check: Check) -> Iterator[Problem]:
    """The ratio of the update to the old logprobs must compare two weights, not two routings; R2 replays a pass that chose by itself."""
    replay, mode = check.config.replay, check.config.old_logprobs_mode
    fitting = {"rollout": "rollout", "proximal": "off", "off": "off"}[replay.actor]
    if mode is not None and mode != fitting:
        yield Problem(
            ("replay.actor", "replay.old_logprobs", "replay.reference", "objective.epochs_per_batch"),
            f"replay.old_logprobs {mode!r} does not fit replay.actor {replay.actor!r}: the update would be compared with logprobs of "
            f"another routing; set it to 'auto' or {fitting!r}",
        )
    if replay.reference == "proximal" and replay.actor != "proximal":
        yield Problem(
            ("replay.actor", "replay.reference"),
            f"replay.reference 'proximal' replays what the pass for the old logprobs chose, but with replay.actor {replay.actor!r} "
            "that pass chooses nothing; set replay.actor = 'proximal', or replay.reference to 'rollout' or 'off'",
        )


def balancing(check: Check) -> Iterator[Problem]:
    """Statistics that a setting wants to see must exist, and those that exist must be wanted."""
    config = check.config
    coefficient, sees = config.megatron.get("moe_aux_loss_coeff", 0.0), config.replay.aux_loss
    has_loss = any(coefficient) if isinstance(coefficient, list) else bool(coefficient)
    reads = ("replay.aux_loss", "megatron.moe_aux_loss_coeff")
    if has_loss and sees == "frozen":
        yield Problem(
            reads,
            f"megatron.moe_aux_loss_coeff {coefficient}: choose what the loss sees; set replay.aux_loss to 'native' or 'replayed'",
        )
    elif sees != "frozen" and not has_loss:
        yield Problem(
            reads,
            f"replay.aux_loss {sees!r} has no effect without a loss: set megatron.moe_aux_loss_coeff and "
            "megatron.moe_router_load_balancing_type, or leave it out",
        )


SILENT = (
    ("objective.tis_cap", "objective.correction", lambda config: config.objective.correction in TIS),
    ("objective.mis_cap", "objective.correction", lambda config: config.objective.correction in MIS),
    ("objective.unbiased_kl", "objective.kl_coef", lambda config: config.objective.kl_coef > 0),
    ("objective.icepop_low", "objective.correction", lambda config: config.objective.correction == "icepop"),
    ("objective.icepop_high", "objective.correction", lambda config: config.objective.correction == "icepop"),
    ("task.path", "task.kind", lambda config: config.task.kind == "jsonl"),
    ("task.name", "task.kind", lambda config: config.task.kind == "reasoning_gym"),
    ("train.mtp_loss_weight", "train.mtp", lambda config: config.train.mtp == "trained"),
    ("train.expert_bias_update_rate", "replay.expert_bias", lambda config: config.replay.expert_bias != "frozen"),
    ("buffer.policy", "buffer.max_lag", lambda config: config.buffer.max_lag > 0),
    ("buffer.max_resamples_per_step", "buffer.dynamic_sampling", lambda config: config.buffer.dynamic_sampling),
    ("buffer.length_memory", "buffer.longest_first", lambda config: config.buffer.longest_first),
    ("replay.reference", "objective.kl_coef", lambda config: config.objective.kl_coef > 0),
    ("replay.evaluation", "diagnostics.mismatch_every_steps", lambda config: config.diagnostics.mismatch_every_steps > 0),
    ("diagnostics.capture_tokens", "diagnostics.capture_every_steps", lambda config: config.diagnostics.capture_every_steps > 0),
    ("diagnostics.evaluate_every_steps", "diagnostics.evaluate", lambda config: config.diagnostics.evaluate),
)
"""(setting, the setting that decides whether it counts, whether it does)."""


def silent_settings(check: Check) -> Iterator[Problem]:
    """Settings that were given another value than their default, but do nothing.

    One that a later source switched off (an ablation of a file) is fine.
    """
    by_default = -1
    for path, switch, counts in SILENT:
        value, default = _lookup(check.config, path)
        decided_by = check.given.get(switch, by_default)
        if path in check.given and value != default and not counts(check.config) and check.given[path] >= decided_by:
            now = _lookup(check.config, switch)[0]
            shown = str(now).lower() if isinstance(now, bool) else repr(now)
            yield Problem((path, switch), f"{path} has no effect with {switch} = {shown}; change one of them, or leave {path} out")


def _lookup(config: Config, path: str) -> tuple[object, object]:
    """(value, default) of a setting."""
    section, key = path.split(".")
    part = getattr(config, section)
    return getattr(part, key), type(part).model_fields[key].default


def _template_fields(template: str) -> list[tuple[str, str | None, str | None, str | None]]:
    try:
        return list(string.Formatter().parse(template))
    except ValueError:
        return []


RULES: tuple[Callable[[Check], Iterator[Problem]], ...] = (
    launched,
    parallel_sizes,
    sampling,
    truncation,
    token_budgets,
    buffering,
    waits,
    task,
    correction,
    losses,
    capturing,
    evaluation,
    replay_guards,
    multi_token_prediction,
    replay_modes,
    balancing,
    silent_settings,
)
