"""`--fail-if 'kl_replay>1e-3'`: conditions on the numbers at the top of a report, for scripts and CI."""

import difflib
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moerl.errors import ConfigError, ReportError

FAILED = 3  # exit status of a report whose gate is hit; 1 and 2 are errors
_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_CONDITION = re.compile(r"\s*(\w+)\s*(>=|<=|>|<)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*")


@dataclass(frozen=True)
class Gate:
    """A report fails if `name` compares so with `limit`."""

    name: str
    sign: str
    limit: float

    def __str__(self) -> str:
        return f"{self.name} {self.sign} {self.limit:g}"


def parse(conditions: Sequence[str]) -> list[Gate]:
    """Gates from conditions such as `kl_replay>1e-3`; one text may hold several, with commas between.

    Raises:
        ConfigError: conditions that are none, all of them.
    """
    found, problems = [], []
    for text in (part for condition in conditions for part in condition.split(",")):
        match = _CONDITION.fullmatch(text)
        try:
            found.append(Gate(match[1], match[2], float(match[3])) if match else _refuse(text))
        except ValueError:
            problems.append(f"--fail-if {text!r}: expected a name, one of > >= < <=, and a number, such as kl_replay>1e-3")
    if problems:
        raise ConfigError(problems)
    return found


def _refuse(text: str) -> Gate:
    raise ValueError(text)


def numbers(report: dict[str, Any]) -> dict[str, float | None]:
    """The numbers at the top of a report."""
    return {
        name: value
        for name, value in report.items()
        if name != "schema" and (value is None or isinstance(value, int | float)) and name != "against"
    }


def check(gates: Sequence[Gate], report: dict[str, Any]) -> list[str]:
    """One sentence per gate that is hit; empty if the report passes.

    Raises:
        ReportError: names that the report does not have, or figures that were not measured, all of them; a gate never passes for want
            of a figure.
    """
    known = numbers(report)
    problems = []
    for gate in gates:
        if gate.name not in known:
            near = difflib.get_close_matches(gate.name, known, n=1)
            problems.append(f"no number {gate.name!r}; " + (f"did you mean {near[0]}? " if near else "") + f"there are {', '.join(known)}")
        elif known[gate.name] is None:
            problems.append(f"{gate.name} was not measured in these recordings, so {str(gate)!r} cannot be judged")
    if problems:
        raise ReportError("a gate cannot be judged" + "".join(f"\n  - {problem}" for problem in problems))
    return [f"{gate} holds: {gate.name} is {known[gate.name]:.6g}" for gate in gates if _COMPARE[gate.sign](known[gate.name], gate.limit)]
