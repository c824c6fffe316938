"""Hypotheses about the output of a module, given its input."""

import math
from collections.abc import Iterator
from itertools import islice

import numpy as np

from crossframe.dtypes import unit_roundoff
from crossframe.recording.event_format import INPUT, OUTPUT
from crossframe.recording.module_calls import called_module
from crossframe.verdict.diagnosis.case import At, Case
from crossframe.verdict.diagnosis.fit import Fit
from crossframe.verdict.diagnosis.kernel_fits import kernel_reordered, paddings_of
from crossframe.verdict.diagnosis.module_fits import (
    ERF_GELU,
    TANH_GELU,
    Dropped,
    branch_of,
    dropout_of,
    functions_of,
    norm_epsilons,
    rounded_epsilons,
    two_masks_of,
)
from crossframe.verdict.diagnosis.rank_fits import on_grid
from crossframe.verdict.measure.metrics import norm

LOWER = ("bfloat16", "float16", "float32")
"""Dtypes in which a part of a run in a finer dtype may compute, the coarsest first."""
NEARBY = 6
"""The number of earlier activations that are tried as inputs of an activation function."""
GATES = 3
"""The number of these that are tried as gates."""
COARSE = 2.0**-12
"""The unit roundoff from which on the epsilon of a norm is found by exact repetition."""
LEAST_BITS = 29
"""A random value is one of a lower dtype with probability 2^-bits, for the bits by which their significands differ; all differing
elements together must have this many. One float64 element is enough for float32, two float32 elements for bfloat16."""
NOISE_ROUNDINGS = 1 / 8, 16.0
"""The error of a part of a module that computes in a lower dtype, in roundings: from one that is averaged to one that adds up."""
FEWEST_OF_NOISE = 64
"""The smallest number of differing elements whose directions are judged."""
MOST_ROUNDINGS = 64
"""The largest error of a computation in a lower dtype, in roundings."""

Both = tuple[np.ndarray, np.ndarray]


def norm_epsilon(case: Case) -> Iterator[Fit]:
    """The epsilons of a norm differ. Symmetric, so tried with one assignment of sides only."""
    if case.swapped:
        return
    for what, given, weight, bias in _norms(case):
        found = norm_epsilons(case.sides, given, weight, bias, case.compute_roundoff)
        if found is None and case.compute_roundoff >= COARSE:
            found = rounded_epsilons(case.sides, given, weight, bias, case.quantity.dtypes[0])
        if found is None:
            continue
        uncertainty = found.right.uncertainty + found.wrong.uncertainty
        text = f"{what} is a {found.text} with different epsilons"
        if abs(found.right.value - found.wrong.value) > uncertainty:
            text = (
                f"{what} is a {found.text} with an epsilon of {found.right} in {case.names[0]} and "
                f"{found.wrong} in {case.names[1]}{f' (+- {uncertainty:.0e})' if uncertainty else ''}"
            )
        yield Fit("norm_epsilon", text, found.residual)
        return


def _norms(case: Case) -> Iterator[tuple[str, Both, np.ndarray, np.ndarray | None]]:
    """(description, input, weight, bias) of a norm that may have computed the quantity: the module, or a function of an earlier
    activation without parameters, whose module is not recorded."""
    if (given := input_of(case)) is not None:
        for weight, bias in affine_parameters(case):
            yield case.module, given, weight, bias
    elif case.quantity.use == INPUT:
        for at in _nearby(case):
            if (both := of_both(case, at)) is not None:
                yield f"the input of {case.quantity.module}", both, np.ones(case.both.right.shape[-1:]), None


def tanh_gelu(case: Case) -> Iterator[Fit]:
    """An erf GELU on one side and a tanh GELU on the other. Symmetric, so tried with one assignment of sides only."""
    if case.swapped:
        return
    near = [(at, both) for at in _nearby(case) if (both := of_both(case, at)) is not None]
    for i, (at, inputs) in enumerate(near):
        gates: list[tuple[str, Both] | None] = [None]
        gates += [(f" times the {gate[2]} of {gate[1]}", both) for j, (gate, both) in enumerate(near[:GATES]) if j != i]
        for gate in gates:
            times = gate[1] if gate else None
            found = functions_of(case.sides, inputs, case.compute_roundoff, times, case.quantity.dtypes[0])
            if found is None:
                continue
            # Other differing functions have no signature.
            if {found.right, found.wrong} == {ERF_GELU, TANH_GELU}:
                of = f"with x the {at[2]} of {at[1]}, {case.names[0]} has {found.right} and {case.names[1]} has {found.wrong}"
                yield Fit("tanh_gelu", of + (gate[0] if gate else ""), found.residual, found.error)
            return


