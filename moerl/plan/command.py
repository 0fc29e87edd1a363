"""`moerl plan`: memory, parallel sizes, weight-sync bytes and bounds on speed for a cluster. Needs a config.json, no GPU, no process.

    moerl plan @ c.toml [SETTINGS]                         the job of a settings file
    moerl plan --hf CONFIG.json --trainer tp=2,pp=4,ep=8,dp=4 --engine tp=8,ep=1,replicas=4
    moerl plan --hf CONFIG.json --gpus 1000 --prompt-tokens 1024 --response-tokens 8192      how to split so many GPUs

Options besides `assumptions.Assumptions`' (`--gpu-gib 141`, `--mfu 0.4`, ...):
    --hf PATH            config.json (by any name), or the folder that holds it, in place of model.path
    --world N            trainer ranks; parallel.nodes x parallel.nproc_per_node otherwise
    --ranks-per-node N   8
    --fp8                engines serve fp8 in blocks of 128 x 128
    --json, --markdown   one JSON object as the last line; the row for a table, and nothing else

Without a settings file a step has 128 prompts with 16 completions each, generation runs one step ahead, engines run up to 256 sequences
and give their caches what memory that takes and is there, the trainer recomputes everything, and buckets have 256 MiB. Settings on the
command line change any of that.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from moerl.config.load import load_config, merge, read_sources
from moerl.config.schema import Config
from moerl.errors import ConfigError, ModelError
from moerl.models import read_spec
from moerl.plan import fit, show
from moerl.plan.assumptions import NAMES, assumptions_of
from moerl.plan.estimate import Job, as_dict, estimate, job_of
from moerl.plan.split import splits
from moerl.reshard.trainer_layout import TrainerTopology

_COUNTS = ("--world", "--ranks-per-node", "--gpus")
_RANKS_PER_NODE = {"--ranks-per-node": 8}
_FLAGS = ("--fp8", "--json", "--markdown")
_TEXTS = ("--hf", "--trainer", "--engine")
_ENGINE_SETTINGS = {"tp": "engine.tp", "ep": "sglang.ep_size", "replicas": "engine.count"}
_WITHOUT_FILE = (
    "--rollout.prompts_per_step=128",
    "--rollout.group_size=16",
    "--engine.max_running_requests=256",
    "--buffer.max_lag=1",
    "--sync.bucket_mib=256",
    "--megatron.recompute_granularity=full",
    "--megatron.recompute_method=uniform",
    "--megatron.recompute_num_layers=1",
)


@dataclass(frozen=True)
class Asked:
    """The command line, sorted.

    Attributes:
        figures: for `Assumptions`, by field.
        settings: everything else, for `load_config`.
    """

    counts: dict[str, int] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()
    texts: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    settings: tuple[str, ...] = ()

    @property
    def has_file(self) -> bool:
        return any(word.startswith("@") for word in self.settings)


def main(argv: list[str]) -> int:
    """Plan and print; the exit status.

    Raises:
        ConfigError: wrong settings or sizes, or ranks that do not fit. ModelError: a model that is not supported. ReshardError: a
            transfer that cannot be planned.
    """
    asked = split_options(argv)
    job = make_job(asked)
    console, found = Console(), []
    if "--gpus" in asked.counts:
        found = splits(job, asked.counts["--gpus"])
        job = replace(job, trainer=found[0].trainer, engine=found[0].engine)
        if "--markdown" not in asked.flags:
            console.print(show.split_table(found))  # at once: planning the transfer of a thousand ranks takes longer
    done = estimate(job)
    if "--markdown" in asked.flags:
        console.file.write(show.markdown(done) + "\n")
        return 0
    console.print(show.table(done))
    if "--json" in asked.flags:
        best = {"split": asdict(found[0]) | {"gpus": found[0].gpus}} if found else {}
        console.file.write(msgspec.json.encode(as_dict(done) | best).decode() + "\n")
    return 0


def split_options(argv: list[str]) -> Asked:
    """Sort the arguments.

    Raises:
        ConfigError: a count that is no positive whole number, a figure that is none, an option without its value; all of them.
    """
    counts, texts, figures, settings, problems = {}, {}, {}, [], []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name in (*_COUNTS, *_TEXTS, *NAMES):
            value = value if equals else next(words, "")
            if name in _COUNTS and (not value.isdecimal() or not int(value)):
                problems.append(f"{name} needs a positive whole number, got {value!r}")
            elif name in _COUNTS:
                counts[name] = int(value)
            elif name in _TEXTS:
                texts[name] = value
                problems += [] if value else [f"{name} needs a value"]
            else:
                try:
                    figures[NAMES[name]] = float(value)
                except ValueError:
                    problems.append(f"{name} needs a number, got {value!r}")
        elif word not in _FLAGS:
            settings.append(word)
    if problems:
        raise ConfigError(problems)
    return Asked(counts, frozenset(argv) & frozenset(_FLAGS), texts, figures, tuple(settings))


@contextmanager
def model_folder(path: Path) -> Iterator[Path]:
    """A folder with `path` as its config.json: the one it lies in, or a temporary one where it has another name."""
    if not path.is_file() or path.name == "config.json":
        yield path.parent if path.is_file() else path
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(path.read_bytes())
        try:
            yield Path(folder)
        except (ConfigError, ModelError) as error:
            raise _renamed(error, f"{folder}/config.json", str(path)) from error


def _renamed(error: ConfigError | ModelError, old: str, new: str) -> ConfigError | ModelError:
    if isinstance(error, ConfigError):
        return ConfigError([violation.replace(old, new) for violation in error.violations])
    return ModelError(str(error).replace(old, new))


def make_job(asked: Asked) -> Job:
    """Settings, model and topologies that were asked for.

    Raises:
        ConfigError, ModelError: with every problem found.
    """
    if "--hf" not in asked.texts:
        return _make_job(asked, ())
    with model_folder(Path(asked.texts["--hf"])) as folder:
        read_spec(folder)  # a model that is not supported is the first thing to say
        return _make_job(asked, (f"--model.path={folder}",))


def _make_job(asked: Asked, model: tuple[str, ...]) -> Job:
    given, world = _sizes(asked)
    settings = [*(() if asked.has_file else (*_WITHOUT_FILE, *_lengths(asked))), *given, *asked.settings, *model]
    config = _load(settings, world)
    if config.engine.model_path and model:
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"model_path": config.model.path})})
    folders = {"model.path": config.model.path, "engine.model_path": config.engine.model_path}
    if absent := [f"{name} {path}" for name, path in folders.items() if path and not (Path(path) / "config.json").is_file()]:
        raise ConfigError(
            [f"{one} has no config.json; put the model there, or plan with its config alone: --hf CONFIG.json" for one in absent]
        )
    job = job_of(
        config,
        read_spec(config.model.path),
        world or config.parallel.world,
        assumptions_of(asked.figures, config),
        name=_name(asked, config),
        ranks_per_node=(_RANKS_PER_NODE | asked.counts)["--ranks-per-node"],
        fill_cache=not asked.has_file or "--gpus" in asked.counts,
    )
    return replace(job, engine=replace(job.engine, fp8_block=(128, 128))) if "--fp8" in asked.flags else job


def _name(asked: Asked, config: Config) -> str:
    """The settings' files; without any, the model."""
    files = [word[1:] or following for word, following in pairwise((*asked.settings, "")) if word.startswith("@")]
    if files:
        return " + ".join(Path(file).stem for file in files)
    model = Path(({"--hf": config.model.path} | asked.texts)["--hf"])
    return model.parent.name if model.name == "config.json" else model.stem if model.suffix == ".json" else model.name


