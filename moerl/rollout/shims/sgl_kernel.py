"""Stands in for SGLang's compiled kernels on machines without them (they are published for CUDA only).

This folder is put on the engine's import path only where the real package is missing. SGLang imports the `*_cpu` names at
module scope, in every process and before plugins are loaded, but calls them only for speculative decoding and for moving
KV entries; a call says so instead of failing obscurely. Any other name is absent, so SGLang takes its own fallbacks.
"""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"module 'sgl_kernel' has no attribute {name!r}: SGLang's compiled kernels are not installed here")

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"sgl_kernel.{name} needs SGLang's compiled CPU kernels; switch off the option that calls it (speculative decoding)"
        )

    return missing
