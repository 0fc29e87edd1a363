"""Parts of the plugin that need no SGLang: the hash, the derived tensors, the end of a process without a parent."""

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moerl.rollout
from moerl.rollout import plugin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8])
def test_the_hash_is_of_the_bytes_in_row_major_order(dtype):
    tensor = torch.arange(12).to(dtype).reshape(3, 4)
    expected = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    strided = tensor.t().contiguous().t()
    assert not strided.is_contiguous()
    assert plugin.hash_tensor(tensor) == plugin.hash_tensor(strided) == expected
    changed = tensor.clone()
    changed[2, 3] += 1
    assert plugin.hash_tensor(changed) != expected


def test_scalars_and_empty_tensors_hash():
    assert plugin.hash_tensor(torch.tensor(1.0)) != plugin.hash_tensor(torch.tensor(2.0))
    assert plugin.hash_tensor(torch.empty(0)) == hashlib.sha256(b"").hexdigest()[:16]


def test_derived_tensors_are_those_that_are_neither_parameters_nor_buffers():
    model = torch.nn.Module()
    model.attention = torch.nn.Linear(2, 2)
    model.attention.w_kc = torch.ones(3)
    model.attention.w_vc = None
    model.other = torch.nn.Linear(2, 2)
    model.other.w_kc = torch.nn.Parameter(torch.ones(1))
    assert [(name, tensor.tolist()) for name, tensor in plugin.derived_tensors(model)] == [("attention.w_kc", [1, 1, 1])]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_batched_decode_equals_one_request_at_a_time(kv_heads, dtype, tolerance):
    torch.manual_seed(0)
    heads, width, value_width, lengths = 4, 10, 6, torch.tensor([3, 1, 7])
    query = torch.randn(3, heads, width, dtype=dtype)
    keys, values = torch.randn(40, kv_heads, width, dtype=dtype), torch.randn(40, kv_heads, value_width, dtype=dtype)
    slots = torch.randperm(39)[:21].reshape(3, 7)
    unwritten = torch.arange(7) >= lengths[:, None]
    slots[unwritten] = 39
    keys[39] = values[39] = float("nan")
    result = plugin.batched_decode(query, keys, values, slots, lengths, 0.3)
    group = heads // kv_heads
    for request, length in enumerate(lengths):
        own = slots[request, :length]
        for head in range(heads):
            weights = torch.softmax(0.3 * keys[own, head // group].float() @ query[request, head].float(), 0)
            expected = weights @ values[own, head // group].float()
            torch.testing.assert_close(result[request, head].float(), expected, atol=tolerance, rtol=tolerance)


def test_register_does_nothing_where_no_model_lives(monkeypatch):
    monkeypatch.delitem(sys.modules, plugin._MODEL_PROCESS, raising=False)
    before = {name for name in sys.modules if name.startswith("sglang")}
    plugin.register()
    assert {name for name in sys.modules if name.startswith("sglang")} == before


def test_the_kernel_stand_in_has_cpu_names_only_and_says_what_is_missing():
    path = Path(moerl.rollout.__file__).parent / "shims" / "sgl_kernel.py"
    spec = importlib.util.spec_from_file_location("sgl_kernel_stand_in", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(RuntimeError, match="verify_tree_greedy_cpu needs SGLang's compiled CPU kernels"):
        module.verify_tree_greedy_cpu()
    assert not hasattr(module, "topk_sigmoid")


PARENT = """
import multiprocessing, os, sys, time
from moerl.rollout import plugin

def child():
    print(os.getpid(), flush=True)
    parent = os.getppid()
    while os.getppid() == parent:  # as if it were still importing
        time.sleep(0.01)
    plugin.register()
    print("lives on", flush=True)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=child).start()
    time.sleep(60)
"""


def test_a_process_whose_parent_died_before_it_was_ready_ends(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    env = os.environ | {"PYTHONPATH": str(Path(plugin.__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    said, _ = parent.communicate(timeout=60)  # until the child has closed it too
    assert said == ""
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().rpartition(")")[2]
