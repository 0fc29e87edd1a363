"""The log between engines and trainer: which prompt may start, which groups form a step, how stale they are, what became of each.

    stream of prompts --admit--> waiting --dispatch--> running --score--> ready --take--> a training step
                                                           \\________ refused, with a reason

Staleness is consumer lag. Training step *s* trains the weights of version *s* and makes version *s + 1*; a token of version *v* that
is trained in step *s* has the lag *s - v*. `scheduler.py` decides, on events alone: it has no clock, no I/O and no threads, so that
the live loop and `simulate.py` drive the very same code. `ledger.py` keeps its events on disk and rebuilds from them what a
resumed run still owes. `lag.py` is the per-token side, `metrics.py` the figures, `command.py` is `moerl plan --simulate`.

Invariants: every admitted group is delivered exactly once or refused exactly once, with a reason; under the policy `wait` nothing is
handed out with a lag above `buffer.max_lag`; nothing is generated only to be dropped for its age. Needs no torch and no Ray.
"""
