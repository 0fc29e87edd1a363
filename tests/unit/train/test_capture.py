"""What a capture holds, against numpy and passes made outside of it: a real model in one process, whose engine's routes are random."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from moerl.config.schema import Config
from moerl.convert.tiny import tiny_config, write_tiny
from moerl.errors import ReplayError
from moerl.observe.timer import PhaseTimer
from moerl.report import capture as recording
from moerl.rollout.sample import Group, Sample
from moerl.routing.layout import Layout, VersionRun
from moerl.routing.replay import Own, moe_layers
from moerl.routing.trace import Trace
from moerl.train import capture, megatron, trainer
from moerl.train.batch import Part, Sequence, cut, pack
from moerl.train.forward import compute_logprobs, localise
from moerl.train.progress import Progress
from tests.unit.routing.routes import random_ids

LAYOUT = Layout((1, 2, 3), 8, 2)
LENGTHS = [(3, 6), (4, 9), (2, 4), (5, 7)]
"""(prompt, response) of the samples."""


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    folder = tmp_path_factory.mktemp("capture")
    config = tiny_config(hidden=32, layers=4, experts=8, topk=2, groups=4, group_topk=2, expert_width=16, initializer_range=0.2)
    spec = write_tiny(folder, config, seed=4)

    def build(**sections):
        sections["diagnostics"] = {"capture_every_steps": 1} | sections.get("diagnostics", {})
        config = Config(model={"path": str(folder)}, train={"dtype": "float32", "device": "cpu", "lr": 1e-2}, **sections)
        made = trainer.build(config, spec, ranks)
        for layer, router in moe_layers(made.model):
            router.expert_bias.copy_(0.1 * torch.randn(8, generator=torch.Generator().manual_seed(layer.layer_number)))
        return made

    defaults = Config(model={"path": str(folder)}, train={"device": "cpu"})
    ranks = megatron.initialise(defaults.parallel, defaults.train, seed=1)
    yield SimpleNamespace(build=build, spec=spec, ranks=ranks)
    megatron.shutdown()


def sample(number: int, *, version: int = 3, behind: int = 1, routes: bool = True, prompt_id: int = 7) -> Sample:
    prompt, response = LENGTHS[number % len(LENGTHS)]
    rng, rows = np.random.default_rng(number), prompt + response - 1
    tokens = rng.integers(3, 16, rows + 1)
    ids = random_ids(number, rows, 3, 8, 2).astype(LAYOUT.dtype)
    trace = Trace.of(ids, LAYOUT, tokens[:-1], [VersionRun(version - behind, 0, prompt), VersionRun(version, prompt, rows)])
    logprobs = rng.uniform(-4, -1, response).astype("<f4").tobytes()
    record = trace.to_bytes() if routes else b""
    return Sample(
        prompt_id, number, tokens[:prompt].tolist(), tokens[prompt:].tolist(), logprobs, record, [], "", "stop", reward=number / 4
    )


def parts_of(built: trainer.Trainer, samples: list[Sample], chosen: list[int]) -> list[Part]:
    items = []
    for one in samples:
        rows, first = len(one.tokens) - 1, len(one.prompt_tokens) - 1
        mask, engine = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
        mask[first:], engine[first:] = 1.0, one.logprob_array
        items.append(Sequence(one.tokens, mask, one.load_trace().ids, {"advantages": mask, "engine_logprobs": engine, "lag": 0 * mask}))
    micro = pack(items, tokens_per_microbatch=24, dp=1, multiple=4, layout=built.layout)[0]
    assert len(micro) > 1
    return [cut(one, built.place, chosen) for one in micro]


def captured(built: trainer.Trainer, folder, chosen: list[int], parts: list[Part] | None = None) -> tuple[recording.Rows, dict, dict]:
    """(rows of the file, metrics of the capture, metrics of the step) of one step of training."""
    samples = [sample(number) for number in range(4)]
    parts = parts or parts_of(built, samples, chosen)
    recorder = built.recorder(parts)
    metrics = trainer.train_step(built, parts, 0, lambda name: nullcontext(), recorder)
    meta = capture.describe(built.config, built.spec, built.model, step=12, version=3, source="training")
    found = capture.write(folder, recorder, {number: samples[number] for number in chosen}, meta, {"trainer_bias": recorder.bias})
    rows = recording.concatenate(recording.read(recording.list_steps(folder)[12]))
    return rows, found, metrics


def outside(built: trainer.Trainer, parts: list[Part], routes=None) -> tuple[list[np.ndarray], dict[int, list[np.ndarray]], Own | None]:
    """Of a pass outside any step, forced onto `routes` if given: logprobs float32[n, 1] of each microbatch, scores float32[n, experts] of
    each layer's router in each, and what was chosen.
    """
    local, scores, handles = localise(parts, built.ranks), {}, []
    for layer, router in moe_layers(built.model):
        weight, found = router.weight.detach().numpy().copy(), scores.setdefault(layer.layer_number - 1, [])
        hook = partial(lambda weight, found, _, args: found.append(sigmoid(args[0].squeeze(1).numpy() @ weight.T)), weight, found)
        handles.append(router.register_forward_pre_hook(hook))
    with built.replay.recorded([rows.real for rows in local]) if routes is None else built.replay.forced(routes) as own:
        logprobs = [one.numpy()[:, None] for one in compute_logprobs(built.model, local, built.ranks, **built.passes)]
    for handle in handles:
        handle.remove()
    return logprobs, scores, own


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def placed(parts: list[Part], found: list[np.ndarray], keys: list[tuple[int, int]]) -> np.ndarray:
    """From arrays [n, ...] per microbatch: those of the rows (sequence, position) in `keys`, in their order."""
    held = {}
    for part, array in zip(parts, found, strict=True):
        held |= dict(zip(zip(part.captured.tolist(), part.positions.tolist(), strict=True), array, strict=True))
    return np.stack([held[key] for key in keys])


@pytest.mark.parametrize(
    "sections",
    [{}, {"diagnostics": {"mismatch_every_steps": 0}}, {"replay": {"actor": "off"}}, {"replay": {"evaluation": "rollout"}}],
    ids=["default", "no_mismatch_pass", "no_replay", "forced_evaluation"],
)
def test_the_file_holds_both_passes_at_the_weights_before_the_update(setup, tmp_path, sections):
    built = setup.build(**sections)
    chosen, samples = [0, 1, 3], [sample(number) for number in range(4)]
    parts = parts_of(built, samples, chosen)
    natural, scores, own = outside(built, parts)
    replayed, _, _ = outside(built, parts, [rows.routes for rows in localise(parts, built.ranks)])
    r2, _, _ = outside(built, parts, own.routes())
    assert all(map(np.array_equal, r2, natural)), "replaying one's own choice at the same weights changes no bit"
    rows, found, metrics = captured(built, tmp_path, chosen, parts)

    assert metrics["kl_natural"] > 1e-3
    keys = list(zip(rows.sample.tolist(), rows.position.tolist(), strict=True))
    assert sorted(keys) == [(number, i) for number in chosen for i in range(sum(LENGTHS[number]) - 1)]
    assert set(rows.prompt_id.tolist()) == {7}
    for column, expected in ((rows.natural_logprob, natural), (rows.replay_logprob, replayed)):
        assert np.array_equal(column[rows.response], placed(parts, expected, keys)[rows.response, 0])
        assert np.isnan(column[~rows.response]).all()
    assert np.array_equal(rows.r2_logprob, rows.natural_logprob, equal_nan=True)
    for row, (number, i) in enumerate(keys):
        one, trace = samples[number], samples[number].load_trace()
        first = len(one.prompt_tokens) - 1
        assert (rows.token[row], rows.next_token[row]) == tuple(one.tokens[i : i + 2])
        assert (rows.response[row], rows.version[row], rows.reward[row]) == (i >= first, 2 + (i > first), np.float32(number / 4))
        assert np.array_equal(rows.engine_ids[row], trace.ids[i])
        assert i < first or rows.engine_logprob[row] == one.logprob_array[i - first]
    for index, (layer, router) in enumerate(moe_layers(built.model)):
        assert_routed(rows, index, placed(parts, scores[layer.layer_number - 1], keys), router.expert_bias.numpy())
    differ = (np.sort(rows.trainer_ids, axis=-1) != np.sort(rows.engine_ids, axis=-1)).any(axis=-1)
    assert found["capture_rows"] == len(rows)
    assert found["tokens_with_flip"] == pytest.approx(differ.any(axis=1).mean())
    assert found["flip_share_by_layer"] == pytest.approx(differ.mean(axis=0).tolist())
    biases = recording.read_biases(recording.list_steps(tmp_path)[12])
    assert np.array_equal(biases["trainer_bias"], np.stack([router.expert_bias.numpy() for _, router in moe_layers(built.model)]))


def assert_routed(rows: recording.Rows, index: int, scores: np.ndarray, bias: np.ndarray) -> None:
    """Experts, margins and flipped mass of one layer, by numpy from the router's scores float32[row, experts]."""
    grouped = (scores + bias).reshape(-1, 4, 2)
    best = np.argsort(-grouped.sum(axis=-1), axis=1)[:, :2]  # groups compete by their two best experts, here all they have
    open_ = np.zeros(grouped.shape[:2], bool)
    np.put_along_axis(open_, best, True, axis=1)
    limited = np.where(open_[..., None], grouped, -np.inf).reshape(len(scores), 8)
    order = np.argsort(-limited, axis=1)
    ranked, chosen, engine = np.take_along_axis(limited, order, axis=1), order[:, :2], rows.engine_ids[:, index]
    assert np.array_equal(np.sort(rows.trainer_ids[:, index], axis=1), np.sort(chosen, axis=1))
    np.testing.assert_allclose(rows.margin[:, index], ranked[:, 1] - ranked[:, 2], rtol=2e-3, atol=1e-5)
    gates = np.take_along_axis(scores, chosen, axis=1)
    other = ~(chosen[:, :, None] == engine[:, None]).any(axis=-1)
    assert 0.3 < other.mean() < 1
    np.testing.assert_allclose(rows.flipped_mass[:, index], (gates * other).sum(axis=1) / gates.sum(axis=1), atol=1e-3)


