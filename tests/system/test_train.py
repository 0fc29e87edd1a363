"""The whole loop through the command line: what a run leaves, and that it can be repeated and resumed bit by bit."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moerl.config.schema import Engine
from moerl.report import capture as recording
from moerl.rollout.client import EngineClient
from moerl.rollout.server import EngineServer
from moerl.routing.compare import differing, k3
from tests.system.run_harness import Finished

EXACT = ("loss", "grad_norm", "entropy", "kl_replay", "kl_natural", "replay_agreement")


def trained(run: Finished) -> list[dict[str, object]]:
    return [{name: record[name] for name in ("step", *EXACT)} for record in run.metrics if record["step"] >= 0]


def exported(run: Finished) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "export" / "model.safetensors")


def assert_same_weights(one: Finished, other: Finished) -> None:
    a, b = exported(one), exported(other)
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


def test_a_run_leaves_what_it_promises(live_run: Finished) -> None:
    summary = live_run.summary
    assert summary["steps"] == 4
    assert summary["replay_agreement"] == 1.0
    assert summary["versions_consistent"]
    assert summary["kl_replay"] < summary["kl_natural"]
    assert 0 < summary["natural_flip_share"] < 1
    for name in ("reward_start", "reward_end", "heldout_start", "heldout_end", "extreme_share_natural", "extreme_share_replay", "ess"):
        assert isinstance(summary[name], float)
    steps = [record for record in live_run.metrics if record["step"] >= 0]
    assert [record["engine_versions"] for record in steps] == [[1], [2], [3], [4]]
    assert len({record["weights_checksum"] for record in steps}) == 4
    assert sorted(path.name for path in (live_run.folder / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    assert len(list((live_run.folder / "rollouts").glob("step-*.rollout"))) == 4
    assert {"rank-0.log", "engine-0.log"} <= {path.name for path in (live_run.folder / "logs").iterdir()}
    assert json.loads((live_run.folder / "config.json").read_text())["train"]["steps"] == 4


def test_captures_hold_every_token_that_the_metrics_are_means_of(live_run: Finished) -> None:
    found = recording.list_steps(live_run.folder / "mismatch")
    assert list(found) == [0, 2]
    for step, path in found.items():
        rows, metrics = recording.concatenate(recording.read(path)), live_run.metrics[step + 1]
        assert (metrics["step"], metrics["capture_rows"], set(rows.version.tolist())) == (step, len(rows), {step})
        for side, gap in (("natural", rows.differences("natural")), ("replay", rows.differences("replay"))):
            assert metrics[f"kl_{side}"] == pytest.approx(k3(gap[rows.response]).mean(), rel=1e-6)
        flips = differing(rows.engine_ids, rows.trainer_ids).mean(axis=0)
        assert metrics["flip_share_by_layer"] == pytest.approx(flips.tolist())
        assert metrics["natural_flip_share"] == pytest.approx(flips.mean())
        biases = recording.read_biases(path)
        assert biases["engine_bias"].shape == (2, 16)
        assert np.array_equal(biases["engine_bias"], biases["trainer_bias"])


def test_it_is_silent_and_no_process_is_left(live_run: Finished) -> None:
    assert live_run.output == ""
    assert live_run.left == []


def test_recorded_rollouts_replayed_twice_give_the_same_bits(moerl: Callable[..., Finished], live_run: Finished) -> None:
    first, second = (moerl(name, "--rollouts", str(live_run.folder)) for name in ("recorded-a", "recorded-b"))
    assert first.status == second.status == 0, first.output[-4000:]
    assert trained(first) == trained(second) == trained(live_run)
    assert_same_weights(first, second)
    assert_same_weights(first, live_run)


def test_a_resumed_run_continues_bit_by_bit(moerl: Callable[..., Finished], live_run: Finished) -> None:
    rollouts = ("--rollouts", str(live_run.folder))
    half = moerl("resumed", *rollouts, "--train.steps", "2")
    assert half.status == 0, half.output[-4000:]
    whole = moerl("resumed", *rollouts, "--resume")
    assert whole.status == 0, whole.output[-4000:]
    assert trained(whole) == trained(live_run)
    assert_same_weights(whole, live_run)


def test_resume_refuses_when_there_is_nothing_or_another_run(moerl: Callable[..., Finished], live_run: Finished) -> None:
    nothing = moerl("nowhere", "--resume")
    assert nothing.status != 0
    assert "no checkpoint in" in nothing.output
    other = moerl("live", "--resume", "--rollout.group_size", "2")
    assert other.status != 0
    assert "rollout.group_size: saved 4, now 2" in other.output


def test_a_run_folder_is_not_overwritten_by_accident(moerl: Callable[..., Finished], live_run: Finished) -> None:
    again = moerl("live")
    assert again.status == 2
    assert "already holds a run" in again.output
    onto_itself = moerl("live", "--overwrite", "--rollouts", str(live_run.folder))
    assert onto_itself.status == 2
    assert "lies in run.dir" in onto_itself.output
    assert len(list((live_run.folder / "rollouts").glob("step-*.rollout"))) == 4


def test_dry_run_starts_nothing(moerl: Callable[..., Finished]) -> None:
    dry = moerl("dry", "--dry-run")
    assert dry.status == 0
    assert "nothing was started" in dry.output
    assert not dry.folder.exists()


def test_a_rollout_of_another_model_is_refused(moerl: Callable[..., Finished], live_run: Finished, tmp_path: Path) -> None:
    from moerl.convert.tiny import tiny_config, write_tiny

    write_tiny(tmp_path / "other", tiny_config(layers=3, experts=8, topk=4, groups=4, group_topk=2))
    refused = moerl("other", "--rollouts", str(live_run.folder), "--model.path", str(tmp_path / "other"))
    assert refused.status == 1
    assert refused.output.startswith("error: ")
    assert "experts" in refused.output
    assert "Traceback" not in refused.output + (refused.folder / "logs" / "rank-0.log").read_text()
    assert refused.left == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("--parallel.tp", "3"), "3"),
        (("--engine.cuont", "1"), "engine.count"),
        (("--model.path", "/nowhere"), "/nowhere"),
        (("--rollouts", "/nowhere"), "no step-*.rollout"),
    ],
)
def test_a_wrong_setting_starts_nothing(moerl: Callable[..., Finished], settings: tuple[str, ...], words: str) -> None:
    refused = moerl("wrong", *settings)
    assert refused.status in (1, 2)
    assert refused.output.startswith("error: ")
    assert words in refused.output
    assert "Traceback" not in refused.output
    assert not refused.folder.exists()


def test_the_export_decodes_in_sglang_as_in_transformers(live_run: Finished) -> None:
    import transformers

    folder = live_run.folder / "export"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [[4, 13, 5, 15], [7, 14, 9, 13, 3, 15], [12, 13, 12, 15]]
    expected = []
    for tokens in prompts:
        out = model.generate(torch.tensor([tokens]), max_new_tokens=6, do_sample=False, pad_token_id=0)
        expected.append(out[0, len(tokens) :].tolist())
    server = EngineServer(
        str(folder), Engine(device="cpu", dtype="float32"), {}, port=None, log_path=live_run.folder / "logs" / "export.log", seed=1
    )

    async def greedy() -> list[list[int]]:
        async with EngineClient(server.url, 60.0, 60.0) as client:
            return [
                (await client.generate(tokens, rid=f"greedy-{i}", max_new_tokens=6, temperature=0.0, routes=False))["output_ids"]
                for i, tokens in enumerate(prompts)
            ]

    server.start()
    try:
        server.wait_healthy()
        assert asyncio.run(greedy()) == expected
    finally:
        server.stop()
