"""What a person sees: plain lines in a file, a bar on a terminal, nothing when switched off."""

import io

import pytest
from rich.console import Console

from moerl.observe.console import RunConsole, duration, short


def console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False)


def text(of: Console) -> str:
    return of.file.getvalue()  # type: ignore[attr-defined]


def test_plain_lines_where_there_is_no_terminal() -> None:
    out = console()
    with RunConsole(12, console=out) as run:
        run.header("moerl", {"model": "deepseek", "ranks": 2})
        run.phase("rollout")
        run.step(0, {"reward": 0.25, "kl": 1.5e-6})
        run.step(1, {"reward": 0.5})
        run.message("[not markup]")
    shown = text(out)
    assert "step  1/12  reward 0.250  kl 1.5e-06  (elapsed 0 s)\n" in shown  # one step tells nothing of the pace
    assert "step  2/12  reward 0.500  (elapsed 0 s, left 0 s)\n" in shown
    assert "[not markup]\n" in shown
    assert "deepseek" in shown
    assert "rollout" not in shown
    assert "\x1b" not in shown


def test_a_bar_on_a_terminal() -> None:
    out = console(terminal=True)
    with RunConsole(12, first_step=4, console=out) as run:
        run.phase("sync weights")
        run.step(5, {"reward": 0.25})
    shown = text(out)
    assert "sync weights" in shown
    assert "6/12" in shown
    assert "(elapsed" not in shown


def test_nothing_where_it_is_not_shown() -> None:
    for out in (console(), console(terminal=True)):
        with RunConsole(2, shown=False, console=out) as run:
            run.header("a", {"b": 1})
            run.phase("x")
            run.step(0, {"reward": 1})
            run.message("x")
            run.table("done", {"reward": 1}, next_command="x")
        assert text(out) == ""


def test_closing_table_ends_with_the_next_command() -> None:
    out = console()
    RunConsole(2, console=out).table("run finished", {"reward at the end": 0.75}, next_command="moerl report runs/a")
    shown = text(out)
    assert "run finished" in shown
    assert "0.750" in shown
    assert shown.endswith("next: moerl report runs/a\n")


def test_bar_is_taken_down_when_the_loop_fails() -> None:
    out = console(terminal=True)
    run = RunConsole(2, console=out)
    with pytest.raises(ZeroDivisionError), run:
        raise ZeroDivisionError
    assert run._bar is None


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.4312, "0.431"),
        (0.0, "0.000"),
        (-1.5e-5, "-1.5e-05"),
        (1234.56, "1,234.6"),
        (123456.0, "1.2e+05"),
        (12345, "12,345"),
        (True, "True"),
        ("x", "x"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_short(value: object, shown: str) -> None:
    assert short(value) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7620, "2 h 07 min")])
def test_duration(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
