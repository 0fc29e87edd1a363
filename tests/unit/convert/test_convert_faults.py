"""Interruptions, full disks, damage and folders that do not fit: one clear error, nothing half done under the final name."""

import errno
import json
import os
import shutil
import weakref
from types import SimpleNamespace

import pytest
import torch

from moerl.convert import hf_to_megatron, jobs, megatron_to_hf
from moerl.convert.limits import Limits, limits
from moerl.convert.survey import survey
from moerl.convert.verify import verify
from moerl.errors import CheckpointError, ConfigError, ModelError
from tests.unit.convert.folders import SMALL, make, read, same, to_hf, to_megatron, write

ONE = Limits(workers=1, chunk_elements=SMALL.chunk_elements, file_bytes=20_000)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """(folder, checkpoint of it)"""
    root = tmp_path_factory.mktemp("qwen3")
    folder = make(root / "hf", "qwen3")
    return folder, to_megatron(folder, root / "megatron")


@pytest.fixture
def source(qwen3, tmp_path):
    """A copy of the folder, to be damaged."""
    return shutil.copytree(qwen3[0], tmp_path / "hf")


@pytest.fixture
def checkpoint(qwen3, tmp_path):
    return shutil.copytree(qwen3[1], tmp_path / "megatron")


def files(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.suffix in (".distcp", ".safetensors")}


def stop_after(monkeypatch, module, name, calls, error):
    """Let a function of a conversion fail at its n-th call."""
    original, left = getattr(module, name), [calls]

    def failing(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return original(*arguments)

    monkeypatch.setattr(module, name, failing)


class TestInterrupted:
    @pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("killed")], ids=["Ctrl-C", "error"])
    def test_to_megatron_goes_on_with_the_files_that_are_missing(self, qwen3, tmp_path, monkeypatch, error):
        final, whole = tmp_path / "out", read(qwen3[0])
        with monkeypatch.context() as patch:
            stop_after(patch, hf_to_megatron, "read_chunk", 30, error)
            with pytest.raises(type(error)):
                to_megatron(qwen3[0], final, sizes=ONE)
        assert not final.exists()
        before = {name: at for name, at in files(jobs.aside(final)).items() if (jobs.aside(final) / "journal" / f"{name}.json").is_file()}
        written = hf_to_megatron.convert(survey(qwen3[0], "keep"), final, ONE)
        assert 0 < len(before) < len(written)
        assert {one.name for one in written if one.kept} == before.keys()
        assert {name: files(final)[name] for name in before} == before
        assert not jobs.aside(final).exists()
        assert not (final / "journal").exists()
        assert same(read(to_hf(final, tmp_path / "back")), whole)

    def test_to_hf_writes_a_file_anew_that_was_damaged_meanwhile(self, qwen3, tmp_path, monkeypatch):
        final = tmp_path / "out"
        with monkeypatch.context() as patch:
            stop_after(patch, megatron_to_hf, "read_box", 30, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                to_hf(qwen3[1], final, sizes=ONE)
        done = sorted(path.stem for path in (jobs.aside(final) / "journal").glob("model-*.json"))
        assert len(done) > 1
        damaged = jobs.aside(final) / done[0]
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
        planned = megatron_to_hf.plan(qwen3[1], None, dtype="keep", mtp="keep", sizes=lambda _: ONE)
        written = megatron_to_hf.convert(planned, final)
        assert {one.name for one in written if one.kept} == set(done[1:])
        assert same(read(final), read(qwen3[0]))

    def test_another_conversion_does_not_go_on_there(self, source, tmp_path, monkeypatch):
        final = tmp_path / "out"
        with monkeypatch.context() as patch:
            stop_after(patch, hf_to_megatron, "read_chunk", 30, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                to_megatron(source, final)
        os.utime(next(source.glob("*.safetensors")), ns=(1, 1))
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"use_cache": False}))
        with pytest.raises(CheckpointError, match=r"another conversion that was interrupted(.|\n)*- config: (.|\n)*- files: "):
            to_megatron(source, final)

    def test_what_exists_is_neither_overwritten_nor_taken_for_an_interrupted_conversion(self, qwen3, tmp_path):
        final = tmp_path / "out"
        final.mkdir()
        with pytest.raises(CheckpointError, match="exists; choose another folder"):
            to_megatron(qwen3[0], final)
        final.rmdir()
        jobs.aside(final).mkdir()
        with pytest.raises(CheckpointError, match="is no interrupted conversion"):
            to_hf(qwen3[1], final)


