"""What moerl adds inside SGLang's processes: the only module that imports SGLang.

SGLang calls `register` in every process it starts (entry point group `sglang.srt.plugins`, name `moerl`). The processes that
hold a model get

- checksums of every tensor a forward pass reads: MLA's `w_kc` and `w_vc` are derived from `kv_b_proj` and SGLang's
  `/weights_checker` leaves them out, so a rebuild that was forgotten would go unnoticed;
- the same hash on every device (SGLang's own differs between CPU and CUDA);
- a mark in `/server_info` (`internal_states[*].moerl`), by which `server.py` knows that all this is in force;
- on CPU: plain host memory for the route buffer, MLA under torch's own attention, and DP attention's fill value.

SGLang logs and swallows exceptions of plugins: the missing mark is what makes a failure here visible.
"""

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

MARK = "moerl"
VERSION = 1
_MODEL_PROCESS = "sglang.srt.managers.scheduler"
_DERIVED = ("w_kc", "w_vc")


def register() -> None:
    """Entry point. Does nothing in processes that hold no model (HTTP, detokenizer): they have not imported the scheduler."""
    if _MODEL_PROCESS not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not torch.cuda.is_available():
        _support_cpu()
    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker._model_state", _with_derived, HookType.AROUND)
    HookRegistry.register("sglang.srt.utils.weight_checker._hash_tensor", hash_tensor, HookType.REPLACE)
    HookRegistry.register(f"{_MODEL_PROCESS}.Scheduler.get_internal_state", _mark, HookType.AFTER)


def hash_tensor(tensor: torch.Tensor) -> str:
    """First 16 hex digits of the SHA-256 of the tensor's elements in row-major order, whatever its device and strides."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.cpu().numpy().data).hexdigest()[:16]


def derived_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the tensors that forward passes read but that are neither parameters nor buffers."""
    for prefix, module in model.named_modules():
        for name in _DERIVED:
            tensor = module.__dict__.get(name)
            if isinstance(tensor, torch.Tensor):
                yield f"{prefix}.{name}", tensor


def _with_derived(original: Any, checker: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from original(checker)
    yield from derived_tensors(checker._get_model())


def _mark(result: Any, *args: Any) -> Any:
    result.internal_state[MARK] = VERSION
    return result


def _support_cpu() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory
    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda backend: 1


def _plain_memory(dims: tuple[int, ...], dtype: torch.dtype, device: str, **pinning: Any) -> torch.Tensor:
    """Host memory without the registration that needs a CUDA driver."""
    return torch.empty(dims, dtype=dtype, device=device)
