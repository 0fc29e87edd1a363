"""What the tests of whole runs share: settings of a very small run, and a finished command to look at."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

SETTINGS = """
[model]
path = "{model}"
[task]
options = {{ min_terms = 2, max_terms = 3, min_digits = 1, max_digits = 1 }}
strip_question = "(State the final answer to the following arithmetic problem:)|(\\\\s)"
prompts = 200
heldout_prompts = 16
reward = "exact_integer"
[rollout]
prompts_per_step = 4
group_size = 4
max_prompt_tokens = 16
max_new_tokens = 6
[engine]
device = "cpu"
[train]
device = "cpu"
dtype = "float32"
steps = 4
tokens_per_microbatch = 512
lr = 1e-3
[sync]
bucket_mib = 1
[checkpoint]
every_steps = 2
keep = 4
[observe]
console = false
"""


@dataclass(frozen=True)
class Finished:
    """A finished command: its run folder and what it printed."""

    folder: Path
    output: str
    status: int

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())