def test_samples_are_chosen_whole_by_seed_and_step():
    groups = [Group(group, "", [sample(number, prompt_id=group) for number in range(4)]) for group in range(5)]
    groups[2].samples[1] = sample(1, routes=False)

    def chosen(limit=0, seed=1, step=0, lag=None):
        settings = {"diagnostics": {"capture_every_steps": 1, "capture_tokens": limit}, "replay": {"max_row_lag": lag}}
        return capture.choose(groups, Config(model={"path": ""}, run={"seed": seed}, **settings), step=step, version=3)

    everything = chosen()
    assert list(everything) == [number for number in range(20) if number != 9], "without routes for all rows nothing can be compared"
    assert all(one is groups[number // 4].samples[number % 4] for number, one in everything.items())
    some = chosen(60)
    assert 40 < sum(len(one.tokens) - 1 for one in some.values()) <= 60
    assert list(chosen(60)) == list(some)
    assert len({tuple(chosen(60, seed, step)) for seed in (1, 2) for step in (0, 1, 2)}) == 6
    assert chosen(lag=0) == {}, "rows of version 2 are not replayed at version 3"
    assert list(chosen(lag=1)) == list(everything)


def test_a_step_without_samples_to_capture_leaves_no_file(setup, tmp_path):
    built = setup.build()
    parts = parts_of(built, [sample(number) for number in range(4)], [])
    recorder = built.recorder(parts)
    trainer.train_step(built, parts, 0, lambda name: nullcontext(), recorder)
    meta = capture.describe(built.config, built.spec, built.model, step=12, version=3, source="training")
    assert capture.write(tmp_path, recorder, {}, meta, {}) == {"capture_rows": 0}
    assert recording.list_steps(tmp_path) == {}


def pieces(rows: int = 4) -> list[capture.Piece]:
    """Of a sample of four rows on two pipeline stages, of which the last has the logprobs."""
    places, logprobs = np.stack([np.full(rows, 5), np.arange(rows)], axis=1), np.zeros(rows, np.float32)

    def piece(indices, scored):
        ids, half = np.zeros((rows, len(indices), 2), np.uint8), np.zeros((rows, len(indices)), np.float16)
        return capture.Piece(indices, places, ids, half, half, places[:scored], logprobs[:scored], logprobs[:scored])

    return [piece((0, 2), 0), piece((1,), rows)]


@pytest.mark.parametrize(
    "wrong", [lambda p: p[:1], lambda p: [*p, p[0]], lambda p: [p[0], replace(p[1], indices=(2,))]], ids=["lost", "twice", "mixed"]
)
def test_rows_and_layers_must_come_from_one_rank_each(wrong):
    samples = {
        5: Sample(
            0,
            0,
            [1, 2],
            [3, 4, 5],
            b"\0" * 12,
            Trace.of(random_ids(0, 4, 3, 8, 2), LAYOUT, np.arange(1, 5), [VersionRun(0, 0, 4)]).to_bytes(),
            [],
            "",
            "",
        )
    }
    assert len(capture.assemble(pieces(), samples, LAYOUT)) == 4
    with pytest.raises(ReplayError, match="must be held by one rank"):
        capture.assemble(wrong(pieces()), samples, LAYOUT)


def test_with_a_lag_the_weights_that_sampled_are_captured(setup, tmp_path):
    """One version later, beside the figures without staleness; the file is that of the version, and so are the logprobs in it."""
    from moerl.train import loop
    from moerl.train.run import Run

    built = setup.build(buffer={"max_lag": 1}, diagnostics={"capture_every_steps": 2, "mismatch_every_steps": 2})
    samples = [msgspec.structs.replace(sample(number, version=2, behind=0), versions=[(2, 0, LENGTHS[number][1])]) for number in range(4)]
    parts = parts_of(built, samples, [0, 1, 2, 3])
    wanted, (groups, later) = outside(built, parts)[0], ([Group(7, "", samples[2 * i : 2 * i + 2])] for i in range(2))
    run = Run(built.config, built.spec, tmp_path, built, None, None, Progress(2, 2, 0), [(0, built.place)], PhaseTimer(), None, None, 0.0)
    assert loop.measure_fresh(run, groups) == {}
    trainer.train_step(built, parts, 0, lambda name: nullcontext())
    run.progress = Progress(3, 3, 0)
    found = loop.measure_fresh(run, later)
    assert found["capture_rows"] == sum(len(one.tokens) - 1 for one in samples)
    assert found["fresh/version"] == 2
    (path,) = recording.list_steps(tmp_path / "mismatch").values()
    meta, rows = recording.read_meta(path), recording.concatenate(recording.read(path))
    assert (meta.step, meta.trainer_version, *set(rows.version.tolist())) == (2, 2, 2)
    keys = list(zip(rows.sample.tolist(), rows.position.tolist(), strict=True))
    expected = placed(parts, wanted, keys)[:, 0]
    np.testing.assert_allclose(rows.natural_logprob[rows.response], expected[rows.response], atol=1e-5)
    assert np.isfinite(rows.replay_logprob[rows.response]).all()
    assert np.abs(outside(built, parts)[0][0] - wanted[0]).max() > 1e-3, "the live weights are others"
