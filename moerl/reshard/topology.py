"""How the engines of a run cut the model: what `[engine]`, `[sglang]` and the folder that they serve say about it."""

import json
from pathlib import Path
from typing import Any

from moerl.config.schema import Config
from moerl.reshard.engine_boxes import EngineTopology


def engine_topology(config: Config) -> EngineTopology:
    """How the engines cut the model. `cpu` holds where the settings say so; `auto` is known only where the engines run."""
    engine, native = config.engine, config.sglang
    return EngineTopology(
        count=engine.count,
        tp=engine.tp,
        ep=native.get("ep_size", 1),
        attention_dp=native.get("dp_size", 1) if native.get("enable_dp_attention") else 1,
        dp_output_layer=bool(native.get("enable_dp_lm_head")),
        replicated_dense=native.get("moe_dense_tp_size") == 1,
        cpu=engine.device == "cpu",
        dtype=engine.dtype,
        **_quantisation(Path(engine.model_path or config.model.path)),
    )


def _quantisation(folder: Path) -> dict[str, Any]:
    """`fp8_block` and `fp8_power_of_two` of a checkpoint in block-quantised fp8; nothing for any other."""
    path = folder / "config.json"
    found = json.loads(path.read_text()).get("quantization_config") if path.is_file() else None
    if not found or found.get("quant_method") != "fp8" or not found.get("weight_block_size"):
        return {}
    return {"fp8_block": tuple(found["weight_block_size"]), "fp8_power_of_two": found.get("scale_fmt") == "ue8m0"}
