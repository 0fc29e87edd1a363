"""Real Megatron under every layout -> real SGLang with one rank and with two: each engine is as if it had loaded the weights from disk."""

import json
from pathlib import Path

import pytest

from tests.system.sync_harness import FAMILIES, difference, same
from tests.torchrun import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LAYOUTS = {"tp2": {"tp": 2}, "ep2": {"ep": 2}, "pp2": {"pp": 2}, "tp2_ep2": {"tp": 2, "ep": 2}}
CASES = {layout: {"parallel": sizes, "way": "direct"} for layout, sizes in LAYOUTS.items()}
CASES["tp2_ep2-compatible"] = CASES["tp2_ep2"] | {"way": "compatible"}
ENGINES = {"tp1": (1, 0), "tp2": (2, 0)}


@pytest.fixture(scope="module")
def engines(fleet):
    """Family -> the engines of `ENGINES`, on NEW from disk."""
    return lambda family: dict(zip(ENGINES, fleet.get(family, *ENGINES.values()), strict=True))


@pytest.fixture(scope="module")
def pushed(fleet, engines, tmp_path_factory):
    """(family, case) -> what the worker found; all cases of a family are launched together, once."""
    launched: dict[str, Path] = {}

    def find(family, case):
        if family not in launched:
            out = launched[family] = tmp_path_factory.mktemp(f"push-{family}")
            old, new = (str(folder) for folder in fleet.checkpoints(family))
            job = {
                "old": old,
                "new": new,
                "engines": {name: {"url": one.server.url, "tp": one.tp} for name, one in engines(family).items()},
                "cases": {name: each | {"versions": [fleet.version(), fleet.version()]} for name, each in CASES.items()},
            }
            (out / "job.json").write_text(json.dumps(job))
            (out / "output.txt").write_text("it did not end in time")
            done = launch(2, Path(__file__).with_name("push_worker.py"), str(out / "job.json"), str(out), timeout_s=600)
            (out / "output.txt").write_text(done.stdout)
        out = launched[family]
        errors, result = "\n".join(path.read_text() for path in out.glob("*.error")), out / f"{case}.json"
        assert result.is_file(), f"the worker did not get to {case}:\n{errors}\n{(out / 'output.txt').read_text()[-3000:]}"
        return json.loads(result.read_text())

    return find


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_the_engine_equals_one_that_loaded_the_weights_from_disk(engines, pushed, family, name, case):
    engine, found = engines(family)[name], pushed(family, case)[name]
    old, new = found["old"], found["new"]
    assert [old["attempts"], new["attempts"]] == [1, 1]
    assert new["version"] == old["version"] + 1
    assert new["digest"] != old["digest"]
    changed = [weight for weight, wanted in engine.checksums[0].items() if old["checksums"][0][weight] != wanted]
    assert len(changed) > 0.9 * len(engine.checksums[0]), "what the test needs: NEW differs from OLD everywhere"
    assert difference(old["answers"], engine.answers) > 0.1
    print(f"{family} {case} -> {name}: logprobs differ by {difference(new['answers'], engine.answers)} from those of the disk's;")
    print(f"  received {new['received']}, parameters {engine.parameter_nbytes}; {new['seconds']}")
    assert new["checksums"] == engine.checksums
    assert same(new["answers"], engine.answers)
    if CASES[case]["way"] == "direct":
        assert new["received"] == [[nbytes, nbytes] for nbytes in engine.parameter_nbytes]
