"""Student's distribution, whose tail bounds what the spread of a few perturbed runs leaves to chance."""

import functools
import math


@functools.cache
def student_limit(chance: float, degrees: int) -> float:
    """The t that |T| of Student's distribution exceeds with probability `chance`.

    >>> [round(student_limit(0.05, k), 3) for k in (1, 2, 4, 30)]
    [12.706, 4.303, 2.776, 2.042]
    >>> round(student_limit(1e-7, 4), 1)
    88.0
    """
    low, high = 0.0, 1.0
    while _student_tail(high, degrees) > chance and high < 1e12:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_tail(middle, degrees) > chance else (low, middle)
    return high


def _student_tail(t: float, degrees: int) -> float:
    """The probability that |T| > t (M. Abramowitz, I. Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(degrees))
    cosine = math.cos(angle)
    term = total = math.cos(angle) if degrees % 2 else 1.0
    for i in range(3 if degrees % 2 else 2, degrees, 2):
        term *= cosine**2 * (i - 1) / i
        total += term
    if degrees == 1:
        total = 0.0
    inside = math.sin(angle) * total
    return 1 - (2 / math.pi * (angle + inside) if degrees % 2 else inside)
