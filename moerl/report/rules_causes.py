"""Rules about why decisions flip, where the recording itself is sound."""

import numpy as np

from moerl.report.evidence import Evidence, Finding, name_layers, percent

TIES = 0.005  # share of margins that are exactly 0: float32 scores hardly ever tie
COARSE_SCORES = 1e-3  # error of a score difference: as large as bfloat16 rounding of sigmoid scores (2**-9 / 2) makes it
ONE_WAY = 0.5  # of the flips of a layer, beyond chance; repeated prompts and tokens alone reach 0.3
ONE_WAY_FLIPS = 200
FAR = 0.25  # share of flips with a margin above the median: 0.5 if margins don't matter; rounding in bfloat16 alone reaches 0.15
MOST = 0.6  # share of a layer's decisions: rounding in bfloat16 was seen to reach 0.3
FAR_FLIPS = 100  # of the layer, so that the share means something
NEAR = 0.6  # margin of a flip over that of any decision, medians
CONCENTRATED = 3.0


def _low_precision(e: Evidence) -> Finding | None:
    dtype = e.report["meta"]["router_dtype"]
    causes = e.report["causes"]
    ties = [entry for entry in (causes["by_layer"] if causes else []) if (entry["ties"] or 0) > TIES]
    error = e.report["score_error"]
    low = dtype in ("bfloat16", "float16")
    if not low and not ties and (error or 0) < COARSE_SCORES:
        return None
    said = []
    if low:
        said.append(f"the trainer's router runs in {dtype}")
    if ties:
        worst = max(ties, key=lambda entry: entry["ties"])
        said.append(f"{percent(worst['ties'])} of the margins of layer {worst['layer']} are exactly 0, which float32 scores are not")
    if error is not None:
        said.append(f"flips imply an error of {error:.1e} in a difference of scores (median over layers)")
    title = "The router selects experts in low precision" if low or ties else "Scores differ as much as a router in bfloat16 makes them"
    if not low and not ties and dtype:
        said.append(f"the trainer's router runs in {dtype}, so look at the engine's and at what comes before either")
    return Finding(
        "warning" if low or ties else "note",
        "router-precision",
        title,
        "; ".join(said).capitalize() + ".",
        'Compute router logits and scores in float32 on both sides (Megatron: `megatron.moe_router_dtype = "fp32"`; SGLang does so on '
        "GPUs), and keep replay on: what rounding overturns, replay repairs.",
    )


def _one_way(e: Evidence) -> Finding | None:
    causes = e.report["causes"]
    found = [
        entry
        for entry, flips in zip(causes["by_layer"] if causes else [], e.layer_flips, strict=False)
        if (entry["direction"] or 0) > ONE_WAY and flips >= ONE_WAY_FLIPS
    ]
    if not found:
        return None
    worst = max(found, key=lambda entry: entry["direction"])
    experts = [entry for entry in causes["experts"] if entry["layer"] == worst["layer"]][:4]
    named = ", ".join(f"{x['expert']} (engine {x['engine']}, trainer {x['trainer']})" for x in experts)
    i = e.report["meta"]["layers"].index(worst["layer"])
    versions = [entry for entry in e.report["flips"]["by_version"] if entry["rows"]]
    version = max(versions, key=lambda entry: entry["by_layer"][i])["version"]
    rows = f", most in rows of version {version}" if version >= 0 else ""
    return Finding(
        "warning",
        "one-way-flips",
        f"Flips go one way in {name_layers([entry['layer'] for entry in found])}{rows}",
        f"In layer {worst['layer']} {percent(worst['direction'])} of the flips beyond chance favour the same experts: {named or 'spread'}.",
        "Rounding has no favourites: the router's correction bias or weights differ between engine and trainer. Compare them after a "
        'weight update (`sync.verify = "every"`).',
    )


def _far(e: Evidence) -> Finding | None:
    causes, flips = e.report["causes"], e.report["flips"]
    found = (
        [
            (entry, other["share"])
            for entry, other, count in zip(causes["by_layer"], flips["by_layer"], e.layer_flips, strict=True)
            if count >= FAR_FLIPS and (other["share"] > MOST or (entry["far_flip_share"] or 0) > FAR)
        ]
        if causes and flips
        else []
    )
    if not found:
        return None
    worst, share = max(found, key=lambda pair: (pair[1] > MOST, (pair[0]["far_flip_share"] or 0) * pair[1]))
    far = worst["far_flip_share"]
    margins = f", and {percent(far)} of these have a margin above the median" if far is not None else ""
    return Finding(
        "warning",
        "clear-flips",
        f"Clear decisions differ in {name_layers([entry['layer'] for entry, _ in found])}, not only near-ties",
        f"In layer {worst['layer']} {percent(share)} of the decisions differ{margins}; rounding reaches about {percent(MOST / 2)}, "
        "hardly any of them clear.",
        "Rounding does not explain it: weights or inputs of these layers differ. Compare checksums after a weight update, versions of "
        "the rows, and what the layers before do (attention backend, shared experts, quantisation).",
    )


def _concentrated(e: Evidence) -> Finding | None:
    flips, decisions = e.sample_flips.T if len(e.sample_flips) else np.zeros((2, 0))
    if len(flips) < 20 or not flips.sum():
        return None
    shares = flips / np.maximum(decisions, 1)
    odd = shares > max(CONCENTRATED * np.median(shares), np.median(shares) + 0.1)
    if not odd.any() or flips[odd].sum() < 0.1 * flips.sum():
        return None
    return Finding(
        "warning",
        "odd-samples",
        f"{int(odd.sum())} of {len(flips)} samples hold {percent(flips[odd].sum() / flips.sum())} of the differing decisions",
        f"They differ in {percent(flips[odd].sum() / decisions[odd].sum())} of their decisions, the median sample in "
        f"{percent(float(np.median(shares)))}.",
        "Their routes may belong to other weights or another request: look at the worst samples, and at interrupted or resumed requests.",
    )


def _near_ties(e: Evidence) -> Finding | None:
    causes, share = e.report["causes"], e.report["flip_share"]
    if not causes or not causes["margin"] or not share:
        return None
    layers = [entry for entry in causes["by_layer"] if entry["median_margin"] and entry["median_margin_flipped"]]
    if not layers or share > MOST or any((entry["far_flip_share"] or 0) > FAR for entry in layers):
        return None
    ratio = float(np.median([entry["median_margin_flipped"] / entry["median_margin"] for entry in layers]))
    if ratio > NEAR:
        return None
    error = e.report["score_error"]
    return Finding(
        "note",
        "near-ties",
        f"{percent(share)} of the decisions differ, and they are near-ties",
        f"The margin of a flip is {percent(ratio)} of the usual one (medians)"
        + (f"; an error of {error:.1e} in a difference of scores explains as many." if error is not None else "."),
        "That is rounding. Replay removes its effect; a float32 router on both sides makes it rarer.",
    )


CAUSES = (_low_precision, _one_way, _far, _concentrated, _near_ties)
