"""Native options against the installed packages: real sources, typos, owned keys, packages that are absent."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from moerl.config import native, rules
from moerl.config.schema import Observe
from moerl.convert.tiny import tiny_config, tiny_deepseek_v2_config, tiny_glm4_config, tiny_qwen3_config
from moerl.models import ModelSpec, deepseek, deepseek_v2, glm4, qwen3


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No optional package can be found."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    native.megatron_fields.cache_clear()
    native.sglang_fields.cache_clear()


def test_megatron_fields_are_those_of_the_imported_class() -> None:
    code = (
        "import dataclasses, json; from megatron.core.transformer.transformer_config import MLATransformerConfig as C;"
        "print(json.dumps([field.name for field in dataclasses.fields(C)]))"
    )
    answer = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, timeout=280)
    assert native.megatron_fields() == set(json.loads(answer.stdout))


def test_sglang_fields_are_those_of_its_own_order() -> None:
    source = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt" / "arg_groups" / "field_order.py"
    scope: dict = {}
    exec(compile(source.read_text(), str(source), "exec"), scope)
    assert set(scope["POSITIONAL_FIELD_ORDER"]) <= native.sglang_fields()
    assert len(native.sglang_fields()) < len(scope["POSITIONAL_FIELD_ORDER"]) + 20


def test_valid_options_pass() -> None:
    assert native.megatron_problems({"recompute_granularity": "full", "recompute_num_layers": 1}) == []
    assert native.sglang_problems({"mem_fraction_static": 0.4, "attention_backend": "triton"}) == []
    assert native.megatron_problems({}) == native.sglang_problems({}) == []


def test_typo_names_the_nearest_and_the_version() -> None:
    (message,) = native.megatron_problems({"recompute_granularit": "full"})
    assert message.startswith("megatron.recompute_granularit is not an option of the installed megatron-core 0.19.")
    assert message.endswith("; did you mean megatron.recompute_granularity?")
    (message,) = native.sglang_problems({"mem-fraction-static": 0.4})
    assert message.endswith("; did you mean sglang.mem_fraction_static?")


def test_option_like_nothing_else_has_no_suggestion() -> None:
    (message,) = native.sglang_problems({"qqqqqqqq": 1})
    assert "did you mean" not in message


def test_an_owned_key_is_refused_with_the_setting_to_use() -> None:
    assert native.sglang_problems({"tp_size": 2}) == ["sglang.tp_size cannot be set: set engine.tp"]
    assert native.megatron_problems({"context_parallel_size": 2}) == ["megatron.context_parallel_size cannot be set: set parallel.cp"]
    (message,) = native.megatron_problems({"finalize_model_grads_func": "f"})
    assert "is a Python callable" in message


def test_an_owned_key_is_never_suggested() -> None:
    (message,) = native.sglang_problems({"tp_sizes": 2})
    assert "tp_size?" not in message


def test_owned_keys_exist() -> None:
    assert native.OWNED_MEGATRON.keys() <= native.megatron_fields()
    assert native.OWNED_SGLANG.keys() <= native.sglang_fields()


SPECS = [
    deepseek.spec(tiny_config()),
    deepseek_v2.spec(tiny_deepseek_v2_config()),
    qwen3.spec(tiny_qwen3_config()),
    glm4.spec(tiny_glm4_config()),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.family)
def test_all_that_the_model_decides_is_owned(spec: ModelSpec) -> None:
    assert spec.megatron.keys() | spec.megatron_model.keys() <= native.OWNED_MEGATRON.keys()


@pytest.mark.usefixtures("absent")
def test_package_that_is_absent() -> None:
    (message,) = native.sglang_problems({"mem_fraction_static": 0.4})
    assert message == "[sglang] cannot be checked, since sglang is not installed; `moerl doctor` says how to install it"
    (message,) = native.megatron_problems({"recompute_granularity": "full"})
    assert "megatron-core is not installed" in message


@pytest.mark.usefixtures("absent")
def test_sink_that_is_absent_says_how_to_install_it() -> None:
    assert native.sink_problems(Observe()) == []
    found = native.sink_problems(Observe(tensorboard=True, wandb_project="w", trackio_project="t"))
    assert [message.rpartition(": ")[2] for message in found] == ["pip install tensorboard", "pip install wandb", "pip install trackio"]


def test_sources_that_moved_are_an_error_and_not_an_empty_list(tmp_path: Path) -> None:
    with pytest.raises(native.ConfigError, match="no options where they were expected"):
        native._class_fields([tmp_path / "gone.py"], lambda node: True)


def test_the_limit_of_sampling_masks_is_that_of_sglang() -> None:
    folder = native._package_folder("sglang", "sglang") / "srt" / "arg_groups" / "fields"
    fields = [node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.AnnAssign)]
    (limit,) = [ast.literal_eval(node.value) for node in fields if ast.unparse(node.target) == "sampling_mask_max_tokens"]
    assert limit == rules.MASK_TOKENS
