"""What a module computed otherwise: another epsilon in a norm, another activation function, dropout, a transposed kernel."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.verdict.diagnosis.fit import Contrast, accepted
from crossframe.verdict.measure.metrics import distance, norm

_SAMPLE = 4096
TINY = np.finfo(np.float64).tiny
ERF_GELU, TANH_GELU = "x Phi(x) by erf", "x Phi(x) by tanh"


@dataclass(frozen=True)
class Normed:
    """What normalises: the dims that are averaged over, whether the mean is subtracted, the dim of weight and bias."""

    said: str
    dims: tuple[int, ...]
    centred: bool
    weight_dim: int


@dataclass(frozen=True)
class Epsilon:
    """What keeps a norm from dividing by zero: its value, how far that may be off, and whether it stands under the root.

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
    """The epsilons in both sides of a norm's output, and what they leave of the wrong side."""

    said: str
    right: Epsilon
    wrong: Epsilon
    rest: float


def norm_kinds(shape: Sequence[int], numel: int) -> Iterator[Normed]:
    """The norms that a weight of so many elements can belong to: layer norm and RMS norm over the last dim, batch norm over all
    but the dim of channels."""
    dims = tuple(range(len(shape)))
    if len(shape) >= 2 and shape[-1] == numel:
        yield Normed("layer norm", dims[-1:], True, dims[-1])
        yield Normed("RMS norm", dims[-1:], False, dims[-1])
    if len(shape) >= 2 and shape[1] == numel:
        yield Normed("batch norm", (0, *dims[2:]), True, 1)


def norm_epsilons(
    sides: Contrast,
    inputs: tuple[np.ndarray, np.ndarray],
    weight: np.ndarray,
    bias: np.ndarray | None,
    roundoff: float,
) -> Epsilons | None:
    """The epsilons that both sides of an output imply, where they explain it and are not the same.

    y = (x - mean) / sqrt(var + epsilon) * w + b, or with sqrt(var) + epsilon below; only epsilon is not recorded. It is found by
    Gauss and Newton from dy / d epsilon.

    Args:
        inputs: of the right and of the wrong side.
        roundoff: of the dtype of the output.
    """
    for kind in norm_kinds(sides.right.shape, weight.size):
        shape = [weight.size if dim == kind.weight_dim else 1 for dim in range(sides.right.ndim)]
        w, b = weight.reshape(shape), 0.0 if bias is None else bias.reshape(shape)
        right = one_side(kind, inputs[0], sides.right, w, b, roundoff, sides.limit)
        wrong = one_side(kind, inputs[1], sides.wrong, w, b, roundoff, sides.limit)
        if right is None or wrong is None:
            continue
        (first, _), (second, rest) = right, wrong
        same = first.under_root == second.under_root and first.value == second.value
        if accepted(rest, sides.difference, math.inf) and not same:
            return Epsilons(kind.said, first, second, rest)
    return None


def one_side(
    kind: Normed, x: np.ndarray, y: np.ndarray, w: np.ndarray, b: np.ndarray | float, roundoff: float, limit: float
) -> tuple[Epsilon, float] | None:
    """The epsilon of one side and what it leaves, where that is no more than rounding may."""
    centred = x - x.mean(axis=kind.dims, keepdims=True) if kind.centred else x
    square = np.square(centred).mean(axis=kind.dims, keepdims=True)
    for under_root in (True, False):
        value, steep = _epsilon_of(y - b, centred * w, square, under_root)
        below = _below(square, value, under_root)
        rest = distance(y, centred * w / below + b)
        # The mean is off by 2 u max|x|, the rest takes 8 operations on numbers as large as what comes out.
        coarse = 2 * np.abs(x).max(initial=0.0) * np.abs(w) / below
        error = roundoff * (8 * norm(y) + norm(np.broadcast_to(coarse, y.shape)) * kind.centred)
        if rest <= max(limit, error):
            return Epsilon(value, error / max(steep, TINY), under_root), rest
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


