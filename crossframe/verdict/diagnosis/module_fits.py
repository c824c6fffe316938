"""Fits differences within a module: the epsilon of a norm, the activation function, dropout, a branch."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from crossframe.alignment.elementwise import gelu_by_erf, gelu_by_tanh, relu, silu
from crossframe.dtypes import numpy_dtype, unit_roundoff
from crossframe.verdict.diagnosis.fit import TINY, Contrast, accepted, factor_between, rounded_in
from crossframe.verdict.measure.metrics import distance, norm

_SAMPLE = 4096
ERF_GELU, TANH_GELU = "x Phi(x) by erf", "x Phi(x) by tanh"


@dataclass(frozen=True)
class Normed:
    """A kind of norm: the reduced dims, whether the mean is subtracted, and the dim of weight and bias.

    With groups, dim 1 (channels) is split into (groups, channels of a group), and `dims` are those of the split array.
    """

    text: str
    dims: tuple[int, ...]
    centred: bool
    weight_dim: int
    groups: int = 0

    def split(self, array: np.ndarray) -> np.ndarray:
        """An input or output with its channels split into groups."""
        return array.reshape(len(array), self.groups, -1, *array.shape[2:]) if self.groups else array

    def broadcast(self, weight: np.ndarray, ndim: int) -> np.ndarray:
        """A weight or bias in a shape that broadcasts against inputs with `ndim` dims, split into groups."""
        if weight.ndim > 1 and self.weight_dim == ndim - 1 and not self.groups:
            return weight
        shape = [weight.size if dim == self.weight_dim else 1 for dim in range(ndim)]
        return self.split(weight.reshape(shape))

    def centred_and_square(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """An input, split into groups, as it is divided by the root, and its mean square."""
        centred = x - x.mean(axis=self.dims, keepdims=True) if self.centred else x
        return centred, np.square(centred).mean(axis=self.dims, keepdims=True)


@dataclass(frozen=True)
class Epsilon:
    """The epsilon of a norm: its value, the bound on its error, and whether it is added inside the square root.

    >>> str(Epsilon(1e-5, 1e-8, True)), str(Epsilon(1e-6, 1e-8, False))
    ('1e-05', '1e-06 added to the root')
    """

    value: float
    uncertainty: float
    under_root: bool

    def __str__(self) -> str:
        return f"{self.value:.3g}{'' if self.under_root else ' added to the root'}"


@dataclass(frozen=True)
class Epsilons:
    """The epsilons of both sides of a norm's output, and the residual of the wrong side."""

    text: str
    right: Epsilon
    wrong: Epsilon
    residual: float


def norm_kinds(shape: tuple[int, ...], weight: tuple[int, ...]) -> Iterator[Normed]:
    """The kinds of norms that match the shape of a weight: layer norm and RMS norm over the last dims or over channels, batch
    norm over all other dims, group norm and instance norm over the channels of a group in each sample."""
    dims, numel = tuple(range(len(shape))), math.prod(weight)
    if len(shape) > len(weight) and shape[-len(weight) :] == weight:
        yield Normed("layer norm", dims[-len(weight) :], True, dims[-1])
        yield Normed("RMS norm", dims[-len(weight) :], False, dims[-1])
    if len(shape) >= 2 and shape[1] == numel:
        yield Normed("batch norm", (0, *dims[2:]), True, 1)
        if len(shape) > 3:
            yield Normed("layer norm over channels", (1,), True, 1)
            yield Normed("RMS norm over channels", (1,), False, 1)
        for groups in range(1, numel + 1):
            if numel % groups == 0 and (groups < numel or len(shape) > 2):
                text = (
                    "instance norm" if groups == numel else f"group norm of {groups} group{'s' if groups > 1 else ''}"
                )
                yield Normed(text, (2, *(dim + 1 for dim in dims[2:])), True, 1, groups)


def norm_epsilons(
    sides: Contrast,
    inputs: tuple[np.ndarray, np.ndarray],
    weight: np.ndarray,
    bias: np.ndarray | None,
    roundoff: float,
) -> Epsilons | None:
    """The epsilons of both sides of a norm's output, if they explain it and differ.

    y = (x - mean) / sqrt(var + epsilon) * w + b, or with the denominator sqrt(var) + epsilon. Only epsilon is unknown; it is
    fitted by Gauss-Newton.

    Args:
        inputs: of the right and the wrong side.
        roundoff: unit roundoff of the output's dtype.
    """
    return _epsilons(sides, inputs, weight, bias, partial(one_side, roundoff=roundoff))