def dropout(case: Case) -> Iterator[Fit]:
    """Dropout of an activation or of a branch that was added to it."""
    if found := dropout_of(case.sides):
        yield _dropped(case, found, "elements")
        return
    for name, branch in _branches(case):
        if found := dropout_of(case.sides, branch):
            yield _dropped(case, found, f"elements added from {name}")
            return
    if not case.swapped and (found := two_masks_of(case.sides)):
        text = f"both drop {found.share:.3f} of {found.numel} elements, with different masks"
        yield Fit("dropout", text, found.residual)


def _dropped(case: Case, found: Dropped, what: str) -> Fit:
    text = (
        f"in {case.names[1]} {found.share:.3f} of {found.numel} {what} are dropped, and the others are multiplied by "
        f"{found.factor:.4g}: dropout with p = {1 - 1 / found.factor:.3g}"
    )
    return Fit("dropout", text, found.residual)


def transposed_kernel(case: Case) -> Iterator[Fit]:
    """A module uses its weight with permuted dims."""
    given, params = input_of(case), parameters_of(case)
    if given is None or params is None or params[0].ndim not in (2, 4):
        return
    if found := kernel_reordered(case.sides, given, *params, case.compute_roundoff):
        text = f"{case.names[0]} uses the weight of {case.module} unchanged, {case.names[1]} uses it {found[0]}"
        yield Fit("transposed", text, found[1])


def convolution_padding(case: Case) -> Iterator[Fit]:
    """A convolution pads its input differently. Symmetric, so tried with one assignment of sides only."""
    given, params = input_of(case), parameters_of(case)
    if case.swapped or given is None or params is None:
        return
    if found := paddings_of(case.sides, given, *params, case.compute_roundoff):
        stride, (first, second), residual = found
        text = (
            f"{case.quantity.module} is a convolution with stride {stride} and {first} zeros before height and width in "
            f"{case.names[0]}, {second} in {case.names[1]}"
        )
        yield Fit("padding_shift", text, residual)


def factor_of_branch(case: Case) -> Iterator[Fit]:
    """A branch is added with another factor. Symmetric, so tried with one assignment of sides only."""
    if case.swapped:
        return
    for name, branch in _branches(case):
        if found := branch_of(case.sides, branch):
            times = 0.0 if abs(found.factor) <= found.error else found.factor
            text = f"{case.names[1]} adds {times:.6g} times {name} that {case.names[0]} adds"
            yield Fit("constant_factor", text, found.residual)
            return


def input_of(case: Case) -> Both | None:
    """The input of the module that computed the quantity on both sides; None if no module did.

    A side that calls a function instead of the module has no input of its own, and the other side's is used.
    """
    if not (module := case.module):
        return None
    at = (case.quantity.microbatch, module, INPUT)
    if (both := of_both(case, at)) is not None or case.quantity.use == OUTPUT:
        return both
    given = case.activation(case.right, case.step, at)
    return None if given is None else (np.asarray(given, np.float64), np.asarray(given, np.float64))


def of_both(case: Case, at: At) -> Both | None:
    """An activation on both sides; None if their shapes differ, for then no layer takes both."""
    found = case.in_both(lambda recording: case.activation(recording, case.step, at))
    if found is None or found[0].shape != found[1].shape:
        return None
    return np.asarray(found[0], np.float64), np.asarray(found[1], np.float64)


def parameters_of(
    case: Case, module: str = "", *, step: int | None = None
) -> tuple[np.ndarray, np.ndarray | None] | None:
    """(weight, bias) of a module (default: that of the quantity) as the rank used them, or as they were before an earlier step of
    the wrong side; None without exactly one weight, or with a bias that is not of its first dim."""
    module = module or called_module(case.module)
    own = [name for name in case.right.manifest.params if name.rpartition(".")[0] == module]
    weights = [name for name in own if not name.endswith("bias")]
    biases = [name for name in own if name.endswith("bias")]
    if len(weights) != 1 or len(biases) > 1:
        return None
    names = (*weights, *biases)
    found = [case.as_used(case.right, name) if step is None else case.before(case.wrong, step, name) for name in names]
    if any(value is None for value in found):
        return None
    weight, *bias = (np.asarray(value, np.float64) for value in found)
    if any(each.shape != weight.shape[:1] for each in bias):
        return None
    return weight, bias[0] if bias else None


