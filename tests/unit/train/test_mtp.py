"""The layer for multi-token prediction in the trainer, in one process: what each `train.mtp` builds, trains, keeps and exports."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moerl.config.schema import Config
from moerl.convert import hf_to_megatron, megatron_to_hf
from moerl.convert.limits import Limits
from moerl.convert.survey import survey
from moerl.convert.tiny import tiny_config, tiny_glm4_config, write_tiny
from moerl.errors import CheckpointError, ModelError
from moerl.models import read_spec
from moerl.reshard.gather import gather_hf
from moerl.routing.layout import Layout
from moerl.routing.replay import routers
from moerl.train import megatron, trainer, weights
from moerl.train.batch import Microbatch, Sequence, cut, labels_ahead, pack
from moerl.train.export import export_hf
from moerl.train.forward import LocalMicrobatch, forward_backward, localise
from moerl.train.progress import Progress
from moerl.train.trainer import Trainer
from tests.unit.models.test_mtp import by_transformers
from tests.unit.routing.routes import random_ids

SIZES: dict[str, Any] = {"hidden": 64, "layers": 2, "experts": 8, "topk": 4, "expert_width": 32, "initializer_range": 0.1, "mtp": True}
MODELS = {
    "deepseek_v3": tiny_config(**SIZES, groups=4, group_topk=2),
    "glm4": tiny_glm4_config(**SIZES, heads=6, kv_heads=2, head_dim=16),
}
LENGTHS = [9, 17, 4, 2, 12]
TEMPERATURE = 0.8
LIMITS = Limits(workers=1, chunk_elements=3000, file_bytes=100_000)


class Made(NamedTuple):
    """Attributes:
    ahead: tensors of the layer in the folder, without copies.
    """

    folder: Path
    ranks: megatron.Ranks
    ahead: dict[str, torch.Tensor]

    def build(
        self, mtp: str, *, native: dict[str, Any] | None = None, replay: str = "frozen", checkpoint: str = "", **train: Any
    ) -> Trainer:
        settings = {"dtype": "float32", "device": "cpu", "lr": 3e-3, "grad_clip": 0.1, "mtp": mtp} | train
        model = {"path": str(self.folder), "megatron_checkpoint": checkpoint}
        config = Config(model=model, train=settings, megatron=native or {}, replay={"expert_bias": replay})
        return trainer.build(config, read_spec(self.folder), self.ranks)


@pytest.fixture(scope="module")
def ranks():
    config = Config(model={"path": "unused"}, train={"dtype": "float32", "device": "cpu"})
    yield megatron.initialise(config.parallel, config.train, seed=1)
    megatron.shutdown()


@pytest.fixture(scope="module", params=MODELS)
def made(request, ranks, tmp_path_factory) -> Made:
    return write(tmp_path_factory.mktemp("mtp") / request.param, MODELS[request.param], ranks)


@pytest.fixture(scope="module")
def deepseek(ranks, tmp_path_factory) -> Made:
    return write(tmp_path_factory.mktemp("mtp") / "deepseek", MODELS["deepseek_v3"], ranks)


def write(folder: Path, config: dict[str, Any], ranks: megatron.Ranks) -> Made:
    """A folder whose norms and biases matter."""
    spec = write_tiny(folder, config, seed=4)
    stored, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, tensor in stored.items():
        if tensor.ndim == 1:
            stored[name] = tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    ahead = f"model.layers.{spec.layers}."
    return Made(folder, ranks, {name: one for name, one in stored.items() if name.startswith(ahead) and name not in spec.mtp_copies()})


def sequences(layout: Layout) -> list[Sequence]:
    """The first third of each is a prompt, which is not trained; routes are random."""
    rng, found = np.random.default_rng(3), []
    for number, length in enumerate(LENGTHS):
        mask = (np.arange(length - 1) >= length // 3).astype(np.float32)
        routes = random_ids(number, length - 1, len(layout.layers), layout.experts, layout.topk)
        columns = {name: rng.standard_normal(length - 1).astype(np.float32) for name in ("advantages", "engine_logprobs")}
        found.append(Sequence(rng.integers(0, 16, length), mask, routes, columns))
    return found


def microbatches(layout: Layout, multiple: int = 1) -> list[Microbatch]:
    return pack(sequences(layout), tokens_per_microbatch=32, dp=1, multiple=multiple, layout=layout)[0]


def rows_of(built: Trainer, multiple: int = 1) -> list[LocalMicrobatch]:
    parts = [cut(one, built.place, ahead=built.config.train.mtp == "trained") for one in microbatches(built.layout, multiple)]
    return localise(parts, built.ranks)


def loss(outputs, rows):
    total = -(outputs.logprobs * rows.columns["advantages"] * rows.loss_mask).sum()
    return total, rows.loss_mask.sum(), {"loss": total}


def backward(built: Trainer, *, weight: float = 0.0, fp32_head: bool = True, forced: bool = False, multiple: int = 1) -> dict[str, float]:
    """Sums of the metrics; gradients are in the model."""
    local, passes = rows_of(built, multiple), {"temperature": TEMPERATURE, "fp32_head": fp32_head}

    def run() -> list[dict[str, torch.Tensor]]:
        return forward_backward(built.model, local, built.ranks, loss_fn=loss, mtp_weight=weight, **passes)

    if forced:
        with built.replay.forced([rows.routes for rows in local]):
            results = run()
    else:
        results = run()
    return {name: sum(float(one[name]) for one in results) for name in results[0]}


def gradients(built: Trainer, *, ahead: bool) -> dict[str, torch.Tensor]:
    """Of the layer, or of all else."""
    items = weights.placed(built.model, built.spec, built.ranks)
    learned = (item for item in items if item.tensor.requires_grad and (item.entry.param.layers == "mtp") == ahead)
    return {item.entry.megatron: item.tensor.main_grad.clone() for item in learned}


def values(built: Trainer, *, ahead: bool) -> dict[str, torch.Tensor]:
    """HF name -> weight of the layer, or of all else."""
    shards = weights.local_shards(built.model, built.spec, built.ranks)
    whole = dict(gather_hf(shards, built.spec, dtype=torch.float32, mtp=built.config.train.builds_mtp))
    names = {name for entry in built.spec.mtp_entries() for name in entry.hf}
    return {name: tensor.clone() for name, tensor in whole.items() if (name in names) == ahead}


def step(built: Trainer) -> dict[str, Any]:
    parts = [cut(one, built.place, ahead=built.config.train.mtp == "trained") for one in microbatches(built.layout)]
    return trainer.train_step(built, parts, 0, lambda name: nullcontext())


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names that differ in a bit, or that only one has."""

    def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))

    return sorted({*(left.keys() ^ right.keys()), *(name for name in left.keys() & right.keys() if not equal(left[name], right[name]))})


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


