"""Fits a constant factor between both sides, and names it in terms of the run's counts."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from crossframe.recording import Manifest
from crossframe.verdict.diagnosis.fit import Contrast, accepted, factor_between
from crossframe.verdict.measure.metrics import norm

BY_CHANCE = 0.05
"""The probability that an unrelated factor is named after a count of the run."""


@dataclass(frozen=True)
class Factor:
    """wrong = value * right.

    Attributes:
        value: the factor.
        error: a worst-case bound on its error.
        noise: its probable error: three standard errors of least squares for an isotropic residual.
        residual: norm(wrong - value * right).
        roundoff: the part of the residual due to rounding the product.
    """

    value: float
    error: float
    noise: float
    residual: float
    roundoff: float


def factor_of(sides: Contrast) -> Factor | None:
    """The least-squares factor, if it explains the difference; None for zeros.

    Two correct sides are x + e and x + f. Here the wrong side is c * x + f', and the residual is f' - c * e, with norm(e) <=
    limit and norm(f') <= max(1, |c|) * limit, whether the factor was applied before or after rounding. The product rounds by u
    relative to its result.

    >>> import numpy as np
    >>> round(factor_of(Contrast(np.array([1.0, 2.0, 4.0]), np.array([2.0, 4.0, 8.0]), 1e-9)).value, 6)
    2.0
    """
    size, value = norm(sides.right), factor_between(sides.right, sides.wrong)
    residual, roundoff = sides.residual(value * sides.right), 2 * sides.roundoff * norm(sides.wrong)
    tolerance = sides.limit * (abs(value) + max(1.0, abs(value))) + roundoff
    if abs(value) * size <= tolerance or not accepted(residual, sides.difference, tolerance):
        return None
    noise = 3 * residual / math.sqrt(sides.right.size - 1) + roundoff if sides.right.size > 1 else tolerance
    return Factor(value, tolerance / size, min(noise, tolerance) / size, residual, roundoff)


def counts_of(manifest: Manifest, microbatches: int) -> dict[str, float]:
    """The counts of a run that gradients are or should be divided by, by name; without counts of 1.

    Args:
        microbatches: the number of accumulated microbatches of a step.
    """
    kinds = (
        {
            "the world size": manifest.world_size,
            "the number of replicas": manifest.mesh.replicate,
            "the number of shards": manifest.mesh.shard,
        },
        {"the accumulation steps": microbatches},
        {"the samples of a microbatch": manifest.settings.get("batch_size", 1), "the terms of a mean": manifest.terms},
    )
    found = {}
    for counts in kinds:
        numbers = {name: float(n) for name, n in counts.items() if isinstance(n, int | float) and n > 1}
        # Of equal counts of one kind the first is kept: all ranks may be shards.
        found |= {name: n for name, n in numbers.items() if name == next(m for m in numbers if numbers[m] == n)}
    return found


def name_of(value: float, error: float, counts: Mapping[str, float]) -> str | None:
    """Name a factor in terms of counts: a count, its square root or square, a product of two, or an inverse of these.

    Equal counts are all named. Returns None if no number matches, several match, or a match by chance is too likely: a number
    between value / 2 and 2 * value with uniform logarithm matches a given number with probability at most 2 * error / value /
    log(4), and the sum over numbers must be at most `BY_CHANCE`.

    >>> name_of(0.5, 1e-9, {"the world size": 2.0}), name_of(0.1447, 0.12, {"the world size": 2.0})
    ('1 / the world size', None)
    >>> name_of(2.0, 1e-9, {"the world size": 2.0, "the accumulation steps": 2.0})
    'the world size or the accumulation steps'
    """
    names: dict[float, str] = {}
    for name, number in counts.items():
        for each, text in ((number, name), (1 / number, f"1 / {name}")):
            names[each] = f"{names[each]} or {text}" if each in names else text
    for name, number in _combinations(counts):
        names.setdefault(number, name)
        names.setdefault(1 / number, f"1 / {name}")
    near = [target for target in names if value / 2 <= target <= 2 * value]
    # The same number computed in two ways can differ by rounding.
    apart = [t for i, t in enumerate(near) if not any(math.isclose(t, other, rel_tol=1e-12) for other in near[:i])]
    found = [target for target in apart if abs(value - target) <= max(error, 1e-12 * target)]
    by_chance = 2 * error / value * len(apart) / math.log(4) if value > 0 else math.inf
    return names[found[0]] if len(found) == 1 and by_chance <= BY_CHANCE else None


def _combinations(counts: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    items = list(counts.items())
    for name, number in items:
        yield f"the square root of {name}", math.sqrt(number)
    for i, (first, n) in enumerate(items):
        yield f"the square of {first}", n * n
        for second, m in items[i + 1 :]:
            yield f"({first} times {second})", n * m
