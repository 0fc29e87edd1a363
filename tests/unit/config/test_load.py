"""Sources, merging, command line values, and what a wrong config says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moerl.config.load import leaves, load_config, merge, read_sources, setting_paths
from moerl.errors import ConfigError

PATH = ["--model.path", "somewhere"]


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def violations(argv: list[str], **options: int) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv, **options)
    return caught.value.violations


def test_defaults_and_one_setting() -> None:
    config = load_config([*PATH, "--train.steps", "3"])
    assert (config.model.path, config.train.steps, config.rollout.group_size) == ("somewhere", 3, 8)


@pytest.mark.parametrize("form", [["@ {}"], ["@", "{}"], ["@{}"]], ids=["one word", "two words", "joined"])
def test_file_can_be_named_in_two_ways(tmp_path: Path, form: list[str]) -> None:
    file = write(tmp_path, "a.toml", '[model]\npath = "m"\n[train]\nsteps = 7\n')
    words = [word.format(file) for part in form for word in part.split(" ")]
    assert load_config(words).train.steps == 7


def test_files_merge_left_to_right_and_the_command_line_wins(tmp_path: Path) -> None:
    base = write(tmp_path, "base.toml", '[model]\npath = "m"\n[train]\nsteps = 7\nlr = 0.5\n[task.options]\na = 1\nb = 1\n')
    more = write(tmp_path, "more.toml", "[train]\nsteps = 8\n[task.options]\nb = 2\n")
    config = load_config(["--train.steps=9", "@", base, "@", more])
    assert config.train.steps == 9
    assert config.train.lr == 0.5
    assert config.task.options == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("--train.lr=1e-3", 1e-3),
        ("--train.lr=2", 2.0),
        ("--train.fp32_head=false", False),
        ("--engine.dtype=float32", "float32"),
        ("--engine.dtype='float32'", "float32"),
        ("--observe.wandb_project=", ""),
        ("--run.dir=2024", "2024"),
        ('--run.dir="a b"', "a b"),
        ("--require.min_reward_gain=0.1", 0.1),
        ("--require.min_reward_gain=none", None),
        ("--task.options={min_terms = 2, words = ['a', 'b']}", {"min_terms": 2, "words": ["a", "b"]}),
        ("--task.options.max_digits=3", {"max_digits": 3}),
        ("--sglang.mem_fraction_static=0.3", {"mem_fraction_static": 0.3}),
    ],
)
def test_values_of_the_command_line(argument: str, value: object) -> None:
    config = load_config([*PATH, argument]).model_dump()
    section, key = argument[2:].split("=")[0].split(".")[:2]
    found = config[section] if section == "sglang" else config[section][key]
    assert found == value
    assert type(found) is type(value)


def test_negative_value_as_a_word_of_its_own() -> None:
    assert load_config([*PATH, "--objective.entropy_coef", "-0.5"]).objective.entropy_coef == -0.5


def test_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    file = write(tmp_path, "a.toml", '[model]\npath = "m"\n[train]\nstpes = 3\n')
    assert violations(["@", file]) == [f"{file}: train.stpes is not a setting; did you mean train.steps?"]


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("--train.group_size=4", "did you mean rollout.group_size?"),
        ("--train.tp=2", "did you mean engine.tp or parallel.tp?"),
        ("--trian.steps=2", "did you mean train.steps?"),
        ("--obsrve.foo=2", "did you mean [observe]?"),
        ("--sync.zzzz=2", "[sync] has way, transport, interrupt, bucket_mib, verify, delta, timeout_s"),
        ("--zzzz.yyyy=2", "the sections are run, model, task"),
        ("--steps=2", "did you mean train.steps?"),
    ],
)
def test_unknown_key_of_the_command_line(argument: str, hint: str) -> None:
    (message,) = violations([*PATH, argument])
    assert message.startswith(f"command line: {argument[2:].split('=')[0]} is not a setting")
    assert hint in message


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--train.steps=0", "train.steps: expected a number above 0, got 0"),
        ("--train.steps=2.5", "train.steps: expected a whole number, got 2.5"),
        ("--train.steps=many", 'train.steps: expected a whole number, got "many"'),
        ("--train.lr=fast", 'train.lr: expected a number, got "fast"'),
        ("--train.lr=nan", "train.lr: expected a finite number, got NaN"),
        ("--train.adam_beta1=1", "train.adam_beta1: expected a number below 1, got 1"),
        ("--run.seed=-1", "run.seed: expected a number of at least 0, got -1"),
        ("--train.fp32_head=yes", 'train.fp32_head: expected true or false, got "yes"'),
        ("--train.fp32_head=1", "train.fp32_head: expected true or false, got 1"),
        ("--task.options=3", "task.options: expected a table, got 3"),
        ("--train=3", "train: expected a table, got 3"),
        ("--engine.dtype=bf16", "engine.dtype: expected one of 'float32' or 'bfloat16', got \"bf16\"; did you mean bfloat16?"),
    ],
)
def test_wrong_value(argument: str, message: str) -> None:
    assert violations([*PATH, argument]) == [message]


def test_model_path_is_required() -> None:
    assert violations([]) == ["model.path is required; give it in a file or as --model.path VALUE"]


def test_all_violations_come_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, "a.toml", "[train]\nstpes = 3\nlr = -1\n[rollout]\ngroup_size = 1\n[megatron]\nrecompute_granularit = 1\n")
    found = violations(["@", file, "--sglang.port=1", "--objective.correction=icepop", "--objective.icepop_low=2.5"])
    beginnings = [
        f"{file}: train.stpes",
        "model.path is required",
        "train.lr: expected",
        "rollout.group_size 1",
        "objective.icepop_low 2.5",
        "megatron.recompute_granularit",
        "sglang.port",
    ]
    assert len(found) == len(beginnings)
    for beginning in beginnings:
        assert sum(message.startswith(beginning) for message in found) == 1, beginning


def test_the_error_counts_and_lists_them() -> None:
    with pytest.raises(ConfigError, match=r"(?s)2 settings are wrong:\n  - .*\n  - "):
        load_config([*PATH, "--train.steps=0", "--train.lr=0"])


def test_missing_file_names_a_neighbour(tmp_path: Path) -> None:
    write(tmp_path, "tiny_cpu.toml", "")
    (first, _) = violations(["@", str(tmp_path / "tiny-cpu.toml")])
    assert first == f"config file {tmp_path / 'tiny-cpu.toml'} does not exist; did you mean {tmp_path / 'tiny_cpu.toml'}?"


def test_bad_toml_says_where(tmp_path: Path) -> None:
    file = write(tmp_path, "a.toml", "[model]\npath = \n")
    message = violations(["@", file])[0]
    assert message.startswith(f"{file} is not valid TOML: ")
    assert "line 2" in message


def test_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe\x00")
    assert "is not valid TOML" in violations(["@", str(tmp_path / "a.toml"), *PATH])[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train.steps"], "--train.steps needs a value, as in --train.steps VALUE or --train.steps=VALUE"),
        (["--train.steps", "--train.lr=1"], "--train.steps needs a value"),
        (["@"], "`@` needs a file name after it"),
        (["configs/a.toml"], "cannot read the argument 'configs/a.toml': expected `@ file.toml`"),
    ],
)
def test_malformed_arguments(words: list[str], message: str) -> None:
    assert violations([*PATH, *words])[0].startswith(message)


def test_section_that_is_not_a_table_in_a_file(tmp_path: Path) -> None:
    file = write(tmp_path, "a.toml", 'train = 3\n[model]\npath = "m"\n')
    assert violations(["@", file]) == ["train: expected a table, got 3"]


def test_every_setting_can_be_named() -> None:
    paths = setting_paths()
    assert len(set(paths)) == len(paths) > 60
    assert {"train.steps", "task.options", "megatron", "sglang"} <= set(paths)


def test_merge_replaces_what_is_not_a_table() -> None:
    tree = {"a": {"x": 1, "y": [1, 2]}, "b": 1}
    merge(tree, {"a": {"y": [3]}, "b": {"z": 1}})
    assert tree == {"a": {"x": 1, "y": [3]}, "b": {"z": 1}}
    assert dict(leaves(tree)) == {"a.x": 1, "a.y": [3], "b.z": 1}


def test_sources_keep_files_before_the_command_line(tmp_path: Path) -> None:
    file = write(tmp_path, "a.toml", "[train]\nsteps = 1\n")
    sources, problems = read_sources(["--train.steps=2", "@", file])
    assert [source.name for source in sources] == [file, "command line"]
    assert not problems


def test_loading_imports_no_torch() -> None:
    code = (
        "import sys, json; from moerl.config.load import load_config;"
        "load_config(['--model.path=m', '--sglang.log_level=info', '--megatron.recompute_granularity=full']);"
        "print(json.dumps([name for name in ('torch', 'megatron', 'sglang', 'ray', 'numpy') if name in sys.modules]))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(answer.stdout) == []
