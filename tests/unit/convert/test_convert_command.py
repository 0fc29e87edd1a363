"""The command line of conversions: what it prints, refuses and leaves behind."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from moerl import cli
from moerl.config.rules import model_problems
from moerl.config.schema import Config
from moerl.models import read_spec
from tests.unit.convert.folders import make, read, same, write

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("command") / "hf", "glm4 mtp", scales="rows")


def run(capsys, *words):
    status = cli.main(["convert", *map(str, words)])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_there_and_back_with_verification(folder, tmp_path, capsys):
    status, printed = run(capsys, "hf-to-megatron", folder, tmp_path / "megatron", "--verify", "--workers", 1)
    assert status == 0
    for text in (
        r"hf: glm4, 3 layers, 4 experts, \d+ tensors, 0\.00 GB",
        r"\d+ fp8 weights become bfloat16",
        r"\d+ weights for multi-token prediction are kept",
        r"2 tensors repeat others and are stored once: model\.layers\.3\.\S+, model\.layers\.3\.\S+",
        r"megatron: 1 files, 0\.00 GB in \d+\.\d s",
        r"verified: \d+ tensors, \d+ values are the same on both sides, bit for bit; 1 files have the checksums of their writing",
    ):
        assert re.search(text, printed), text
    status, printed = run(capsys, "megatron-to-hf", tmp_path / "megatron", tmp_path / "back", "--verify", "--dtype", "fp8")
    assert status == 0
    assert re.search(r"verified: .* the same on both sides, \d+ of them rounded to another type", printed)
    assert run(capsys, "verify", tmp_path / "back", tmp_path / "megatron")[0] == 0
    assert run(capsys, "verify", folder, tmp_path / "megatron")[0] == 0


def test_a_dry_run_measures_and_writes_nothing(folder, tmp_path, capsys):
    status, printed = run(capsys, "hf-to-megatron", folder, tmp_path / "megatron", "--dry-run", "--mtp", "drop")
    assert status == 0
    assert "left out, as asked for (--mtp drop)" in printed
    assert re.search(r"would write 1 files, 0\.00 GB, \d at a time; \d+\.\d+ GB are free", printed)
    assert re.search(r"estimate from 32 MB written at \d+ MB/s and read at \d+ MB/s just now", printed)
    assert not list(tmp_path.iterdir())


def test_errors_have_a_status_and_one_message(folder, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    status, printed = run(capsys, "hf-to-megatron", folder, tmp_path / "there")
    assert (status, printed) == (1, f"error: {tmp_path / 'there'} exists; choose another folder, or remove it\n")
    for words, text in (
        (("hf-to-megatron", folder), "the following arguments are required: target"),
        (("sideways", folder, tmp_path / "out"), "invalid choice: 'sideways'"),
        (("hf-to-megatron", folder, tmp_path / "out", "--dtype", "fp8", "--hf-config", folder), "2 settings are wrong"),
        (("megatron-to-hf", folder, tmp_path / "out", "--memory-mib", "-3"), "expected a positive whole number, got '-3'"),
        (("verify", folder, tmp_path / "out", "--dry-run"), "and no options"),
    ):
        status, printed = run(capsys, *words)
        assert status == 2
        assert text in printed


def test_wrappers_are_the_command(folder, tmp_path, monkeypatch):
    for script, source, target in (("hf_to_megatron", folder, "megatron"), ("megatron_to_hf", tmp_path / "megatron", "back")):
        monkeypatch.setattr(sys, "argv", [script, str(source), str(tmp_path / target)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "tools" / f"{script}.py"), run_name="__main__")
        assert end.value.code == 0
    assert len(read(tmp_path / "back")) < len(read(folder))


def test_the_trainers_setting_is_checked_before_anything_starts(folder):
    def problems(checkpoint):
        config = Config(model={"path": str(folder), "megatron_checkpoint": str(checkpoint)})
        return [text for text in model_problems(config, read_spec(folder)) if "megatron_checkpoint" in text]

    (text,) = problems(folder)
    assert "has no metadata.json; make one with `moerl convert hf-to-megatron" in text
    assert not problems("")


def test_a_folder_without_an_index_is_read_too(tmp_path, capsys):
    source = make(tmp_path / "hf", "deepseek_v2")
    tensors = read(source)
    write(source, tensors, parts=1)
    (source / "model.safetensors.index.json").unlink()
    assert run(capsys, "hf-to-megatron", source, tmp_path / "megatron")[0] == 0
    assert run(capsys, "megatron-to-hf", tmp_path / "megatron", tmp_path / "back")[0] == 0
    assert same(read(tmp_path / "back"), tensors)
