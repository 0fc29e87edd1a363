"""What token ids say, where the model's tokenizer.json is at hand; a report without it shows ids."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import msgspec

Decode = Callable[[Sequence[int]], str]


def decoder(model: str | Path | None, run: str | Path | None = None) -> Decode | None:
    """A function from token ids to text.

    Args:
        model: folder with the tokenizer.json; empty or None: the one that `run`'s config.json names as model.path.
        run: a run folder.

    Returns:
        None if there is no tokenizer.json, or the `tokenizers` package is not installed.
    """
    folders = [Path(model)] if model else []
    folders += _configured(Path(run) / "config.json") if run else []
    file = next((folder / "tokenizer.json" for folder in folders if (folder / "tokenizer.json").is_file()), None)
    if file is None:
        return None
    try:
        tokenizer = import_module("tokenizers").Tokenizer.from_file(str(file))
    except ImportError:
        return None
    size = tokenizer.get_vocab_size()
    return lambda ids: tokenizer.decode([int(one) for one in ids if 0 <= one < size], skip_special_tokens=False)


def _configured(config: Path) -> list[Path]:
    """The model folder of a run's settings, as a list of none or one."""
    if not config.is_file():
        return []
    try:
        settings = msgspec.json.decode(config.read_bytes())
        return [Path(settings["model"]["path"])]
    except (msgspec.DecodeError, KeyError, TypeError):
        return []