def _elementwise(function: Callable[[float], float]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.vectorize(function, otypes=[np.float64])(x) if x.size else x


_erf = _elementwise(math.erf)


def _logistic(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


FUNCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    ERF_GELU: lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    TANH_GELU: lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "ReLU": lambda x: np.maximum(x, 0.0),
    "SiLU": lambda x: x * _logistic(x),
}
"""Activation functions, in float64."""


@dataclass(frozen=True)
class Functions:
    """The activation functions of both sides, and what they leave of the wrong one."""

    right: str
    wrong: str
    rest: float
    error: float


def functions_of(
    sides: Contrast,
    inputs: tuple[np.ndarray, np.ndarray],
    roundoff: float,
    gates: tuple[np.ndarray, np.ndarray] | None = None,
    dtype: str = "float64",
) -> Functions | None:
    """Which functions of their inputs both sides are, where these are two.

    Each is x * g with 0 <= g <= 1, and g is taken by some five operations on numbers of at most 2, so it is off by at most 10 u;
    with the product, and that with the gate, by 12 u |x| in all.

    Args:
        inputs: of the right and of the wrong side.
        roundoff: of the dtype in which they were computed.
        gates: what the function's value is multiplied by.
        dtype: in which the sides are held. Kernels compute in a wider one and round once, so that what they give is predicted
            bit for bit; in low precision that alone tells two functions apart which lie nearer to one another than rounding.
    """
    names, rests = [], []
    error = 0.0
    if inputs[0].size > _SAMPLE:
        # What a part of the elements leaves, all of them do.
        some = tuple(x.reshape(-1)[:_SAMPLE] for x in inputs)
        gated = tuple(x.reshape(-1)[:_SAMPLE] for x in gates) if gates else None
        tolerance = max(12 * roundoff * norm(inputs[0] * (gates[0] if gates else 1.0)), sides.limit)
        part = sides.right.reshape(-1)[:_SAMPLE]
        least = min(_distance(part, f(some[0]) * (gated[0] if gated else 1.0), dtype) for f in FUNCTIONS.values())
        if least > tolerance:
            return None
    for i, side in enumerate((sides.right, sides.wrong)):
        gate = gates[i] if gates else 1.0
        error = 12 * roundoff * norm(inputs[i] * gate)
        tolerance = max(error, sides.limit)
        left = {name: _distance(side, function(inputs[i]) * gate, dtype) for name, function in FUNCTIONS.items()}
        name = min(left, key=left.__getitem__)
        if not accepted(left[name], sides.difference, tolerance):
            return None
        names.append(name)
        rests.append(left[name])
    return Functions(names[0], names[1], rests[1], error) if names[0] != names[1] else None


def _distance(side: np.ndarray, predicted: np.ndarray, dtype: str) -> float:
    """Of a side from a prediction, or from that prediction rounded as the side is, whichever is less."""
    rounded = predicted.astype(numpy_dtype(dtype)).astype(np.float64)
    return min(distance(side, predicted), distance(side, rounded))


@dataclass(frozen=True)
class Dropped:
    """A share of elements is missing, and the others are larger by a factor."""

    share: float
    factor: float
    numel: int
    rest: float
    both: bool = False


def dropout_of(sides: Contrast, through: np.ndarray | None = None) -> Dropped | None:
    """Which share of a branch was dropped: wrong = right + branch * (mask / (1 - p) - 1).

    The factor of what was kept is the median of what the kept elements say; it must be 1 / (1 - p) for the share p that was
    dropped, as far as a share of so many draws can tell (five standard deviations).

    Args:
        through: the branch; None: the right side itself.
    """
    x = sides.right if through is None else through
    apart, occurs = sides.wrong - sides.right, x != 0
    total = int(occurs.sum())
    if total < 8:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        grown = np.where(occurs, apart / np.where(occurs, x, 1.0), 0.0)
    away = occurs & (grown < -0.5)
    kept = occurs & ~away
    share = float(away.sum() / total)
    if not 0 < share < 1:
        return None
    factor = 1 + float(np.median(grown[kept]))
    predicted = sides.right + x * np.where(away, -1.0, np.where(kept, factor - 1, 0.0))
    tolerance = max(1.0, factor) * sides.limit + 8 * sides.roundoff * norm(sides.wrong)
    rest = sides.rest(predicted)
    if not accepted(rest, sides.difference, tolerance):
        return None
    luck = 5 * math.sqrt(share * (1 - share) / total)
    return Dropped(share, factor, total, rest) if abs((1 - 1 / factor) - share) <= luck else None


def two_masks_of(sides: Contrast) -> Dropped | None:
    """Whether both sides were dropped out, by other masks: where both are there they agree, elsewhere one of them is zero."""
    x, y = sides.right, sides.wrong
    both = (x != 0) & (y != 0)
    only = ((x != 0) != (y != 0)).sum()
    rest = distance(np.where(both, x, 0.0), np.where(both, y, 0.0))
    if x.size < 8 or not both.any() or not only or not accepted(rest, sides.difference, sides.limit):
        return None
    shares = [float((side == 0).mean()) for side in (x, y)]
    # Of two masks of one share p, p (1 - p) of all elements are in the first alone, and as many in the second.
    share = sum(shares) / 2
    expected, luck = 2 * share * (1 - share), 5 * math.sqrt(0.25 / x.size)
    alike = abs(only / x.size - expected) <= luck and abs(shares[0] - shares[1]) <= 2 * luck
    return Dropped(share, 1 / (1 - share), x.size, rest, both=True) if alike and share > 0 else None


def kernel_reordered(
    sides: Contrast, inputs: tuple[np.ndarray, np.ndarray], weight: np.ndarray, bias: np.ndarray | None, roundoff: float
) -> tuple[str, float] | None:
    """In which other order one side had the dims of a module's weight, and what that leaves; the other side has them as they are.

    A sum of n products errs by at most n u times the sum of their magnitudes (Higham, section 4.2).
    """
    say = _times if weight.ndim == 2 else _with_bias_of_channels
    tolerance = sides.limit + (weight[0].size + 2) * roundoff * norm(
        _or_nothing(say(np.abs(inputs[1]), np.abs(weight), None if bias is None else np.abs(bias)))
    )
    right = say(inputs[0], weight, bias)
    if right is None or right.shape != sides.right.shape or distance(sides.right, right) > tolerance:
        return None
    for said, other in _kernels(weight):
        wrong = say(inputs[1], other, bias)
        if wrong is not None and wrong.shape == sides.wrong.shape:
            rest = distance(sides.wrong, wrong)
            if accepted(rest, sides.difference, tolerance):
                return said, rest
    return None


def _kernels(weight: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    if weight.ndim == 2:
        yield "transposed", weight.T
    elif weight.ndim == 4:
        yield "with height and width exchanged", weight.transpose(0, 1, 3, 2)
        yield "with channels in and out exchanged", weight.transpose(1, 0, 2, 3)
        yield "transposed, all of it", weight.transpose(1, 0, 3, 2)


def _times(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray | None:
    return x @ weight.T + (0.0 if bias is None else bias) if x.ndim and x.shape[-1] == weight.shape[1] else None


def _with_bias_of_channels(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray | None:
    found = convolved(x, weight)
    return found if found is None or bias is None else found + bias[:, None, None]


def _or_nothing(array: np.ndarray | None) -> np.ndarray:
    return np.zeros(0) if array is None else array


@dataclass(frozen=True)
class Branch:
    """What was added is another multiple of what should have been."""

    factor: float
    error: float
    rest: float


def branch_of(sides: Contrast, through: np.ndarray) -> Branch | None:
    """The c of wrong = right + (c - 1) * branch, where a branch is added to others and that explains the difference."""
    size = norm(through)
    if not size or not math.isfinite(size):
        return None
    more = float(((sides.wrong - sides.right).reshape(-1) @ (through.reshape(-1) / size)) / size)
    tolerance = sides.limit * (1 + abs(more)) + 4 * sides.roundoff * norm(sides.wrong)
    rest = sides.rest(sides.right + more * through)
    return Branch(1 + more, tolerance / size, rest) if accepted(rest, sides.difference, tolerance) else None


def convolved(x: np.ndarray, weight: np.ndarray) -> np.ndarray | None:
    """What a convolution without stride gives whose output is as large as its input: (batch, channels, height, width) with a
    weight of (channels out, channels in, height, width), both odd. None of anything else.

    >>> x = np.arange(4.0).reshape(1, 1, 2, 2)
    >>> convolved(x, np.ones((1, 1, 3, 3)))[0, 0].tolist()
    [[6.0, 6.0], [6.0, 6.0]]
    """
    if (
        x.ndim != 4
        or weight.ndim != 4
        or x.shape[1] != weight.shape[1]
        or weight.shape[2] % 2 == 0
        or weight.shape[3] % 2 == 0
    ):
        return None
    half = [size // 2 for size in weight.shape[2:]]
    padded = np.pad(x, ((0, 0), (0, 0), (half[0], half[0]), (half[1], half[1])))
    windows = np.lib.stride_tricks.sliding_window_view(padded, weight.shape[2:], axis=(2, 3))
    return np.einsum("bihwyx,oiyx->bohw", windows, weight, optimize=True)
