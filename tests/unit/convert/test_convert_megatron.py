"""A converted checkpoint is what Megatron itself would have written, and a trainer started from it is the one started from the folder."""

import json
import shutil

import pytest
import torch

from moerl.config.schema import Config
from moerl.convert.stored import open_checkpoint
from moerl.convert.verify import verify
from moerl.errors import CheckpointError
from moerl.models import read_spec
from moerl.train import megatron, trainer
from moerl.train.progress import Progress
from tests.unit.convert.folders import CONFIGS, make, read, same, to_hf, to_megatron, write

FAMILIES = sorted(CONFIGS)


@pytest.fixture(scope="module")
def ranks():
    defaults = Config(model={"path": ""}, train={"device": "cpu"})
    yield megatron.initialise(defaults.parallel, defaults.train, seed=1)
    megatron.shutdown()


@pytest.fixture(scope="module", params=FAMILIES)
def converted(request, tmp_path_factory):
    """(HF folder, checkpoint)"""
    root = tmp_path_factory.mktemp("converted")
    folder = make(root / "hf", request.param)
    return folder, to_megatron(folder, root / "megatron")


def settings(folder, dtype="bfloat16", checkpoint="", **more):
    return Config(model={"path": str(folder), "megatron_checkpoint": str(checkpoint)}, train={"dtype": dtype, "device": "cpu"}, **more)


