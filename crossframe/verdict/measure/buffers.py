"""The tensors of a model that are no parameters, after each step: running means, codebooks, averages of parameters.

Each rank has its own. They are compared rank by rank where the ranks of both recordings have the same samples in the same
microbatches. At other world sizes they are compared if all ranks of a recording have the same bits, as after an all-reduce, and
both call the model as often in a step. If the samples come in another order, and blocks of as many rows of a buffer do so too, as
in a queue of features, rows are compared in one order. A buffer, or an element of it, that no step of either run has changed is
not compared: what is computed from it shows whether it is right, and memory that is not initialised may have any value.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from crossframe.dtypes import unit_roundoff
from crossframe.recording import Recording, Sketch
from crossframe.recording.event_format import BUFFERS, INPUT, PARAMETERS, UPDATE
from crossframe.verdict.measure.aligned_samples import in_place
from crossframe.verdict.measure.comparable import labels
from crossframe.verdict.measure.metrics import distance, norm, parameter_scale
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import Quantity, finite
from crossframe.verdict.measure.routed_rows import MOST_ROWS, matching_rows
from crossframe.verdict.measure.values import Side, assemble, match_values

EVENT = "buffer"


def buffers_of(pair: Pair, step: int) -> Iterator[list[Quantity]]:
    """Yield the buffers that either recording has changed by the end of a step, each on all compared ranks."""
    names = dict.fromkeys((*pair.a.buffers(step), *pair.b.buffers(step)))
    for name in (each for each in names if pair.a.has_buffer(step, each) and pair.b.has_buffer(step, each)):
        ranks = _compared_ranks(pair, step, name)
        if ranks is not None:
            yield [_quantity(pair, step, name, rank) for rank in ranks]


def buffer_value(recording: Recording, step: int, rank: int, name: str) -> Side:
    """A buffer after a step; before the first step for -1."""
    value = recording.buffer(step, rank, name)
    return Side(None, value) if isinstance(value, Sketch) else Side(value)


def _compared_ranks(pair: Pair, step: int, name: str) -> range | None:
    """The ranks whose values are compared, or the first one for all of them; None, with a note in the pair, if none are."""
    worlds = [recording.manifest.world_size for recording in (pair.a, pair.b)]
    for rank in range(min(worlds)):
        shapes = [recording.buffer_shape(step, rank, name) for recording in (pair.a, pair.b)]
        if shapes[0] != shapes[1]:
            first, second = labels(pair.a, pair.b)
            pair.unlike_buffers[name] = f"it has shape {shapes[0]} in {first} and {shapes[1]} in {second}"
            return None
    if pair.by_rank and (not pair.reordered(step) or in_place(pair.a, pair.b, step)):
        return range(worlds[0])
    if _calls(pair.a) != _calls(pair.b):
        pair.unlike_buffers[name] = "the models are called for other microbatches"
    elif not all(_is_one(recording, step, name) for recording in (pair.a, pair.b)):
        pair.unlike_buffers[name] = "each rank has its own, of its own samples"
    else:
        return range(1)
    return None


def _calls(recording: Recording) -> int:
    """The number of microbatches of a step, as far as recorded."""
    steps = recording.recorded_steps()
    return max((at[0] for step in steps[:1] for at in recording.activations(step)), default=0)


def _is_one(recording: Recording, step: int, name: str) -> bool:
    """Whether all ranks have the same bits."""
    first, *others = (buffer_value(recording, step, rank, name) for rank in range(recording.manifest.world_size))
    return all(first.has_bits_of(other) for other in others)


def _quantity(pair: Pair, step: int, name: str, rank: int) -> Quantity:
    sides = (buffer_value(recording, step, rank, name) for recording in (pair.a, pair.b))
    a, b, sketches = match_values(*sides, by_sketch=pair.sketched)
    if sketches is None and (not pair.by_rank or pair.reordered(step)):
        b = _in_one_order(pair, step, name, a, b)
    if sketches is None and a.tobytes() != b.tobytes():
        unchanged = _unchanged(pair.a, step, rank, name) & _unchanged(pair.b, step, rank, name)
        b = np.where(unchanged, a, b).astype(b.dtype, copy=False)
    unit, bound = pair.b.manifest.maker(name, INPUT), pair.bounds.parameter
    made = Quantity(step, BUFFERS, EVENT, unit, "", rank, 0, a, b, 1.0, bound, buffer=name, sketches=sketches)
    of = pair.remember((buffers_of, name, rank), lambda: averaged_parameter(pair.a, step, rank, name))
    if of is None:
        return made.with_scale(_scale(pair, step, rank, made))
    if of in pair.zero_gradient or of in pair.noise:
        made = replace(made, bound=math.inf)
    rate = pair.a.manifest.learning_rate or 0.0
    return made.with_scale(parameter_scale(made.norms[0], made.numel, pair.total_update_norm(of), rate, pair.num_steps))


def _in_one_order(pair: Pair, step: int, name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The other side's values, their rows in the order of a's where they come in the order of the samples, as in a queue of
    features that ranks fill with those of a whole batch at a time."""
    order = _order_of_samples(pair, step)
    if order is None or a.ndim < 2 or a.shape != b.shape or len(a) % len(order) or len(a) > MOST_ROWS:
        return b
    rows = matching_rows(a.reshape(len(a), -1), b.reshape(len(b), -1), pair.bounds.parameter, are_known=True)
    if rows is None or (rows == np.arange(len(rows))).all():
        return b
    blocks = rows.reshape(-1, len(order)) - len(order) * np.arange(len(rows) // len(order))[:, None]
    if not all((block == order).all() or (block == np.arange(len(order))).all() for block in blocks):
        return b
    pair.routed.setdefault(name, step)
    return b[rows]


def _order_of_samples(pair: Pair, step: int) -> np.ndarray | None:
    """Where b has each of a's samples, if all ranks together have the same ones in another order; None if not."""
    sides = [
        [i for rank in range(recording.manifest.world_size) for i in recording.batch(step, rank).sample_ids]
        for recording in (pair.a, pair.b)
    ]
    if sides[0] == sides[1] or sorted(sides[0]) != sorted(sides[1]) or len(set(sides[0])) < len(sides[0]):
        return None
    at = {sample: i for i, sample in enumerate(sides[1])}
    return np.array([at[sample] for sample in sides[0]])


def _unchanged(recording: Recording, step: int, rank: int, name: str) -> np.ndarray | np.bool:
    """The elements that are as before the first step; none if those were not recorded."""
    if has_before(recording, -1, step, name):
        sides = (buffer_value(recording, at, rank, name) for at in (-1, step))
        first, now, sketches = match_values(*sides, by_sketch=False)
        if sketches is None:
            return (now == first) | ((now != now) & (first != first))
    return np.False_


def _scale(pair: Pair, step: int, rank: int, quantity: Quantity) -> float:
    """The norm of a buffer, but at least that of the module's other buffers of as many elements.

    The rounding of a mean is proportional to the values, not to their mean, which may be zero. The size of the values is in the
    variance next to it.
    """
    module = quantity.buffer.rpartition(".")[0]
    others = [
        buffer_value(pair.a, step, rank, name)
        for name in pair.a.buffers(step)
        if name.rpartition(".")[0] == module
        and pair.a.has_buffer(step, name)
        and math.prod(pair.a.buffer_shape(step, rank, name)) == quantity.numel
    ]
    return max([quantity.norms[0], *(side.norm for side in others)])


def has_before(recording: Recording, before: int, step: int, name: str) -> bool:
    """Whether a buffer is known after an earlier step (-1: before the first one), in the shape that it has after a step."""
    if before not in (-1, *recording.recorded_steps()) or not recording.has_buffer(before, name):
        return False
    ranks = range(recording.manifest.world_size)
    return all(recording.buffer_shape(before, rank, name) == recording.buffer_shape(step, rank, name) for rank in ranks)


def averaged_parameter(recording: Recording, step: int, rank: int, name: str) -> str | None:
    """The parameter of which a buffer is a moving average: b' = b + c (p - b), from equal values. None if there is none."""
    if not all(has_before(recording, before, step, name) for before in (-1, step - 1)):
        return None
    before, after = (buffer_value(recording, each, rank, name) for each in (step - 1, step))
    start, shape = buffer_value(recording, -1, rank, name), recording.buffer_shape(step, rank, name)
    for param, spec in recording.manifest.params.items():
        if spec.shape != shape or not recording.has(UPDATE, step, param) or not recording.has(PARAMETERS, 0, param):
            continue
        if not start.has_bits_of(assemble(recording, PARAMETERS, 0, param)):
            continue
        new, old, _ = match_values(after, before, by_sketch=False)
        value, _, _ = match_values(assemble(recording, UPDATE, step, param), before, by_sketch=False)
        old, new, value = finite(old), finite(new), finite(value)
        x, y = value - old, new - old
        # A few roundings of the values.
        error = 4 * unit_roundoff(spec.dtype) * (norm(old) + norm(value))
        if norm(x) and norm(y) > error and distance(y, float((x * y).sum() / (x * x).sum()) * x) <= error:
            return param
    return None


def differing_at_first(pair: Pair) -> list[str]:
    """The buffers of both recordings whose values before the first step differ by more than rounding."""
    theirs, found = set(pair.b.initial_buffers()), []
    for name in (name for name in pair.a.initial_buffers() if name in theirs):
        if pair.a.buffer_shape(-1, 0, name) != pair.b.buffer_shape(-1, 0, name):
            continue
        sides = (buffer_value(recording, -1, 0, name) for recording in (pair.a, pair.b))
        a, b, _ = match_values(*sides, by_sketch=False)
        a, b = finite(a), finite(b)
        if distance(a, b) > pair.bounds.parameter * max(norm(a), norm(b)):
            found.append(name)
    return found
