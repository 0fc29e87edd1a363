"""Rollout files come back bit for bit, or not at all."""

import json
import shutil

import msgspec
import pytest

from moerl.errors import RolloutError
from moerl.rollout import store
from moerl.rollout.check import to_sample
from moerl.rollout.sample import Group, Prompt
from moerl.routing.codec import Codec
from moerl.routing.group import codec_of
from tests.unit.rollout.fakes import LAYERS, LAYOUT, make_reply


@pytest.fixture
def groups(prompt) -> list[Group]:
    samples = [to_sample(make_reply(prompt.tokens, [10, 4, 2][: 1 + i]), prompt, i, LAYOUT, layers=LAYERS, routes=True) for i in range(3)]
    samples[1].reward = 0.1
    return [Group(prompt.id, prompt.answer, samples)]


@pytest.fixture
def header(tiny_folder) -> store.Header:
    return store.make_header(tiny_folder, step=12, version=11)


def test_round_trip(tmp_path, groups, header):
    path = store.save_step(tmp_path / "rollouts", 12, groups, header)
    assert path.name == "step-000012.rollout"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    found, loaded = store.load_step(tmp_path / "rollouts", 12, header)
    assert found == header
    assert found.layout == LAYOUT
    assert loaded == groups
    assert loaded[0].samples[2].load_trace().rows == 6


@pytest.mark.parametrize("codec", ["narrow", "packed", "set"])
def test_traces_come_back_in_the_codec_they_had(tmp_path, prompt, header, codec):
    replies = [make_reply(prompt.tokens, [10, 4, 2]) for _ in range(2)]
    options = {"layers": LAYERS, "routes": True, "codec": Codec(codec)}
    group = Group(prompt.id, "7", [to_sample(reply, prompt, i, LAYOUT, **options) for i, reply in enumerate(replies)])
    traces = [sample.trace for sample in group.samples]
    store.save_step(tmp_path, 1, [group], header)
    assert [sample.trace for sample in group.samples] == traces  # saving takes nothing from the caller
    _, loaded = store.load_step(tmp_path, 1, header)
    assert loaded == [group]
    assert codec_of(loaded[0].samples[0].trace) == Codec(codec)


def test_the_prompts_routes_are_stored_once(tmp_path, header):
    long = Prompt(id=1, text="", tokens=[3] * 2000, answer="")
    samples = [to_sample(make_reply(long.tokens, [10, 2]), long, i, LAYOUT, layers=LAYERS, routes=True) for i in range(8)]
    one = store.save_step(tmp_path, 1, [Group(1, "", samples[:1])], header).stat().st_size
    all_of_them = store.save_step(tmp_path, 2, [Group(1, "", samples)], header).stat().st_size
    tokens = 2000 + 40  # one byte each, and little else, is what a further sample costs
    assert all_of_them - one < 7 * (tokens + 300)
    assert store.load_step(tmp_path, 2, header)[1][0].samples == samples


def test_groups_without_routes_and_no_groups(tmp_path, prompt, header):
    sample = to_sample(make_reply(prompt.tokens, [10, 2]), prompt, 0, LAYOUT, layers=LAYERS, routes=False)
    groups = [Group(prompt.id, "", [sample]), Group(8, "", [])]
    store.save_step(tmp_path, 1, groups, header)
    assert store.load_step(tmp_path, 1, header)[1] == groups
    store.save_step(tmp_path, 2, [], header)
    assert store.load_step(tmp_path, 2, header)[1] == []


def test_sampling_masks_come_back(tmp_path, prompt, header):
    reply = make_reply(prompt.tokens, [10, 2])
    reply["meta_info"] |= {"output_token_sampling_mask": [[3, 10], [2]], "output_token_sampling_logprobs": [-0.5, 0.0]}
    sample = to_sample(reply, prompt, 0, LAYOUT, layers=LAYERS, routes=True, vocab=16)
    store.save_step(tmp_path, 1, [Group(prompt.id, "", [sample])], header)
    (loaded,) = store.load_step(tmp_path, 1, header)[1][0].samples
    assert loaded == sample
    assert loaded.load_mask().ids.tolist() == [3, 10, 2]


def test_steps_are_listed_in_order(tmp_path, groups, header):
    for step in (3, 1000000, 20):
        store.save_step(tmp_path, step, groups, header)
    (tmp_path / ".step-000004.rollout.123").write_bytes(b"left by a crash")
    assert store.list_steps(tmp_path) == [3, 20, 1000000]
    assert store.list_steps(tmp_path / "nowhere") == []


def test_a_missing_step_says_what_there_is(tmp_path, groups, header):
    store.save_step(tmp_path, 3, groups, header)
    with pytest.raises(RolloutError, match=r"no rollouts of step 4; it has steps 3\.\.3"):
        store.load_step(tmp_path, 4, header)


@pytest.mark.parametrize("position", [0, 40, -20, -1])
def test_a_damaged_byte_anywhere_is_found(tmp_path, groups, header, position):
    path = store.save_step(tmp_path, 1, groups, header)
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)
    with pytest.raises(RolloutError, match="damaged|not a rollout file"):
        store.load_step(tmp_path, 1, header)


@pytest.mark.parametrize("size", [0, 5, 30, -1])
def test_a_file_cut_short(tmp_path, groups, header, size):
    path = store.save_step(tmp_path, 1, groups, header)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(RolloutError, match="damaged|not a rollout file"):
        store.load_step(tmp_path, 1, header)


def test_rollouts_of_another_model_name_the_fields(tmp_path, groups, header, tiny_folder):
    other = tmp_path / "other"
    shutil.copytree(tiny_folder, other)
    config = json.loads((other / "config.json").read_text()) | {"kv_lora_rank": 48, "rms_norm_eps": 1e-5}
    (other / "config.json").write_text(json.dumps(config))
    store.save_step(tmp_path, 1, groups, header)
    with pytest.raises(RolloutError, match="another model.*kv_lora_rank: 64 in the file, 48 in this model.*layernorm_epsilon"):
        store.load_step(tmp_path, 1, store.make_header(other, step=1, version=0))


def test_rollouts_of_another_tokenizer(tmp_path, groups, header):
    store.save_step(tmp_path, 1, groups, header)
    with pytest.raises(RolloutError, match="another tokenizer"):
        store.load_step(tmp_path, 1, msgspec.structs.replace(header, tokenizer="0" * 64))


def test_weights_and_steps_do_not_matter(tmp_path, groups, header):
    store.save_step(tmp_path, 1, groups, header)
    found, _ = store.load_step(tmp_path, 1, msgspec.structs.replace(header, step=99, version=98))
    assert (found.step, found.version) == (12, 11)
