"""Log files of a run: `logs/rank-<n>.log` per trainer rank (or `logs/<name>.log`), quiet third parties, stacks of crashes."""

import faulthandler
import logging
import sys
from pathlib import Path
from typing import IO

QUIET = {
    "megatron": logging.ERROR,
    "torch": logging.ERROR,
    "ray": logging.WARNING,
    "transformers": logging.ERROR,
    "huggingface_hub": logging.ERROR,
    "py.warnings": logging.ERROR,
    "asyncio": logging.WARNING,
    "aiohttp": logging.WARNING,
    "urllib3": logging.WARNING,
    "filelock": logging.WARNING,
    "matplotlib": logging.WARNING,
}
"""Loggers of others, and the level below which they stay silent."""

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
_installed: list[logging.Handler] = []


def setup_logging(run_dir: Path, who: int | str, level: str = "info", *, stderr: bool = False) -> Path:
    """Send this process's log to its own file in the run folder.

    Calling it again replaces the earlier file; handlers that others installed stay.

    Args:
        run_dir: the run folder; `logs/` is made in it.
        who: rank of a trainer process, or the name of another.
        level: of moerl's own messages.
        stderr: also show errors on stderr (rank 0 of a run without a console).

    Returns:
        the log file.
    """
    folder = Path(run_dir) / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (f"rank-{who}.log" if isinstance(who, int) else f"{who}.log")
    root = logging.getLogger()
    while _installed:
        handler = _installed.pop()
        root.removeHandler(handler)
        handler.close()
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter(_FORMAT, "%Y-%m-%d %H:%M:%S"))
    _add(root, file)
    if stderr:
        errors = logging.StreamHandler(sys.stderr)
        errors.setLevel(logging.ERROR)
        errors.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        _add(root, errors)
    root.setLevel(logging.WARNING)
    logging.getLogger("moerl").setLevel(level.upper())
    for name, quiet in QUIET.items():
        logging.getLogger(name).setLevel(quiet)
    logging.captureWarnings(True)
    stream: IO[str] = file.stream
    faulthandler.enable(file=stream)
    return path


def _add(root: logging.Logger, handler: logging.Handler) -> None:
    root.addHandler(handler)
    _installed.append(handler)