class TestFullDisk:
    def test_too_little_room_is_noticed_before_anything_is_written(self, qwen3, tmp_path, monkeypatch):
        monkeypatch.setattr(jobs.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
        with pytest.raises(CheckpointError, match=r"0\.00 GB free, but 0\.07 GB are needed; make room, then run the same command again"):
            to_megatron(qwen3[0], tmp_path / "out")
        assert not files(jobs.aside(tmp_path / "out"))

    @pytest.mark.parametrize("direction", [to_megatron, to_hf])
    def test_a_disk_that_becomes_full_is_named_and_the_next_start_goes_on(self, qwen3, tmp_path, monkeypatch, direction):
        final, origin = tmp_path / "out", qwen3[direction is to_hf]
        original, room = os.fsync, [3]

        class Full(jobs.Output):
            def write(self, data):
                if room[0] <= 0:
                    self.error = OSError(errno.ENOSPC, "No space left on device")
                    raise self.error
                return super().write(data)

        def synced(handle):
            room[0] -= 1
            return original(handle)

        with monkeypatch.context() as patch:
            patch.setattr(jobs, "Output", Full)
            patch.setattr(jobs.os, "fsync", synced)
            with pytest.raises(CheckpointError, match="the disk is full after .* GB; make room, then run the same command again"):
                direction(origin, final, sizes=ONE)
        assert not final.exists()
        assert len(list((jobs.aside(final) / "journal").glob("*.json"))) > 1
        direction(origin, final, sizes=ONE)
        assert verify(*((qwen3[0], final) if direction is to_megatron else (final, qwen3[1]))).rounded == 0


class TestSources:
    def test_every_problem_of_the_weights_is_told_at_once(self, source):
        tensors = read(source)
        del tensors["model.norm.weight"]
        tensors["model.layers.0.surprise"] = torch.zeros(2)
        tensors["lm_head.weight"] = torch.zeros(3, 48)
        tensors["model.layers.1.mlp.gate.weight"] = torch.zeros(4, 48, dtype=torch.int8)
        tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(96, 48).to(torch.float8_e4m3fn)
        tensors["model.layers.2.self_attn.o_proj.weight_scale_inv"] = torch.zeros(1, 1)
        write(source, tensors)
        with pytest.raises(ModelError) as error:
            survey(source, "keep")
        for line in (
            "1 tensors are missing: model.norm.weight",
            "1 tensors are unknown: model.layers.0.surprise",
            "lm_head.weight: shape [3, 48], expected [16, 48]",
            "model.layers.1.mlp.gate.weight: type I8, expected F32, BF16, F16, F8_E4M3",
            "model.layers.1.self_attn.q_proj.weight: F8_E4M3 of shape [96, 48] needs two axes and one of",
            "model.layers.2.self_attn.o_proj.weight: has scales, but is BF16, not F8_E4M3",
        ):
            assert line in str(error.value)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda scale: scale[:-1], r"q_proj.weight: scales \[5, 3\], expected \[6, 3\] for \[96, 48\] in blocks of \[16, 16\]"),
            (lambda scale: scale.to(torch.float16), "q_proj.weight: scales of type F16, expected F32 or BF16"),
        ],
    )
    def test_scales_that_do_not_fit_are_refused(self, tmp_path, change, match):
        source = make(tmp_path / "hf", "qwen3", scales=torch.float32)
        tensors, name = read(source), "model.layers.0.self_attn.q_proj.weight_scale_inv"
        write(source, tensors | {name: change(tensors[name])})
        with pytest.raises(ModelError, match=match):
            survey(source, "keep")

    def test_blocks_that_no_config_describes_are_refused(self, tmp_path):
        source = make(tmp_path / "hf", "qwen3", scales=torch.float32)
        config = json.loads((source / "config.json").read_text())
        del config["quantization_config"]
        (source / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match="config.json has no quantization_config.weight_block_size"):
            survey(source, "keep")

    def test_damaged_and_missing_files_are_named(self, source):
        first, second, third = sorted(source.glob("*.safetensors"))
        first.write_bytes(first.read_bytes()[:-100])
        second.unlink()
        third.write_bytes(b"\xff" * 100)
        with pytest.raises(ModelError) as error:
            survey(source, "keep")
        for path, what in ((first, "damaged"), (second, "missing"), (third, "damaged")):
            assert f"{path.name}: {what}" in str(error.value)

    def test_a_file_that_shrinks_meanwhile_is_an_error(self, source, tmp_path):
        found = survey(source, "keep")
        path = sorted(source.glob("*.safetensors"))[0]
        os.truncate(path, path.stat().st_size - 50)
        with pytest.raises(ModelError, match="in the middle of a tensor; it was changed meanwhile"):
            hf_to_megatron.convert(found, tmp_path / "out", SMALL)

    def test_an_index_that_says_otherwise_is_refused(self, source):
        index = source / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["weight_map"]["lm_head.weight"] = content["weight_map"]["model.norm.weight"]
        del content["weight_map"]["model.layers.0.mlp.gate.weight"]
        index.write_text(json.dumps(content))
        with pytest.raises(ModelError, match=r"not in the file that .* names: lm_head.weight\n.*not in .*: model.layers.0.mlp.gate.weight"):
            survey(source, "keep")

    def test_parts_of_one_weight_must_have_one_type(self, source, tmp_path):
        tensors, name = read(source), "model.layers.0.self_attn.k_proj.weight"
        write(source, tensors | {name: tensors[name].float()})
        with pytest.raises(ModelError, match="stored in different types:\n.*k_proj.weight, .*: torch.bfloat16, torch.float32"):
            to_megatron(source, tmp_path / "out")


