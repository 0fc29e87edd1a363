"""Lets Megatron-core run on the CPU over gloo. The only module that changes Megatron or torch, and only for device "cpu".

Megatron assumes CUDA in literals (`device="cuda"`, `torch.cuda.current_device()`), in types ('torch.cuda.FloatTensor') and
in streams. Each assumption has one patch here, listed in `PATCHES` with the failure it avoids. Patches on torch go in before
Megatron is imported, patches on Megatron right after.

    install("cpu")   once, before any `import megatron`     -> all patches
    install("cuda")                                         -> nothing

Invariant: a second `install` for the same device does nothing; switching devices within a process is an error.
"""

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.utils._device

from moerl.errors import ConfigError

Device = Literal["cpu", "cuda"]

_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn", "linspace", "eye")
_CUDA_TYPES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}
_NOTICES = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "MimoModelConfig is experimental",
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # of experts, which get their rows from the dispatcher
    r"`torch\.distributed\.\w+` is deprecated",
)
_NOTICE_LOGGERS = (
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.tensor_parallel.random",
    "torch.utils.cpp_extension",
)
_installed: list[Device] = []


@dataclass(frozen=True)
class Patch:
    """Attributes:
    name: what is patched.
    avoids: what fails without it.
    apply: makes the change; called once.
    after_import: it changes Megatron itself rather than torch.
    """

    name: str
    avoids: str
    apply: Callable[[], None]
    after_import: bool = False


def pick_device(setting: str) -> Device:
    """Resolve `train.device`: "auto" is CUDA where a GPU is visible.

    Raises:
        ConfigError: "cuda" without a visible GPU.
    """
    available = torch.cuda.is_available()
    if setting == "cuda" and not available:
        raise ConfigError('train.device is "cuda" but torch sees no GPU; set train.device to "cpu" or "auto"')
    return "cuda" if setting == "cuda" or (setting == "auto" and available) else "cpu"


def install(device: Device) -> None:
    """Prepare this process for Megatron on `device`.

    Raises:
        ConfigError: Megatron was imported before, or the process was prepared for the other device.
    """
    if _installed:
        if _installed[0] != device:
            raise ConfigError(f'this process was prepared for device "{_installed[0]}"; start another process for "{device}"')
        return
    if device == "cpu":
        if "megatron.core" in sys.modules:
            raise ConfigError("megatron was imported before moerl.train.platform.install('cpu'); import moerl.train.megatron first")
        for patch in PATCHES:
            if not patch.after_import:
                patch.apply()
        for patch in PATCHES:
            if patch.after_import:
                patch.apply()
    _installed.append(device)


def quiet() -> None:
    """Hide notices of Megatron and torch that tell a user of moerl nothing: fallbacks chosen on purpose, renamed collectives."""
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # of others' sources, compiled at their first import
    for message in _NOTICES:
        warnings.filterwarnings("ignore", message=message)
    for name in _NOTICE_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


# ---------------------------------------------------------------------------------------------------------------- torch


def _disable_dynamo() -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read by torch when Megatron decorates its functions with torch.compile


def _kernel_cache() -> None:
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "16384"  # read by oneDNN at its first multiplication


def _rng() -> None:
    """One generator serves both names; Megatron saves and restores its state by value, which is all it needs."""
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.set_rng_state = lambda new_state, device="cuda": torch.set_rng_state(new_state)
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed) and None
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state


def _current_device() -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


def _factories() -> None:
    # `with torch.device(...)` recognises factories by identity, in a set that torch builds once: build it from the originals.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _cuda_method() -> None:
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


