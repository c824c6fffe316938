"""Hypotheses about layers: positions, attention, padding in a norm, another layer's weight."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

import numpy as np

from crossframe.recording.event_format import INPUT, OUTPUT
from crossframe.recording.module_calls import called_module
from crossframe.verdict.diagnosis.attention_fits import (
    MOST_ELEMENTS,
    MOST_KEYS,
    Change,
    Projections,
    attention_of,
    head_counts,
)
from crossframe.verdict.diagnosis.case import At, Case
from crossframe.verdict.diagnosis.fit import Fit, Key, accepted
from crossframe.verdict.diagnosis.kernel_fits import Affine, other_kernel, other_scale
from crossframe.verdict.diagnosis.layer_fits import (
    MOST_ROWS,
    padded_norm,
    pooled,
    positions_off,
    rows_off,
)
from crossframe.verdict.diagnosis.module_hypotheses import (
    Both,
    affine_parameters,
    input_of,
    of_both,
    parameters_of,
)
from crossframe.verdict.measure.metrics import distance

NEARBY = 8
"""The number of earlier activations that are tried as projections."""


def shifted_positions(case: Case) -> Iterator[Fit]:
    """Positions are looked up a few rows too early or too late, in a parameter or in the table of sines and cosines."""
    if len(case.both.right.shape) < 2:
        return
    yield from _other_rows(case)
    for name, table in _position_tables(case):
        if found := positions_off(case.sides, table):
            rows = f"{abs(found.rows)} row{'s' if abs(found.rows) > 1 else ''}"
            where = f"{rows} {'later' if found.rows > 0 else 'earlier'} than {case.names[0]}"
            text = f"{case.names[1]} looks up each position in {name} {where}"
            yield Fit("shifted_positions", text, found.residual, found.error)


def _other_rows(case: Case) -> Iterator[Fit]:
    """The same for the output of a table itself, where the shift may differ between samples and need not hold for padding."""
    params = parameters_of(case)
    if params is None or params[0].ndim != 2:
        return
    if found := rows_off(case.both, params[0].astype(case.quantity.a.dtype).astype(np.float64)):
        shifts = ", ".join(f"{abs(by)} {'later' if by > 0 else 'earlier'}" for by in found.shifts)
        text = (
            f"{case.names[1]} looks up {found.num_shifted} of {found.total} positions in the table of {case.quantity.module} "
            f"some rows later or earlier than {case.names[0]}: {shifts}"
        )
        yield Fit("shifted_positions", text, 0.0)


def _position_tables(case: Case) -> Iterator[tuple[str, np.ndarray]]:
    """(name, table of shape (positions, width)), where a parameter may have leading dims of 1."""
    length, width = case.both.right.shape[-2:]
    for name, spec in case.right.manifest.params.items():
        shape = tuple(spec.shape[-2:])
        if len(shape) < 2 or spec.numel != shape[0] * shape[1] or shape[1] != width or shape[0] < length:
            continue
        if (table := case.as_used(case.right, name)) is not None:
            yield repr(name), np.asarray(table, np.float64).reshape(shape)
    if width % 2 == 0:
        angles = np.arange(length + MOST_ROWS)[:, None] * 1e4 ** -(np.arange(0, width, 2) / width)
        waves = np.sin(angles), np.cos(angles)
        yield "a table of alternating sines and cosines", np.stack(waves, axis=-1).reshape(len(angles), width)
        yield "a table of sines followed by cosines", np.concatenate(waves, axis=-1)


def attention(case: Case) -> Iterator[Fit]:
    """Attention differs in the scale of its scores, in what it masks, in its projections, or in the dtype of its shares.

    The projections must be recorded; rotary positions, groups of heads and masked keys at one end of a sample are recognised.
    """
    shape = case.both.right.shape
    if len(shape) not in (3, 4) or math.prod(shape) > MOST_ELEMENTS:
        return
    sides = case.both
    if len(shape) == 4:
        right, wrong = (side.reshape(*shape[:2], -1) for side in (sides.right, sides.wrong))
        sides = replace(sides, right=right, wrong=wrong)
    for inputs in _projections(case, sides.right.shape):
        if found := attention_of(sides, inputs, case.compute_roundoff):
            yield _described(case, found)
            return


def later_positions(case: Case) -> Iterator[Fit]:
    """All positions differ but the last one, which sees all others with a causal mask and without. Symmetric, so tried with one
    assignment of sides only."""
    right, wrong = case.both.right, case.both.wrong
    if case.swapped or right.ndim != 3 or case.quantity.rank is None or right.shape[1] < 3:
        return
    of_position = np.sqrt(np.square(right - wrong).sum(axis=(0, 2)))
    residual, tolerance = float(of_position[-1]), case.both.limit
    if of_position[:-1].min() > 2 * tolerance and accepted(residual, case.both.difference, tolerance):
        text = (
            f"of the {len(of_position)} positions of each sample all differ but the last one, which sees all others in any case: "
            "one run attends to later positions, and the other does not"
        )
        yield Fit("causal_mask", text, residual)


def _described(case: Case, found: Change) -> Fit:
    right, wrong = case.names
    heads = f"attention of {found.right.heads} heads"
    match found.kind:
        case "scale":
            width = math.prod(case.both.right.shape[2:]) // found.right.heads
            usual = math.isclose(found.right.factor, width**-0.5, rel_tol=1e-3)
            which = f" (1 / the square root of {width}, a head's width)" if usual else ""
            text = f"{heads} multiplies scores by {found.right.factor:.6g}{which} in {right}, and by "
            signature, text = "attention_scale", f"{text}{found.wrong.factor:.6g} in {wrong}"
        case "causal":
            masked, unmasked = (right, wrong) if found.right.causal else (wrong, right)
            signature = "causal_mask"
            text = f"{heads} sees later positions in {unmasked}, which a causal mask hides in {masked}"
        case "keys":
            seen, seen_by_wrong = found.right.keys, found.wrong.keys
            assert seen_by_wrong is not None  # it is what differs
            counts = seen_by_wrong.size if seen is None else seen.sum(), seen_by_wrong.sum()
            signature = "padding_counted"
            text = (
                f"{heads} masks keys: over all samples it sees {counts[0]} keys in {right} and {counts[1]} in {wrong}"
            )
        case "exchanged":
            signature, text = "mixed_parameters", f"{heads} uses queries as keys and keys as queries in {wrong}"
        case "scrambled":
            signature = "transposed"
            text = f"{heads} reads (positions, width) as (heads, positions, head width) in {wrong}, without exchanging dims"
        case dtype:
            signature, text = "low_precision", f"{heads} rounds its scores or shares to {dtype} in {wrong}"
    return Fit(signature, text, found.residual, found.error)


def _projections(case: Case, shape: tuple[int, ...]) -> Iterator[tuple[Projections, Projections]]:
    """Candidates for the projections of both sides: three of the nearest outputs, or one output that contains all three."""
    yield from _inside_module(case)
    near: list[tuple[At, tuple[np.ndarray, np.ndarray]]] = []
    for at in case.earlier(same_shape=False):
        if at[2] != OUTPUT or (both := of_both(case, at)) is None:
            continue
        if (flat := _by_position(both, shape)) is None:
            continue
        yield from _contained(flat, shape)
        near.append((at, flat))
        if len(near) == NEARBY:
            break
    for i in range(len(near) - 2):
        v, k, q = near[i : i + 3]
        yield from _of_three(q[1], k[1], v[1])
    normed = [
        each for each in near if len(case.right.activation_shape(case.step, case.quantity.rank or 0, *each[0])) == 4
    ]
    if len(normed) >= 2:
        for value in near:
            if value not in normed[:2]:
                yield from _of_three(normed[1][1], normed[0][1], value[1])


def _of_three(q: Both, k: Both, v: Both) -> Iterator[tuple[Projections, Projections]]:
    if k[0].shape == v[0].shape and q[0].shape[-1] % k[0].shape[-1] == 0:
        yield Projections(q[0], k[0], v[0]), Projections(q[1], k[1], v[1])


def _by_position(both: Both, shape: tuple[int, ...]) -> Both | None:
    """Both sides as (batch, positions, width); None for other shapes."""
    first, second = both
    if first.ndim == 4 and first.shape[1] != shape[1] and first.shape[2] == shape[1]:
        first, second = first.swapaxes(1, 2), second.swapaxes(1, 2)
    if first.ndim not in (3, 4) or first.shape[0] != shape[0]:
        return None
    flat = (*first.shape[:2], math.prod(first.shape[2:]))
    return first.reshape(flat), second.reshape(flat)


def _contained(both: Both, shape: tuple[int, ...]) -> Iterator[tuple[Projections, Projections]]:
    """Queries, keys and values next to each other, or next to each other in each head."""
    wide, width = both[0].shape[-1], shape[-1]
    if both[0].shape[:2] != shape[:2] or wide <= width or (wide - width) % 2:
        return
    narrow = (wide - width) // 2
    if width % narrow:
        return
    cut = width + narrow
    first, second = (Projections(side[..., :width], side[..., width:cut], side[..., cut:]) for side in both)
    yield first, second
    for heads in head_counts(width)[1:] if narrow == width else ():
        parts = [side.reshape(*side.shape[:2], heads, 3, -1) for side in both]
        q, k, v = ([part[..., i, :].reshape(shape) for part in parts] for i in range(3))
        first, second = (Projections(q[side], k[side], v[side]) for side in (0, 1))
        yield first, second


def _inside_module(case: Case) -> Iterator[tuple[Projections, Projections]]:
    """Projections by the parameters of a module that computes attention as a whole, as torch.nn.MultiheadAttention does."""
    given, module = input_of(case), called_module(case.quantity.module)
    names = [f"{module}.{name}" for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")]
    if given is None or given[0].ndim != 3 or any(name not in case.right.manifest.params for name in names):
        return
    values = [np.asarray(value, np.float64) for name in names if (value := case.as_used(case.right, name)) is not None]
    width = given[0].shape[-1]
    if [value.shape for value in values] != [(3 * width, width), (3 * width,), (width, width), (width,)]:
        return
    enter, enter_bias, weight, bias = values
    first, second = (Projections(*np.split(x @ enter.T + enter_bias, 3, axis=-1), after=(weight, bias)) for x in given)
    yield first, second


def padding_in_norm(case: Case) -> Iterator[Fit]:
    """The mean of a norm includes padding."""
    if (given := input_of(case)) is None:
        return
    for weight, bias in affine_parameters(case):
        if found := padded_norm(case.sides, given, weight, bias, case.compute_roundoff):
            text = (
                f"{case.quantity.module} is a {found.text} over {found.numel} elements in {case.names[0]}; in {case.names[1]} "
                f"its mean is over {found.counted}, {found.counted - found.numel} of which are padding"
            )
            yield Fit("padding_counted", text, found.residual, found.error)
            return


def padding_in_pooling(case: Case) -> Iterator[Fit]:
    """A mean, a maximum or the last position of a sequence counts padding at its end."""
    shape, rank = case.both.right.shape, case.quantity.rank
    if len(shape) != 2 or rank is None:
        return
    candidates = (
        at
        for at in case.earlier(same_shape=False)
        if len(given := case.right.activation_shape(case.step, rank, *at)) == 3
        and (given[0], given[2]) == shape
        and 1 < given[1] <= MOST_KEYS
    )
    for at in islice(candidates, NEARBY):
        if (both := of_both(case, at)) is not None and (found := pooled(case.sides, both)):
            text = (
                f"{case.names[0]} {found.text.format(f'the first {found.counted} of {found.total} positions')} of the {at[2]} of "
                f"{at[1]}, {case.names[1]} {found.wrong.format('all positions')}"
            )
            yield Fit("padding_counted", text, found.residual, found.error)
            return


def modules_exchanged(case: Case) -> Iterator[Fit]:
    """Modules run in another order: another module has the input that this one should have."""
    here, rank = case.here, case.quantity.rank
    if case.quantity.use != INPUT or not case.quantity.module or rank is None:
        return
    for at in case.right.activations(case.step):
        if at[0] != here[0] or at[2] != INPUT or at[1] == here[1] or at not in case.wrong.activations(case.step):
            continue
        same_shape = case.right.activation_shape(case.step, rank, *at) == case.both.right.shape
        if not same_shape or (both := of_both(case, at)) is None:
            continue
        residual = distance(both[1], case.both.right)
        if distance(both[0], case.both.right) > 2 * case.limit and accepted(residual, case.both.difference, case.limit):
            of_one = called_module(at[1]) == called_module(here[1])
            order = f"{'its calls come' if of_one else 'modules run'} in another order"
            text = f"in {case.names[1]} {at[1]} has the input that {here[1]} has in {case.names[0]}: {order}"
            yield Fit("mixed_parameters", text, residual)
            return


def other_layer(case: Case) -> Iterator[Fit]:
    """A module uses the weight of another module with the same shape, for example after units were gathered in the wrong
    order, or its own weight of an earlier step."""
    given, params = input_of(case), parameters_of(case)
    if given is None or params is None or params[0].ndim not in (1, 2):
        return
    others = {}
    for name, spec in case.right.manifest.params.items():
        module = name.rpartition(".")[0]
        if spec.shape == params[0].shape:
            theirs = parameters_of(case, module)
            if theirs is not None and theirs[0].shape == params[0].shape:
                others[module] = theirs
    earlier = {step: old for step in range(case.step) if (old := parameters_of(case, step=step)) is not None}
    for used in (others, _with_own_bias(others, params), earlier, _with_own_bias(earlier, params)):
        found = other_scale(case.sides, params, used)
        if found := found or other_kernel(case.sides, given, params, used, case.compute_roundoff):
            which, signature = f"the weight of {found[0]}", "mixed_parameters"
            if used is not others and isinstance(found[0], int):
                which, signature = f"its weight before step {found[0]}", "stale_copy"
            text = f"{case.module} uses {which} in {case.names[1]} and its own weight in {case.names[0]}"
            yield Fit(signature, text, found[1], found[2])
            return


def _with_own_bias(others: Mapping[Key, Affine], own: Affine) -> dict[Key, Affine]:
    return {name: (weight, own[1]) for name, (weight, _) in others.items()} if own[1] is not None else {}


ALL = (
    shifted_positions,
    attention,
    later_positions,
    padding_in_norm,
    padding_in_pooling,
    modules_exchanged,
    other_layer,
)