def affine_parameters(case: Case) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Candidates for (weight, bias) of a norm, whatever they are called; ones and None for a norm without parameters.

    A weight w may multiply as 1 + w, as in Gemma.
    """
    shape = case.both.right.shape
    module = called_module(case.module)
    own = [name for name in case.right.manifest.params if name.rpartition(".")[0] == module]
    found = [case.as_used(case.right, name) for name in own]
    values = [np.asarray(value, np.float64) for value in found if value is not None]
    if len(values) < len(own) or len(own) > 2:
        return
    for value in values or [np.ones(size) for size in dict.fromkeys((*shape[-1:], *shape[1:2]))]:
        others = [other for other in values if other is not value]
        if others and others[0].shape != value.shape:
            return
        bias = others[0] if others else None
        yield value, bias
        if bias is None and values:
            yield 1 + value, bias


def _nearby(case: Case) -> list[At]:
    return list(islice(case.earlier(same_shape=True), NEARBY))


def _branches(case: Case) -> Iterator[tuple[str, np.ndarray]]:
    """(description, values) on the right side of activations that may have been added to the quantity."""
    for at in _nearby(case):
        if (values := case.activation(case.right, case.step, at)) is not None:
            yield f"the {at[2]} of {at[1]}", np.asarray(values, np.float64)


def low_precision(case: Case) -> Iterator[Fit]:
    """A module computed in a lower dtype than the run, as norms that cast their input to float32 do.

    All elements of the wrong side, or all after dividing by the module's weight (often applied after the cast back), are values
    of the lower dtype; at most half of the right side's are. The sides differ by at most `MOST_ROUNDINGS`. Also for a loss.
    """
    params = parameters_of(case) if case.quantity.module else None
    weight = params[0] if params is not None and params[1] is None and params[0].ndim == 1 else None
    scales: list[tuple[str, np.ndarray | float]] = [("", 1.0)]
    if weight is not None and weight.shape == case.sides.wrong.shape[-1:] and weight.all():
        scales.append((" times the weight", weight))
    right, wrong = case.sides.right, case.sides.wrong
    for low in LOWER:
        step = unit_roundoff(low)
        if step <= case.compute_roundoff or case.sides.difference > MOST_ROUNDINGS * step * norm(right):
            continue
        for scaled, scale in scales:
            fits, others = (on_grid(side / scale, low, case.compute_roundoff) for side in (wrong, right))
            bits = math.log2(step / case.compute_roundoff) * (wrong != right).sum()
            if fits == 1.0 and others <= 0.5 and bits >= LEAST_BITS:
                text = f"in {case.names[1]} all elements are {low} values{scaled}, in {case.names[0]} {others:.0%} are"
                yield Fit("low_precision", f"{text}: it is computed in {low}", 0.0)
                return


def noise_of_float32(case: Case) -> bool:
    """Whether a difference in float64 looks like rounding in float32, as if a part of a module computes in it and later
    operations hide its values: a softmax in float32 before a product in float64.

    Before the first update, such a difference has `NOISE_ROUNDINGS` and no direction: neither its sum nor its product with the
    values exceeds four standard deviations of that of random signs. Lower dtypes are not recognised by size, because many faults
    are as large as their rounding.
    """
    right, apart = case.sides.right, case.sides.wrong - case.sides.right
    size, float32 = norm(right), unit_roundoff("float32")
    if case.step or not size or case.compute_roundoff >= float32 or (apart != 0).sum() < FEWEST_OF_NOISE:
        return False
    along = (float(apart.sum()), float(np.vdot(apart, right)))
    random = (norm(apart), norm(apart * right))
    if any(abs(found) > 4 * spread for found, spread in zip(along, random, strict=True)):
        return False
    return NOISE_ROUNDINGS[0] <= norm(apart) / (float32 * size) <= NOISE_ROUNDINGS[1]


ALL = (low_precision, norm_epsilon, tanh_gelu, dropout, transposed_kernel, convolution_padding, factor_of_branch)
