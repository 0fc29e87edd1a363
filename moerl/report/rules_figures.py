"""Rules about the figures: what replay gives and leaves, how even the load is, how much was recorded."""

from moerl.report.evidence import Evidence, Finding, name_layers, percent

REMAINDER = 1e-3
REMAINDER_SHARE = 0.5
EXTREME = 1e-3
LOW_ESS = 0.9
UNEVEN = 2.0  # busiest expert-parallel rank over the mean
DEAD = 0.1
FEW_TOKENS = 2000


def _remainder(e: Evidence) -> Finding | None:
    natural, replay = e.report["kl_natural"], e.report["kl_replay"]
    if replay is None or (replay < REMAINDER and not (natural and natural > 1e-5 and replay > REMAINDER_SHARE * natural)):
        return None
    part = f", {percent(replay / natural)} of the natural gap" if natural else ""
    return Finding(
        "warning",
        "other-gap",
        "Replay leaves much of the gap: it is not (only) routing",
        f"KL (k3) is {replay:.1e} under replay{part}.",
        "Look beyond the router: versions served against versions scored, sampling temperature and truncation in the logprobs, "
        "precision of attention and of the output layer on both sides, quantised weights.",
    )


def _extreme(e: Evidence) -> Finding | None:
    name = "extreme_share" if e.report["extreme_share_replay"] is None else "extreme_share_replay"
    share, ess = e.report[name] or 0, e.report["ess_natural" if name == "extreme_share" else "ess_replay"]
    if share < EXTREME and (ess is None or ess >= LOW_ESS):
        return None
    mode = "without replay" if name == "extreme_share" else "even under replay"
    return Finding(
        "warning",
        "extreme-ratios",
        f"{percent(share)} of the tokens have a probability ratio outside 1/2 … 2 {mode}",
        f"Effective sample size {ess:.3f} of 1." if ess is not None else "",
        'Such tokens dominate a gradient: replay the engine\'s routes (`replay.actor = "rollout"`) and keep a correction on '
        '(`objective.correction = "icepop"` or `"tis"`).',
    )


def _benefit(e: Evidence) -> Finding | None:
    removes, natural, replay = e.report["replay_removes"], e.report["kl_natural"], e.report["kl_replay"]
    if removes is None or replay > REMAINDER_SHARE * natural:
        return None
    return Finding(
        "good",
        "replay-works",
        f"Replay removes {percent(removes)} of the gap",
        f"KL (k3) {natural:.1e} natural, {replay:.1e} replayed, on the same tokens.",
        "Keep it on.",
    )


def _uneven(e: Evidence) -> Finding | None:
    side = e.report["soundness"]["engine"]
    found = [entry for entry in side["by_layer"] if (entry["rank_imbalance"] or 0) > UNEVEN]
    dead = [entry for entry in side["by_layer"] if len(entry["dead"]) > DEAD * e.report["meta"]["experts"]]
    enough = e.report["rows"] * e.report["meta"]["topk"] >= 20 * e.report["meta"]["experts"]
    if not enough or not (found or dead):
        return None
    said = (
        [f"the busiest expert-parallel rank of {name_layers([x['layer'] for x in found])} has over {UNEVEN:g} times the mean"]
        if found
        else []
    )
    said += [f"over {percent(DEAD)} of the experts of {name_layers([x['layer'] for x in dead])} are never chosen"] if dead else []
    return Finding(
        "note",
        "uneven-load",
        "Experts are used unevenly",
        "; ".join(said).capitalize() + ".",
        "Uneven ranks slow every step; dead experts are lost capacity. Rearrange experts over ranks, or let the bias move "
        '(`replay.expert_bias = "native"`).',
    )


def _few(e: Evidence) -> Finding | None:
    tokens = e.report["tokens"]
    if tokens >= FEW_TOKENS or not tokens:
        return None
    return Finding(
        "note",
        "few-tokens",
        f"{tokens} generated tokens are few",
        f"Bands are wide below about {FEW_TOKENS} tokens.",
        "Capture more (`diagnostics.capture_tokens`, `diagnostics.capture_every_steps`).",
    )


FIGURES = (_remainder, _extreme, _uneven, _few, _benefit)
