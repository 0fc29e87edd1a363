"""`moerl bench NAME`: one measurement in one process, as ratios within the run, since machines differ.

A benchmark prints a table; with `--json`, the last line of its output is one JSON object.
"""

from importlib import import_module

from moerl.errors import ConfigError

BENCHMARKS = {name: f"moerl.bench.{name}:main" for name in ("trace", "replay", "pack", "sync", "loop", "report", "convert")}


def main(argv: list[str]) -> int:
    """Run the benchmark that the first word names; returns its exit status.

    Raises:
        ConfigError: no such benchmark, or an unknown argument.
    """
    name, *rest = argv or [""]
    sizes = {}
    if name == "convert" and "--gib" in rest:
        at = rest.index("--gib")
        sizes["gib"] = _gib("".join(rest[at + 1 : at + 2]))
        del rest[at : at + 2]
    if name not in BENCHMARKS or any(word != "--json" for word in rest):
        raise ConfigError(
            f"moerl bench: expected one of {', '.join(BENCHMARKS)}, then nothing or --json (convert: also --gib N); "
            f"got {' '.join(argv) or 'nothing'}"
        )
    module, function = BENCHMARKS[name].split(":")
    return getattr(import_module(module), function)(as_json=bool(rest), **sizes)


def _gib(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"moerl bench convert: --gib needs a number, got {text!r}") from error
