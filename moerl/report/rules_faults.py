"""Rules about the recording itself: holes, routes in the wrong place, other experts or biases, other versions."""

from collections import Counter

from moerl.report.evidence import Evidence, Finding, name_layers, name_some, percent

STALE = 0.001  # share of rows


def _missing_layers(e: Evidence) -> Finding | None:
    layers = e.report["soundness"]["missing_layers"]
    if not layers:
        return None
    return Finding(
        "error",
        "missing-layers",
        f"The engine recorded no routes for {name_layers(layers)}",
        f"All ids of {name_layers(layers)} are 0 in every row.",
        "SGLang returns zeros for layers of later pipeline stages and for top-k kernels that bypass the capture: run the engine without "
        "pipeline parallelism and with a MoE backend that captures ids, then record again.",
    )


def _zero_rows(e: Evidence) -> Finding | None:
    found = e.report["soundness"]
    share, padding = found["zero_rows"] or 0, found["padding_share"] or 0
    if not share or found["missing_layers"]:
        return None
    where = "at the ends of samples" if padding > 0.9 * share else "within samples"
    return Finding(
        "error",
        "zero-rows",
        f"{percent(share)} of the rows carry no routes",
        f"Their ids are 0 in every layer, {where} ({percent(padding)} of all rows are a zero tail).",
        "Such rows were lost (an aborted or retracted request, padding). Replaying them sends every token to expert 0: have them count "
        'as missing (`replay.missing = "native"` or `"mask"`), and find out why the engine lost them.',
    )


def _repeated_ids(e: Evidence) -> Finding | None:
    share = e.report["soundness"]["repeated_ids"] or 0
    if not share:
        return None
    return Finding(
        "error",
        "repeated-ids",
        f"{percent(share)} of the decisions name an expert twice",
        "A top-k has k different experts; repeated ids collapse in the routing map and break the dispatcher's splits.",
        "Look at what wrote these ids: padding, a truncated integer type, or rows of another request.",
    )


def _repeated_rows(e: Evidence) -> Finding | None:
    share = e.report["soundness"]["repeated_rows"] or 0
    if share < 0.005 or len(e.report["meta"]["layers"]) < 2:
        return None
    trainer = e.report["soundness"]["repeated_rows_trainer"]
    if trainer is not None and share < 3 * trainer:
        return None
    return Finding(
        "error",
        "repeated-rows",
        f"{percent(share)} of the engine's rows repeat the row before them",
        f"All layers have the same ids in the same order; in the trainer's choice that is so for {percent(trainer or 0)}.",
        "Rows of one token were stored for the next: check the turn boundaries and the resumption of interrupted requests.",
    )


def _bad_logprobs(e: Evidence) -> Finding | None:
    count = e.report["bad_logprobs"]
    if not count:
        return None
    return Finding(
        "error",
        "bad-logprobs",
        f"{count} generated tokens have a logprob that is not finite",
        "They are left out of every figure of the gap.",
        "With truncated sampling, compare over the same tokens (the sampling mask travels with the sample); otherwise look for overflow.",
    )


def _moved_layers(e: Evidence) -> Finding | None:
    if not e.moved_layers:
        return None
    shift, count = Counter(b - a for a, b in e.moved_layers).most_common(1)[0]
    most = count > 0.5 * len(e.moved_layers)
    pairs = ", ".join(f"{a} fits {b}" for a, b in e.moved_layers[:6]) + (" …" if len(e.moved_layers) > 6 else "")
    how = f"{abs(shift)} layer(s) too {'late' if shift < 0 else 'early'}" if most else "at other layers"
    return Finding(
        "error",
        "moved-layers",
        f"The engine's routes stand {how}: {len(e.moved_layers)} of {len(e.report['meta']['layers'])} layers fit another layer",
        f"Engine layer against the trainer's layer that shares most experts with it: {pairs}.",
        "The layer map is wrong: check which layers are dense (first_k_dense_replace, moe_layer_freq) and how pipeline stages number them.",
    )


def _moved_positions(e: Evidence) -> Finding | None:
    if not e.shifted:
        return None
    offset = max(e.offsets, key=lambda value: e.offsets[value])
    step, prompt, sample, _ = e.shifted[0]
    count = sum(e.offsets.values())
    return Finding(
        "error",
        "moved-positions",
        f"Routes are shifted by {abs(offset)} position(s) in {count} of {e.samples} samples",
        f"The engine's row i fits the trainer's row i{offset:+d}; for instance step {step}, prompt {prompt}, sample {sample}.",
        "Row i must be the routing used when token i was the input; the last token has none. Check slicing at the prompt's end, at turn "
        "boundaries and where a request was resumed.",
    )


