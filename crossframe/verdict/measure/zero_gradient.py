"""Finds parameters whose gradient is zero in exact arithmetic, so that the recorded gradient is rounding, which Adam amplifies.

A key bias in attention adds the same value to all scores of a query, which softmax ignores; a bias before batch norm is
subtracted again. The computed gradient is a sum of terms that cancel. Summing n terms in floating point has an error of at most
(n - 1) u sum|t_i| to first order (Higham, section 4.2), so a mean over n terms has an error of at most n * u times their mean
magnitude. So such a gradient is at most terms * u times the typical gradient, in both recordings and at every step. Adam divides
it by its own magnitude and moves the parameter by up to the learning rate per step in an arbitrary direction, so two correct runs
differ there as much as two incorrect ones.

Where queries, keys and values have one bias, only the elements of keys are such. So elements of parameters with one dim are told
apart by the same limit.

A gradient that is exactly 0.0 on both sides at all steps is not noise: nothing is amplified, and the parameter changes in the
same way (weight decay, or not at all) on both sides. It is compared.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossframe.dtypes import unit_roundoff
from crossframe.recording import Recording
from crossframe.recording.event_format import REDUCE
from crossframe.verdict.measure.metrics import norm, root_mean_square
from crossframe.verdict.measure.values import assemble

_TELLABLE = 0.01


@dataclass(frozen=True)
class GradientSizes:
    """Root mean squares of the reduced gradients of one recording: `of[step][name]`, and `typical[step]` over all."""

    of: Mapping[int, Mapping[str, float]]
    typical: Mapping[int, float]


def gradient_sizes(recording: Recording) -> GradientSizes:
    """The sizes of the reduced gradients, computed for each step on first use. A gradient that was not recorded is zero (R29).

    Elements that are not finite make the size of their parameter infinite and are excluded from the typical size.
    """
    both = _ByStep(lambda step: _measured(recording, step))
    return GradientSizes(_ByStep(lambda step: both[step][0]), _ByStep(lambda step: both[step][1]))


class _ByStep(dict[int, Any]):
    """Computes missing entries."""

    def __init__(self, compute: Callable[[int], Any]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, step: int) -> Any:
        self[step] = found = self._compute(step)
        return found


def _measured(recording: Recording, step: int) -> tuple[dict[str, float], float]:
    """The root mean square of each gradient at a step, and over all gradients."""
    of, norms, numel = {}, [], 0
    for name, spec in recording.manifest.params.items():
        if not recording.has(REDUCE, step, name):
            of[name] = 0.0
            continue
        grad = assemble(recording, REDUCE, step, name)
        norms.append(grad.norm)
        numel += spec.numel - grad.num_not_finite
        of[name] = np.inf if grad.num_not_finite else root_mean_square(grad.norm, spec.numel)
    return of, root_mean_square(norm(np.array(norms)), numel)


def terms_of(recording: Recording) -> int:
    """The number of terms in the sum of a gradient element.

    If the loop did not state it: the number of rows of the largest activation, over which a backward sums; 1 if none was
    recorded.
    """
    if recording.manifest.terms is not None:
        return recording.manifest.terms
    step = recording.first_step_with_activations
    if step is None:
        return 1
    shapes = (recording.activation_shape(step, 0, *at) for at in recording.activations(step))
    return max(max(math.prod(shape[:-1]), 1) for shape in shapes)


def zero_gradient_parameters(
    a: Recording,
    b: Recording,
    steps: tuple[int, ...],
    sizes: tuple[GradientSizes, GradientSizes],
    dtype: str | None = None,
) -> tuple[str, ...]:
    """The parameters whose gradient is at most terms * u * typical in both recordings at all these steps, but not always zero.

    Empty if terms * u exceeds 0.01, where small gradients and noise cannot be distinguished.

    Args:
        dtype: the dtype whose unit roundoff is u; None for the compute dtype of the runs.
    """
    tolerated = _tolerated(a, b, dtype)
    if max(tolerated) > _TELLABLE:
        return ()

    found = [name for name, spec in a.manifest.params.items() if spec.requires_grad]
    positive: set[str] = set()
    for step in steps:
        for own, limit in zip(sizes, tolerated, strict=True):
            of, largest = own.of[step], limit * own.typical[step]
            found = [name for name in found if of[name] <= largest]
            positive.update(name for name in found if of[name] > 0.0)
        if not found:
            break  # later steps need not be read for this
    return tuple(name for name in found if name in positive)


def zero_gradient_elements(
    a: Recording,
    b: Recording,
    steps: tuple[int, ...],
    sizes: tuple[GradientSizes, GradientSizes],
    name: str,
    dtype: str | None = None,
) -> np.ndarray | None:
    """A mask of the elements of a parameter with one dim for which the same holds; None if there are none, or all.

    None also where gradients were recorded as sketches.

    Args:
        dtype: as of `zero_gradient_parameters`.
    """
    spec = a.manifest.params[name]
    tolerated = _tolerated(a, b, dtype)
    if len(spec.shape) != 1 or not spec.requires_grad or max(tolerated) > _TELLABLE:
        return None
    found, positive = np.ones(spec.shape, bool), np.zeros(spec.shape, bool)
    for step in steps:
        for recording, own, limit in zip((a, b), sizes, tolerated, strict=True):
            grad = assemble(recording, REDUCE, step, name).elements
            if grad is None:
                return None
            size = np.abs(grad.astype(np.float64))
            found &= size <= limit * own.typical[step]
            positive |= size > 0.0
        if not found.any():
            return None
    found &= positive
    return found if found.any() and not found.all() else None


def _tolerated(a: Recording, b: Recording, dtype: str | None) -> list[float]:
    """The largest gradient that is rounding, relative to the typical one, of each recording."""
    return [terms_of(recording) * unit_roundoff(dtype or recording.manifest.dtype) for recording in (a, b)]
