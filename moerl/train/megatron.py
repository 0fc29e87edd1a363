"""Megatron's set-up: process groups, model, optimizer, tear-down. Importing it prepares nothing; `initialise` does.

Megatron itself is imported inside functions only, here and in all modules but `layers`, `packing` and `mtp`, since the platform must be
ready first.

    initialise -> Ranks -> build_model -> chunks --(weights.load_hf)--> build_optimizer -> forward.forward_backward
                                                                                        -> optimizer_step

A model is a list of chunks, one per virtual pipeline stage. A trainable chunk is wrapped in Megatron's data-parallel module
(gradients in a contiguous float32 buffer, reduced once per step); a reference model is bare and frozen.
"""

import datetime
import itertools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch

from moerl.config.schema import Config, Parallel, Train
from moerl.errors import ConfigError, TrainError
from moerl.models.spec import ModelSpec
from moerl.models.stages import pipeline_stages
from moerl.train import platform

_PIPELINE_OPTIONS = {"pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"}
"""With any of these in `[megatron]` the user spreads the layers; otherwise we do."""

_joins = itertools.count()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Ranks:
    """Where this process stands.

    Attributes:
        device: "cpu" or "cuda".
        rank, world: over all processes.
        tp, pp, cp, dp, ep, etp, edp: (index, size) along each axis; ep, etp, edp are the experts' own.
        vpp: virtual pipeline stages per process.
    """

    device: platform.Device
    rank: int
    world: int
    tp: tuple[int, int]
    pp: tuple[int, int]
    cp: tuple[int, int]
    dp: tuple[int, int]
    ep: tuple[int, int]
    etp: tuple[int, int]
    edp: tuple[int, int]
    vpp: int

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")

    @property
    def sequence_multiple(self) -> int:
        """Every padded sequence's length is a multiple of this, so that context and sequence parallelism can cut it."""
        return self.tp[1] * (2 * self.cp[1] if self.cp[1] > 1 else 1)

    @property
    def microbatch_multiple(self) -> int:
        """The number of microbatches per data-parallel rank is a multiple of this (interleaved pipeline schedule)."""
        return self.pp[1] if self.vpp > 1 else 1

    @property
    def last_stage(self) -> bool:
        """Whether this process holds the language-model head."""
        return self.pp[0] == self.pp[1] - 1


def initialise(parallel: Parallel, train: Train, seed: int) -> Ranks:
    """Join the process group that torchrun's environment describes (alone without one) and make Megatron's groups.

    Raises:
        ConfigError: the world size does not factor; the message shows the product.
    """
    device = platform.pick_device(train.device)
    platform.quiet()
    platform.install(device)
    world = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else 1
    check_world(parallel, world)
    _join(device, parallel.timeout_s, world)
    if device == "cpu":
        torch.set_num_threads(train.threads)

    return make_groups(device, parallel, seed)


def make_groups(device: platform.Device, parallel: Parallel, seed: int, *, gloo: bool = True) -> Ranks:
    """Megatron's groups over the processes that have joined, its generators seeded for this one, and its place among them.

    Args:
        gloo: make those groups too that Megatron wants over gloo beside the default backend.
    """
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        distributed_timeout_minutes=parallel.timeout_s / 60,
        create_gloo_process_groups=gloo,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return _read_ranks(device, parallel.vpp)


def check_world(parallel: Parallel, world: int) -> None:
    """Check that `world` processes can be arranged as asked.

    Raises:
        ConfigError: with every product that does not fit.
    """
    dense, expert = parallel.tp * parallel.pp * parallel.cp, parallel.etp * parallel.ep * parallel.pp
    wrong = []
    if world % dense:
        wrong.append(
            f"world size {world} is not a multiple of tp * pp * cp = {parallel.tp} * {parallel.pp} * {parallel.cp} = {dense}; "
            "change [parallel] or the number of processes"
        )
    if world % expert:
        wrong.append(
            f"world size {world} is not a multiple of etp * ep * pp = {parallel.etp} * {parallel.ep} * {parallel.pp} = {expert}; "
            "change [parallel] or the number of processes"
        )
    if parallel.vpp > 1 and parallel.pp == 1:
        wrong.append(f"parallel.vpp = {parallel.vpp} needs pipeline parallelism, but parallel.pp is 1; set parallel.vpp to 1 or raise pp")
    if wrong:
        raise ConfigError(wrong)


