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
    megatron_checkpoint: str = ""
    """Megatron distributed checkpoint of the same model (`moerl convert hf-to-megatron`): the trainer takes the weights of version 0 from
    it, and the engines from the trainer. Config and tokenizer still come from `path`. Empty: the weights come from there as well."""


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
    """Deadline for one group."""
    reward_retries: NonNegative = 1
    """How often a reward that failed is tried again; then its group is refused."""


class Rollout(Section):
    """How completions are sampled."""

    prompts_per_step: Positive = 16
    group_size: Positive = 8
    """Completions per prompt: the group that advantages are normalised over."""
    max_prompt_tokens: Positive = 512
    max_new_tokens: Positive = 512
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the fewest likeliest tokens that hold this much probability. The engine then says which tokens it kept, and engine,
    trainer and reference are compared within those; entropy stays that of the whole vocabulary. Needs a finite top_k."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample from this many likeliest tokens, as for top_p; -1: from all. Evaluations always sample from the whole vocabulary."""
    request_timeout_s: Seconds = 300.0
    trace_codec: Literal["narrow", "packed", "set"] = "narrow"
    """How routes travel and are stored: narrow is fastest; packed drops unused bits; set is smallest and drops the slots' order."""
    save: bool = True
    """Write every step's rollouts to `rollouts/`, so that `train --rollouts` can repeat the run."""


class Engine(Section):
    """The SGLang engines and their life cycle; SGLang's own options go into `[sglang]`."""

    count: Positive = 1
    model_path: str = ""
    """Hugging Face folder that the engines start from, if not `model.path`: the same model in another precision, such as block-quantised
    fp8. The trainer then quantises what it sends them."""
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
    mtp: Literal["passed_through", "frozen", "trained"] = "passed_through"
    """What becomes of the checkpoint's layer for multi-token prediction. passed_through: the trainer builds none, and its export has the
    layer as it came. frozen: it is built, never run, and stays as it is in checkpoints, exports and what engines are sent. trained: as
    frozen, but it learns from the rollouts to predict the token after next, on hidden states to which its loss passes no gradient."""
    mtp_loss_weight: Annotated[float, Field(gt=0)] = 0.1
    """Weight of that loss, a mean over the tokens predicted. Its weights have no other loss and a `grad_clip` of their own, so with Adam it
    decides little more than when they are clipped."""

    @property
    def builds_mtp(self) -> bool:
        """Whether the trainer has a layer for multi-token prediction."""
        return self.mtp != "passed_through"


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
    nodes: Positive = 1
    """Machines that train. `moerl train` starts the ranks of one; several are started by torchrun, on each machine."""
    nproc_per_node: Positive = 1
    """Trainer ranks on each of them."""
    timeout_s: Seconds = 1800.0
    """Deadline of a collective (the ranks wait in one while rank 0 generates), and of every phase of a step."""

    @property
    def world(self) -> int:
        """Trainer ranks."""
        return self.nodes * self.nproc_per_node


class Objective(Section):
    """GRPO and its relatives: what is compared, clipped and averaged, and what corrects the engine-trainer gap and staleness.

    Ratios and weights are of probabilities, 1 where two policies agree. DAPO's loss is the default; Dr. GRPO is normalize_std = false and
    length_normalization = "constant"; RLOO is baseline = "leave_one_out" and normalize_std = false.
    """

    loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    """ppo: the clip takes single tokens' gradient. gspo: the ratio is the geometric mean over a sequence's tokens, and the clip takes whole
    sequences. cispo: the clip bounds the token's weight, and no token loses its gradient."""
    old_policy: Literal["trainer", "engine"] = "trainer"
    """What the clipped ratio is taken to. trainer: the weights before the batch's first update; `correction` stands for the rest of the
    way to the engine (decoupled PPO). engine: what sampled, at once, so that the clip bounds mismatch, staleness and update together."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The ratio is clipped below 1 - clip_low; 1: never. gspo needs far narrower clips, such as 3e-4 and 4e-4."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The ratio is clipped above 1 + clip_high."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What rewards are compared with: the mean of the prompt's group, or that of its other completions."""
    normalize_std: bool = True
    """Divide group advantages by the group's standard deviation (false: Dr. GRPO)."""
    overlong_margin_tokens: NonNegative = 0
    """Lower the rewards of the completions that come nearer than this to `rollout.max_new_tokens`, linearly by up to 1 (DAPO). 0: none."""
    length_normalization: Literal["tokens", "sequences", "constant"] = "tokens"
    """What the loss is a mean over. tokens: all of the batch, equally. sequences: each sequence's mean, equally, as in GRPO and GSPO.
    constant: as tokens, but divided by sequences times `rollout.max_new_tokens`, so that no step's lengths scale it (Dr. GRPO)."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the k3 KL to the reference (the policy at version 0); 0 keeps no reference model."""
    unbiased_kl: bool = False
    """Weigh the KL of a token by the live policy's ratio to the engine's: value and gradient are then unbiased, also off policy."""
    entropy_coef: float = 0.0
    correction: Literal["none", "tis", "tis_sequence", "mis", "mis_sequence", "icepop"] = "tis"
    """Weight of old policy to engine. tis: truncated at tis_cap; mis: zero above mis_cap; icepop: zero outside [icepop_low, icepop_high].
    *_sequence: one weight per sequence, the product of its tokens', whose spread grows with the length."""
    tis_cap: Annotated[float, Field(gt=0)] = 2.0
    mis_cap: Annotated[float, Field(gt=0)] = 2.0
    icepop_low: Annotated[float, Field(gt=0)] = 0.5
    icepop_high: Annotated[float, Field(gt=0)] = 2.0
    opsm_threshold: Annotated[float, Field(ge=0)] = 0.0
    """Off-policy sequence masking: leave out sequences of negative advantage whose mean log(engine / live) per token, in nats, is above
    this. 0: none are."""
    epochs_per_batch: Positive = 1
    """Optimizer updates on one batch. Above 1 the old logprobs are computed before the first."""

    @property
    def needs_sequences(self) -> bool:
        """Whether a token's loss depends on the other tokens of its sequence."""
        per_sequence = self.loss == "gspo" or self.correction.endswith("_sequence") or self.length_normalization != "tokens"
        return per_sequence or self.opsm_threshold > 0