def _lengths(asked: Asked) -> list[str]:
    """Settings that allow sequences of the lengths that were given."""
    prompt, response = (int(asked.figures[name]) if name in asked.figures else 512 for name in ("prompt_tokens", "response_tokens"))
    longest = prompt + response
    return [
        f"--rollout.max_prompt_tokens={max(prompt, 1)}",
        f"--rollout.max_new_tokens={max(response, 1)}",
        f"--train.tokens_per_microbatch={max(longest, 4096)}",
        f"--engine.max_total_tokens={max(longest, 32768)}",
        "--diagnostics.mismatch_every_steps=0",
    ]


def _sizes(asked: Asked) -> tuple[list[str], int | None]:
    """(settings for `--trainer` and `--engine`, trainer ranks if they follow from them or were given).

    Raises:
        ConfigError: sizes that there are not, or that are no positive whole numbers; all of them.
    """
    problems: list[str] = []
    trainer = _pairs(asked, "--trainer", (*fit.SIZES, "dp"), problems)
    engine = _pairs(asked, "--engine", tuple(_ENGINE_SETTINGS), problems)
    if problems:
        raise ConfigError(problems)
    settings = [f"--{_ENGINE_SETTINGS[name]}={size}" for name, size in engine.items()]
    world = asked.counts.get("--world")
    if trainer:
        sizes = dict.fromkeys((*fit.SIZES, "dp"), 1) | trainer
        world = world or sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"]
        settings += [f"--parallel.{name}={sizes[name]}" for name in fit.SIZES]
        settings += ["--parallel.nodes=1", f"--parallel.nproc_per_node={world}"]
    return settings, world


def _pairs(asked: Asked, option: str, names: tuple[str, ...], problems: list[str]) -> dict[str, int]:
    found = {}
    for pair in asked.texts[option].split(",") if option in asked.texts else ():
        name, _, value = pair.partition("=")
        if name in names and value.isdecimal() and int(value):
            found[name] = int(value)
        else:
            problems.append(f"{option}: expected {', '.join(f'{known}=N' for known in names)} with commas between them, got {pair!r}")
    return found


def _load(settings: list[str], world: int | None) -> Config:
    """The settings. Where parallel sizes are what is wrong with them, the message ends with the nearest that are legal."""
    try:
        return load_config(settings, world=world)
    except ConfigError as error:
        hint = None
        with suppress(ConfigError, ModelError):
            hint = _legal_instead(settings, world)
        if hint is None:
            raise
        raise ConfigError([*error.violations, f"nearest legal sizes of the trainer: {hint}"]) from error


def _legal_instead(settings: list[str], world: int | None) -> str | None:
    """In words; None where parallel sizes are not what is wrong."""
    legal = load_config([*settings, *(f"--parallel.{name}=1" for name in fit.SIZES)], world=world)
    tree: dict[str, Any] = {}
    for source in read_sources(settings)[0]:
        merge(tree, source.tree)
    sizes = {name: size for name, size in tree["parallel"].items() if name in fit.SIZES} if "parallel" in tree else {}
    if not all(isinstance(size, int) and size > 0 for size in sizes.values()):
        return None
    asked = TrainerTopology(world or legal.parallel.world, **sizes, transformer_engine=legal.train.device != "cpu")
    found = fit.nearest_trainer(read_spec(legal.model.path), asked)
    return fit.words(found) if found else "none"