# What the layer learns from.


def test_tokens_after_next_are_trained_ones_of_the_same_sequence():
    layout = Layout((0,), 4, 1)
    everything, (one,) = sequences(layout), pack(sequences(layout), tokens_per_microbatch=64, dp=1, multiple=4, layout=layout)[0]
    ahead, expected = labels_ahead(one), np.full(one.size, -1)
    for number, start in zip(range(len(LENGTHS)), one.cu_seqlens[:-1], strict=True):
        item = everything[number]
        for row in range(len(item.tokens) - 2):
            if item.loss_mask[row + 1] > 0:
                expected[start + row] = item.tokens[row + 2]
    assert np.array_equal(ahead, expected)
    assert (ahead >= 0).sum() == sum(max(0, len(item.tokens) - 2 - max(0, len(item.tokens) // 3 - 1)) for item in everything)


def test_the_loss_is_that_of_transformers_layer_sequence_by_sequence(made):
    """Hidden states, layer and logits by transformers; tokens after next read off the sequences themselves."""
    from transformers import AutoModelForCausalLM

    built = made.build("trained")
    found = backward(built, weight=0.1)
    stored = {name: tensor.numpy() for name, tensor in load_file(made.folder / "model.safetensors").items()}
    target = AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32, attn_implementation="eager").eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for item in sequences(built.layout):
            tokens = torch.from_numpy(item.tokens)
            hidden = target.model(tokens[None, :-1]).last_hidden_state[0]
            embedded = target.model.embed_tokens(tokens[1:])
            ahead = by_transformers(built.spec, made.folder, stored, hidden, embedded)
            scores = (target.lm_head(ahead) / TEMPERATURE).log_softmax(-1)
            for row in range(len(tokens) - 2):
                if item.loss_mask[row + 1] > 0:
                    total, count = total - float(scores[row, tokens[row + 2]]), count + 1
    assert found["mtp_tokens"] == count > 20
    assert found["mtp_loss"] == pytest.approx(total, rel=1e-5)


def test_its_gradient_is_that_of_its_mean_loss_times_its_weight(made):
    """By finite differences, in the largest element of each kind of weight that is not behind a choice of experts."""
    built, weight = made.build("trained"), 0.3
    backward(built, weight=weight)
    found = gradients(built, ahead=True)
    live = {item.entry.megatron: item.tensor.detach() for item in weights.placed(built.model, built.spec, built.ranks)}
    for name in ("mtp.layers.0.eh_proj.weight", "mtp.layers.0.final_layernorm.weight", "mtp.layers.0.mtp_model_layer.mlp.router.weight"):
        place, shift = np.unravel_index(int(found[name].abs().argmax()), found[name].shape), 1e-2
        losses = []
        for sign in (1, -1):
            live[name][place] += sign * shift
            sums = backward(built, weight=weight)
            losses.append(weight * sums["mtp_loss"] / sums["mtp_tokens"])
            live[name][place] -= sign * shift
        assert (losses[0] - losses[1]) / (2 * shift) == pytest.approx(float(found[name][place]), rel=2e-2), name


# What it leaves alone.


@pytest.mark.parametrize("forced", [False, True])
def test_all_other_gradients_and_the_step_are_bit_by_bit_those_without_it(made, forced):
    without, trained = made.build("passed_through"), made.build("trained")
    sums, more = backward(without, forced=forced), backward(trained, weight=0.5, forced=forced)
    assert sums["loss"] == more["loss"]
    assert not same(gradients(without, ahead=False), gradients(trained, ahead=False))
    learned = gradients(trained, ahead=True)
    assert not [name for name, one in learned.items() if not one.abs().sum() and ".experts." not in name], "all but unused experts learn"
    assert len(learned) == sum(not name.endswith("expert_bias") for name in (entry.megatron for entry in trained.spec.mtp_entries()))
    norms = [megatron.optimizer_step(built.optimizer, 1e-2) for built in (without, trained)]
    assert norms[0] == norms[1] > 0.1, "what the test needs: gradients are clipped"
    assert not same(values(without, ahead=False), values(trained, ahead=False))


def test_a_whole_step_of_the_trainer_is_bit_by_bit_that_without_it(made):
    without, trained = made.build("passed_through"), made.build("trained")
    plain, more = step(without), step(trained)
    assert more.pop("mtp_loss") > 1
    assert plain == more
    assert not same(values(without, ahead=False), values(trained, ahead=False))


def test_replay_and_balancing_leave_its_router_alone(made):
    """With statistics that move the decoder's correction biases; those of the layer stay, and its experts are its own."""
    built = made.build("trained", replay="replayed", native={"moe_z_loss_coeff": 1e-2})
    inner = megatron.unwrap(built.model[0])
    (ahead,) = routers(inner.mtp)
    before, used, bias = ahead.expert_bias.clone(), [], [router.expert_bias.clone() for router in routers(inner.decoder)]
    handle = ahead.register_forward_hook(lambda module, args, output: used.append((module.router_replay, output[1].clone())))
    backward(built, weight=0.1, forced=True)
    handle.remove()
    assert built.place.moe_indices == built.replay.moe_indices == tuple(range(len(built.spec.moe_layers)))
    assert len(used) == len(rows_of(built))
    assert all(replay is None for replay, _ in used)
    forced = torch.cat([rows.routes.ids[:, -1].long() for rows in rows_of(built)])
    assert not torch.cat([chosen for _, chosen in used]).gather(1, forced).all()
    assert torch.equal(ahead.expert_bias, before)
    assert all(not torch.equal(router.expert_bias, one) for router, one in zip(routers(inner.decoder), bias, strict=True))
    built_without = made.build("passed_through", replay="replayed", native={"moe_z_loss_coeff": 1e-2})
    backward(built_without, forced=True)
    assert not same(gradients(built_without, ahead=False), gradients(built, ahead=False))


# Passes and settings.


@pytest.mark.parametrize(
    "native",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe", "layernorm"]},
    ],
    ids=["full", "block", "selective"],
)
def test_recomputation_changes_nothing(made, native):
    """Bit by bit where choices are forced; what its router's scores are normalised by may be added up otherwise."""
    plain, again = made.build("trained"), made.build("trained", native=native)
    sums, found = backward(plain, weight=0.1, forced=True), backward(again, weight=0.1, forced=True)
    assert found == {**sums, "mtp_loss": pytest.approx(sums["mtp_loss"], rel=1e-6)}
    assert not same(gradients(plain, ahead=False), gradients(again, ahead=False))
    assert not farther(gradients(plain, ahead=True), gradients(again, ahead=True), 1e-6)


def farther(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], limit: float) -> list[str]:
    """Names of arrays that differ by more than `limit` of their largest magnitude, or that only one has."""
    both = left.keys() & right.keys()
    far = (name for name in both if float((left[name] - right[name]).abs().max()) > limit * float(left[name].abs().max()))
    return sorted({*(left.keys() ^ right.keys()), *far})