def _join(device: platform.Device, timeout_s: float, world: int) -> None:
    timeout = datetime.timedelta(seconds=timeout_s)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else 0)
    if world > 1:
        store, rank, _ = next(torch.distributed.rendezvous("env://", timeout=timeout))
    else:
        store, rank = torch.distributed.HashStore(), 0
    # A process may join several times; under one prefix it would find the addresses of the group it left.
    store = torch.distributed.PrefixStore(f"moerl-{next(_joins)}", store)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _read_ranks(device: platform.Device, vpp: int) -> Ranks:
    from megatron.core import parallel_state as state

    return Ranks(
        device=device,
        rank=torch.distributed.get_rank(),
        world=torch.distributed.get_world_size(),
        tp=(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
        pp=(state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()),
        cp=(state.get_context_parallel_rank(), state.get_context_parallel_world_size()),
        dp=(state.get_data_parallel_rank(), state.get_data_parallel_world_size()),
        ep=(state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
        etp=(state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()),
        edp=(state.get_expert_data_parallel_rank(), state.get_expert_data_parallel_world_size()),
        vpp=vpp,
    )


def shutdown() -> None:
    """Leave all process groups. The process may `initialise` again afterwards, on the same device."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    destroy_moe_metrics_tracker()  # sized for the model that was here
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def transformer_config(spec: ModelSpec, config: Config, ranks: Ranks) -> Any:
    """Megatron's configuration of the model: its own values, then ours, then `[megatron]`. Multi-latent attention has its own class.

    Raises:
        ConfigError: an unknown option in `[megatron]`, or one that Megatron refuses.
    """
    import torch.nn.functional as F
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from moerl.train.layers import has_transformer_engine

    kind = MLATransformerConfig if spec.latent_attention else TransformerConfig

    engine = ranks.device == "cuda" and has_transformer_engine()
    dtype, parallel = DTYPES[config.train.dtype], config.parallel
    options: dict[str, Any] = {
        "qk_layernorm": True,
        **spec.megatron,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "transformer_impl": "transformer_engine" if engine else "local",
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "sequence_parallel": parallel.tp > 1,
        # Microbatches are padded to one size instead (`forward`). With two interleaved stages, batched sends and receives between
        # the same two ranks pair up in the wrong order, silently; an exchange of shapes is always batched.
        "variable_seq_lengths": False,
        "batch_p2p_comm": ranks.device == "cuda" and not (parallel.pp == 2 and parallel.vpp > 1),
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "moe_grouped_gemm": engine,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_dtype": "fp32",
        "moe_router_bias_update_rate": config.train.expert_bias_update_rate,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_enable_routing_replay": config.replays,
        "bias_activation_fusion": engine,
    }
    if not spreads_layers(config):
        options["pipeline_model_parallel_layout"] = _uneven_layout(spec.layers, parallel)
    options |= config.megatron
    known = {field.name for field in fields(kind)}
    if unknown := sorted(set(config.megatron) - known):
        why = f"is not an option of the installed Megatron's {kind.__name__}, which {spec.family} models use"
        raise ConfigError([f"megatron.{name} {why}" for name in unknown])
    if (groups := spec.megatron.get("num_query_groups", parallel.tp)) % parallel.tp:
        raise ConfigError(f"parallel.tp: the model's {groups} key-value heads cannot be split over {parallel.tp} ranks; choose a divisor")
    if options.get("overlap_moe_expert_parallel_comm") and spec.layers - 1 not in spec.moe_layers:
        wrong = "its schedule leaves out the final norm of a model whose last layer is dense, like this one"
        raise ConfigError([f"megatron.overlap_moe_expert_parallel_comm must be false: {wrong}"])
    try:
        return kind(**options)
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(f"Megatron refuses these settings: {error}") from error


def _uneven_layout(layers: int, parallel: Parallel) -> list[list[str]] | None:
    """Megatron's words for `pipeline_stages` when the layers do not divide evenly; None when they do.

    Raises:
        ConfigError: fewer layers than stages.
    """
    stages = parallel.pp * parallel.vpp
    if layers % stages == 0:
        return None
    if layers < stages:
        raise ConfigError(f"the model has {layers} layers, fewer than pp * vpp = {parallel.pp} * {parallel.vpp} = {stages} stages")
    layout = [["decoder"] * count for count in pipeline_stages(layers, stages)]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout


def spreads_layers(config: Config) -> bool:
    """Whether `[megatron]` says how many layers a pipeline stage has, in place of `pipeline_stages`."""
    return not _PIPELINE_OPTIONS.isdisjoint(config.megatron)


def build_model(spec: ModelSpec, config: Config, ranks: Ranks, *, trainable: bool = True, mtp: bool | None = None) -> list[torch.nn.Module]:
    """This process's model chunks, initialised from Megatron's seeded generators (weights come with `weights.load_hf`).

    Args:
        trainable: wrap for training; False builds a frozen reference model without gradients.
        mtp: with the layer for multi-token prediction; None: where `train.mtp` asks for it and the model is trainable.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    from moerl.routing.replay import routers
    from moerl.train.layers import block_spec

    settings = transformer_config(spec, config, ranks)
    vocab = -(-spec.vocab_size // ranks.tp[1]) * ranks.tp[1]
    chunks = []
    for number in range(ranks.vpp):
        stage = number if ranks.vpp > 1 else None
        with no_global_routers():
            chunk = GPTModel(
                config=settings,
                transformer_layer_spec=block_spec(settings, stage),
                vocab_size=vocab,
                max_sequence_length=spec.hf_config["max_position_embeddings"],
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                share_embeddings_and_output_weights=spec.tied_embeddings,
                position_embedding_type="rope",
                **spec.megatron_model,
                vp_stage=stage,
            )
        # The head masks the columns beyond it (`forward`).
        chunk.moerl_vocab_size = spec.vocab_size
        chunks.append(chunk.to(ranks.torch_device))
    for router in (router for chunk in chunks for router in routers(chunk)):
        router.frozen_expert_bias = config.replay.expert_bias == "frozen"
    if chunks[-1].post_process and (trainable and config.train.builds_mtp if mtp is None else mtp):
        from moerl.train.mtp import attach

        attach(chunks[-1], ranks.vpp - 1 if ranks.vpp > 1 else None, trained=config.train.mtp == "trained")
        chunks[-1].mtp.to(ranks.torch_device)
    if trainable:
        return [_wrap(chunk, number) for number, chunk in enumerate(chunks)]
    for chunk in chunks:
        chunk.requires_grad_(False).eval()
    return chunks


@contextmanager
def no_global_routers() -> Iterator[None]:
    """Keep new routers off Megatron's process-wide list, even if building fails: it would keep models alive, and in the way of others."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    everyone = RouterReplay.global_router_replay_instances
    before = list(everyone)
    try:
        yield
    finally:
        everyone[:] = before


def _wrap(chunk: torch.nn.Module, number: int) -> torch.nn.Module:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    chunk.config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return DistributedDataParallel(chunk.config, ddp, chunk, disable_bucketing=number > 0)


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside a chunk."""
    from megatron.core.distributed import DistributedDataParallel

    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk


def build_optimizer(model: list[torch.nn.Module], config: Config) -> Any:
    """Megatron's distributed AdamW over float32 master weights. Build it after the weights are loaded.

    Norms and other vectors have no weight decay. The learning rate is set per step (`optimizer_step`).
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    train, dtype = config.train, DTYPES[config.train.dtype]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=train.lr,
            min_lr=0.0,
            weight_decay=train.weight_decay,
            adam_beta1=train.adam_beta1,
            adam_beta2=train.adam_beta2,
            adam_eps=1e-8,
            clip_grad=train.grad_clip,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        ),
        model,
    )
    for group in optimizer.param_groups:
        group["weight_decay"] = train.weight_decay * group["wd_mult"]
    return optimizer


def optimizer_step(optimizer: Any, lr: float) -> float:
    """Clip and apply the finalised gradients with learning rate `lr`. Those of multi-token prediction are clipped by a norm of their own.

    Returns:
        The gradient norm before clipping, over all ranks, without multi-token prediction.

    Raises:
        TrainError: a norm is not finite; the weights are unchanged.
    """
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    for group in optimizer.param_groups:
        group["lr"] = lr
    overflow = optimizer.prepare_grads()
    norms: dict[str | None, float] = {None: float(optimizer.get_grad_norm())}
    norms |= {name: float(norm) for name, norm in optimizer._compute_grad_norms_by_group().items()}
    if overflow or not all(map(math.isfinite, norms.values())):
        shown = "".join(f", of {name} {norm}" for name, norm in norms.items() if name)
        raise TrainError(f"the gradient norm is {norms[None]}{shown}; the step was refused and the weights are unchanged")
    for part in optimizer.chained_optimizers:
        if part.config.clip_grad > 0 and not part.is_stub_optimizer:
            parameters = part.get_parameters()
            for name, norm in norms.items():
                mine = [parameter for parameter in parameters if getattr(parameter, "grad_norm_group", None) == name]
                if mine:
                    clip_grad_by_total_norm_fp32(mine, part.config.clip_grad, norm)
    optimizer.step_with_ready_grads()
    return norms[None]