def _swapped(e: Evidence) -> Finding | None:
    if not e.swapped or e.moved_layers or e.shifted:
        return None
    layers = sorted({entry[0] for entry in e.swapped})
    pairs = ", ".join(f"{expert} -> {place}" for _, expert, place, _ in e.swapped[:8]) + (" …" if len(e.swapped) > 8 else "")
    return Finding(
        "error",
        "swapped-experts",
        f"Experts are swapped in {name_layers(layers)}",
        f"Where the trainer chooses an expert, the engine nearly always has another in its place: {pairs} ({len(e.swapped)} experts).",
        "Engine and trainer number the experts differently: check the weight sync's expert order (EP ranks, stacked experts), and "
        "whether the engine reports physical instead of logical ids (EPLB).",
    )


def _bias(e: Evidence) -> Finding | None:
    bias = (e.report["causes"] or {"bias": []})["bias"]
    apart = [entry for entry in bias if entry["max_diff"] > 1e-6]
    same = [entry for entry in apart if entry["engine_version"] in (entry["trainer_version"], None)]
    if not apart:
        return None
    worst = max(same or apart, key=lambda entry: entry["max_diff"])
    layers = sorted({entry["layer"] for entry in same or apart})
    version = "" if worst["engine_version"] is None else f", version {worst['engine_version']}"  # of the engine
    margins = {entry["layer"]: entry["median_margin"] for entry in e.report["causes"]["by_layer"]}
    median = margins[worst["layer"]]
    scale = f"; the median margin there is {median:.1e}" if median else ""
    return Finding(
        "error" if same else "warning",
        "bias-apart",
        f"The correction bias of {name_layers(layers)} differs between engine and trainer{version}",
        f"Worst is layer {worst['layer']}, expert {worst['expert']}, step {worst['step']}: {worst['max_diff']:.1e} apart{scale}.",
        "The bias was not synced, or was rounded on the way: it is kept in float32 and belongs into every weight update. "
        '`replay.expert_bias = "frozen"` keeps it from moving.',
    )


def _newer(e: Evidence) -> Finding | None:
    found = e.report["soundness"]
    if not found["newer_rows"] and not found["decreasing_samples"]:
        return None
    newer, falling = found["newer_rows"], found["decreasing_samples"]
    return Finding(
        "error",
        "newer-rows",
        "Weight versions run backwards: " + (f"{newer} rows are newer than the trainer" if newer else f"in {falling} samples"),
        f"{newer} rows with a version above the trainer's; {falling} samples in which a later row is older than an earlier one.",
        "Rows were overwritten by a later pass (a retracted request, computed again), or the trainer scored with an older checkpoint.",
    )


def _stale(e: Evidence) -> Finding | None:
    share, sound = e.report["stale_share"] or 0, e.report["soundness"]
    if share < STALE:
        return None
    flips = e.report["flips"]
    lags = {entry["lag"]: entry for entry in flips["by_lag"]} if flips else {}
    old = [entry for lag, entry in lags.items() if lag]
    fresh = lags[0]["share"] if 0 in lags else None
    stale = sum(entry["share"] * entry["rows"] for entry in old) / sum(entry["rows"] for entry in old) if old else None
    worse = fresh is not None and stale is not None and stale > 1.5 * fresh
    compared = f"; they differ in {percent(stale)} of their decisions" if stale is not None else ""
    compared += f", rows of the trainer's own version in {percent(fresh)}" if stale is not None and fresh is not None else ""
    return Finding(
        "warning" if worse else "note",
        "stale-rows",
        f"{percent(share)} of the rows were computed by older weights",
        f"Versions {name_some(sound['stale_versions'])}{compared}; {sound['mixed_samples']} samples mix versions.",
        "Under replay the old routes are forced onto new weights. Lower `buffer.max_lag`, have older rows count as missing "
        "(`replay.max_row_lag`), and check that a weight update flushes the prefix cache.",
    )


FAULTS = (
    _missing_layers,
    _zero_rows,
    _repeated_ids,
    _moved_layers,
    _moved_positions,
    _swapped,
    _bias,
    _newer,
    _repeated_rows,
    _bad_logprobs,
    _stale,
)
EXPLAINS = ("missing-layers", "zero-rows", "moved-layers", "moved-positions", "swapped-experts", "bias-apart")