def real_state(folder, ranks):
    """Megatron's own description of a model with all its layers, those for multi-token prediction included."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from moerl.train.layers import block_spec

    spec = read_spec(folder)
    options = {"mtp_num_layers": 1} if spec.mtp_layers else {}
    config = megatron.transformer_config(spec, settings(folder, megatron=options), ranks)
    layers = block_spec(config, None)
    ahead = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False) if spec.mtp_layers else None
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=spec.vocab_size,
        max_sequence_length=64,
        share_embeddings_and_output_weights=spec.tied_embeddings,
        position_embedding_type="rope",
        mtp_block_spec=ahead,
        **spec.megatron_model,
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)  # torch's norms, which Megatron uses for multi-token prediction, ask for fp32
    return model, model.sharded_state_dict(metadata={})


def test_a_checkpoint_is_what_megatron_writes_but_for_norms_that_have_their_other_names_too(converted, ranks, tmp_path):
    from megatron.core import dist_checkpointing

    folder, checkpoint = converted
    model, state = real_state(folder, ranks)
    real = tmp_path / "real"
    real.mkdir()
    dist_checkpointing.save(state, str(real))
    one, other = (open_checkpoint(place).metadata.state_dict_metadata for place in (real, checkpoint))
    assert one.keys() - other.keys() == set()
    for key in one:
        if hasattr(one[key], "size"):
            assert (one[key].size, one[key].properties.dtype) == (other[key].size, other[key].properties.dtype), key
    norms = (".layer_norm_weight", "layernorm.weight")
    assert all(key.endswith(norms) for key in other.keys() - one.keys())
    loaded = dist_checkpointing.load(model.sharded_state_dict(metadata={}), str(checkpoint))
    model.load_state_dict({name: value for name, value in loaded.items() if name in model.state_dict()})
    (tmp_path / "again").mkdir()
    dist_checkpointing.save(model.sharded_state_dict(metadata={}), str(tmp_path / "again"))
    assert verify(folder, tmp_path / "again").rounded == 0
    assert same(read(to_hf(tmp_path / "again", tmp_path / "back", config=folder)), read(folder))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_trainer_starts_with_the_same_bits(converted, ranks, dtype):
    folder, checkpoint = converted
    spec = read_spec(folder)
    one = trainer.build(settings(folder, dtype), spec, ranks)
    other = trainer.build(settings(folder, dtype, checkpoint), spec, ranks)
    pairs = zip(one.shards(), other.shards(), strict=True)
    assert all(left.entry == right.entry and torch.equal(left.tensor, right.tensor) for left, right in pairs)
    for left, right in zip(one.optimizer.param_groups, other.optimizer.param_groups, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left["params"], right["params"], strict=True))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    root = tmp_path_factory.mktemp("deepseek")
    folder = make(root / "hf", "deepseek_v3 mtp")
    return folder, to_megatron(folder, root / "megatron")


def test_a_trainers_checkpoint_is_exported(deepseek, ranks, tmp_path):
    from moerl.train import checkpoint as checkpoints

    folder, checkpoint = deepseek
    spec, config = read_spec(folder), settings(folder, checkpoint=checkpoint)
    built = trainer.build(config, spec, ranks)
    for parameter in (parameter for chunk in built.model for parameter in chunk.parameters()):
        parameter.main_grad.fill_(0.01)
    megatron.optimizer_step(built.optimizer, 0.1)
    saved = checkpoints.save(tmp_path, Progress(1, 1, 0), built.model, built.optimizer, config, spec)
    with pytest.raises(CheckpointError, match="no weights for multi-token prediction"):
        to_hf(saved, tmp_path / "hf", config=folder)
    back = read(to_hf(saved, tmp_path / "hf", config=folder, mtp="drop"))
    shards = {name: part for shard in built.shards() for name, part in zip(shard.entry.hf, parts(shard), strict=True)}
    assert back.keys() == shards.keys()
    assert all(torch.equal(back[name], shards[name]) for name in back)
    assert not torch.equal(back["lm_head.weight"], read(folder)["lm_head.weight"])


def parts(shard):
    return shard.tensor.chunk(len(shard.entry.hf))


def test_another_model_or_a_checkpoint_that_lacks_weights_is_refused(deepseek, ranks, tmp_path):
    folder, checkpoint = deepseek
    changed = shutil.copytree(folder, tmp_path / "hf")
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"routed_scaling_factor": 1.0}))
    with pytest.raises(CheckpointError, match="routed_scaling_factor: the checkpoint has 2.5, config.json has 1.0"):
        trainer.build(settings(changed, checkpoint=checkpoint), read_spec(changed), ranks)
    smaller = make(tmp_path / "smaller", "deepseek_v3 plain queries")
    other = to_megatron(smaller, tmp_path / "megatron")
    shutil.rmtree(other / "huggingface")
    with pytest.raises(CheckpointError, match=r"lacks \d+ weights of this rank: decoder.layers.0.self_attention.linear_q_down_proj.weight"):
        trainer.build(settings(folder, checkpoint=other), read_spec(folder), ranks)
    with pytest.raises(CheckpointError, match="no Megatron distributed checkpoint"):
        trainer.build(settings(folder, checkpoint=folder), read_spec(folder), ranks)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path, ranks, family):
    """On the folder that comes back, by transformers, against Megatron's on the checkpoint in between."""
    import numpy as np
    import transformers

    from moerl.train import checkpoint as checkpoints
    from moerl.train.batch import Microbatch
    from tests.passes import run_logprobs

    source = make(tmp_path / "hf", family, torch.float32)
    write(source, {name: one * (0.1 if one.dim() > 1 else 1) for name, one in read(source).items()})
    checkpoint = to_megatron(source, tmp_path / "megatron")
    back = to_hf(checkpoint, tmp_path / "back")
    spec, config = read_spec(source), settings(source, "float32", checkpoint)
    model = megatron.build_model(spec, config, ranks, trainable=False)
    checkpoints.load_policy(checkpoint, model, source)
    tokens = np.random.default_rng(0).integers(0, 16, 12)
    batch = Microbatch(
        tokens=tokens,
        labels=np.roll(tokens, -1),
        positions=np.arange(12),
        cu_seqlens=np.array([0, 12], np.int32),
        loss_mask=np.ones(12, np.float32),
        routes=None,
        real=np.ones(12, bool),
    )
    ((ours, _),) = run_logprobs(model, [batch], ranks, temperature=1.0, fp32_head=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logprobs = theirs(torch.as_tensor(tokens)[None]).logits[0].log_softmax(-1)
    expected = logprobs[torch.arange(12), torch.as_tensor(batch.labels)]
    assert (torch.as_tensor(ours) - expected).abs().max() < 1e-5
