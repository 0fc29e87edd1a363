"""What a person sees of a run: a header, a bar with the current phase, one line per step, and a table at the end.

On a terminal the bar stays at the bottom and the lines scroll above it; elsewhere (a file, CI) only the lines are printed.
With `shown=False` (other ranks, `observe.console = false`) nothing is.
"""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


class RunConsole:
    """Use as a context manager around the loop; everything but the bar also works outside it.

    Args:
        steps: of the whole run.
        first_step: where it begins (above 0 after a resume).
        shown: False prints nothing.
        console: where to print; the terminal where None.
    """

    def __init__(self, steps: int, *, first_step: int = 0, shown: bool = True, console: Console | None = None):
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._steps, self._first, self._shown = steps, first_step, shown
        self._start = time.monotonic()
        self._bar: Progress | None = None
        self._pace: tuple[int, float] | None = None  # steps done when the first line was shown, and when that was

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        if self._shown and self._console.is_terminal:
            columns = (BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("[dim]{task.description}"), console=self._console, transient=True)
            self._task = self._bar.add_task("", total=self._steps, completed=self._first)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def header(self, title: str, facts: Mapping[str, Any]) -> None:
        """A panel with one fact per line."""
        if self._shown:
            self._console.print(Panel(_facts(facts), title=title, title_align="left", expand=False))

    def phase(self, name: str) -> None:
        """Say beside the bar what is going on."""
        if self._bar is not None:
            self._bar.update(self._task, description=name)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line for a finished step (0-based); `metrics` in the order to show them."""
        if not self._shown:
            return
        width = len(str(self._steps))
        cells = "  ".join(f"{name} {short(value)}" for name, value in metrics.items())
        line = f"step {step + 1:>{width}}/{self._steps}  {cells}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step + 1)
        else:
            now = time.monotonic()
            done_before, since = self._pace = self._pace or (step + 1, now)  # what came before the first step says nothing of the rest
            line += f"  (elapsed {duration(now - self._start)}"
            if step + 1 > done_before:
                line += f", left {duration((now - since) / (step + 1 - done_before) * (self._steps - step - 1))}"
            line += ")"
        self._console.print(Text(line))

    def message(self, text: str) -> None:
        """One line of plain text."""
        if self._shown:
            self._console.print(Text(text))

    def table(self, title: str, rows: Mapping[str, Any], *, next_command: str = "") -> None:
        """The closing table, and the next command to type."""
        if not self._shown:
            return
        self._console.print(Panel(_facts(rows), title=title, title_align="left", expand=False))
        if next_command:
            self._console.print(Text(f"next: {next_command}"))


def short(value: Any) -> str:
    """A value in few characters: `0.431`, `1.2e-05`, `12,345`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size != size or size == float("inf"):
        return str(value)
    if size == 0 or 1e-3 <= size < 1e5:
        return f"{value:.3f}" if size < 100 else f"{value:,.1f}"
    return f"{value:.1e}"


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _facts(facts: Mapping[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(Text(name, style="dim"), Text(short(value)))
    return grid
