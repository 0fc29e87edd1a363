"""One converted checkpoint, loaded by real Megatron models in several layouts: the weights are those of the folder, bit for bit."""

import json

import pytest

from moerl.convert import hf_to_megatron
from moerl.convert.limits import Limits
from moerl.convert.survey import survey
from moerl.convert.tiny import tiny_config, tiny_glm4_config, tiny_qwen3_config
from tests.parallel.conftest import write_small
from tests.parallel.convert_worker import LAYOUTS

# Vocabularies don't divide by two; one model has fewer layers than would spread evenly.
FAMILIES = {
    "deepseek": tiny_config(hidden=64, layers=5, experts=8, topk=2, groups=4, group_topk=2, expert_width=32),
    "glm4": tiny_glm4_config(hidden=64, layers=4, experts=4, topk=2, heads=8, kv_heads=4, head_dim=16, expert_width=32),
    "qwen3": tiny_qwen3_config(hidden=64, layers=4, experts=4, topk=2, expert_width=32) | {"tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def found(torchrun, tmp_path_factory):
    """What each rank found."""
    root = tmp_path_factory.mktemp("converted")
    for name, config in FAMILIES.items():
        (root / name).mkdir()
        write_small(root / name / "hf", config | {"vocab_size": 17})
        sizes = Limits(workers=2, chunk_elements=3000, file_bytes=200_000)
        hf_to_megatron.convert(survey(root / name / "hf", "keep"), root / name / "megatron", sizes)
    done = torchrun(2, "convert_worker.py", str(root), *FAMILIES, timeout_s=250)
    assert done.returncode == 0, done.stdout[-3000:]
    return [json.loads((root / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_loads_the_folders_bits(found, family, layout):
    assert [rank[f"{family} {layout}"] for rank in found] == [[], []]
