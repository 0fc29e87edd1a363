"""The command: JSON with stable names, gates with an exit status, options that are checked all at once, texts of the worst tokens."""

import json
from dataclasses import replace

import pytest

from moerl import cli
from moerl.convert.tiny import VOCABULARY, tiny_config, write_tiny
from moerl.errors import ConfigError, ReportError
from moerl.report import capture, gates, recompute
from moerl.report.command import parse
from tests.unit.report.router_model import World, record

STABLE = {"kl_natural", "kl_r2", "kl_replay", "flip_share_by_layer", "tokens_with_flip", "extreme_share", "findings", "schema"}


@pytest.fixture
def run(tmp_path):
    meta, rows, biases = record(World(prompts=4))
    rows = replace(rows, token=rows.token % len(VOCABULARY), next_token=rows.next_token % len(VOCABULARY))
    capture.write(tmp_path / "run" / capture.FOLDER, meta, rows, biases)
    return tmp_path / "run"


def test_json_has_the_promised_names_and_only_finite_numbers(run, capsys) -> None:
    assert cli.main(["report", str(run), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() >= STABLE
    assert report["schema"] == 1
    assert {"severity", "title", "evidence", "advice"} <= report["findings"][0].keys()
    assert "NaN" not in json.dumps(report)
    assert not list(run.glob("*.html"))


@pytest.mark.parametrize(
    ("conditions", "status"),
    [(["kl_replay>1e-3"], 0), (["kl_replay > 1e-9"], 3), (["kl_replay>1,tokens<1e9"], 3), (["flip_share<0", "ess_replay<=0.5"], 0)],
)
def test_a_gate_decides_the_exit_status(run, capsys, conditions: list[str], status: int) -> None:
    words = [word for condition in conditions for word in ("--fail-if", condition)]
    assert cli.main(["report", str(run), "--json", *words]) == status
    assert ("gate" in capsys.readouterr().err) == bool(status)


def test_a_gate_on_what_is_not_known_or_not_measured_is_an_error(run, capsys) -> None:
    meta, rows, _ = record(World(prompts=4))
    capture.write(run / capture.FOLDER, meta, replace(rows, replay_logprob=rows.replay_logprob * float("nan")))
    assert cli.main(["report", str(run), "--json", "--fail-if", "kl_replay>1e-3", "--fail-if", "kl_natral>1"]) == 1
    said = capsys.readouterr().err
    assert "kl_replay was not measured" in said
    assert "did you mean kl_natural?" in said
    assert "flip_share" in said


def test_wrong_conditions_and_options_are_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)'kl' ?.*'x=3'"):
        gates.parse(["kl", "x=3", "kl_replay>1"])
    with pytest.raises(ConfigError) as error:
        parse(["a", "b", "--jsn", "--side", "left", "--steps", "3", "--import", "trtllm", "-o"])
    assert len(error.value.violations) >= 5
    with pytest.raises(ConfigError, match="folder of one run, got none"):
        parse(["--json"])


def test_a_folder_without_recordings_says_how_to_record(tmp_path, capsys) -> None:
    assert cli.main(["report", str(tmp_path)]) == 1
    assert "capture_every_steps" in capsys.readouterr().err


def test_import_is_followed_by_the_next_command(tmp_path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    (tmp_path / "replies.json").write_text("{}")
    words = ["report", "--import", "sglang", str(tmp_path / "replies.json"), "--model", str(tmp_path / "config.json"), "-o", "nowhere"]
    assert cli.main(words) == 1
    assert "--enable-return-routed-experts" in capsys.readouterr().err


def test_worst_tokens_have_texts_where_the_run_names_a_tokenizer(run, tmp_path, capsys) -> None:
    cli.main(["report", str(run), "--json"])
    assert json.loads(capsys.readouterr().out)["cost"]["worst_tokens"][0]["text"] is None
    write_tiny(tmp_path / "model", tiny_config())
    (run / "config.json").write_text(json.dumps({"model": {"path": str(tmp_path / "model")}}))
    cli.main(["report", str(run), "--json"])
    report = json.loads(capsys.readouterr().out)
    token = report["cost"]["worst_tokens"][0]
    assert token["text"] == VOCABULARY[token["next_token"]]
    assert token["before"].endswith(VOCABULARY[token["token"]])
    sample = report["cost"]["worst_samples"][0]
    assert sample["text"].replace(" ", "").startswith("".join(VOCABULARY[one] for one in sample["token_ids"][:8]))


def test_recomputation_is_a_process_of_its_own_whose_failure_is_an_error(run, tmp_path, monkeypatch) -> None:
    said = "import json, pathlib, sys; pathlib.Path('said').write_text(json.dumps(sys.argv[1:])); sys.exit('--fail.it' in sys.argv)"
    (tmp_path / "stand_in.py").write_text(said)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recompute, "_MODULE", "stand_in")
    words = ["report", str(run), "--json", "--recompute", "model", "--steps", "0,3", "--diagnostics.capture_tokens", "0"]
    assert cli.main(words) == 0
    expected = [str(run), "--checkpoint", "model", "--steps", "0,3", "--diagnostics.capture_tokens", "0"]
    assert json.loads((tmp_path / "said").read_text()) == expected
    with pytest.raises(ReportError, match="failed with status 1"):
        recompute.recompute(run, "model", ["--fail.it"])
