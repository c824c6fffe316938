"""The report in plain English, and its numbers as text. The page and the terminal share these."""

import math
from typing import Any

from crossframe.verdict import Bounds

_DISPLAY = {"jax": "JAX"}
KINDS = {
    "equal": "Equal",
    "rounding": "Rounding",
    "bug": "Bug",
    "inconclusive": "Inconclusive",
    "incomparable": "Incomparable",
}


def display(name: str) -> str:
    """A framework as it writes itself."""
    return _DISPLAY.get(name, name)


def decisive_pair(report: dict[str, Any]) -> dict[str, Any] | None:
    """The first pair that has the report's verdict."""
    return next((pair for pair in report["pairs"] if pair["verdict"] == report["verdict"]), None)


def headline(report: dict[str, Any]) -> str:
    """The verdict in one sentence.

    >>> pair = {"a": "torch", "b": "jax", "verdict": "rounding", "reason": "..."}
    >>> headline({"verdict": "rounding", "pairs": [pair]})
    'torch and JAX agree: the differences are rounding.'
    """
    pair = decisive_pair(report)
    if pair is None:
        return "Nothing was compared."
    both = f"{display(pair['a'])} and {display(pair['b'])}"
    match report["verdict"]:
        case "equal":
            return f"{both} agree: every bit that was compared is equal."
        case "rounding":
            return f"{both} agree: the differences are rounding."
        case "bug":
            return f"There is a bug: {pair['reason']}."
        case "inconclusive":
            return f"Nothing can be concluded yet: {pair['reason']}."
        case _:
            return f"These are not recordings of the same run: {pair['reason']}."


def number(value: float | None) -> str:
    """A difference or a bound.

    >>> number(3.14159e-15), number(0.0), number(None), number(float("inf"))
    ('3.1e-15', '0', '-', '∞')
    """
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "∞"
    return f"{value:.1e}" if value else "0"


def limits(bounds: Bounds | None) -> tuple[str, str]:
    """What is said beside a difference of losses, and of parameters. None: twins measured what rounding does.

    >>> limits(None)
    ('by twins', 'by twins')
    """
    if bounds is None:
        return ("by twins", "by twins")
    if not bounds.decisive:
        return ("no bound", "no bound")
    return (f"bound {number(bounds.loss)}", f"bound {number(bounds.parameter)}")


def num_bytes(value: int) -> str:
    """Bytes with a unit.

    >>> num_bytes(512), num_bytes(153600), num_bytes(3 << 20)
    ('512 B', '150.0 KiB', '3.0 MiB')
    """
    amount, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{int(amount)} B" if unit == "B" else f"{amount:.1f} {unit}"
