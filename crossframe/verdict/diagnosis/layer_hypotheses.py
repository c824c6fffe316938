"""Hypotheses about layers: positions, attention, padding in a norm, another layer's weight."""

from collections.abc import Iterator

import numpy as np

from crossframe.recording.lines import OUTPUT
from crossframe.verdict.diagnosis.case import At, Case
from crossframe.verdict.diagnosis.fit import Claim, Fit
from crossframe.verdict.diagnosis.layer_fits import attention_of, other_kernel, other_scale, padded_norm, positions_off
from crossframe.verdict.diagnosis.module_hypotheses import input_of, of_both, parameters_of

NEARBY = 8
"""How many earlier activations are tried as projections."""


def shifted_positions(case: Case) -> Iterator[Fit]:
    """Rows of a table are looked up some places early or late, and added."""
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
        said = f"{case.names[1]} takes each position from {name!r} {where}"
        yield Fit("shifted_positions", said, found.rest, found.error, Claim("positions", found.rows))


def attention_scale(case: Case) -> Iterator[Fit]:
    """Attention whose scores have another factor. Projections must have been recorded, and nothing may lie between them and the
    scores, as rotary positions do."""
    for ats in _projections(case):
        both = [of_both(case, at) for at in ats]
        if any(each is None for each in both):
            continue
        inputs = [[each[side] for each in both if each is not None] for side in (0, 1)]
        if len(ats) == 1:
            inputs = [np.split(one[0], 3, axis=-1) for one in inputs]
        if found := attention_of(case.both, inputs, case.compute_roundoff):
            width = case.both.right.shape[2] // found.heads
            said = (
                f"attention of {found.heads} heads multiplies scores by {found.right:.6g} (1 / the square root of {width}, "
                f"a head's width) in {case.names[0]}, and by {found.wrong:.6g} in {case.names[1]}"
            )
            yield Fit("attention_scale", said, found.rest, found.error, Claim("scale", found.wrong, found.uncertainty))
            return


def _projections(case: Case) -> Iterator[list[At]]:
    """Where q, k and v may be: the outputs of three modules that ran one after the other, or one output three times as wide."""
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
    """A norm whose mean counts padding."""
    given, params = input_of(case), parameters_of(case)
    if given is None or params is None or params[0].ndim != 1:
        return
    if found := padded_norm(case.sides, given, *params, case.compute_roundoff):
        said = (
            f"{case.quantity.module} is a {found.said} over {found.numel} elements in {case.names[0]}; in {case.names[1]} its "
            f"mean is taken over {found.counted}, {found.counted - found.numel} of padding among them"
        )
        yield Fit("padding_counted", said, found.rest, found.error, Claim("counted", found.counted))


def other_layer(case: Case) -> Iterator[Fit]:
    """A module multiplied by the weight of another one of the same shape, as of units gathered in another order."""
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
        said = f"{case.quantity.module} of {case.names[1]} uses the weight of {found[0]}, and that of {case.names[0]} its own"
        yield Fit("mixed_parameters", said, found[1], found[2], Claim("mixed"))


ALL = (shifted_positions, attention_scale, padding_in_norm, other_layer)
