"""Aligns the order of dims of activations in two recordings.

Where one recording does not state its order (`crossframe.recording.dims`), the shapes of both decide: they agree either as
recorded, or after the channels are moved from the last dim to dim 1. If both are possible, for example with 8 channels of 8 x 8,
two recordings of the same framework are left as recorded, and channels of convolutions are moved. Otherwise the order with the
smaller distance at the first dense step is used. One order holds for each module's input or output at all steps.
"""

from collections.abc import Iterable

import numpy as np

from crossframe.recording import Recording, common_steps
from crossframe.recording.dims import LEAST_DIMS, Order, channels_first_shape
from crossframe.verdict.measure.aligned_samples import At, aligned, shared_activations
from crossframe.verdict.measure.metrics import distance
from crossframe.verdict.measure.quantities import finite
from crossframe.verdict.measure.sample_ranks import is_by_rank
from crossframe.verdict.measure.values import Side, activation_values, match_values

Of = tuple[str, str]
"""(module, use)."""
_AS_THEY_ARE = (False, False)


def in_one_order(a: Recording, b: Recording) -> tuple[Recording, Recording]:
    """Return both recordings with the channels of activations moved to dim 1 where needed, so that the orders of dims agree."""
    steps = [step for step in common_steps(a, b) if a.activations(step) and b.activations(step)]
    same_framework = a.manifest.framework == b.manifest.framework
    moved: tuple[set[Of], set[Of]] = (set(), set())
    open_ones: dict[Of, list[tuple[bool, bool]]] = {}
    for of, choices in _choices(a, b, steps).items():
        if not choices:
            continue  # `measure.causal_order.walk` notes that the shapes differ
        if same_framework and _AS_THEY_ARE in choices:
            continue
        if len(choices) == 1 or choices[0] != _AS_THEY_ARE:
            _note(moved, of, choices[0])
        else:
            open_ones[of] = choices
    if open_ones:
        for of, choice in _nearest(a, b, steps[0], open_ones).items():
            _note(moved, of, choice)
    return a.with_channels_first(moved[0]), b.with_channels_first(moved[1])


def _note(moved: tuple[set[Of], set[Of]], of: Of, choice: tuple[bool, bool]) -> None:
    for names, is_moved in zip(moved, choice, strict=True):
        if is_moved:
            names.add(of)


def _choices(a: Recording, b: Recording, steps: Iterable[int]) -> dict[Of, list[tuple[bool, bool]]]:
    """For each activation whose order is unknown, the choices of (move in a, move in b) under which all shapes agree."""
    by_rank = is_by_rank(a, b)
    found: dict[Of, list[tuple[bool, bool]]] = {}
    for step in steps:
        for at in shared_activations(a, b, step):
            for rank in range(a.manifest.world_size if by_rank else 1):
                orders = [recording.activation_order(step, rank, *at) for recording in (a, b)]
                if orders == [Order.TORCH, Order.TORCH]:
                    break
                shapes = [recording.activation_shape(step, rank, *at) for recording in (a, b)]
                choices = found.setdefault(at[1:], _all_choices(orders))
                # At different world sizes, ranks have different numbers of samples.
                found[at[1:]] = [choice for choice in choices if _agree(shapes, choice, 0 if by_rank else 1)]
    return found


def _all_choices(orders: list[Order]) -> list[tuple[bool, bool]]:
    """All choices, the likeliest first: moving nothing, unless exactly one side is known to be a convolution's activation."""
    moves = [
        move for move, order in zip(((True, False), (False, True)), orders, strict=True) if order is not Order.TORCH
    ]
    is_known = orders.count(Order.CONVOLUTION) == 1 and orders.count(Order.TORCH) == 1
    return [*moves, _AS_THEY_ARE] if is_known else [_AS_THEY_ARE, *moves]


def _agree(shapes: list[tuple[int, ...]], choice: tuple[bool, bool], first: int) -> bool:
    if any(moved and len(shape) < LEAST_DIMS for shape, moved in zip(shapes, choice, strict=True)):
        return False
    a, b = (channels_first_shape(s) if moved else s for s, moved in zip(shapes, choice, strict=True))
    return a[first:] == b[first:]


def _nearest(
    a: Recording, b: Recording, step: int, of: dict[Of, list[tuple[bool, bool]]]
) -> dict[Of, tuple[bool, bool]]:
    """For each activation, the choice with the smallest distance between values; the first one on ties."""
    best: dict[Of, tuple[float, tuple[bool, bool]]] = {}
    for choice in ((False, False), (True, False), (False, True)):
        names = {each for each, choices in of.items() if choice in choices}
        views = (a.with_channels_first(names) if choice[0] else a, b.with_channels_first(names) if choice[1] else b)
        for each, apart in _distances(*views, step, names).items():
            if each not in best or apart < best[each][0]:
                best[each] = apart, choice
    return {each: choice for each, (_, choice) in best.items()}


def _distances(a: Recording, b: Recording, step: int, names: set[Of]) -> dict[Of, float]:
    found: dict[Of, float] = {}
    for at, x, y in _sides(a, b, step, names):
        left, right, _ = match_values(x, y, by_sketch=False)
        found[at[1:]] = float(np.hypot(found.get(at[1:], 0.0), distance(finite(left), finite(right))))
    return found


def _sides(a: Recording, b: Recording, step: int, names: set[Of]) -> Iterable[tuple[At, Side, Side]]:
    if not is_by_rank(a, b):
        yield from ((at, Side(x), Side(y)) for at, _, x, y in aligned(a, b, step) if at[1:] in names)
        return
    for at in shared_activations(a, b, step):
        if at[1:] in names:
            for rank in range(a.manifest.world_size):
                yield at, activation_values(a, step, rank, at), activation_values(b, step, rank, at)
