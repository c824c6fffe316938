"""Recognises norms and GELUs among recorded activations, and estimates what each side computes from its own input.

Differences of the input cancel in such estimates, so they show effects that are smaller than those differences.

A GELU by tanh differs from one by erf by at most 5e-4. Where y = x Phi(x) for an earlier activation x, each recording has its own
estimate of how much of a tanh GELU it has, sum((y - erf(x)) h) / sum(h h) with h = tanh(x) - erf(x): 0 for erf and 1 for tanh.
Their difference must exceed 1/2, which no rounding of a constant does.

Another epsilon in a norm is a factor. Where y is an RMS norm, layer norm or batch norm of its module's input up to a factor g for
each channel, each recording's g is estimated from its own input. Any function that is affine in each channel looks like a batch
norm, so its g must also be a weight w of the module. With n the normalised input, g is estimated as sum(y n) / sum(n n). Until
then a low dtype rounds at most four times in w n (the difference to the mean, the reciprocal of the deviation, their product, and
that with w) and once in y, each time by at most u. So abs(sum(y n) - w sum(n n)) <= u sum((4 |w n| + |y|) |n|), which is 5 u of g
if there is no bias: 2 % in bfloat16. An epsilon of more than 4 % of a channel's variance hides a batch norm there.

    gain      sum((g of b - g of a) (g of a)) / sum(g of a squared)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crossframe.alignment.elementwise import gelu_by_erf, gelu_by_tanh
from crossframe.dtypes import coarser, numpy_dtype, unit_roundoff
from crossframe.recording.event_format import OUTPUT, PARAMETERS, UPDATE
from crossframe.recording.module_calls import called_module
from crossframe.verdict.measure.quantities import Quantity, finite

RMS, LAYER, BATCH, BATCH_LAST = "RMS norm", "layer norm", "batch norm", "batch norm over the last dim"
_OVER_BATCH = (BATCH, BATCH_LAST)
_MOST_ELEMENTS = 1 << 15
"""The number of elements of a possible GELU that are used."""
_NEARBY = 4
"""The number of earlier activations of the same shape that are tried as the input of a GELU."""


@dataclass
class Estimates:
    """Sums over the elements of an activation.

    Attributes:
        way, along: of a GELU, sum(h h), and the difference between both sides of sum((y - erf(x)) h).
        gains: of a norm, by channel: sum(y n) and sum(n n) of a, and those of b.
        statistics: of a batch norm: (channel, standard deviation in the low dtype).
        cast: of a norm, the effect of a cast of its weight on the gain.
    """

    way: float = 0.0
    along: float = 0.0
    gains: np.ndarray | None = None
    statistics: frozenset[tuple[int, float]] = frozenset()
    cast: float = 0.0

    def __iadd__(self, other: "Estimates") -> "Estimates":
        self.way, self.along = self.way + other.way, self.along + other.along
        if other.gains is not None:
            self.gains = other.gains if self.gains is None else self.gains + other.gains
        self.cast, self.statistics = max(self.cast, other.cast), self.statistics | other.statistics
        return self

    @property
    def tanh(self) -> float | None:
        """How much more of a tanh GELU b is than a; None if this is no GELU."""
        return self.along / self.way if self.way else None

    @property
    def gain(self) -> float | None:
        """The relative difference of the gain; None if this is no norm."""
        if self.gains is None or not (varying := (self.gains[1] > 0) & (self.gains[3] > 0)).any():
            return None
        of = self.gains[:, varying]
        first, second = of[0] / of[1], of[2] / of[3]
        return float(np.vdot(second - first, first) / np.vdot(first, first))


class Recogniser:
    """Recognises GELUs and norms in the order of the activations."""

    def __init__(self) -> None:
        self._recent: dict[tuple[int, int], list[Sequence[Quantity]]] = {}
        self._gelu_of: dict[str, str] = {}
        self._norms: dict[str, str | None] = {}
        self._num_channels: dict[str, int] = {}
        self._weights: dict[str, np.ndarray] = {}

    def note_weights(self, group: Sequence[Quantity]) -> None:
        """Note a parameter of the first recording, as a possible weight of a norm."""
        if group[0].phase in (PARAMETERS, UPDATE) and group[0].a.ndim == 1 and not group[0].sketched:
            self._weights[group[0].parameter] = finite(group[0].a)

    def estimates(self, group: Sequence[Quantity]) -> Estimates:
        """The estimates of an activation on several ranks."""
        at, found = (group[0].step, group[0].microbatch), Estimates()
        recent = self._recent.get(at, [])
        self._recent = {at: recent}
        for x, y in zip(self._input_of_gelu(recent, group), group, strict=False):
            found += _of_gelu(x, y)
        name = f"input of {group[0].module}"
        given = next((each for each in recent if group[0].use == OUTPUT and each[0].name == name), ())
        for x, y in zip(given, group, strict=False):
            if x.a.shape == y.a.shape and y.a.ndim >= 2:
                found += self._of_norm(x, y)
        recent.append(group)
        return found

    def _input_of_gelu(self, recent: Sequence[Sequence[Quantity]], group: Sequence[Quantity]) -> Sequence[Quantity]:
        """The earlier activation of which this one is a GELU on both sides; empty if there is none."""
        name = group[0].name
        alike = [each for each in recent if each[0].a.shape == group[0].a.shape][-_NEARBY:]
        if name not in self._gelu_of:
            inputs = (x[0] for x in alike if _is_gelu(x[0].a, group[0].a) and _is_gelu(x[0].b, group[0].b))
            self._gelu_of[name] = next((x.name for x in inputs), "")
        return next((each for each in alike if each[0].name == self._gelu_of[name]), ())

    def _of_norm(self, x: Quantity, y: Quantity) -> Estimates:
        if y.name not in self._norms:
            self._norms[y.name] = _norm_of(x.a, y.a)
        if (norm := self._norms[y.name]) is None:
            return Estimates()
        channels = y.a.shape[_channel_dim(norm)]
        if self._num_channels.setdefault(y.name, channels) != channels:  # but positions, for instance
            self._norms[y.name] = None
            return Estimates()
        dtype, gains = coarser(*y.dtypes), np.array([*_gains(x.a, y.a, norm), *_gains(x.b, y.b, norm)])
        weight, over_batch = self._weight(x, y, norm, gains), norm in _OVER_BATCH
        if weight is None and self._weights and over_batch:
            return Estimates()
        statistics = _statistics(x.b, _channel_dim(norm), dtype) if over_batch else frozenset()
        return Estimates(gains=gains, statistics=statistics, cast=_gain_of_cast(weight, dtype))

    def _weight(self, x: Quantity, y: Quantity, norm: str, gains: np.ndarray) -> np.ndarray | None:
        """The parameter of a module that is the factor of its norm in each channel, up to rounding; None if there is none."""
        products, squares = gains[:2]
        module = called_module(y.module)
        of_module = (weight for name, weight in self._weights.items() if name.rpartition(".")[0] == module)
        for weight in of_module:
            if weight.shape == squares.shape:
                terms = np.abs(_by_channel(y.a, _channel_dim(norm)) * _normalised(x.a, norm)).sum(axis=0)
                rounding = unit_roundoff(coarser(*y.dtypes)) * (4 * np.abs(weight) * squares + terms)
                if np.all(np.abs(products - weight * squares) <= rounding):
                    return weight
        return None


def _of_gelu(x: Quantity, y: Quantity) -> Estimates:
    (first, way), (second, other_way) = _estimate(x.a, y.a), _estimate(x.b, y.b)
    # From the other recording's own inputs, whose sum of squares is nearly the same.
    return Estimates(way=way, along=second * (way / other_way if other_way else 0.0) - first)


def _estimate(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """sum((y - erf(x)) h) and sum(h h) with h = tanh(x) - erf(x)."""
    x, y = (finite(side).reshape(-1)[:_MOST_ELEMENTS] for side in (x, y))
    by_erf = gelu_by_erf(x)
    way = gelu_by_tanh(x) - by_erf
    return float(np.vdot(y - by_erf, way)), float(np.vdot(way, way))


def _is_gelu(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether y is an erf or tanh GELU of x; these differ by at most 5e-4, less than rounding in low precision."""
    x, y = (finite(side).reshape(-1)[:512] for side in (x, y))
    apart, size = float(np.linalg.norm(y - gelu_by_erf(x))), float(np.linalg.norm(y))
    return bool(size) and np.ptp(x) > 0 and apart <= 0.02 * size


