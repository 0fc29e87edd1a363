"""Each rule between settings: what breaks it, and what does not."""

from pathlib import Path

import pytest

from moerl.config.load import load_config
from moerl.config.rules import model_problems
from moerl.config.schema import Config
from moerl.convert.tiny import tiny_config
from moerl.errors import ConfigError
from moerl.models import deepseek


def check(*settings: str, world: int | None = None, started: int | None = None) -> list[str]:
    try:
        load_config(["--model.path=m", *(f"--{setting}" for setting in settings)], world=world, started=started)
    except ConfigError as error:
        return error.violations
    return []


def test_world_size_that_does_not_factor_shows_the_product() -> None:
    (message,) = check("parallel.nproc_per_node=4", "parallel.tp=2", "parallel.cp=3")
    assert "4 trainer ranks cannot be split into groups of tp 2 x pp 1 x cp 3 = 6" in message


def test_experts_have_a_product_of_their_own() -> None:
    (message,) = check("parallel.nproc_per_node=4", "parallel.pp=2", "parallel.ep=4")
    assert "4 trainer ranks cannot be split into groups of etp 1 x ep 4 x pp 2 = 8" in message


def test_another_world_may_be_planned_for() -> None:
    assert check("parallel.tp=2", world=4) == []
    assert len(check("parallel.tp=2", "parallel.nproc_per_node=2", world=3)) == 1


def test_machines_times_ranks_on_each_are_the_world() -> None:
    assert check("parallel.nodes=2", "parallel.nproc_per_node=3", "parallel.tp=2", "parallel.cp=3") == []
    (message,) = check("parallel.nodes=3", "parallel.nproc_per_node=3", "parallel.tp=2")
    assert "9 trainer ranks cannot be split into groups of tp 2 x pp 1 x cp 1 = 2" in message
    (message,) = check("parallel.nodes=0", "parallel.tp=2")
    assert message.startswith("parallel.nodes: expected a number above 0")


def test_a_launcher_must_start_as_many_ranks_as_the_settings_say() -> None:
    settings = ("parallel.nodes=2", "parallel.nproc_per_node=8")
    assert check(*settings, started=16) == []
    (message,) = check(*settings, started=8)
    assert "the launcher has started 8 trainer ranks (WORLD_SIZE), expected parallel.nodes 2 x parallel.nproc_per_node 8 = 16" in message
    assert "torchrun's --nnodes and --nproc-per-node" in message
    assert check(started=1) == []
    assert [text.split(":")[0] for text in check("parallel.tp=3", "rollout.group_size=1", started=2)] == [
        "parallel",
        "parallel",
        "rollout.group_size 1",
    ]