class _Inert:
    """A stream or event on a device that has neither: everything is already done."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def record_event(self, event: "_Inert | None" = None) -> "_Inert":
        return event if event is not None else self

    def query(self) -> bool:
        return True

    def record(self, *args: Any) -> None:
        pass

    wait = wait_stream = wait_event = synchronize = record


def _streams() -> None:
    stream = _Inert()
    torch.cuda.Stream = torch.cuda.Event = _Inert
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.record_stream = lambda self, stream: None


# ------------------------------------------------------------------------------------------------------------- Megatron


def _rng_tracker() -> None:
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


def _checkpoint_fp8() -> None:
    from megatron.core.tensor_parallel import random

    random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def _share_storage() -> None:
    from megatron.core.tensor_parallel import random

    def refill(emptied: torch.Tensor, recomputed: torch.Tensor) -> None:
        target, source = emptied.untyped_storage(), recomputed.untyped_storage()
        target.resize_(source.nbytes())
        target.copy_(source)

    random._get_share_storage = lambda: refill


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    """Within, `tensor.type()` answers the CUDA name: for code that tests it against a literal."""
    original = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return _CUDA_TYPES[answer] if isinstance(answer, str) and answer in _CUDA_TYPES else answer

    torch.Tensor.type = named
    try:
        yield
    finally:
        torch.Tensor.type = original


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _cuda_type_names():
            return function(*args, **kwargs)

    return wrapped


def _type_tests() -> None:
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    for owner in (distrib_optimizer.DistributedOptimizer, optimizer.Float16OptimizerWithFloat16Params):
        owner.__init__ = _with_cuda_type_names(owner.__init__)
    clip = _with_cuda_type_names(clip_grads.clip_grad_by_total_norm_fp32)
    for module in (clip_grads, optimizer, distrib_optimizer):
        if hasattr(module, "clip_grad_by_total_norm_fp32"):
            module.clip_grad_by_total_norm_fp32 = clip


def _splits() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = move


def _uneven_collectives() -> None:
    """gloo gathers and scatters even sizes only; all-to-all with splits does the same for uneven ones."""
    from megatron.core.tensor_parallel import mappings

    even_gather, even_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    @functools.wraps(even_gather)
    def gather(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, None, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        output = input_.new_empty((sum(sizes), *input_.shape[1:]))
        copies = torch.cat([input_] * group.size())
        torch.distributed.all_to_all_single(output, copies, sizes, [len(input_)] * group.size(), group=group)
        return output

    @functools.wraps(even_scatter)
    def scatter(input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(input_, group, None, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        mine = sizes[group.rank()]
        output = input_.new_empty((mine * group.size(), *input_.shape[1:]))
        torch.distributed.all_to_all_single(output, input_.contiguous(), [mine] * group.size(), sizes, group=group)
        return output.view(group.size(), mine, *input_.shape[1:]).sum(0)

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, scatter


PATCHES: tuple[Patch, ...] = (
    Patch("dynamo", "the first step compiles for seconds what runs in milliseconds", _disable_dynamo),
    Patch(
        "kernel_cache", "bfloat16 kernels, one per expert load, push each other out of a cache of 1024 and are built again", _kernel_cache
    ),
    Patch("rng", "torch.cuda.get_rng_state has no device to ask", _rng),
    Patch("current_device", "buffers of embedding, attention and router are put on torch.cuda.current_device()", _current_device),
    Patch("factories", 'literal device="cuda" in schedules, optimizer and gradient clipping', _factories),
    Patch("cuda_method", "`.cuda()` on tensors under context parallelism", _cuda_method),
    Patch("streams", "token dispatcher, shared experts and overlapped schedules create CUDA streams, and tensors record them", _streams),
    Patch("rng_tracker", "Megatron keeps generator states through private CUDA functions", _rng_tracker, True),
    Patch("checkpoint_fp8", "selective recomputation asks Transformer Engine for an fp8 state by default", _checkpoint_fp8, True),
    Patch("share_storage", "selective recomputation compiles a C++ extension in the first backward pass, with ninja", _share_storage, True),
    Patch("type_tests", "optimizers test `param.type()` against CUDA type names", _type_tests, True),
    Patch("splits", "all-to-all split sizes stay tensors, which torch refuses", _splits, True),
    Patch("uneven_collectives", "gloo refuses uneven gather and reduce-scatter (expert tensor parallelism)", _uneven_collectives, True),
)