class TestCheckpoints:
    def test_a_config_of_another_model_is_refused_with_every_field(self, checkpoint, source, tmp_path):
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"num_experts": 8, "rms_norm_eps": 1e-5, "use_cache": False}))
        with pytest.raises(CheckpointError) as error:
            to_hf(checkpoint, tmp_path / "out", config=source)
        assert "2 fields differ" in str(error.value)
        assert "num_experts: the checkpoint has 4, config.json has 8" in str(error.value)
        assert "rms_norm_eps: the checkpoint has 1e-06, config.json has 1e-05" in str(error.value)

    def test_what_no_config_was_carried_with_is_compared_with_the_tensors(self, checkpoint, source, tmp_path):
        shutil.rmtree(checkpoint / "huggingface")
        with pytest.raises(CheckpointError, match="give the model's folder with --hf-config"):
            to_hf(checkpoint, tmp_path / "out")
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(
            json.dumps(config | {"num_hidden_layers": 2, "moe_intermediate_size": 48, "mlp_only_layers": [0]})
        )
        with pytest.raises(CheckpointError) as error:
            to_hf(checkpoint, tmp_path / "out", config=source)
        for text in (
            "linear_fc1.weight: shape [4, 48, 48], expected [4, 96, 48]",
            "tensors are missing: decoder.layers.0.mlp.linear_fc1.weight",
            "tensors are unknown: decoder.layers.0.mlp.router.weight",
        ):
            assert text in str(error.value)

    def test_what_is_no_checkpoint_or_a_damaged_one_is_refused(self, checkpoint, tmp_path):
        with pytest.raises(CheckpointError, match="no such folder"):
            to_hf(tmp_path / "nothing", tmp_path / "out")
        first = sorted(checkpoint.glob("*.distcp"))[0]
        first.write_bytes(first.read_bytes()[:-2000])
        with pytest.raises(CheckpointError, match="cannot be read"):
            to_hf(checkpoint, tmp_path / "out")
        (checkpoint / ".metadata").write_bytes(b"nonsense")
        with pytest.raises(CheckpointError, match="metadata is damaged"):
            to_hf(checkpoint, tmp_path / "other")
        (checkpoint / "metadata.json").write_text('{"sharded_backend": "zarr"}')
        with pytest.raises(CheckpointError, match="format 'zarr'"):
            to_hf(checkpoint, tmp_path / "other")


class TestMemory:
    @pytest.mark.parametrize("direction", ["to megatron", "to hf"])
    def test_no_more_than_a_chunk_per_worker_is_held(self, qwen3, tmp_path, monkeypatch, direction):
        module, name = (hf_to_megatron, "read_chunk") if direction == "to megatron" else (megatron_to_hf, "read_box")
        original, alive, most = getattr(module, name), [0], [0]

        def counted(*arguments):
            tensor = original(*arguments)
            size = tensor.numel()
            alive[0] += size
            most[0] = max(most[0], alive[0])
            weakref.finalize(tensor.untyped_storage(), lambda: alive.__setitem__(0, alive[0] - size))
            return tensor

        monkeypatch.setattr(module, name, counted)
        to_megatron(qwen3[0], tmp_path / "out") if direction == "to megatron" else to_hf(qwen3[1], tmp_path / "out")
        grouped = (96 + 2 * 32) * 48
        assert grouped <= most[0] <= SMALL.workers * (grouped + 2 * SMALL.chunk_elements)

    def test_limits_follow_from_the_memory(self):
        small, large = (limits(40 << 30, memory_mib=mib, workers=16) for mib in (200, 8192))
        assert small.workers == 1
        assert small.chunk_elements < large.chunk_elements == 1 << 25
        assert large.workers == 16
        assert limits(1 << 20, memory_mib=1024).file_bytes == 256 << 20
        assert limits(10 << 40, memory_mib=1024).file_bytes == 4 << 30
        assert limits(1 << 20, memory_mib=1024, file_mib=7).file_bytes == 7 << 20
        with pytest.raises(ConfigError, match="--memory-mib 50: expected at least 90"):
            limits(1, memory_mib=50)
