"""Hypotheses about layers: positions, attention, padding in a norm, another layer's weight."""

from collections.abc import Iterator

import numpy as np

from crossframe.recording.event_format import OUTPUT
from crossframe.verdict.diagnosis.case import At, Case
from crossframe.verdict.diagnosis.fit import Claim, Fit
from crossframe.verdict.diagnosis.layer_fits import attention_of, other_kernel, other_scale, padded_norm, positions_off
from crossframe.verdict.diagnosis.module_hypotheses import input_of, of_both, parameters_of

NEARBY = 8
"""The number of earlier activations that are tried as projections."""


def shifted_positions(case: Case) -> Iterator[Fit]:
    """Positions are looked up a few rows too early or too late."""
    shape = case.both.right.shape
    if len(shape) < 2:
        return
    for name, spec in case.right.manifest.params.items():
        if len(spec.shape) != 2 or spec.shape[1] != shape[-1] or spec.shape[0] < shape[-2]:
            continue
        table = case.as_used(case.right, name)
        if table is None or not (found := positions_off(case.sides, np.asarray(table, np.float64))):
            continue
        rows = f"{abs(found.rows)} row{'s' if abs(found.rows) > 1 else ''}"
        where = f"{rows} {'later' if found.rows > 0 else 'earlier'} than {case.names[0]}"
        text = f"{case.names[1]} looks up each position in {name!r} {where}"
        yield Fit("shifted_positions", text, found.residual, found.error, Claim("positions", found.rows))


def attention_scale(case: Case) -> Iterator[Fit]:
    """Attention scores have another scale. The projections must be recorded and enter the scores unchanged, so without rotary
    positions."""
    for ats in _projections(case):
        both = [of_both(case, at) for at in ats]
        if any(each is None for each in both):
            continue
        inputs = [[each[side] for each in both if each is not None] for side in (0, 1)]
        if len(ats) == 1:
            inputs = [np.split(one[0], 3, axis=-1) for one in inputs]
        if found := attention_of(case.both, inputs, case.compute_roundoff):
            width = case.both.right.shape[2] // found.heads
            text = (
                f"attention of {found.heads} heads multiplies scores by {found.right:.6g} (1 / the square root of {width}, "
                f"a head's width) in {case.names[0]}, and by {found.wrong:.6g} in {case.names[1]}"
            )
            yield Fit(
                "attention_scale", text, found.residual, found.error, Claim("scale", found.wrong, found.uncertainty)
            )
            return


def _projections(case: Case) -> Iterator[list[At]]:
    """Candidates for q, k and v: three consecutive outputs, or one output three times as wide."""
    shape, rank = case.both.right.shape, case.quantity.rank
    if len(shape) != 3 or rank is None:
        return
    near: list[At] = []
    for at in case.earlier(same_shape=False):
        if at[2] != OUTPUT:
            continue
        given = case.right.activation_shape(case.step, rank, *at)
        if given == (*shape[:2], 3 * shape[2]):
            yield [at]
        if given == shape:
            near.append(at)
        if len(near) == NEARBY:
            break
    for i in range(len(near) - 2):
        yield near[i : i + 3][::-1]


def padding_in_norm(case: Case) -> Iterator[Fit]:
    """The mean of a norm includes padding."""
    given, params = input_of(case), parameters_of(case)
    if given is None or params is None or params[0].ndim != 1:
        return
    if found := padded_norm(case.sides, given, *params, case.compute_roundoff):
        text = (
            f"{case.quantity.module} is a {found.text} over {found.numel} elements in {case.names[0]}; in {case.names[1]} its "
            f"mean is over {found.counted}, {found.counted - found.numel} of which are padding"
        )
        yield Fit("padding_counted", text, found.residual, found.error, Claim("counted", found.counted))


def other_layer(case: Case) -> Iterator[Fit]:
    """A module uses the weight of another module with the same shape, for example after units were gathered in the wrong
    order."""
    given, params = input_of(case), parameters_of(case)
    if given is None or params is None or params[0].ndim not in (1, 2):
        return
    others = {}
    for name, spec in case.right.manifest.params.items():
        module = name.rpartition(".")[0]
        if spec.shape == params[0].shape and module != case.quantity.module:
            theirs = parameters_of(case, module)
            if theirs is not None and theirs[0].shape == params[0].shape:
                others[module] = theirs
    found = other_scale(case.sides, given, params, others)
    if found := found or other_kernel(case.sides, given, params, others, case.compute_roundoff):
        text = f"{case.quantity.module} uses the weight of {found[0]} in {case.names[1]} and its own weight in {case.names[0]}"
        yield Fit("mixed_parameters", text, found[1], found[2], Claim("mixed"))


ALL = (shifted_positions, attention_scale, padding_in_norm, other_layer)
