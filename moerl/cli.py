"""The command line: a command's name -> a module that is imported only then.

`moerl COMMAND ...` passes the rest of the arguments on. Errors that moerl raises on purpose are printed as one message
without a traceback: status 2 for a wrong config or a wrong command, 1 for any other; Ctrl-C ends with 130.
"""

import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module

from moerl import __version__
from moerl.errors import ConfigError, MoerlError


@dataclass(frozen=True)
class Command:
    """Attributes:
    target: `module:function`, called with the arguments after the command; returns the exit status.
    about: one line of help.
    usage: the arguments it takes.
    modes: flags that lead to another function.
    """

    target: str
    about: str
    usage: str
    modes: dict[str, str] = field(default_factory=dict)


COMMANDS = {
    "train": Command(
        "moerl.train.launch:main", "generate with routes, train on the same routes, push the weights back", "@ FILE [SETTINGS]"
    ),
    "rollout": Command("moerl.train.launch:rollout_main", "generate and record only, with the engines alone", "@ FILE [SETTINGS]"),
    "config": Command("moerl.config.command:main", "show the effective settings as TOML, or check them", "show|check @ FILE [SETTINGS]"),
    "plan": Command(
        "moerl.plan.command:main",
        "what a cluster would hold, send and reach, or how busy it would be; no GPU needed",
        "@ FILE [SETTINGS] | --hf CONFIG [OPTIONS] | --simulate",
        {"--simulate": "moerl.buffer.command:main"},
    ),
    "report": Command(
        "moerl.report.command:main",
        "what the gap between engine and trainer is made of, as one page",
        "RUN [--against RUN] [--json] [--fail-if CONDITION]",
    ),
    "convert": Command(
        "moerl.convert.command:main",
        "a Hugging Face folder to a Megatron distributed checkpoint, and back",
        "hf-to-megatron|megatron-to-hf|verify SRC DST [OPTIONS]",
    ),
    "bench": Command(
        "moerl.bench.command:main", "measure one part, as ratios within one run", "trace|replay|pack|sync|loop|convert|report [--json]"
    ),
    "doctor": Command("moerl.doctor:main", "what is installed, what is missing, why, and the command that fixes it", "[--json]"),
}

OPTIONS = """\
settings:
  @ FILE                  a TOML file; several are laid over one another, left to right
  --SECTION.KEY VALUE     one setting, as in --train.steps 3; `moerl config show @ FILE` lists them all

options of train and rollout:
  --dry-run               check everything, start nothing
  --resume                train: continue from the last checkpoint in run.dir
  --overwrite             replace the run in run.dir
  --rollouts DIR          train: no engine; train on the rollouts recorded in DIR

options of report:
  -o FILE                 where the page goes, instead of RUN/report.html
  --json                  print one object instead of writing a page
  --against RUN           two recordings of the same tokens; --side engine (default) or trainer
  --fail-if CONDITION     end with status 3 if it holds, as in 'kl_replay>1e-3'; may be repeated
  --recompute CHECKPOINT  record first, with these weights; --steps 0,3, --version N and settings go along
  --import KIND FILE ...  records of sglang, vllm or megatron, into -o RUN, with --model CONFIG [--step N]

options of plan:
  --hf CONFIG             a config.json, or the folder that holds it, in place of model.path
  --trainer tp=2,pp=4,... sizes of the trainer: tp, pp, vpp, cp, ep, etp, dp; likewise --engine tp=8,ep=1,replicas=4
  --gpus N                how to split N GPUs between trainer and engines
  --world N               trainer ranks
  --gpu-gib 80 ...        what is assumed: reserve-gib, gbps-per-rank, hbm-tb-s, tflops, mfu, imbalance, prompt-tokens, response-tokens
  --json, --markdown      one JSON object as the last line; one row of a table and nothing else

options of convert:
  --verify                compare both sides bit for bit afterwards, by other code
  --dry-run               inventory, sizes and an estimate of the time; write nothing
  --mtp keep|drop         weights for multi-token prediction (kept by default)
  --dtype TYPE            megatron-to-hf: keep (default), bfloat16, float32 or fp8 (in blocks, with scales)
  --hf-config DIR         megatron-to-hf: HF folder of the model, for a checkpoint that carries no config
  --memory-mib N          memory for the values in flight (1024)
  --workers N             files written at a time (one for each CPU)
  --file-mib N            size of each output file, the unit of resuming
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"moerl {__version__}")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        return _complain(f"moerl has no command {name!r}; {hint}", 2)
    if any(word in ("-h", "--help") for word in rest):
        print(f"moerl {name} {COMMANDS[name].usage}\n\n{COMMANDS[name].about}\n\n{OPTIONS}", end="")
        return 0
    return guarded(_target(COMMANDS[name], rest), rest)


def guarded(command: Callable[[list[str]], int], words: list[str]) -> int:
    """Run a command; the exit status, also of what it raises on purpose."""
    try:
        return command(words)
    except ConfigError as error:
        return _complain(str(error), 2)
    except MoerlError as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def usage() -> str:
    """The help text."""
    left = [f"  moerl {name} {command.usage}" for name, command in COMMANDS.items()]
    width = max(map(len, left)) + 2
    lines = [f"{entry:<{width}}{command.about}" for entry, command in zip(left, COMMANDS.values(), strict=True)]
    return "\n".join(("moerl: RL post-training of mixture-of-experts models", "", *lines, "", OPTIONS.rstrip()))


def _target(command: Command, words: Sequence[str] = ()) -> Callable[[list[str]], int]:
    module, function = next((target for flag, target in command.modes.items() if flag in words), command.target).split(":")
    return getattr(import_module(module), function)


def _complain(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