def _epsilons(
    sides: Contrast,
    inputs: tuple[np.ndarray, np.ndarray],
    weight: np.ndarray,
    bias: np.ndarray | None,
    epsilon_of: Callable[..., tuple[Epsilon, float] | None],
) -> Epsilons | None:
    """The epsilons of the first kind of norm that explains both sides with different ones.

    Args:
        epsilon_of: the epsilon and the residual of one side, from (kind, x, y, w, b); None if no epsilon explains it.
    """
    if any(given.shape != sides.right.shape for given in inputs):
        return None  # not the input of a norm, as that of a block that begins with a convolution
    for kind in norm_kinds(sides.right.shape, weight.shape):
        ndim = sides.right.ndim
        w, b = kind.broadcast(weight, ndim), 0.0 if bias is None else kind.broadcast(bias, ndim)
        right, wrong = (
            epsilon_of(kind, kind.split(x), kind.split(y), w, b)
            for x, y in zip(inputs, (sides.right, sides.wrong), strict=True)
        )
        if right is None or wrong is None:
            continue
        (first, _), (second, residual) = right, wrong
        same = (first.under_root, first.value) == (second.under_root, second.value)
        if not same and accepted(residual, sides.difference, math.inf):
            return Epsilons(kind.text, first, second, residual)
    return None


_USUAL = tuple(10.0**-k for k in range(3, 13))
"""Usual epsilons of norms."""
_ALIKE = 0.99
"""The share of elements that must be equal: a sum in float32 rounds some of them to the neighbouring value."""


def rounded_epsilons(
    sides: Contrast,
    inputs: tuple[np.ndarray, np.ndarray],
    weight: np.ndarray,
    bias: np.ndarray | None,
    dtype: str,
) -> Epsilons | None:
    """The usual epsilons with which a norm gives both sides bit for bit after rounding to a coarse dtype, if they differ.

    In such a dtype the effect of an epsilon is as small as rounding, so `norm_epsilons` cannot fit it. Norms in coarse dtypes
    compute in float32 and round the result, with the weight applied before or after that.
    """

    def epsilon_of(
        kind: Normed, x: np.ndarray, y: np.ndarray, w: np.ndarray, b: np.ndarray | float
    ) -> tuple[Epsilon, float] | None:
        centred, square = kind.centred_and_square(x)
        fits = []
        for epsilon in _USUAL:
            normed = centred / _below(square, epsilon, under_root=True)
            for value in (normed * w + b, rounded_in(normed, dtype) * w + b):
                value = rounded_in(value, dtype)
                fits.append((float((value == y).mean()), epsilon, distance(value, y)))
        share, epsilon, residual = max(fits)
        return (Epsilon(epsilon, 0.0, True), residual) if share >= _ALIKE else None

    return _epsilons(sides, inputs, weight, bias, epsilon_of)


def one_side(
    kind: Normed, x: np.ndarray, y: np.ndarray, w: np.ndarray, b: np.ndarray | float, roundoff: float
) -> tuple[Epsilon, float] | None:
    """The epsilon of one side and its residual; None if the residual exceeds rounding."""
    centred, square = kind.centred_and_square(x)
    for under_root in (True, False):
        value, steep = _epsilon_of(y - b, centred * w, square, under_root)
        below = _below(square, value, under_root)
        residual = distance(y, centred * w / below + b)
        # The mean, which is computed in float32 at least, has an error of 2 u max|x|; the remaining 8 operations are on numbers
        # as large as the output.
        of_mean = 2 * np.abs(x).max(initial=0.0) * np.abs(w) / below
        fine = min(roundoff, unit_roundoff("float32"))
        error = 8 * roundoff * norm(y) + fine * norm(np.broadcast_to(of_mean, y.shape)) * kind.centred
        if residual <= error:
            return Epsilon(value, error / max(steep, TINY), under_root), residual
    return None


def _below(square: np.ndarray, epsilon: float, under_root: bool) -> np.ndarray:
    return np.sqrt(np.maximum(square + epsilon, TINY)) if under_root else np.maximum(np.sqrt(square) + epsilon, TINY)


def _epsilon_of(y: np.ndarray, numerator: np.ndarray, square: np.ndarray, under_root: bool) -> tuple[float, float]:
    """The epsilon of y = numerator / root, and norm(dy / d epsilon) there."""
    epsilon, steep = 0.0, 0.0
    for _ in range(60):
        below = _below(square, epsilon, under_root)
        now = numerator / below
        slope = -now / (2 * below**2) if under_root else -now / below
        steep = norm(slope)
        if not 1e-150 < steep < math.inf:
            break
        reached = max(epsilon + float(((y - now) / steep * (slope / steep)).sum()), epsilon / 8)
        if abs(reached - epsilon) <= 1e-12 * reached:
            break
        epsilon = reached
    return epsilon, steep


FUNCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    ERF_GELU: gelu_by_erf,
    TANH_GELU: gelu_by_tanh,
    "ReLU": relu,
    "SiLU": silu,
}
"""Activation functions in float64."""


@dataclass(frozen=True)
class Functions:
    """The activation functions of both sides, and the residual of the wrong side."""

    right: str
    wrong: str
    residual: float
    error: float


