"""Every setting of moerl, in one torch-free tree. Defaults live here and nowhere else.

Units are in the names. A section is one table of the TOML file; `[megatron]` and `[sglang]` pass native options of the
installed versions through.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", validate_default=True, frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Run(Section):
    """Where a run lives and what makes it repeatable."""

    dir: str = "runs/default"
    """Run folder: config.json, metrics.jsonl, rollouts/, checkpoints/, logs/, summary.json."""
    seed: NonNegative = 1


class Model(Section):
    path: str
    """Hugging Face folder of the policy at version 0 (config.json, *.safetensors, tokenizer)."""


class Task(Section):
    """What is asked, and how an answer is scored."""

    kind: Literal["reasoning_gym", "jsonl"] = "reasoning_gym"
    name: str = "chain_sum"
    """reasoning_gym: name of the dataset."""
    options: dict[str, Any] = {}
    """reasoning_gym: options of the dataset, such as min_terms or max_digits."""
    path: str = ""
    """jsonl: file with one {"prompt": …, "answer": …} per line."""
    prompt_template: str = "{prompt}"
    """How a question becomes the prompt text; `{prompt}` is the question."""
    strip_question: str = ""
    """Regular expression whose matches are removed from the question before the template (compact prompts for tiny models)."""
    add_bos: bool = False
    """Put the tokenizer's bos token first."""
    prompts: Positive = 4096
    """Size of the training set (distinct prompts)."""
    heldout_prompts: NonNegative = 128
    """Prompts set aside for evaluation; never trained on."""
    reward: str = "math_verify"
    """`math_verify`, `exact_integer`, or `package.module:function` taking (completion text, answer, finish_reason) -> float."""
    reward_workers: Positive = 1
    reward_timeout_s: Seconds = 10.0


class Rollout(Section):
    """How completions are sampled."""

    prompts_per_step: Positive = 16
    group_size: Positive = 8
    """Completions per prompt: the group that advantages are normalised over."""
    max_prompt_tokens: Positive = 512
    max_new_tokens: Positive = 512
    temperature: Annotated[float, Field(gt=0)] = 1.0
    request_timeout_s: Seconds = 300.0
    trace_codec: Literal["narrow", "packed", "set"] = "narrow"
    """How routes travel and are stored: narrow is fastest; packed drops unused bits; set is smallest and drops the slots' order."""
    save: bool = True
    """Write every step's rollouts to `rollouts/`, so that `train --rollouts` can repeat the run."""


class Engine(Section):
    """The SGLang engines and their life cycle; SGLang's own options go into `[sglang]`."""

    count: Positive = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tp: Positive = 1
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    threads: Positive = 1
    """CPU only: threads per engine rank. With a trainer on the same cores, 1."""
    max_running_requests: Positive = 128
    max_total_tokens: Positive = 32768
    start_timeout_s: Seconds = 300.0
    """Deadline from process start to healthy."""
    request_timeout_s: Seconds = 60.0
    """Deadline of a control request (update, flush, pause)."""
    max_restarts: NonNegative = 1
    """How often a dead engine is restarted (and given the current weights) before the run ends."""


class Train(Section):
    """The trainer: steps, batching, optimizer."""

    steps: Positive = 100
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute type. bfloat16 keeps fp32 master weights in the optimizer."""
    threads: Positive = 1
    """CPU only: torch threads per rank."""
    tokens_per_microbatch: Positive = 4096
    """Packed tokens per microbatch and data-parallel rank."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    lr_warmup_steps: NonNegative = 0
    lr_final_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Linear decay: learning rate of the last step divided by `lr`."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    expert_bias_update_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Step of the router's correction bias, where `replay.expert_bias` lets it move."""
    fp32_head: bool = True
    """Compute the language-model head in float32."""


class Replay(Section):
    """Whose experts each pass of the trainer uses, and what is done where they are missing.

    rollout: those that the engine recorded (R3). proximal: those that the trainer's own pass for the old logprobs chose (R2).
    off: the pass's own. Gate weights always come from the live scores, so the router learns either way.
    """

    actor: Literal["rollout", "proximal", "off"] = "rollout"
    """The update: forward, backward and recomputation."""
    old_logprobs: Literal["auto", "rollout", "off"] = "auto"
    """The pass that fixes the old logprobs, run where `objective.epochs_per_batch` > 1 or the update replays it. auto: as the update, so
    that their ratio starts at 1; off where the update replays this pass."""
    reference: Literal["rollout", "proximal", "off"] = "off"
    """The reference's pass, with `objective.kl_coef` > 0. Its weights are others than those that were routed, hence off; proximal needs
    an update that is proximal too."""
    evaluation: Literal["rollout", "off"] = "off"
    """The pass that measures the mismatch (`diagnostics.mismatch_every_steps`). off measures the gap that replay closes; rollout
    what is left of it before the update."""
    missing: Literal["error", "native", "mask"] = "error"
    """Rows whose routes are missing or were refused: error ends the run; native lets them choose their own experts; mask does that
    and takes their tokens out of the loss. Counted in the metrics either way."""
    max_row_lag: NonNegative | None = None
    """Refuse routes recorded by weights more than this many versions older than those being trained. Unset: any version is fine,
    since a token's route, logprob and version come from the same pass."""
    expert_bias: Literal["frozen", "native", "replayed"] = "frozen"
    """What the update of the correction bias counts. native: the experts that the router would choose, which is what the bias must
    balance; replayed: those that were used. frozen, because in RL a moving bias changes routes without the objective's say."""
    aux_loss: Literal["frozen", "native", "replayed"] = "frozen"
    """What auxiliary balancing losses (`megatron.moe_aux_loss_coeff`) see. native: their own top-k; replayed: the experts that were
    used; frozen: there are none. Padding rows count for neither. (A z-loss sees logits, not routes.)"""


