"""An `Estimate` for people: a table, or one row of Markdown."""

from collections.abc import Iterable

from rich.table import Table

from moerl.plan import fit
from moerl.plan.assumptions import GIB
from moerl.plan.estimate import Estimate, warnings
from moerl.plan.split import Split

NOTE = (
    "Bytes of weights, gradients, optimizer, KV cache and sync are counts. Activations are an estimate. Times and rates are bounds under "
    "the assumptions named here, not predictions: a real job is slower."
)

COLUMNS = (
    "model",
    "GPUs: trainer + engines",
    "trainer sizes",
    "GiB per trainer GPU, worst stage",
    "GiB per engine GPU",
    "weight update",
    "response tokens/s, bound",
)


def table(found: Estimate) -> Table:
    """All figures, one line per topic."""
    job, spec, worst = found.job, found.job.spec, found.stages[found.worst]
    shown = Table(title=job.name, title_justify="left", show_edge=False, show_header=False)
    shown.add_column(no_wrap=True)
    shown.add_column()
    where = f"stage {found.worst} of {job.trainer.pp}, from rank {found.worst * job.trainer.per_stage}"
    rows = {
        "model": f"{spec.family}, {spec.parameter_count() / 1e9:.2f} B parameters in {spec.tensor_count()} tensors, "
        f"{spec.layers} layers ({len(spec.moe_layers)} MoE), {spec.experts} experts, top-{spec.topk}",
        "trainer": fit.words(job.trainer),
        "engines": fit.words(job.engine),
        "trainer rank": f"{total(found, worst):.1f} GiB of {job.assumptions.gpu_gib:g} ({where}): {parts(worst)}",
        "all stages": ", ".join(f"{total(found, stage):.1f}" for stage in found.stages) + " GiB",
        "engine rank": f"{total(found, found.engine):.1f} GiB of {job.assumptions.gpu_gib:g}: {parts(found.engine)}",
        "KV cache": f"{found.kv_tokens:,} tokens per engine; {found.kv_capacity:,} would fit",
        "weight update": f"{_sync(found)}; {found.sync.buckets} buckets, planned in {found.sync.plan_s:.1f} s",
        "generation": f"{found.rollout_s:.1f} s a step; an engine runs {found.generation.batch} sequences, a token each in "
        f"{found.generation.step_s * 1e3:.1f} ms (memory {found.generation.memory_s * 1e3:.1f}, compute "
        f"{found.generation.compute_s * 1e3:.1f})",
        "training": f"{found.training.step_s:.1f} s a step; {found.training.flops_per_token / 1e9:.1f} GFLOP per token, "
        f"{found.training.microbatches} microbatches, bubble {found.training.bubble:.1%}",
        "bound": f"{found.tokens_per_s:,.0f} response tokens per second, "
        f"{'both pools at once' if job.config.buffer.max_lag else 'one pool after the other'} (buffer.max_lag {job.config.buffer.max_lag})",
        "assumptions": str(job.assumptions),
    }
    for name, text in (*rows.items(), *(("warning", text) for text in warnings(job))):
        shown.add_row(name, text)
    shown.caption = NOTE
    shown.caption_justify = "left"
    return shown


def split_table(found: Iterable[Split], most: int = 5) -> Table:
    """The best splits of a number of GPUs."""
    shown = Table(title="splits, best first", title_justify="left", show_edge=False)
    for name in ("trainer", "engines"):
        shown.add_column(name)
    for name in ("training s", "generation s", "tokens/s"):
        shown.add_column(name, justify="right")
    for one, _ in zip(found, range(most), strict=False):
        shown.add_row(
            fit.words(one.trainer), fit.words(one.engine), f"{one.training_s:.1f}", f"{one.rollout_s:.1f}", f"{one.tokens_per_s:,.0f}"
        )
    return shown


def markdown(found: Estimate) -> str:
    """One row under `COLUMNS`; the same on every machine."""
    job, trainer = found.job, found.job.trainer
    cells = (
        job.name,
        f"{trainer.world} + {job.engine.world} ({job.engine.count} x tp{job.engine.tp}{f' ep{job.engine.ep}' * (job.engine.ep > 1)}"
        f"{' fp8' * (job.engine.fp8_block is not None)}), {job.assumptions.gpu_gib:g} GiB each",
        " ".join(f"{name}{size}" for name in fit.SIZES if (size := getattr(trainer, name)) > 1) or "one rank",
        f"**{total(found, found.stages[found.worst]):.1f}**: {parts(found.stages[found.worst])}",
        f"**{total(found, found.engine):.1f}**: {parts(found.engine)}",
        _sync(found),
        f"{found.tokens_per_s:,.0f} (step: train {found.training.step_s:.0f} s, generate {found.rollout_s:.0f} s)",
    )
    return _line(cells)


def markdown_head() -> str:
    """The two lines above the rows."""
    return f"{_line(COLUMNS)}\n{_line(['---'] * len(COLUMNS))}"


def total(found: Estimate, held: dict[str, int]) -> float:
    """GiB with the reserve."""
    return sum(held.values()) / GIB + found.job.assumptions.reserve_gib


def parts(held: dict[str, int]) -> str:
    """Parts of at least 0.05 GiB."""
    return ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f}" for name, size in held.items() if size / GIB >= 0.05) or "less than 0.1"


def _sync(found: Estimate) -> str:
    sync = found.sync
    return f"{sync.bytes_total / 1e9:,.1f} GB, {sync.ratio:.3f} of the minimum, at least {sync.floor_s:.2f} s"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