class Sync(Section):
    """How new weights reach the engines."""

    way: Literal["auto", "direct", "compatible"] = "auto"
    """direct: every engine rank receives exactly its own bytes from the ranks that hold them. compatible: whole tensors are gathered and
    broadcast, and the engine cuts out its part. auto: direct, and compatible where that failed twice."""
    transport: Literal["auto", "gloo", "nccl", "shared_memory"] = "auto"
    """Of the direct way. auto: nccl between GPUs; on CPU, shared memory between ranks of one machine and gloo between machines."""
    interrupt: Literal["drain", "abort", "in_place", "retract"] = "in_place"
    """What an update does to running requests. drain: it waits until none runs. abort: they are cut off and resumed as new requests.
    in_place: they go on with what they have computed. retract: the engine recomputes them under the new weights."""
    bucket_mib: Annotated[float, Field(gt=0)] = 64.0
    """Sender and receiver each keep twice this much memory for what travels: four buckets of half of it, each of them one message.
    The compatible way broadcasts whole ones."""
    verify: Literal["every", "never"] | Positive = "every"
    """Read every engine parameter back after each sync, never, or after each n-th; what travels is checked in any case."""
    delta: bool = False
    """Send only the elements that changed in the engine's dtype. Lossless; the trainer keeps a copy of what it sent."""
    timeout_s: Seconds = 300.0
    """Deadline of each attempt."""

    @property
    def bucket_bytes(self) -> int:
        """Of a bucket of the direct way, at most."""
        return int(self.bucket_mib * 2**20) // 2

    @property
    def ladder(self) -> tuple[Literal["direct", "compatible"], ...]:
        """The ways that are tried, each after what failed before it."""
        return {"auto": ("direct", "direct", "compatible"), "direct": ("direct", "direct"), "compatible": ("compatible",)}[self.way]


class Buffer(Section):
    """Between engines and trainer: how far generation may run ahead, and what is done where it does. A group is a prompt's completions."""

    max_lag: NonNegative = 0
    """How many versions older than the weights being trained a token may be. 0: each step waits for groups of its own version."""
    policy: Literal["wait", "mask", "refuse"] = "wait"
    """When a step is due for a group that is still running. wait: the step waits for it. mask: it is trained later, without its tokens
    that lag by more than max_lag. refuse: it is dropped; what is dropped is long, so the metrics compare lengths."""
    capacity_groups: Positive | None = None
    """Groups admitted and not yet trained, at most; below prompts_per_step × (max_lag + 1), which is the limit if unset, it lowers the
    usual lag where the trainer is the slower side."""
    oversample: NonNegative = 0
    """Completions begun beyond rollout.group_size; the group is the first to end, the others are aborted and wasted. Favours short ones."""
    sample_retries: NonNegative = 2
    """Fresh completions for failed ones, per group. After that the group is trained with the others, if there are min_group."""
    min_group: Annotated[int, Field(ge=2)] = 2
    """Completions that a group with failed ones needs; its baseline is the mean over those it has."""
    group_timeout_s: Seconds | None = None
    """A group that runs longer is aborted and refused as a whole: a baseline over its quick completions alone would be distorted."""
    dynamic_sampling: bool = False
    """Refuse groups whose rewards are all the same, and generate others instead (DAPO)."""
    max_resamples_per_step: Positive = 64
    """Groups refused so for one step; after that the step trains such groups too, and says so."""
    longest_first: bool = True
    """Begin prompts that were long before earlier, among those admitted at the same version."""
    length_memory: Annotated[float, Field(ge=0, lt=1)] = 0.7
    """Weight of the past in the running average of a prompt's length."""


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
    """Measure every n steps, on the same rollouts, what the trainer would do by itself: routes that differ, KL without replay. With a lag
    also without staleness: the weights of that step are kept on the CPU until max_lag steps later, and put back to measure with. 0: off."""
    capture_every_steps: NonNegative = 0
    """Write every n steps, token by token, what engine and trainer did with the same samples to `mismatch/`, for the report: routes,
    margins, logprobs with and without replay. 0: off."""
    capture_tokens: NonNegative = 8192
    """At most so many input rows per captured step, of whole samples drawn by `run.seed`. 0: all."""
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
    alarm_min_ess: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Raise an alarm where the effective sample size of a step's tokens, or of those of one lag, is below this share. 0: never."""
    alarm_max_kl: Annotated[float, Field(ge=0)] = 0.1
    """Raise an alarm where the KL from the engines' policy to the trainer's, in nats per token, is above this. 0: never."""
    alarm_every_steps: NonNegative = 20
    """An alarm that goes on is shown again after so many steps. 0: alarms are counted (metric `alarms`), but not shown."""


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
    buffer: Buffer = Buffer()
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
        replay, measured = self.replay, self.diagnostics.mismatch_every_steps > 0 or self.diagnostics.capture_every_steps > 0
        return replay.actor != "off" or replay.reference != "off" or measured or self.balances

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
        wanted = self.objective.epochs_per_batch > 1 and self.objective.old_policy == "trainer"
        if not wanted and replay.actor != "proximal":
            return None
        if replay.old_logprobs == "auto":
            return "rollout" if replay.actor == "rollout" else "off"
        return replay.old_logprobs