def test_a_head_in_the_models_type_and_padding_change_nothing(made):
    plain, other = made.build("trained"), made.build("trained")
    sums, found = backward(plain, weight=0.1), backward(other, weight=0.1, fp32_head=False, multiple=8)
    assert found["mtp_tokens"] == sums["mtp_tokens"]
    assert found["mtp_loss"] == pytest.approx(sums["mtp_loss"], rel=1e-6)
    assert not farther(gradients(plain, ahead=True), gradients(other, ahead=True), 1e-5)


def test_in_bfloat16_it_trains_too(deepseek):
    built = deepseek.build("trained", dtype="bfloat16")
    before = values(built, ahead=True)
    found = step(built)
    assert 1 < found["mtp_loss"] < 5
    kept = before.keys() - same(before, values(built, ahead=True))
    assert {name for name in kept if ".experts." not in name} == {"model.layers.2.mlp.gate.e_score_correction_bias"}


def test_steps_on_one_batch_lower_its_loss(made):
    built = made.build("trained")
    before = values(built, ahead=True)
    losses = [step(built)["mtp_loss"] for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]
    kept = before.keys() - same(before, values(built, ahead=True))
    assert {name for name in kept if ".experts." not in name} == {"model.layers.2.mlp.gate.e_score_correction_bias"}


