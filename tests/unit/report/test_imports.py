"""Records of SGLang, vLLM and Megatron-core come into the capture format row by row; what is wrong with them is said together."""

import base64
import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pytest

from moerl.convert.tiny import tiny_config
from moerl.errors import ReportError
from moerl.report import capture
from moerl.report.imports import import_records
from moerl.report.summary import report_run

PROMPT, OUTPUT = [5, 6, 7], [8, 9, 3, 2]


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = tiny_config()
    (folder / "config.json").write_text(json.dumps(config))
    layers, experts, topk = config["num_hidden_layers"], config["n_routed_experts"], config["num_experts_per_tok"]
    rng = np.random.default_rng(0)
    ids = rng.permuted(np.broadcast_to(np.arange(experts), (6, layers, experts)), axis=2)[:, :, :topk]
    dense = config["first_k_dense_replace"]
    ids[:, :dense] = 0
    return folder, ids, ids[:, dense:]


def _router_trace():
    """Megatron-core's module by its file: importing its package would take many times as long."""
    roots = importlib.util.find_spec("megatron")
    files = [Path(root) / "core/transformer/moe/router_trace.py" for root in (roots.submodule_search_locations if roots else [])]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        pytest.skip("this Megatron-core has no router tracer")
    spec = importlib.util.spec_from_file_location("router_trace", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(run, kind, files, folder, step=0, written=None) -> capture.Rows:
    path = capture.list_steps(import_records(kind, files, folder / "config.json", run, step))[step if written is None else written]
    meta = capture.read_meta(path)
    assert (meta.source, meta.groups) == (f"import:{kind}", tiny_config()["n_group"])
    return capture.concatenate(capture.read(path))


def sglang(ids: np.ndarray, **more) -> dict:
    scored = [[-0.5 - i, token, None] for i, token in enumerate(OUTPUT)]
    text = base64.b64encode(ids.astype("<i4").tobytes()).decode()
    meta = {"routed_experts": text, "prompt_tokens": 3, "completion_tokens": 4, "output_token_logprobs": scored, "weight_version": "12"}
    return {"output_ids": OUTPUT, "meta_info": meta, **more}


def npy(ids: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, ids)
    return base64.b64encode(buffer.getvalue()).decode()


def test_sglang(tmp_path, model) -> None:
    folder, ids, moe = model
    file = tmp_path / "replies.jsonl"
    lines = [sglang(ids, input_ids=PROMPT, reward=1.0), [sglang(ids), sglang(ids[2:])]]
    file.write_text("\n".join(map(json.dumps, lines)))
    rows = rows_of(tmp_path / "run", "sglang", [file], folder)
    np.testing.assert_array_equal(rows.engine_ids, np.concatenate([moe, moe, moe[2:]]))
    assert rows.token[:6].tolist() == [*PROMPT, *OUTPUT[:3]]
    assert rows.next_token[:6].tolist() == [*PROMPT[1:], *OUTPUT]
    assert rows.response[:6].tolist() == [False, False, True, True, True, True]
    np.testing.assert_array_equal(rows.engine_logprob[:6], [np.nan, np.nan, -0.5, -1.5, -2.5, -3.5])
    assert (rows.version == 12).all()
    assert rows.prompt_id.tolist() == [0] * 6 + [1] * 10
    assert rows.sample.tolist() == [0] * 12 + [1] * 4
    assert rows.position[12:].tolist() == [2, 3, 4, 5]
    assert rows.token[6:12].tolist() == [-1, -1, -1, *OUTPUT[:3]]
    assert rows.trainer_ids is None
    report = report_run(tmp_path / "run")
    assert (report["sides"], report["flips"], report["flip_share"]) == (["engine", None], None, None)
    assert report["soundness"]["engine"]["load"]
    assert json.loads(json.dumps(report, allow_nan=False))["findings"][0]["severity"] in ("note", "good")


@pytest.mark.parametrize("form", ["npy file", "base64", "parts as lists", "leftover row"])
def test_vllm(tmp_path, model, form: str) -> None:
    folder, ids, moe = model
    file = tmp_path / ("one.npy" if form == "npy file" else "replies.json")
    choice = {"token_ids": OUTPUT, "logprobs": {"token_logprobs": [-0.5, -1.5, None, -3.5]}}
    if form == "npy file":
        np.save(file, moe.astype(np.uint8))
    elif form == "base64":
        file.write_text(json.dumps([{"prompt_token_ids": PROMPT, "choices": [{**choice, "routed_experts": npy(ids.astype(np.uint8))}]}]))
    elif form == "parts as lists":
        parts = {"prompt_routed_experts": moe[:3].tolist(), "usage": {"prompt_tokens": 3}}
        file.write_text(json.dumps({**parts, "choices": [{**choice, "routed_experts": moe[3:].tolist()}]}))
    else:
        more = np.concatenate([ids, ids[:1]])
        file.write_text(json.dumps([{"prompt_token_ids": PROMPT, "choices": [{**choice, "routed_experts": npy(more)}]}]))
    rows = rows_of(tmp_path / "run", "vllm", [file], folder, step=4)
    np.testing.assert_array_equal(rows.engine_ids, moe)
    if form == "npy file":
        assert not rows.response.any()
        assert (rows.token == -1).all()
    else:
        assert rows.response.tolist() == [False, False, True, True, True, True]
        np.testing.assert_array_equal(rows.engine_logprob[2:], [-0.5, -1.5, np.nan, -3.5])


def test_vllm_marks_cached_positions_which_are_rows_without_routes(tmp_path, model) -> None:
    folder, _, moe = model
    moe = moe.copy()
    moe[:2] = -1
    np.save(tmp_path / "one.npy", moe.astype(np.int16))
    rows_of(tmp_path / "run", "vllm", [tmp_path / "one.npy"], folder)
    report = report_run(tmp_path / "run")
    assert report["zero_rows"] == pytest.approx(2 / 6)
    assert report["findings"][0]["id"] == "zero-rows"


def test_megatron_as_its_own_tracer_writes_it(tmp_path, model) -> None:
    torch = pytest.importorskip("torch")
    folder, _, moe = model
    layers = range(1, 1 + moe.shape[1])
    tracer = _router_trace().RouterTracer(str(tmp_path / "trace"), max_steps=10, rank=1, training_mode=True)
    for microbatch in (moe[:4], moe[2:]):
        tracer.record_indices(torch.from_numpy(microbatch), layer_ids=list(layers))
    tracer.record_indices(torch.from_numpy(moe[:, :1]), layer_ids=[1], block="mtp", mtp_idx=0)
    tracer.advance_step(step_id=3)
    rows = rows_of(tmp_path / "run", "megatron", [tmp_path / "trace"], folder, written=3)
    np.testing.assert_array_equal(rows.engine_ids, np.concatenate([moe[:4], moe[2:]]))
    assert rows.prompt_id.tolist() == [1] * 8
    assert rows.sample.tolist() == [0] * 4 + [1] * 4
    assert rows.position.tolist() == [0, 1, 2, 3] * 2


def test_everything_wrong_is_said_at_once_and_nothing_is_written(tmp_path, model) -> None:
    folder, ids, _ = model
    file = tmp_path / "replies.jsonl"
    over = ids.copy()
    over[0, -1, 0] = 64
    wrong = sglang(ids)
    wrong["meta_info"]["routed_experts"] = "***"
    long = sglang(np.concatenate([ids, ids]))
    lines = [{"meta_info": {}}, wrong, sglang(ids[:, :2]), sglang(over), long, 3]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n{")
    with pytest.raises(ReportError) as error:
        import_records("sglang", [file, tmp_path / "absent.json"], folder, tmp_path / "run", 0)
    said = str(error.value)
    for part in (
        "absent.json does not exist",
        ":1: Object missing required field `routed_experts`",
        "--enable-return-routed-experts",
        "is not base64",
        "no whole number of rows",
        "expert ids 0..63, got 0..64",
        "12 rows of routes, but 3 prompt and 4 generated tokens",
        "got `int`",
        ":7 is not JSON",
    ):
        assert part in said
    assert not (tmp_path / "run").exists()


def test_a_trace_of_one_pipeline_stage_is_refused(tmp_path, model) -> None:
    folder, _, moe = model
    record = {"step": 0, "block": "decoder", "layer": 1, "rank": 0, "top_indices": moe[:, 0].tolist()}
    (tmp_path / "router_trace_rank0.jsonl").write_text(json.dumps(record))
    with pytest.raises(ReportError, match=r"layers \[1\], but the model's MoE layers are \[1, 2"):
        import_records("megatron", [tmp_path], folder, tmp_path / "run", 0)
