"""Numbers as a page shows them, and data as a page carries it.

Invariant: what `embed` returns is JSON that cannot end the script element it stands in.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

NONE = "–"
"""Stands for what was not measured."""


def number(value: float | None) -> str:
    """Three significant digits: 0.0123, 1.2e-4, 12,300; whole numbers as they are."""
    if value is None or not math.isfinite(value):
        return NONE
    if value == 0 or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 1e-3:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def nats(value: float | None) -> str:
    """A divergence: 9.3e-4 and 0.0012 side by side would hide which is larger, so what is below 0.01 has an exponent."""
    if value is None or not math.isfinite(value) or value == 0 or abs(value) >= 0.01:
        return number(value)
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def share(value: float | None) -> str:
    """A share of 1 in percent, with a space that does not break: 12.8 %, 0.0012 %, 100 %."""
    if value is None or not math.isfinite(value):
        return NONE
    percent = 100 * value
    if 0 < abs(percent) < 1e-3:
        return f"{number(percent)}\u00a0%"
    return f"{percent:.3g}\u00a0%" if 1 <= abs(percent) < 99.95 or percent == 0 else f"{percent:.{2 if abs(percent) < 1 else 4}g}\u00a0%"


def pair(result: Mapping[str, Any]) -> tuple[str, str]:
    """What the two sides of a result are called in a few letters."""
    return ("a", "b") if result["kind"] == "against" else ("engine", "trainer")


def capital(text: str) -> str:
    """The text with a capital at its beginning, for a sentence."""
    return text[:1].upper() + text[1:]


def count(value: int, one: str, many: str = "") -> str:
    """1 step, 3 steps."""
    return f"{number(value)} {one if value == 1 else many or one + 's'}"


def spans(steps: Sequence[int], most: int = 4) -> str:
    """Steps as a person writes them, 3–5, 9; of many, the first few."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    shown = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs[:most])
    return shown + (f" and {len(runs) - most} more stretches" if len(runs) > most else "")


def plain(value: Any) -> Any:
    """What JSON can hold: floats of four significant digits, large ones (a step, say) with one decimal; None for NaN and infinities."""
    match value:
        case dict():
            return {str(key): plain(item) for key, item in value.items()}
        case np.ndarray() | np.generic():
            return plain(value.tolist())
        case list() | tuple():
            return [plain(item) for item in value]
        case float():
            if not math.isfinite(value):
                return None
            rounded = float(f"{value:.4g}") if abs(value) < 1e4 else round(value, 1)
            return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
    return value


def embed(value: Any) -> str:
    """JSON for a script element: no `<`, no `>`, no line separators that a script may not hold."""
    text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