@pytest.mark.parametrize("sizes", ["tp=2", "pp=2", "cp=2", "ep=2", "etp=2"])
def test_sizes_that_factor(sizes: str) -> None:
    assert check(f"parallel.{sizes}", "parallel.nproc_per_node=2") == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parallel.vpp=2"], "parallel.vpp 2 needs pipeline stages"),
        (
            ["parallel.nproc_per_node=2", "parallel.timeout_s=900"],
            "rollout.request_timeout_s 300 + engine.start_timeout_s 300 + sync.timeout_s 300 x 3 attempts = 1500",
        ),
        (["rollout.group_size=1"], "so it needs at least 2 completions"),
        (["rollout.top_p=0.9"], "rollout.top_p 0.9 needs a finite rollout.top_k as well, from 2 to 4096"),
        (["rollout.top_k=1"], "rollout.top_k 1 leaves no choice"),
        (["rollout.top_k=0", "rollout.top_p=0.9"], "rollout.top_k 0 leaves no choice"),
        (["rollout.top_k=-2"], "rollout.top_k"),
        (["rollout.top_k=4097"], "rollout.top_k 4097 is more than the 4096 tokens of a position that SGLang reports"),
        (["rollout.top_k=20", "sglang.sampling_mask_max_tokens=16"], "rollout.top_k 20 is more than the 16 tokens"),
        (["rollout.prompts_per_step=64", "task.prompts=32"], "rollout.prompts_per_step 64 is more than the 32 prompts"),
        (
            ["engine.max_total_tokens=1023"],
            "engine.max_total_tokens 1023 cannot hold one sequence: rollout.max_prompt_tokens 512 + rollout.max_new_tokens 512 = 1024",
        ),
        (["train.tokens_per_microbatch=1000"], "train.tokens_per_microbatch 1000 cannot hold one sequence"),
        (["task.kind=jsonl"], "task.path is required"),
        (["task.prompt_template=Q: {question}"], "task.prompt_template must hold {prompt} once"),
        (["task.prompt_template={prompt} {prompt}"], "task.prompt_template must hold {prompt} once"),
        (["task.prompt_template={prompt"], "task.prompt_template must hold {prompt} once"),
        (["task.strip_question=("], "task.strip_question is not a regular expression"),
        (["task.reward=math_verfy"], "got 'math_verfy'; did you mean math_verify?"),
        (["objective.correction=icepop", "objective.icepop_low=3.0"], "objective.icepop_low 3.0 and icepop_high 2.0"),
        (["objective.correction=icepop", "objective.icepop_high=0.9"], "must lie below and above 1"),
        (["objective.tis_cap=0.5"], "objective.tis_cap 0.5 would cut even equal policies"),
        (["require.min_heldout_gain=0.1", "task.heldout_prompts=0"], "require.min_heldout_gain needs an evaluation"),
        (["require.min_heldout_gain=0.1", "diagnostics.evaluate=false"], "require.min_heldout_gain needs an evaluation"),
        (["task.heldout_prompts=0"], "task.heldout_prompts 0 leaves nothing to evaluate"),
        (["megatron.moe_router_fusion=true"], "megatron.moe_router_fusion must be false: the fused router returns before"),
        (["megatron.moe_router_fusion=true", "replay.actor=off"], "or let no pass replay or count routes: replay.actor"),
        (["megatron.moe_expert_capacity_factor=1.0"], "a capacity drops experts"),
        (
            ["megatron.overlap_moe_expert_parallel_comm=true", "train.mtp=frozen"],
            "megatron.overlap_moe_expert_parallel_comm must be false: its schedule would run the layer as one more of the decoder's",
        ),
        (["train.mtp=drop"], "train.mtp"),
        (["train.mtp=trained", "train.mtp_loss_weight=0"], "train.mtp_loss_weight"),
        (["megatron.mtp_num_layers=1"], "megatron.mtp_num_layers cannot be set: set train.mtp"),
        (
            ["megatron.moe_router_fusion=true", "replay.actor=off", "diagnostics.mismatch_every_steps=0", "replay.expert_bias=native"],
            "replay.expert_bias and replay.aux_loss 'frozen'",
        ),
        (["megatron.moe_router_load_balancing_type=sinkhorn"], "choose experts without asking replay"),
        (["megatron.moe_token_dispatcher_type=flex"], "rebuild expert ids from probabilities"),
        (["replay.old_logprobs=off", "objective.epochs_per_batch=2"], "set it to 'auto' or 'rollout'"),
        (["replay.actor=proximal", "replay.old_logprobs=rollout"], "set it to 'auto' or 'off'"),
        (["replay.reference=proximal", "objective.kl_coef=0.1"], "that pass chooses nothing"),
        (["megatron.moe_aux_loss_coeff=0.01"], "set replay.aux_loss to 'native' or 'replayed'"),
        (["replay.aux_loss=native"], "has no effect without a loss"),
        (
            [
                "megatron.moe_router_fusion=true",
                "replay.actor=off",
                "diagnostics.mismatch_every_steps=0",
                "diagnostics.capture_every_steps=5",
            ],
            "diagnostics.mismatch_every_steps and diagnostics.capture_every_steps 0",
        ),
        (
            ["diagnostics.capture_every_steps=5", "diagnostics.capture_tokens=1023"],
            "diagnostics.capture_tokens 1023 may not hold one whole sample",
        ),
        (
            ["buffer.max_lag=1", "diagnostics.capture_every_steps=6", "diagnostics.mismatch_every_steps=4"],
            "capture_every_steps 6 must be a multiple of diagnostics.mismatch_every_steps, which is 4",
        ),
        (
            ["buffer.max_lag=1", "diagnostics.capture_every_steps=6", "diagnostics.mismatch_every_steps=0"],
            "capture_every_steps 6 must be a multiple of diagnostics.mismatch_every_steps, which is 0",
        ),
    ],
)
def test_broken_rule(settings: list[str], message: str) -> None:
    (found,) = check(*settings)
    assert message in found