class Parallel(Section):
    """Sizes of the trainer's process groups; dp and edp follow from the world size."""

    tp: Positive = 1
    pp: Positive = 1
    vpp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    etp: Positive = 1
    nproc_per_node: Positive = 1
    """Ranks that `moerl train` starts on this machine. Under torchrun the launcher's world size counts instead."""
    timeout_s: Seconds = 1800.0
    """Deadline of a collective (the ranks wait in one while rank 0 generates), and of every phase of a step."""


class Objective(Section):
    """GRPO with asymmetric clipping and a correction for the engine-trainer gap."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    normalize_std: bool = True
    """Divide group advantages by the group's standard deviation (false: Dr. GRPO)."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the k3 KL to the reference (the policy at version 0); 0 keeps no reference model."""
    entropy_coef: float = 0.0
    correction: Literal["none", "tis", "icepop"] = "tis"
    """tis: truncated importance weight; icepop: tokens outside [icepop_low, icepop_high] are masked."""
    tis_cap: Annotated[float, Field(gt=0)] = 2.0
    icepop_low: Annotated[float, Field(gt=0)] = 0.5
    icepop_high: Annotated[float, Field(gt=0)] = 2.0
    epochs_per_batch: Positive = 1
    """Optimizer updates on one batch. Above 1 the old logprobs are computed before the first."""


class Sync(Section):
    """How new weights reach the engines."""

    bucket_mib: Annotated[float, Field(gt=0)] = 256.0
    verify: bool = True
    """Compare every engine parameter's checksum with the trainer's bytes after each sync."""
    timeout_s: Seconds = 300.0


class Checkpoint(Section):
    every_steps: NonNegative = 0
    """0: only at the end."""
    keep: Positive = 2
    at_end: bool = True
    export_hf: bool = True
    """Write an HF folder of the final weights to `export/`."""


class Diagnostics(Section):
    """What is measured beside training."""

    mismatch_every_steps: NonNegative = 1
    """Measure every n steps, on the same rollouts, what the trainer would do by itself: routes that differ, KL without replay. 0: off."""
    evaluate_every_steps: NonNegative = 0
    """Accuracy on held-out prompts every n steps, besides before and after. 0: only before and after."""
    evaluate: bool = True


class Observe(Section):
    console: bool = True
    tensorboard: bool = False
    wandb_project: str = ""
    trackio_project: str = ""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    heartbeat_s: Seconds = 30.0
    """A wait that lasts longer says so every this many seconds."""


class Require(Section):
    """What a run must achieve; otherwise it ends with an error (used by the quick start)."""

    min_reward_gain: float | None = None
    """Mean reward of the last tenth of the steps minus that of the first tenth."""
    min_heldout_gain: float | None = None
    """Held-out accuracy after minus before."""


class Config(Section):
    """One run."""

    run: Run = Run()
    model: Model
    task: Task = Task()
    rollout: Rollout = Rollout()
    engine: Engine = Engine()
    train: Train = Train()
    replay: Replay = Replay()
    parallel: Parallel = Parallel()
    objective: Objective = Objective()
    sync: Sync = Sync()
    checkpoint: Checkpoint = Checkpoint()
    diagnostics: Diagnostics = Diagnostics()
    observe: Observe = Observe()
    require: Require = Require()
    megatron: dict[str, Any] = {}
    """Native fields of Megatron's MLATransformerConfig."""
    sglang: dict[str, Any] = {}
    """Native fields of SGLang's ServerArgs."""

    @property
    def replays(self) -> bool:
        """Whether some pass of the trainer replays, records or counts routes, and so needs Megatron's hook."""
        replay = self.replay
        return replay.actor != "off" or replay.reference != "off" or self.diagnostics.mismatch_every_steps > 0 or self.balances

    @property
    def balances(self) -> bool:
        """Whether the update moves the correction bias or has an auxiliary loss, which must not see padding."""
        return self.replay.expert_bias != "frozen" or self.replay.aux_loss != "frozen"

    @property
    def replays_rollout(self) -> bool:
        """Whether some pass is forced onto the engine's routes."""
        replay, reference = self.replay, self.replay.reference == "rollout" and self.objective.kl_coef > 0
        evaluation = replay.evaluation == "rollout" and self.diagnostics.mismatch_every_steps > 0
        return "rollout" in (replay.actor, self.old_logprobs_mode) or reference or evaluation

    @property
    def old_logprobs_mode(self) -> Literal["rollout", "off"] | None:
        """Routes of the pass for the old logprobs; None where there is no such pass."""
        replay = self.replay
        if self.objective.epochs_per_batch == 1 and replay.actor != "proximal":
            return None
        if replay.old_logprobs == "auto":
            return "rollout" if replay.actor == "rollout" else "off"
        return replay.old_logprobs