def _channel_dim(norm: str) -> int:
    return 1 if norm == BATCH else -1


def _by_channel(array: np.ndarray, dim: int) -> np.ndarray:
    """The elements as rows, with the channels in the last dim."""
    return np.moveaxis(finite(array), dim, -1).reshape(-1, array.shape[dim])


def _normalised(x: np.ndarray, norm: str) -> np.ndarray:
    """The rows of the normalised x; for a layer norm less their mean, which the bias takes."""
    x = _by_channel(x, _channel_dim(norm))
    over = 0 if norm in _OVER_BATCH else 1
    if norm != RMS:
        x = x - x.mean(axis=over, keepdims=True)
    normed = x / np.sqrt(np.maximum(np.square(x).mean(axis=over, keepdims=True), np.finfo(np.float64).tiny))
    return normed - normed.mean(axis=0, keepdims=True) if norm == LAYER else normed


def _gains(x: np.ndarray, y: np.ndarray, norm: str) -> tuple[np.ndarray, np.ndarray]:
    """sum(y n) and sum(n n) by channel, where n is the normalised x; for norms that add a bias, y minus its mean."""
    y, normed = _by_channel(y, _channel_dim(norm)), _normalised(x, norm)
    if norm != RMS:
        y = y - y.mean(axis=0, keepdims=True)
    return (y * normed).sum(axis=0), np.square(normed).sum(axis=0)


def _norm_of(x: np.ndarray, y: np.ndarray) -> str | None:
    """The norm of x that y is, up to a factor and a bias for each channel; None if it is none of them."""
    for norm in (RMS, LAYER, BATCH, BATCH_LAST):
        dim = _channel_dim(norm)
        if y.shape[dim] < 2 or y.size == y.shape[dim]:
            continue
        products, squares = _gains(x, y, norm)
        if not squares.all() or not products.all():
            continue
        flat = _by_channel(y, dim)
        size = np.square(flat - flat.mean(axis=0) if norm != RMS else flat).sum()
        # The residual of y after fitting a factor for each channel.
        if size - np.square(products / np.sqrt(squares)).sum() <= 0.01 * size:
            return norm
    return None


def _statistics(x: np.ndarray, dim: int, dtype: str) -> frozenset[tuple[int, float]]:
    """The standard deviation of each channel, in a low dtype."""
    deviations = _by_channel(x, dim).std(axis=0)
    return frozenset(enumerate(deviations.astype(numpy_dtype(dtype)).astype(np.float64).tolist()))


def _gain_of_cast(weight: np.ndarray | None, dtype: str) -> float:
    """The effect on a norm's gain of casting its weight; the largest possible one if the weight is not known."""
    if weight is None:
        return unit_roundoff(dtype)
    cast = weight.astype(numpy_dtype(dtype)).astype(np.float64)
    return abs(float(np.vdot(cast - weight, weight) / np.vdot(weight, weight)))