@pytest.mark.parametrize(
    "settings",
    [
        ["parallel.vpp=2", "parallel.pp=2", "parallel.nproc_per_node=2"],
        ["engine.max_total_tokens=1024", "train.tokens_per_microbatch=1024"],
        ["task.kind=jsonl", "task.path=x.jsonl"],
        ["task.prompt_template=<{prompt}> {{literal}}"],
        ["task.reward=my.rewards:score"],
        ["objective.correction=icepop", "objective.icepop_low=0.9", "objective.icepop_high=1.1"],
        ["task.heldout_prompts=0", "diagnostics.evaluate=false"],
        ["require.min_heldout_gain=0.1"],
        ["rollout.top_k=2"],
        ["rollout.top_p=0.9", "rollout.top_k=4096"],
        ["rollout.top_k=5000", "sglang.sampling_mask_max_tokens=8192"],
        ["megatron.moe_router_fusion=true", "replay.actor=off", "diagnostics.mismatch_every_steps=0"],
        ["megatron.moe_router_fusion=false"],
        ["replay.actor=proximal"],
        ["replay.actor=off", "objective.epochs_per_batch=2"],
        ["replay.actor=proximal", "replay.reference=proximal", "objective.kl_coef=0.1"],
        ["replay.aux_loss=replayed", "megatron.moe_aux_loss_coeff=0.01", "megatron.moe_router_load_balancing_type=aux_loss"],
        ["replay.expert_bias=native", "train.expert_bias_update_rate=0.01"],
        ["diagnostics.capture_every_steps=6", "diagnostics.mismatch_every_steps=4", "diagnostics.capture_tokens=1024"],
        ["diagnostics.capture_every_steps=5", "diagnostics.mismatch_every_steps=0", "diagnostics.capture_tokens=0"],
        ["buffer.max_lag=1", "diagnostics.capture_every_steps=8", "diagnostics.mismatch_every_steps=4"],
    ],
)
def test_kept_rule(settings: list[str]) -> None:
    assert check(*settings) == []


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        (["objective.correction=icepop", "objective.tis_cap=3.0"], "objective.tis_cap has no effect with objective.correction = 'icepop'"),
        (["objective.icepop_low=0.4"], "objective.icepop_low has no effect with objective.correction = 'tis'"),
        (["task.kind=jsonl", "task.path=x", "task.name=gcd"], "task.name has no effect"),
        (["task.path=x"], "task.path has no effect"),
        (["train.mtp_loss_weight=0.3"], "train.mtp_loss_weight has no effect with train.mtp = 'passed_through'"),
        (["train.mtp=frozen", "train.mtp_loss_weight=0.3"], "train.mtp_loss_weight has no effect with train.mtp = 'frozen'"),
        (["train.expert_bias_update_rate=0.01"], "train.expert_bias_update_rate has no effect with replay.expert_bias = 'frozen'"),
        (["replay.reference=rollout"], "replay.reference has no effect with objective.kl_coef = 0.0"),
        (["diagnostics.mismatch_every_steps=0", "replay.evaluation=rollout"], "has no effect with diagnostics.mismatch_every_steps = 0"),
        (["diagnostics.capture_tokens=2000"], "diagnostics.capture_tokens has no effect with diagnostics.capture_every_steps = 0"),
        (["diagnostics.evaluate=false", "diagnostics.evaluate_every_steps=5"], "has no effect with diagnostics.evaluate = false"),
    ],
)
def test_setting_without_effect(settings: list[str], path: str) -> None:
    (message,) = check(*settings)
    assert path in message


def test_a_later_source_may_switch_off_what_a_file_set(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[model]\npath = "m"\n[objective]\ncorrection = "icepop"\nicepop_low = 0.4\n')
    assert load_config(["@", str(file), "--objective.correction=none"]).objective.icepop_low == 0.4


def test_a_rule_is_silent_about_settings_that_are_wrong_themselves() -> None:
    found = check("engine.max_total_tokens=lots", "rollout.max_new_tokens=100000", "train.tokens_per_microbatch=200000")
    assert found == ['engine.max_total_tokens: expected a whole number, got "lots"']


def fit(**sections: dict) -> list[str]:
    return model_problems(Config(model={"path": "m"}, **sections), deepseek.spec(tiny_config(layers=5, experts=64)))


def test_model_that_fits() -> None:
    assert fit(parallel={"tp": 2, "pp": 5, "ep": 8}, engine={"tp": 4}) == []


@pytest.mark.parametrize("mtp", ["frozen", "trained"])
def test_a_model_without_multi_token_prediction_builds_no_layer_for_it(mtp: str) -> None:
    (message,) = fit(train={"mtp": mtp})
    assert f"train.mtp: '{mtp}' asks for a layer for multi-token prediction, but m/config.json announces none" in message
    assert model_problems(Config(model={"path": "m"}, train={"mtp": mtp}), deepseek.spec(tiny_config(mtp=True))) == []


def test_fewer_layers_than_stages() -> None:
    (message,) = fit(parallel={"pp": 4, "vpp": 2})
    assert "5 layers, fewer than pp 4 x vpp 2 = 8 stages" in message
    assert fit(parallel={"pp": 2, "vpp": 2}) == []


def test_experts_and_heads_that_ranks_do_not_divide() -> None:
    found = fit(parallel={"ep": 5, "tp": 3}, engine={"tp": 8})
    assert [message.split(":")[0] for message in found] == ["parallel.ep", "parallel.tp", "engine.tp"]
