"""Formats bytes, seconds, counts and names for readers, and computes the ticks of axes."""

import math
from collections.abc import Sequence

TIMES = "\u00d7"
# The displayed name of the root, whose name is "".
ROOT = "(root)"
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
_COUNTS = ("", "k", "M", "G", "T")


def bytes_text(num_bytes: float) -> str:
    """Bytes to three digits, with a binary unit.

    >>> bytes_text(512), bytes_text(153_600), bytes_text(1023.9 * 2**20)
    ('512 B', '150 KiB', '1.00 GiB')
    """
    unit = 0
    while unit < len(_BYTES) - 1 and num_bytes >= (1024 if unit == 0 else 999.5):
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:,.0f} B" if unit == 0 else f"{_three(num_bytes)} {_BYTES[unit]}"


def seconds_text(seconds: float) -> str:
    """Seconds to three digits, with a unit from ns on.

    >>> seconds_text(0), seconds_text(0.01234), seconds_text(3e-7), seconds_text(4321)
    ('0 s', '12.3 ms', '300 ns', '4,321 s')
    """
    if seconds == 0:
        return "0 s"
    unit, size = next((each for each in _SECONDS if seconds >= 0.9995 * each[1]), _SECONDS[-1])
    return f"{_three(seconds / size)} {unit}"


def _three(value: float) -> str:
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f}"


def percent_text(part: float, whole: float) -> str:
    """A fraction as a percentage; "0 %" only if the part is 0.

    >>> percent_text(1, 3), percent_text(1, 10**6), percent_text(0, 5), percent_text(0, 0)
    ('33.3 %', '< 0.1 %', '0 %', '0 %')
    """
    if not part:
        return "0 %"
    share = 100 * part / whole
    return "< 0.1 %" if share < 0.1 else f"{share:.1f} %"


def short_count(count: int) -> str:
    """A count with a decimal prefix, for ticks, which are round.

    >>> short_count(0), short_count(250), short_count(2_500_000)
    ('0', '250', '2.5M')
    """
    unit = 0
    value = float(count)
    while unit < len(_COUNTS) - 1 and value >= 1000:
        value, unit = value / 1000, unit + 1
    return f"{value:g}{_COUNTS[unit]}"


def step_of_ticks(largest: float, at_most: int) -> float:
    """The smallest of 1, 2, 5, 10, 20 ... (and 0.5, 0.2 ...) that divides `largest` into at most `at_most` steps.

    >>> step_of_ticks(97, 5), step_of_ticks(0.3, 5)
    (20.0, 0.1)
    """
    power = math.floor(math.log10(largest / at_most))
    for exponent in (power, power + 1):
        for digit in (1, 2, 5):
            # A division by 10**n gives exactly the float of "0.1"; a product with 10**-n may not.
            step = digit * 10.0**exponent if exponent >= 0 else digit / 10.0**-exponent
            if largest / step <= at_most * (1 + 1e-9):
                return step
    return 10.0 ** (power + 2)


def count_ticks(largest: int, at_most: int = 8) -> list[tuple[int, str]]:
    """(count, label) from 0 to at most `largest`.

    >>> count_ticks(10)
    [(0, '0'), (2, '2'), (4, '4'), (6, '6'), (8, '8'), (10, '10')]
    """
    if largest < 1:
        return [(0, "0")]
    step = max(1, round(step_of_ticks(largest, at_most)))
    return [(at, short_count(at)) for at in range(0, largest + 1, step)]


def bytes_ticks(largest: float, at_most: int = 5) -> list[tuple[float, str]]:
    """(bytes, label) from 0 to at most `largest`, round in the unit of the largest.

    >>> [label for _, label in bytes_ticks(5 * 2**20)]
    ['0', '1 MiB', '2 MiB', '3 MiB', '4 MiB', '5 MiB']
    """
    power = 0
    while power < len(_BYTES) - 1 and largest >= 1024 ** (power + 1):
        power += 1
    return _ticks(largest, 1024**power, _BYTES[power], at_most)


def seconds_ticks(largest: float, at_most: int = 8) -> list[tuple[float, str]]:
    """(seconds, label) from 0 to at most `largest`, round in the unit of the largest.

    >>> [label for _, label in seconds_ticks(0.00403, 4)]
    ['0', '2 ms', '4 ms']
    """
    unit, size = next((each for each in _SECONDS if largest >= each[1]), _SECONDS[-1])
    return _ticks(largest, size, unit, at_most)


def _ticks(largest: float, size: float, unit: str, at_most: int) -> list[tuple[float, str]]:
    if largest <= 0:
        return [(0.0, "0")]
    step = step_of_ticks(largest / size, at_most)
    count = math.floor(largest / size / step * (1 + 1e-9))
    return [(0.0, "0"), *((k * step * size, f"{k * step:,.10g} {unit}") for k in range(1, count + 1))]


def one_line(name: str) -> str:
    """A name in which characters that cannot be printed or written in XML are replaced.

    >>> one_line("w\\n<b>")
    'w�<b>'
    """
    return "".join(c if c.isprintable() else "\ufffd" for c in name)


def ranks_text(ranks: Sequence[int]) -> str:
    """A short form of evenly spaced ranks.

    >>> ranks_text(range(4, 5)), ranks_text(range(0, 3)), ranks_text(range(0, 8, 4)), ranks_text(range(1, 16385, 4))
    ('4', '0 … 2', '0, 4', '1, 5 … 16,381')
    """
    if len(ranks) == 1:
        return f"{ranks[0]:,}"
    if len(ranks) > 2 and ranks[1] - ranks[0] == 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]:,} … {ranks[-1]:,}"
    if len(ranks) <= 3:
        return ", ".join(f"{rank:,}" for rank in ranks)
    return f"{ranks[0]:,}, {ranks[1]:,} … {ranks[-1]:,}"