def test_a_frozen_layer_is_kept_and_never_run(made):
    built = made.build("frozen")
    calls: list[Any] = []
    megatron.unwrap(built.model[0]).mtp.layers[0].register_forward_hook(lambda *seen: calls.append(seen))
    assert not gradients(built, ahead=True)
    others = values(built, ahead=False)
    assert "mtp_loss" not in step(built)
    assert not calls
    assert not same(values(built, ahead=True), made.ahead)
    assert len(same(others, values(built, ahead=False))) > 10
    passed = made.build("passed_through")
    step(passed)
    assert not same(values(passed, ahead=False), values(built, ahead=False))


def test_a_reference_has_no_such_layer(deepseek):
    config = Config(
        model={"path": str(deepseek.folder)}, train={"dtype": "float32", "device": "cpu", "mtp": "frozen"}, objective={"kl_coef": 0.1}
    )
    built = trainer.build(config, read_spec(deepseek.folder), deepseek.ranks)
    assert hasattr(megatron.unwrap(built.model[0]), "mtp")
    assert not hasattr(megatron.unwrap(built.reference[0]), "mtp")


# Where it is stored.


def export(built: Trainer, folder: Path, origin: Path | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any], str | None]:
    source = Path(built.config.model.path)
    settings = {"dtype": torch.float32, "mtp": built.config.train.builds_mtp, "origin": origin}
    said = export_hf(folder, source, built.model, built.spec, built.ranks, **settings)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text()), said


