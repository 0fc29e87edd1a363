"""The command line: help, dispatch, errors as messages, exit statuses, and no heavy import on the way."""

import json
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from moerl import cli
from moerl.errors import ConfigError, EngineError

HELP = """\
moerl: RL post-training of mixture-of-experts models

  moerl train @ FILE [SETTINGS]                                         generate with routes, train on the same routes, push the weights back
  moerl rollout @ FILE [SETTINGS]                                       generate and record only, with the engines alone
  moerl config show|check @ FILE [SETTINGS]                             show the effective settings as TOML, or check them
  moerl plan @ FILE [SETTINGS] | --hf CONFIG [OPTIONS] | --simulate     what a cluster would hold, send and reach, or how busy it would be; no GPU needed
  moerl report RUN [--against RUN] [--json] [--fail-if CONDITION]       what the gap between engine and trainer is made of, as one page
  moerl convert hf-to-megatron|megatron-to-hf|verify SRC DST [OPTIONS]  a Hugging Face folder to a Megatron distributed checkpoint, and back
  moerl bench trace|replay|pack|sync|loop|convert|report [--json]       measure one part, as ratios within one run
  moerl doctor [--json]                                                 what is installed, what is missing, why, and the command that fixes it

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
"""  # noqa: E501

Command = Callable[[Callable[[list[str]], int]], None]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Puts a function in the place of `moerl train`."""

    def put(function: Callable[[list[str]], int]) -> None:
        monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(main=function))

    return put


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "moerl.cli", *arguments], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_is_as_agreed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    assert capsys.readouterr().out == HELP


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--help"]) == 0
    assert capsys.readouterr().out.startswith("moerl config show|check @ FILE [SETTINGS]\n\nshow the effective settings")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("moerl 0.")


def test_every_command_has_its_function() -> None:
    for entry in cli.COMMANDS.values():
        assert callable(cli._target(entry))


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == "error: moerl has no command 'trian'; did you mean train?\n"
    assert cli.main(["zzzz"]) == 2
    assert "the commands are train, rollout, config, plan, report, convert, bench, doctor" in capsys.readouterr().err


def test_arguments_and_status_pass_through(command: Command) -> None:
    seen = []
    command(lambda argv: seen.append(argv) or 7)
    assert cli.main(["train", "@", "a.toml", "--train.steps=3"]) == 7
    assert seen == [["@", "a.toml", "--train.steps=3"]]


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (ConfigError(["a is wrong", "b is wrong"]), 2, "error: 2 settings are wrong:\n  - a is wrong\n  - b is wrong\n"),
        (EngineError("engine 0 died"), 1, "error: engine 0 died\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_become_messages(
    command: Command, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, shown: str
) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    command(fail)
    assert cli.main(["train"]) == status
    assert capsys.readouterr().err == shown


def test_an_unforeseen_error_keeps_its_traceback(command: Command) -> None:
    def fail(argv: list[str]) -> int:
        raise ZeroDivisionError

    command(fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


def test_config_show_and_check() -> None:
    shown = run("config", "show", "--model.path=m", "--train.steps=3")
    assert shown.returncode == 0
    assert "\nsteps = 3\n" in shown.stdout
    checked = run("config", "check", "--model.path=m")
    assert (checked.returncode, checked.stdout.endswith("settings are right\n")) == (0, True)


def test_wrong_config_ends_with_status_2_and_no_traceback() -> None:
    answer = run("config", "check", "--train.stpes=3")
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.startswith("error: 2 settings are wrong:\n  - command line: train.stpes is not a setting; did you mean")
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    "words", [["config"], ["config", "list"], ["doctor", "now"], ["bench"], ["bench", "trase"], ["bench", "trace", "now"]]
)
def test_wrong_words_after_a_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert "expected" in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, json; from moerl import cli; cli.usage(); print(json.dumps(sorted(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.partition(".")[0] for name in json.loads(answer.stdout)}
    assert loaded.isdisjoint({"torch", "numpy", "pydantic", "rich", "ray", "sglang", "megatron", "transformers"})
