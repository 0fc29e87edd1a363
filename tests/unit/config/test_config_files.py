"""Every file in configs/ loads, with all rules and against the installed Megatron and SGLang."""

from pathlib import Path

import pytest

from moerl.config.load import load_config

FOLDER = Path(__file__).resolve().parents[3] / "configs"
FILES = sorted(FOLDER.glob("**/*.toml"))


def test_there_are_config_files() -> None:
    assert FILES


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(FOLDER)) for file in FILES])
def test_config_file_loads(file: Path) -> None:
    assert load_config(["@", str(file)]).train.steps > 0
