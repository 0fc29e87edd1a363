"""What a step minimises: rewards of a group in, advantages out; then log-probabilities of tokens in, one sum with gradient out.

    rewards --advantages--> A        log ratio to the old policy --losses--> surrogate of each token
                                     log ratio old / engine ------corrections--> weight of each token
    loss = - sum over tokens of weight * surrogate  + kl_coef * KL(pi || reference)  - entropy_coef * entropy

| room | holds |
|---|---|
| `advantages` | GRPO, Dr. GRPO, RLOO; uniform groups; DAPO's punishment of overlong answers |
| `losses` | PPO clip, GSPO, CISPO; the KL to the reference; `grpo_loss`, which puts all together |
| `corrections` | what stands between engine and trainer: TIS, MIS, IcePop, OPSM |
| `sequences` | sums over the tokens of a packed sequence that context parallelism has cut |
| `measures` | sums of all ranks to the metrics of a step; effective sample size and KL by lag |
| `sampling` | log-probabilities within the nucleus that the engine sampled from |

Three policies meet. The engine's is the behaviour: it sampled. The old one is what clipping compares with: the trainer before the
first update on the batch (with one update the live policy itself, detached), or the engine (`objective.old_policy`). The live one is
trained. Ratio of live to old under the clip, times weight of old to engine, is decoupled PPO (arXiv 2110.00641; AReaL, arXiv
2505.24298). Invariants: every function is pure, and communicates only through the functions that it is given; weights and masks carry
no gradient; only trained tokens are looked at, so that no value at padding, not even a NaN, reaches a sum or a gradient.
"""

from moerl.train.objective.advantages import group_advantages, is_uniform, overlong_penalty, uniform_share
from moerl.train.objective.corrections import correction
from moerl.train.objective.losses import grpo_loss, supervised_loss
from moerl.train.objective.measures import averages, by_lag
from moerl.train.objective.sampling import masked_logprobs
from moerl.train.objective.sequences import Sequences, sequence_ids

__all__ = [
    "Sequences",
    "averages",
    "by_lag",
    "correction",
    "group_advantages",
    "grpo_loss",
    "is_uniform",
    "masked_logprobs",
    "overlong_penalty",
    "sequence_ids",
    "supervised_loss",
    "uniform_share",
]
