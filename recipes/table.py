"""The table of recipes/README.md: `python recipes/table.py` prints it, `--write` puts it there. Every row is what `moerl plan` prints."""

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from moerl.plan import show
from moerl.plan.command import make_job, split_options
from moerl.plan.estimate import estimate

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "recipes" / "README.md"
START, END = "<!-- what `python recipes/table.py --write` puts here -->", "<!-- end -->"

JOBS = {
    "moonlight_16b_8gpu": ("Moonlight-16B-A3B-Instruct", 80),
    "qwen3_30b_8gpu": ("Qwen3-30B-A3B", 141),
    "qwen3_30b_32gpu": ("Qwen3-30B-A3B", 80),
    "qwen3_235b_128gpu": ("Qwen3-235B-A22B", 80),
    "glm_45_128gpu": ("GLM-4.5", 141),
    "deepseek_v3_384gpu": ("DeepSeek-V3", 141),
    "kimi_k2_512gpu": ("Kimi-K2-Instruct", 141),
}
"""Settings file -> (the published configuration it is planned with, GiB of a GPU)."""


def words(job: str) -> list[str]:
    """Arguments of `moerl plan` for one row, from the root of the repository."""
    model, gib = JOBS[job]
    return ["@", f"configs/{job}.toml", "--hf", f"configs/models/{model}", f"--gpu-gib={gib}", "--markdown"]


def row(job: str) -> str:
    """What that prints."""
    return show.markdown(estimate(make_job(split_options(words(job)))))


def lines() -> Iterator[str]:
    """The table, and the commands that print its rows."""
    yield show.markdown_head()
    yield from map(row, JOBS)
    yield "\n```"
    yield from (f"tools/moerl plan {shlex.join(words(job))}" for job in JOBS)
    yield "```"


def main(argv: list[str]) -> int:
    """Print or write the table; the exit status."""
    os.chdir(ROOT)
    text = "\n".join(lines())
    if "--write" in argv:
        before, rest = README.read_text().split(START)
        README.write_text(f"{before}{START}\n\n{text}\n\n{END}{rest.split(END)[1]}")
    else:
        sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