def functions_of(
    sides: Contrast,
    inputs: tuple[np.ndarray, np.ndarray],
    roundoff: float,
    gates: tuple[np.ndarray, np.ndarray] | None = None,
    dtype: str = "float64",
) -> Functions | None:
    """The activation functions of both sides, if both match a known function and these differ.

    Each function is x * g with 0 <= g <= 1, and g takes about five operations on numbers of at most 2, so its error is at most 10
    u; with the product, and the product with the gate, 12 u |x| in total.

    Args:
        inputs: of the right and the wrong side.
        roundoff: unit roundoff of the compute dtype.
        gates: factors of the function's value.
        dtype: dtype of the sides. Kernels compute in a wider dtype and round once, so their results are predicted bitwise, which
            distinguishes functions that differ by less than rounding.
    """
    found: list[tuple[str, float, float]] = []
    for side, x, gate in zip((sides.right, sides.wrong), inputs, gates or np.ones(2), strict=True):
        gate = np.broadcast_to(gate, x.shape)
        error = 12 * roundoff * norm(x * gate)
        for size in sorted({min(_SAMPLE, x.size), x.size}):  # a sample shows in less time that no function fits
            y, given, times = (each.reshape(-1)[:size] for each in (side, x, gate))
            left = {name: _distance(y, function(given) * times, dtype) for name, function in FUNCTIONS.items()}
            name = min(left, key=left.__getitem__)
            if not accepted(left[name], sides.difference, max(error, sides.limit)):
                return None
        found.append((name, left[name], error))
    (first, *_), (second, residual, error) = found
    return Functions(first, second, residual, error) if first != second else None


def _distance(side: np.ndarray, predicted: np.ndarray, dtype: str) -> float:
    """The distance from a prediction or from the prediction rounded to `dtype`, whichever is smaller."""
    rounded = predicted.astype(numpy_dtype(dtype)).astype(np.float64)
    return min(distance(side, predicted), distance(side, rounded))


@dataclass(frozen=True)
class Dropped:
    """Dropout: a share of elements is zero, and the others are multiplied by a factor."""

    share: float
    factor: float
    numel: int
    residual: float


def dropout_of(sides: Contrast, through: np.ndarray | None = None) -> Dropped | None:
    """Fit dropout of a branch: wrong = right + branch * (mask / (1 - p) - 1).

    The factor is the median over the kept elements. It must agree with 1 / (1 - p) for the dropped share p within five standard
    deviations of the share.

    Args:
        through: the branch; None for the right side itself.
    """
    x = sides.right if through is None else through
    apart, occurs = sides.wrong - sides.right, x != 0
    total = int(occurs.sum())
    if total < 8:
        return None
    grown = apart / np.where(occurs, x, 1.0)
    away = occurs & (grown < -0.5)
    kept = occurs & ~away
    share = float(away.sum() / total)
    if not 0 < share < 1:
        return None
    factor = 1 + float(np.median(grown[kept]))
    predicted = sides.right + x * np.where(away, -1.0, factor - 1)
    tolerance = max(1.0, factor) * sides.limit + 8 * sides.roundoff * norm(sides.wrong)
    residual = sides.residual(predicted)
    if not accepted(residual, sides.difference, tolerance):
        return None
    luck = 5 * math.sqrt(share * (1 - share) / _num_units(away, kept))
    return Dropped(share, factor, total, residual) if abs((1 - 1 / factor) - share) <= luck else None


def _num_units(away: np.ndarray, kept: np.ndarray) -> int:
    """The number of independent decisions of a mask: elements, or whole channels or samples that are dropped or kept together."""
    for stop in range(1, away.ndim):
        dropped, stays = (each.reshape(math.prod(each.shape[:stop]), -1).any(axis=1) for each in (away, kept))
        if not (dropped & stays).any():
            return int((dropped | stays).sum())
    return int((away | kept).sum())


def two_masks_of(sides: Contrast) -> Dropped | None:
    """Fit dropout on both sides with different masks: elements that are nonzero on both sides agree."""
    x, y = sides.right, sides.wrong
    both = (x != 0) & (y != 0)
    only = ((x != 0) != (y != 0)).sum()
    residual = distance(np.where(both, x, 0.0), np.where(both, y, 0.0))
    if x.size < 8 or not both.any() or not only or not accepted(residual, sides.difference, sides.limit):
        return None
    shares = [float((side == 0).mean()) for side in (x, y)]
    # With two masks of share p, p (1 - p) of all elements are only in the first one, and as many only in the second.
    share = sum(shares) / 2
    expected, luck = 2 * share * (1 - share), 5 * math.sqrt(0.25 / x.size)
    alike = abs(only / x.size - expected) <= luck and abs(shares[0] - shares[1]) <= 2 * luck
    return Dropped(share, 1 / (1 - share), x.size, residual) if alike else None


@dataclass(frozen=True)
class Branch:
    """A branch that was added with another factor."""

    factor: float
    error: float
    residual: float


def branch_of(sides: Contrast, through: np.ndarray) -> Branch | None:
    """Fit the c of wrong = right + (c - 1) * branch; None if this does not explain the difference."""
    more = factor_between(through, sides.wrong - sides.right)
    tolerance = sides.limit * (1 + abs(more)) + 4 * sides.roundoff * norm(sides.wrong)
    residual = sides.residual(sides.right + more * through)
    if not accepted(residual, sides.difference, tolerance):
        return None
    return Branch(1 + more, tolerance / norm(through), residual)
