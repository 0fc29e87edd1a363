"""What moerl adds inside SGLang's processes. Beside `reshard.plugin`, the receiving end of weight sync, the one module that imports SGLang.

SGLang calls `register` in every process it starts (entry point group `sglang.srt.plugins`, name `moerl`). No process outlives the one
that started it. The processes that hold a model get

- checksums of every tensor a forward pass reads: MLA's `w_kc` and `w_vc` are derived from `kv_b_proj` and SGLang's
  `/weights_checker` leaves them out, so a rebuild that was forgotten would go unnoticed;
- the same hash on every device (SGLang's own differs between CPU and CUDA);
- marks in `/server_info` (`internal_states[*]`): `moerl`, by which `server.py` knows that all this is in force, and
  `moerl_process_group`, by which it knows its own server from another that took the port;
- on CPU: plain host memory for the route buffer, MLA under torch's own attention, DP attention's fill value, and one
  attention call per decoding step for all requests of a batch instead of one per request.

SGLang logs and swallows exceptions of plugins: the missing mark is what makes a failure here visible.
"""

import ctypes
import hashlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MARK, GROUP = "moerl", "moerl_process_group"
VERSION = 1
_MODEL_PROCESS = "sglang.srt.managers.scheduler"
_PR_SET_PDEATHSIG = 1
_DERIVED = ("w_kc", "w_vc")
_MAX_PADDING = 4


def register() -> None:
    """Entry point. Adds nothing to processes that hold no model (HTTP, detokenizer): they have not imported the scheduler."""
    _die_with_parent()
    if _MODEL_PROCESS not in sys.modules:
        return
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker._model_state", _with_derived, HookType.AROUND)
    HookRegistry.register("sglang.srt.utils.weight_checker._hash_tensor", hash_tensor, HookType.REPLACE)
    HookRegistry.register(f"{_MODEL_PROCESS}.Scheduler.get_internal_state", _mark, HookType.AFTER)
    if not torch.cuda.is_available():
        _support_cpu()
        decode = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_decode"
        HookRegistry.register(decode, _decode, HookType.AROUND)


def _die_with_parent() -> None:
    """SGLang asks the kernel to end its processes with their parent, but that comes too late for a parent that is gone by then."""
    if (parent := multiprocessing.parent_process()) is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not parent.is_alive():
        os._exit(1)


def hash_tensor(tensor: "torch.Tensor") -> str:
    """First 16 hex digits of the SHA-256 of the tensor's elements in row-major order, whatever its device and strides."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.cpu().numpy().data).hexdigest()[:16]


def derived_tensors(model: "torch.nn.Module") -> Iterator[tuple[str, "torch.Tensor"]]:
    """(name, tensor) of the tensors that forward passes read but that are neither parameters nor buffers."""
    import torch

    for prefix, module in model.named_modules():
        for name in _DERIVED:
            tensor = module.__dict__.get(name)
            if isinstance(tensor, torch.Tensor):
                yield f"{prefix}.{name}", tensor


def _with_derived(original: Any, checker: Any) -> Iterator[tuple[str, "torch.Tensor"]]:
    yield from original(checker)
    yield from derived_tensors(checker._get_model())


def _mark(result: Any, *args: Any) -> Any:
    result.internal_state |= {MARK: VERSION, GROUP: os.getpgrp()}
    return result


def _support_cpu() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory
    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda backend: 1


def _plain_memory(dims: tuple[int, ...], dtype: "torch.dtype", device: str, **pinning: Any) -> "torch.Tensor":
    """Host memory without the registration that needs a CUDA driver."""
    import torch

    return torch.empty(dims, dtype=dtype, device=device)


def _decode(original: Callable[..., "torch.Tensor"], backend: Any, *args: Any, **kwargs: Any) -> "torch.Tensor":
    """SGLang's decoding attention, batched where no request needs more than its own causal past."""
    query, output, keys, values, req_to_token, requests, lengths, encoder_lengths = args
    plain = encoder_lengths is None and not kwargs["is_cross_attn"] and kwargs["sliding_window_size"] is None
    longest = int(lengths.max())
    # Padding to the longest request must not cost more than the calls it saves.
    if not plain or longest * len(lengths) > _MAX_PADDING * int(lengths.sum()):
        return original(backend, *args, **kwargs)
    slots = req_to_token[requests, :longest].long()
    output.copy_(batched_decode(query, keys, values, slots, lengths, kwargs["scaling"]))
    return output


def batched_decode(
    query: "torch.Tensor", keys: "torch.Tensor", values: "torch.Tensor", slots: "torch.Tensor", lengths: "torch.Tensor", scale: float
) -> "torch.Tensor":
    """Attention of one query token per request over the request's cached past.

    Args:
        query: float[request, head, d].
        keys, values: float[slot, kv_head, d] and [slot, kv_head, v]; heads share kv heads in equal groups.
        slots: int64[request, longest] cache slots of each request's tokens; entries past its length are ignored.
        lengths: int[request] tokens of each request, at least 1.

    Returns:
        float[request, head, v] in the query's dtype.
    """
    import torch

    valid = torch.arange(slots.shape[1]) < lengths[:, None]
    # Ignored entries read a slot of their own request: an unwritten slot could hold a NaN, which a zero weight does not stop.
    slots = torch.where(valid, slots, slots[:, :1])
    past_keys = keys[slots].transpose(1, 2).to(query.dtype)
    past_values = values[slots].transpose(1, 2).to(query.dtype)
    result = torch.nn.functional.scaled_dot_product_attention(
        query.unsqueeze(2), past_keys, past_values, attn_mask=valid[:, None, None], scale=scale, enable_gqa=query.shape[1] != keys.shape[1]
    )
    return result.squeeze(2)
