"""One side is the other times a constant, and what that constant is."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from crossframe.recording import Manifest
from crossframe.verdict.diagnosis.fit import Contrast, accepted
from crossframe.verdict.measure.metrics import norm

BY_CHANCE = 0.05
"""The rate at which a factor that has nothing to do with the run's counts is called by one of them."""


@dataclass(frozen=True)
class Factor:
    """wrong = value * right.

    Attributes:
        value: the constant.
        error: how far it may be off at worst.
        noise: how far it is likely to be off: three standard errors of least squares, if the rest points nowhere in particular.
        rest: norm(wrong - value * right).
        roundoff: what rounding of the product itself may leave of that.
    """

    value: float
    error: float
    noise: float
    rest: float
    roundoff: float


def factor_of(sides: Contrast) -> Factor | None:
    """The constant by least squares, where it explains the difference; None of zeros.

    Two right sides are x + e and x + f. Here the wrong one is c * x + f', and the rest is f' - c * e. norm(e) <= limit, and
    norm(f') <= max(1, |c|) * limit, whether the constant came before the rounding or behind it. The product itself rounds by u
    of what comes out.

    >>> import numpy as np
    >>> round(factor_of(Contrast(np.array([1.0, 2.0, 4.0]), np.array([2.0, 4.0, 8.0]), 1e-9)).value, 6)
    2.0
    """
    x, y = sides.right.reshape(-1), sides.wrong.reshape(-1)
    size = norm(x)
    if not size or not math.isfinite(size):
        return None
    value = float((x / size) @ y) / size
    rest, roundoff = sides.rest(value * sides.right), 2 * sides.roundoff * norm(y)
    tolerance = sides.limit * (abs(value) + max(1.0, abs(value))) + roundoff
    if abs(value) * size <= tolerance or not accepted(rest, sides.difference, tolerance):
        return None
    noise = 3 * rest / math.sqrt(x.size - 1) + roundoff if x.size > 1 else tolerance
    return Factor(value, tolerance / size, min(noise, tolerance) / size, rest, roundoff)


def counts_of(manifest: Manifest) -> dict[str, float]:
    """The numbers of a run that gradients are divided by, or should be, by what they are called; ones are left out."""
    counts = {
        "the world size": manifest.world_size,
        "the number of replicas": manifest.mesh.replicate,
        "the number of shards": manifest.mesh.shard,
        "the accumulation steps": manifest.settings.get("accumulate", 1),
        "the samples of a microbatch": manifest.settings.get("batch_size", 1),
        "the terms of a mean": getattr(manifest, "terms", None) or 1,
    }
    numbers = {name: n for name, n in counts.items() if isinstance(n, int | float) and n > 1}
    # What is equal to one that stands further up is the same thing under another name.
    return {
        name: float(n) for name, n in numbers.items() if n not in list(numbers.values())[: list(numbers).index(name)]
    }


def name_of(value: float, error: float, counts: Mapping[str, float]) -> str | None:
    """What a constant is in terms of these counts: one of them, its square root, a product of two, or the inverse of such. None
    if it is none of those, or is known so badly that it may be several, or that any number might be called so.

    A number between half and twice this one, whose logarithm is drawn evenly, is called by some name with a chance of at most
    2 * error / value / log(4) for each name there; names are given where these add up to at most `BY_CHANCE`.

    >>> name_of(0.5, 1e-9, {"the world size": 2.0}), name_of(0.1447, 0.12, {"the world size": 2.0})
    ('1 / the world size', None)
    """
    names: dict[float, str] = {}
    for name, number in _combinations(counts):
        names.setdefault(number, name)
        names.setdefault(1 / number, f"1 / {name}")
    near = [target for target in names if value / 2 <= target <= 2 * value]
    # Two ways to the same number differ by rounding.
    apart = [t for i, t in enumerate(near) if not any(math.isclose(t, other, rel_tol=1e-12) for other in near[:i])]
    found = [target for target in apart if abs(value - target) <= max(error, 1e-12 * target)]
    by_chance = 2 * error / value * len(apart) / math.log(4) if value > 0 else math.inf
    return names[found[0]] if len(found) == 1 and by_chance <= BY_CHANCE else None


def _combinations(counts: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    items = list(counts.items())
    yield from items
    for name, number in items:
        yield f"the square root of {name}", math.sqrt(number)
    for i, (first, n) in enumerate(items):
        yield f"the square of {first}", n * n
        for second, m in items[i + 1 :]:
            yield f"({first} times {second})", n * m
