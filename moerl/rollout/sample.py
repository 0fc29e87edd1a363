"""The wire types between generation, storage and training: one prompt, one sample, one group.

Invariant (tuple): token, logprob, route and version of a generated token come from the same forward pass. `Sample.trace`
is the record of `routing.trace.Trace`; token *i* of the response was predicted from row `len(prompt) - 1 + i`.
"""

import msgspec
import numpy as np

from moerl.rollout.mask import ANY_VOCABULARY, SamplingMask, check, from_bytes, unrestricted
from moerl.routing.trace import Trace


class Prompt(msgspec.Struct, frozen=True):
    """One question, tokenized."""

    id: int
    text: str
    tokens: list[int]
    answer: str


class Sample(msgspec.Struct):
    """One completion of a prompt.

    Attributes:
        prompt_tokens: int[p].
        response_tokens: int[r], the stop token included.
        logprobs: raw little-endian float32[r], of the response tokens under the engine's sampling distribution.
        trace: routing record of p + r - 1 rows; empty when routes were not requested (evaluation).
        mask: record of the tokens that top-p or top-k left to choose from, a row per response token (`rollout.mask`), within which the
            logprobs are; empty where all were sampled from the whole vocabulary.
        versions: (weight version, start, stop) runs over the response tokens.
        finish_reason: "stop", "length" or "abort".
    """

    prompt_id: int
    index: int
    prompt_tokens: list[int]
    response_tokens: list[int]
    logprobs: bytes
    trace: bytes
    versions: list[tuple[int, int, int]]
    text: str
    finish_reason: str
    engine: int = 0
    reward: float = 0.0
    mask: bytes = b""

    @property
    def tokens(self) -> np.ndarray:
        """int64[p + r]"""
        return np.asarray(self.prompt_tokens + self.response_tokens, dtype=np.int64)

    @property
    def logprob_array(self) -> np.ndarray:
        """float32[r]"""
        return np.frombuffer(self.logprobs, dtype="<f4")

    def load_trace(self) -> Trace:
        """Parse the record and check that it belongs to these tokens."""
        return Trace.from_bytes(self.trace).check_tokens(self.tokens)

    def load_mask(self) -> SamplingMask:
        """The sampling mask of the response tokens, checked against them; unrestricted rows where there is no record.

        Raises:
            RolloutError: the record is damaged, or that of other tokens.
        """
        if not self.mask:
            return unrestricted(len(self.response_tokens))
        name = f"sample {self.index} of prompt {self.prompt_id}"
        return check(from_bytes(self.mask), np.asarray(self.response_tokens), ANY_VOCABULARY, name)


class Group(msgspec.Struct):
    """All completions of one prompt, scored together."""

    prompt_id: int
    answer: str
    samples: list[Sample]