def whole(built: Trainer, ahead: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What an export must hold: the live weights, `ahead`, and copies that repeat the live ones."""
    live = values(built, ahead=False)
    return live | ahead | {copy: live[of] for copy, of in built.spec.mtp_copies().items()}


@pytest.mark.parametrize("mtp", ["passed_through", "frozen", "trained"])
def test_an_export_is_a_whole_model(made, mtp, tmp_path):
    built = made.build(mtp)
    step(built)
    stored, config, said = export(built, tmp_path / "out")
    ahead = values(built, ahead=True) if mtp == "trained" else made.ahead
    assert not same(stored, whole(built, ahead))
    assert bool(same(ahead, made.ahead)) == (mtp == "trained")
    assert said is None
    assert config["num_nextn_predict_layers"] == 1
    assert survey(tmp_path / "out", "keep").mtp == "keep"
    again = replace_folder(made, tmp_path / "out").build("frozen")
    assert not same(values(again, ahead=True), ahead)


def replace_folder(made: Made, folder: Path) -> Made:
    return made._replace(folder=folder)


def test_an_export_passes_other_types_through(deepseek, tmp_path):
    """Whatever the layer is stored in, quantised with scales or not, it arrives so; scales of copies do not."""
    ahead = {name: one.to(torch.float8_e4m3fn) if one.ndim == 2 else one.to(torch.bfloat16) for name, one in deepseek.ahead.items()}
    ahead |= {f"{name}_scale_inv": torch.rand(1, 1) for name, one in deepseek.ahead.items() if one.ndim == 2}
    stored = load_file(deepseek.folder / "model.safetensors")
    copy = "model.layers.2.shared_head.head.weight"
    other = write_other(deepseek, tmp_path / "in", stored | ahead | {f"{copy}_scale_inv": torch.rand(1, 1)})
    built = other.build("passed_through")
    found, _, said = export(built, tmp_path / "out")
    assert said is None
    assert not same(found, whole(built, ahead))


def write_other(made: Made, folder: Path, tensors: dict[str, torch.Tensor]) -> Made:
    folder.mkdir()
    (folder / "config.json").write_text((made.folder / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return made._replace(folder=folder)


@pytest.mark.parametrize("missing", ["all", "some"])
def test_what_the_source_lacks_is_said(deepseek, tmp_path, caplog, missing):
    stored = load_file(deepseek.folder / "model.safetensors")
    gone = [name for name in stored if name.startswith("model.layers.2.") and (missing == "all" or name.endswith("enorm.weight"))]
    other = write_other(deepseek, tmp_path / "in", {name: one for name, one in stored.items() if name not in gone})
    built = other.build("passed_through")
    found, config, said = export(built, tmp_path / "out")
    assert said in caplog.text
    if missing == "all":
        assert said.endswith("holds no layer for multi-token prediction, so the export has none, and its config.json announces none")
        assert config["num_nextn_predict_layers"] == 0
        assert not same(found, values(built, ahead=False))
    else:
        assert "lacks 1 tensors of the layer for multi-token prediction, and so does the export: model.layers.2.enorm.weight" in said
        assert config["num_nextn_predict_layers"] == 1
        assert found.keys() == stored.keys() - {"model.layers.2.enorm.weight"}
    with pytest.raises(ModelError, match=r"tensors are missing: .*model\.layers\.2\.enorm\.weight"):
        other.build("frozen")


@pytest.fixture
def converted(made, tmp_path) -> Path:
    hf_to_megatron.convert(survey(made.folder, "keep"), tmp_path / "megatron", LIMITS)
    return tmp_path / "megatron"


def test_it_comes_from_a_megatron_checkpoint_too(made, converted, tmp_path):
    """Built from it, and passed through from it; the HF folder then needs no weights."""
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((made.folder / "config.json").read_text())
    other = made._replace(folder=bare)
    assert not same(values(other.build("frozen", checkpoint=str(converted)), ahead=True), made.ahead)
    built = other.build("passed_through", checkpoint=str(converted))
    step(built)
    found, config, said = export(built, tmp_path / "out", origin=converted)
    assert (config["num_nextn_predict_layers"], said) == (1, None)
    assert not same(found, whole(built, made.ahead))


def test_a_megatron_checkpoint_without_it(deepseek, tmp_path):
    hf_to_megatron.convert(survey(deepseek.folder, "drop"), tmp_path / "megatron", LIMITS)
    with pytest.raises(CheckpointError, match=r"lacks \d+ weights of this rank: mtp\.layers\.0"):
        deepseek.build("trained", checkpoint=str(tmp_path / "megatron"))
    built = deepseek.build("passed_through", checkpoint=str(tmp_path / "megatron"))
    found, config, said = export(built, tmp_path / "out", origin=tmp_path / "megatron")
    assert said.startswith(f"{tmp_path / 'megatron'} holds no layer for multi-token prediction")
    assert config["num_nextn_predict_layers"] == 0
    assert not same(found, values(built, ahead=False))


@pytest.mark.parametrize("mtp", ["frozen", "trained"])
def test_checkpoints_of_the_trainer_hold_it(made, mtp, tmp_path):
    """Read back by the trainer, with the optimizer's state, and by `moerl convert`."""
    from moerl.train import checkpoint

    built = made.build(mtp)
    step(built)
    saved = checkpoint.save(tmp_path, Progress(1, 1, 4), built.model, built.optimizer, built.config, built.spec)
    again = made.build(mtp)
    checkpoint.load(saved, again.model, again.optimizer, same_layout=True)
    for ahead in (False, True):
        assert not same(values(built, ahead=ahead), values(again, ahead=ahead))
    planned = megatron_to_hf.plan(saved, made.folder, dtype="keep", mtp="keep", sizes=lambda _: LIMITS)
    megatron_to_hf.convert(planned, tmp_path / "out")
    stored = {name: one for path in (tmp_path / "out").glob("*.safetensors") for name, one in load_file(path).items()}
    assert not same(stored, whole(built, values(built, ahead=True)))
    assert step(built) == step(again)
    for ahead in (False, True):
        assert not same(values(built, ahead=ahead), values(again, ahead=ahead))


def test_ways_that_send_no_such_layer_leave_it_out(deepseek):
    """As to engines that don't draft, on the compatible way."""
    built = deepseek.build("trained")
    shards = weights.local_shards(built.model, built.spec, built.ranks)
    assert {shard.entry.param.layers for shard in shards[-5:]} == {"mtp"}
    assert dict(gather_hf(shards, built.spec, dtype=torch.float32)).keys() == values(built, ahead=False).keys()
