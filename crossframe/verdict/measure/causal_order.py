"""Yields all quantities of a pair in causal order.

Initial parameters; then for each step the gathered parameters, the inputs and outputs of modules, losses, local gradients,
reduced gradients, their norm, optimizer state, updated parameters and buffers; where optimizers take turns within a step, all of
this but buffers for each turn. Gradients come in reverse order of the units, as in
backward. Local quantities are compared at equal world sizes; at different world sizes only activations are, sample by sample. All
causes of the first quantity outside its bound are within their bounds, so the bug is there.
"""

import functools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from crossframe.alignment.elementwise import activation_between
from crossframe.alignment.modules import NEAR
from crossframe.dtypes import coarser, numpy_dtype, unit_roundoff
from crossframe.recording import Recording
from crossframe.recording.element_ranges import ElementRange
from crossframe.recording.event_format import (
    BACKWARD,
    BUFFERS,
    COUNT,
    FORWARD,
    NORM,
    PARAMETERS,
    REDUCE,
    STATE,
    UNSHARDED,
    UPDATE,
    before_step,
)
from crossframe.recording.hashing import same_bits
from crossframe.recording.known_settings import LOSSES, MEAN
from crossframe.trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from crossframe.verdict.measure.aligned_samples import At, aligned, in_place, shared_activations, unmatched
from crossframe.verdict.measure.buffers import buffers_of
from crossframe.verdict.measure.clipping import Multiplied, clipped_on_one_side
from crossframe.verdict.measure.comparable import labels
from crossframe.verdict.measure.judge import judge
from crossframe.verdict.measure.loss_scale import repeats_of_loss, scaled_on_one_side, shares_of
from crossframe.verdict.measure.metrics import FEW_ROUNDINGS, gradient_scale, parameter_scale
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import ACTIVATION, Quantity, finite
from crossframe.verdict.measure.routed_rows import MOST_ROWS, RoutedRows
from crossframe.verdict.measure.squares import holds_squares
from crossframe.verdict.measure.values import (
    Side,
    Sides,
    activation_values,
    assemble,
    is_same,
    match_values,
    rank_values,
)

_MOST_NEAR = 0.05
"""The largest relative distance up to which values are those of an elementwise activation, in dtypes with coarse bounds. It is
smaller than the distance of most activations of standard normal numbers: 0.09 of a sigmoid and a hard sigmoid."""
ALL = (PARAMETERS, UNSHARDED, FORWARD, BACKWARD, REDUCE, NORM, STATE, UPDATE, BUFFERS)

Group = list[Quantity]
"""The same quantity on several ranks or replicas."""


def walk(pair: Pair, phases: Sequence[str] = ALL, steps: Iterable[int] | None = None) -> Iterator[Group]:
    """Yield every group of quantities of these phases in causal order.

    Args:
        steps: None for all common steps.
    """
    if PARAMETERS in phases:
        yield from _parameters(pair)
    for step in range(pair.num_steps) if steps is None else steps:
        if turns := _turns(pair, step):
            yield from sorted(_of_step(pair, step, phases), key=lambda group: _turn_of(pair, turns, group[0]))
        else:
            yield from _of_step(pair, step, phases)


def _of_step(pair: Pair, step: int, phases: Sequence[str]) -> Iterator[Group]:
    """The groups of a step in which optimizers step at the end."""
    if step not in pair.steps:
        phases = [phase for phase in phases if phase in (FORWARD, NORM)]
    if UNSHARDED in phases:
        yield from _unsharded(pair, step)
    if FORWARD in phases:
        whole = pair.by_rank and (not pair.reordered(step) or in_place(pair.a, pair.b, step))
        losses = _losses(pair, step)
        yield from _of_one_kind(pair, (_activations if whole else _aligned_activations)(pair, step), losses)
        yield from _losses_of_backwards(pair, step)
        yield losses
    if BACKWARD in phases and pair.by_rank:
        yield from _local_grads(pair, step)
    if REDUCE in phases:
        yield from _reduced_grads(pair, step)
    if NORM in phases:
        yield from _norms(pair, step)
    if STATE in phases:
        yield from _state(pair, step)
    if UPDATE in phases:
        yield from _updates(pair, step)
    if BUFFERS in phases:
        yield from buffers_of(pair, step)


def _turns(pair: Pair, step: int) -> list[int]:
    """The numbers of forwards after which optimizers step that take turns within a step; [] if the recordings differ in them."""
    if not _alike_backwards(pair, step):
        return []
    turns = [[recording.turn(step, name) for name in pair.names()] for recording in (pair.a, pair.b)]
    return sorted({*turns[0]} - {0}) if turns[0] == turns[1] else []


def _turn_of(pair: Pair, turns: list[int], quantity: Quantity) -> int:
    """The index of the turn that a quantity of a step belongs to: what an optimizer has updated is a cause of later forwards."""
    if quantity.phase == UNSHARDED:
        return 0
    if quantity.parameter:
        after = pair.a.turn(quantity.step, quantity.parameter)
    elif quantity.kind == ACTIVATION:
        after = quantity.microbatch + 1
    else:
        after = quantity.microbatch and pair.a.backwards(quantity.step, 0)[quantity.microbatch - 1][0]
    return bisect_left(turns, after) if after else len(turns)


def _alike_backwards(pair: Pair, step: int) -> bool:
    """Whether all ranks of both recordings have as many forwards before each backward of a step; without turns, none have any."""
    if not pair.by_rank:
        return False
    ranks = range(pair.a.manifest.world_size)
    forwards = [[each for each, _ in r.backwards(step, rank)] for r in (pair.a, pair.b) for rank in ranks]
    return all(each == forwards[0] for each in forwards)


def quantity_of(pair: Pair, phase: str, step: int, name: str, use: str) -> Quantity | None:
    """A reduced gradient, optimizer state entry or updated parameter of the first replicas; None unless both recordings have it.

    Args:
        use: the name of the optimizer state entry.
    """
    if name not in pair.names() or not pair.has(phase, step, name, use):
        return None
    if phase == STATE:
        return _slot(pair, step, name, use, (0, 0))
    return (_reduced_grad if phase == REDUCE else _update)(pair, step, name, (0, 0))


def _quantity(
    pair: Pair,
    step: int,
    phase: str,
    event: str,
    name: str,
    sides: Sides,
    *,
    scale: float = 1.0,
    bound: float | None,
    rank: int | None = None,
    replica: int = 0,
    use: str = "",
    within: str = "",
) -> Quantity:
    """A quantity of a parameter, or of no parameter ("")."""
    if name and bound is not None and (name in pair.zero_gradient or name in pair.noise):
        bound = np.inf
    a, b, sketches = sides
    return Quantity(
        step,
        phase,
        event,
        pair.b.manifest.unit_of.get(name, ""),
        name,
        rank,
        replica,
        a,
        b,
        scale,
        bound,
        late=phase == UPDATE and step >= pair.whole_until,
        use=use,
        sketches=sketches,
        within=within,
    )


def _without_noise(pair: Pair, name: str, sides: Sides) -> Sides:
    """Both sides with a's values where the gradient is zero up to rounding, which optimizers amplify, and both are finite."""
    a, b, sketches = sides
    if sketches is not None or a.ndim != 1 or (mask := pair.zero_gradient_elements(name)) is None:
        return sides
    return a, np.where(mask & np.isfinite(a) & np.isfinite(b), a, b).astype(b.dtype), None


def _numbers(a: float, b: float) -> Sides:
    return np.array([a]), np.array([b]), None


def _parameters(pair: Pair) -> Iterator[Group]:
    for name in pair.names():
        if not pair.has(PARAMETERS, 0, name):
            continue
        yield [_initial(pair, name, replicas) for replicas in pair.replicas]


def _initial(pair: Pair, name: str, replicas: tuple[int, int]) -> Quantity:
    """Initial values must be bitwise equal after a cast to the coarser dtype. Sketches of different dtypes may differ by the unit
    roundoff."""
    a, b, sketches = pair.assemble(PARAMETERS, 0, name, replicas)
    stored = coarser(*(recording.manifest.params[name].dtype for recording in (pair.a, pair.b)))
    bound = None
    if sketches is None:
        a, b = (side.astype(numpy_dtype(stored), copy=False) for side in (a, b))
    elif sketches[0].dtype != sketches[1].dtype:
        bound = unit_roundoff(stored)
    made = _quantity(pair, 0, PARAMETERS, ALL_GATHER, name, (a, b, sketches), bound=None, replica=replicas[1])
    return made if bound is None else replace(made, bound=bound, scale=max(made.norms))


def _unsharded(pair: Pair, step: int) -> Iterator[Group]:
    """A parameter that a rank gathered must be bitwise equal to the shards of the same recording.

    A loop may change parameters between steps, and rounding may decide whether it does (for example, if a norm exceeds a limit).
    If the unsharded values of one recording differ from its shards and the loop of the other one also changes parameters at some
    step, the unsharded values of both recordings are compared instead, if both have them. The same holds for unsharded values
    that differ from their shards by a few roundings, as where an evaluation turns parameters into averaged ones and back.
    """
    for name in pair.names():
        groups = []
        for within, recording in (("a", pair.a), ("b", pair.b)):
            group = []
            for part in recording.ranges(UNSHARDED, step, name):
                if (sides := _gathered(recording, step, part, name)) is not None:
                    group.append(
                        _quantity(
                            pair, step, UNSHARDED, ALL_GATHER, name, sides, bound=None, rank=part.rank, within=within
                        )
                    )
            groups.append(group)
        edited = [[quantity for quantity in group if not judge(quantity).equal] for group in groups]
        others = (recording for recording, own in zip((pair.a, pair.b), edited, strict=True) if not own)
        sides = zip((pair.a, pair.b), edited, strict=True)
        are_rounded = any(edited) and all(_are_rounded(recording, step, name, own) for recording, own in sides)
        are_recorded = all(groups)
        if are_recorded and any(edited) and (are_rounded or all(map(_edits_parameters, others))):
            yield _edited(pair, step, name)
        elif are_recorded or not are_rounded:
            yield from (group for group in groups if group)


def _are_rounded(recording: Recording, step: int, name: str, edited: Sequence[Quantity]) -> bool:
    """Whether the unsharded values that differ from shards were changed by a few roundings: on all ranks alike, and not to the
    shards of an earlier step, which differ by no more if the learning rate is tiny."""
    if not edited:
        return True
    if len(edited) < len(recording.ranges(UNSHARDED, step, name)) or not all(map(_is_rounded, edited)):
        return False
    if not all(same_bits(quantity.b, edited[0].b) for quantity in edited):
        return False
    earlier = (before_step(each) for each in range(step) if each in recording.recorded_steps())
    shards = (assemble(recording, *each, name) for each in earlier if recording.has(*each, name))
    gathered = rank_values(recording, UNSHARDED, step, edited[0].rank or 0, name)
    return not any(is_same(match_values(each, gathered, by_sketch=False)) for each in shards)


def _is_rounded(quantity: Quantity) -> bool:
    """Whether each element is within a few roundings of the largest one, in float32 or float64. A few roundings of a narrower
    dtype are as large as an update by an optimizer."""
    u = max(map(unit_roundoff, quantity.dtypes))
    a, b = (finite(side) for side in (quantity.a, quantity.b))
    return u <= unit_roundoff("float32") and bool(np.abs(a - b).max() <= FEW_ROUNDINGS * u * np.abs(a).max())


@functools.lru_cache(maxsize=8)
def _edits_parameters(recording: Recording) -> bool:
    """Whether the loop changes any parameter between steps."""
    return any(
        (sides := _gathered(recording, step, part, name)) is not None and not is_same(sides)
        for step in recording.recorded_steps()
        for name in recording.manifest.params
        for part in recording.ranges(UNSHARDED, step, name)
    )


def _edited(pair: Pair, step: int, name: str) -> Group:
    """The gathered parameters of both recordings; rank 0 of the side with fewer ranks is used for its missing ranks."""
    worlds = [recording.manifest.world_size for recording in (pair.a, pair.b)]
    group = []
    for rank in range(max(worlds)):
        ranks = [rank if rank < world else 0 for world in worlds]
        sides = (rank_values(r, UNSHARDED, step, own, name) for r, own in zip((pair.a, pair.b), ranks, strict=True))
        made = match_values(*sides, by_sketch=pair.sketched)
        quantity = _quantity(pair, step, UNSHARDED, ALL_GATHER, name, made, bound=pair.bounds.parameter, rank=ranks[1])
        group.append(quantity.with_scale(_moving_scale(pair, name, quantity)))
    return group


def _moving_scale(pair: Pair, name: str, quantity: Quantity) -> float:
    rate = pair.a.manifest.learning_rate or 0.0
    return parameter_scale(quantity.norms[0], quantity.numel, pair.total_update_norm(name), rate, pair.num_steps)


def _gathered(recording: Recording, step: int, part: ElementRange, name: str) -> Sides | None:
    """(value of the shards, value that a rank gathered); None if the former was not recorded or is a sketch of another dtype."""
    rank = part.rank
    phase, before = before_step(step)
    if step and not recording.has(UPDATE, before, name) and not recording.manifest.params[name].requires_grad:
        phase, before = PARAMETERS, 0  # frozen
    if not recording.has(phase, before, name):
        return None
    held = assemble(recording, phase, before, name, replica=recording.manifest.mesh.coordinate(rank)[0])
    if held.elements is not None:
        held = Side(held.elements.astype(numpy_dtype(part.dtype)))  # rounds to nearest, as the gather's cast does (R33)
    elif held.sketch is not None and held.sketch.dtype != part.dtype:
        return None
    return match_values(held, rank_values(recording, UNSHARDED, step, rank, name), by_sketch=False)


def _activations(pair: Pair, step: int) -> Iterator[tuple[At, Group]]:
    """Activations of all ranks; those whose shapes differ are noted in the pair instead."""
    rows = RoutedRows(pair, step)
    for at in shared_activations(pair.a, pair.b, step):
        group = []
        for rank in range(pair.a.manifest.world_size):
            shapes = [recording.activation_shape(step, rank, *at) for recording in (pair.a, pair.b)]
            # A loss of shape (1,) is that of shape (): a number.
            if shapes[0] != shapes[1] and not all(math.prod(shape) == 1 for shape in shapes):
                first, second = labels(pair.a, pair.b)
                pair.of_other_shapes[at[1:]] = (
                    f"at step {step} the {at[2]} of module {at[1]!r} has shape {shapes[0]} in {first} and {shapes[1]} in "
                    f"{second}{_order_hint(shapes)}"
                )
                break
            sides = (activation_values(recording, step, rank, at) for recording in (pair.a, pair.b))
            matched = rows.in_one_order(at, rank, match_values(*sides, by_sketch=pair.sketched))
            if matched is None:
                pair.unmatched[at[1:]] = f"it has more than {MOST_ROWS} rows, in different orders"
                break
            group.append(_activation(pair, step, at, rank, matched))
        else:
            yield at, group


def _of_one_kind(pair: Pair, groups: Iterable[tuple[At, Group]], losses: Group) -> Iterator[Group]:
    """Leave out what is before an elementwise activation on one side and after it on the other, if the next quantity agrees.

    A norm that applies its activation itself is another module than a norm before an activation, and what uses either agrees. If
    it does not, one side lacks the activation, and this is where they differ. The loss follows the last quantity of a microbatch.
    """
    near = max(NEAR, min(pair.bounds.parameter, _MOST_NEAR))
    held: list[tuple[At, Group, str]] = []
    for at, group in groups:
        if held and held[0][0][0] != at[0]:
            yield from _settled(pair, held, losses, near)
            held = []
        if why := _across_activation(pair, group, near):
            held.append((at, group, why))
            continue
        yield from _settled(pair, held, group, near)
        held = []
        yield group
    yield from _settled(pair, held, losses, near)


def _settled(pair: Pair, held: Sequence[tuple[At, Group, str]], following: Group, near: float) -> Iterator[Group]:
    """Yield the groups held back, or note in the pair that they are not compared, as the quantity that follows tells."""
    agree = bool(held) and all(judge(quantity).difference <= near for quantity in following)
    for at, group, why in held:
        if agree:
            pair.unmatched[at[1:]] = why
        else:
            yield group


def _across_activation(pair: Pair, group: Group, near: float) -> str | None:
    """Which implementation has a value before an elementwise activation and which one after it, on all ranks; None if neither."""
    if not pair.two_programs or any(each.sketched or each.a.shape != each.b.shape for each in group):
        return None
    names = labels(pair.a, pair.b)
    for i in (0, 1):
        found = {activation_between(*((each.a, each.b), (each.b, each.a))[i], near) for each in group}
        if len(found) == 1 and (name := found.pop()) is not None:
            return f"those of {names[i]} are before {name}, and those of {names[1 - i]} after it"
    return None


def _order_hint(shapes: list[tuple[int, ...]]) -> str:
    """What to do about shapes that differ in the order of their dims; "" for others."""
    if sorted(shapes[0]) != sorted(shapes[1]):
        return ""
    return (
        ", also with channels moved from the last dim to dim 1; use the same order of dims in both models, or name the modules "
        "with channels last in JAX: Recorder(channels_last=[...])"
    )


def _aligned_activations(pair: Pair, step: int) -> Iterator[tuple[At, Group]]:
    found: dict[At, Group] = {}
    for at, _, a, b in aligned(pair.a, pair.b, step):
        sides = match_values(Side(a), Side(b), by_sketch=pair.sketched)
        found.setdefault(at, []).append(_activation(pair, step, at, None, sides))
    matched, theirs = {at[1:] for at in found}, {at[1:] for at in pair.b.activations(step)}
    for at in pair.a.activations(step):
        known = at[1:] not in theirs or at[1:] in matched or at[1:] in pair.unmatched
        if not known and (why := unmatched(pair.a, pair.b, step, at)):
            pair.unmatched[at[1:]] = why
    yield from found.items()


def _activation(pair: Pair, step: int, at: At, rank: int | None, sides: Sides) -> Quantity:
    (microbatch, module, use), (a, b, sketches) = at, sides
    unit, bound = pair.b.manifest.maker(module, use), pair.bounds.parameter
    made = Quantity(
        step, FORWARD, use, unit, "", rank, 0, a, b, 1.0, bound, microbatch, module=module, use=use, sketches=sketches
    )
    return made.with_scale(made.norms[0])


def _losses(pair: Pair, step: int) -> Group:
    rows = [losses[step] / repeats for losses, repeats in zip(pair.losses, repeats_of_loss(pair), strict=True)]
    alone = pair.by_rank and not any(r.manifest.settings.get(LOSSES) == MEAN for r in (pair.a, pair.b))
    ranks: list[int | None] = list(range(pair.a.manifest.world_size)) if alone else [None]
    if not alone:
        factors = (1.0, 1.0) if pair.by_rank else shares_of(pair)
        rows = [np.array([row.mean() * factor]) for row, factor in zip(rows, factors, strict=True)]
    return [_loss(pair, step, rank, _numbers(rows[0][i], rows[1][i])) for i, rank in enumerate(ranks)]


def _loss(pair: Pair, step: int, rank: int | None, sides: Sides) -> Quantity:
    """A loss on its own scale, without the factor that one recording has."""
    scaled = scaled_on_one_side(pair, step)
    made = _quantity(pair, step, FORWARD, "loss", "", sides, bound=pair.bounds.loss, rank=rank)
    if scaled and scaled.in_loss:
        made = made.times(*scaled.undone)
    return made.with_scale(abs(float(made.a[0])))


def _undone(found: Multiplied | None) -> tuple[float, float]:
    """What to multiply gradients of a and of b by."""
    return found.undone if found else (1.0, 1.0)


def _losses_of_backwards(pair: Pair, step: int) -> Iterator[Group]:
    """The loss of each backward where optimizers take turns, on the scale of all: a single one may be a small difference."""
    if not _alike_backwards(pair, step):
        return
    ranks = range(pair.a.manifest.world_size)
    of_ranks = [[recording.backwards(step, rank) for recording in (pair.a, pair.b)] for rank in ranks]
    for i in range(len(of_ranks[0][0])):
        group = []
        for rank, (a, b) in zip(ranks, of_ranks, strict=True):
            made = replace(_loss(pair, step, rank, _numbers(a[i][1], b[i][1])), microbatch=i + 1)
            group.append(made.with_scale(sum(abs(loss) for _, loss in a)))
        yield group


def _local_grads(pair: Pair, step: int) -> Iterator[Group]:
    # One side may have recorded none at this step because its dense window is shorter.
    if not (names := _recorded(pair, BACKWARD, step, pair.names(backward=True))):
        return
    ranks, by = range(pair.a.manifest.world_size), _undone(scaled_on_one_side(pair, step))
    typical = [pair.typical_local(step, rank) for rank in ranks]
    for name in names:
        if pair.lacks_local_grad(step, name) is not None:
            continue
        group = []
        for rank in ranks:
            sides = pair.rank_values(BACKWARD, step, rank, name)
            bound = pair.bounds.parameter
            made = _quantity(pair, step, BACKWARD, "backward", name, sides, bound=bound, rank=rank)
            group.append(_as_gradient(pair, made, typical[rank], by))
        yield group


def _as_gradient(pair: Pair, made: Quantity, typical: float, by: tuple[float, float]) -> Quantity:
    """A gradient, scaled by its norm but at least by the noise scale.

    Args:
        typical: the root mean square over all gradients of the rank or step, as a recorded them.
        by: the factors by which a and b are multiplied.
    """
    made = made.times(*by)
    return made.with_scale(gradient_scale(made.norms[0], pair.gradient_noise(by[0] * typical, made.numel)))


def _reduced_grads(pair: Pair, step: int) -> Iterator[Group]:
    for name in _recorded(pair, REDUCE, step, pair.names(backward=True)):
        yield [_reduced_grad(pair, step, name, replicas) for replicas in pair.replicas]


def _recorded(pair: Pair, phase: str, step: int, names: list[str]) -> list[str]:
    """The names that either recorded; none if one of them recorded none at this step."""
    if any(not any(r.has(phase, step, name) for name in names) for r in (pair.a, pair.b)):
        return []
    return [name for name in names if pair.any_has(phase, step, name)]


def _reduced_grad(pair: Pair, step: int, name: str, replicas: tuple[int, int]) -> Quantity:
    event = REDUCE_SCATTER if pair.b.manifest.mesh.shard > 1 else ALL_REDUCE
    sides, bound = pair.assemble(REDUCE, step, name, replicas), pair.bounds.parameter
    made = _quantity(pair, step, REDUCE, event, name, sides, bound=bound, replica=replicas[1])
    return _as_gradient(pair, made, pair.sizes[0].typical[step], _undone(clipped_on_one_side(pair, step)))


def _norms(pair: Pair, step: int) -> Iterator[Group]:
    """The gradient norm is global and equal on all ranks; the last rank of the side with fewer ranks is used for its missing
    ranks."""
    worlds = [recording.manifest.world_size for recording in (pair.a, pair.b)]
    group = []
    for rank in range(max(worlds)):
        a, b = (r.grad_norm(step, min(rank, world - 1)) for r, world in zip((pair.a, pair.b), worlds, strict=True))
        if a is None or b is None:
            return
        sides, bound = _numbers(a, b), pair.bounds.parameter
        own = min(rank, worlds[1] - 1)
        group.append(_quantity(pair, step, NORM, "grad_norm", "", sides, scale=abs(a), bound=bound, rank=own))
    yield group


def _state(pair: Pair, step: int) -> Iterator[Group]:
    for name in pair.names():
        counts = [recording.count(step, name) for recording in (pair.a, pair.b)]
        if counts[0] is not None and counts[1] is not None:
            sides = _numbers(counts[0], counts[1])
            yield [_quantity(pair, step, STATE, "state", name, sides, bound=None, use=COUNT)]
        theirs = pair.b.state_slots(step, name)
        for slot in pair.a.state_slots(step, name):
            if slot in theirs:
                yield [_slot(pair, step, name, slot, replicas) for replicas in pair.replicas]


def _slot(pair: Pair, step: int, name: str, slot: str, replicas: tuple[int, int]) -> Quantity:
    sides, bound = pair.assemble(STATE, step, name, replicas, slot), pair.bounds.parameter
    sides = _without_noise(pair, name, sides)
    made = _quantity(pair, step, STATE, "state", name, sides, bound=bound, replica=replicas[1], use=slot)
    sizes, size = pair.sizes[0], made.norms[0]
    noise = pair.gradient_noise(sizes.typical[step], made.numel)
    if not holds_squares(pair, slot):
        return made.with_scale(gradient_scale(size, noise))
    # The relative error of a square is twice that of its root; for a root below the noise it is that of the noise.
    root = sizes.of[step][name] * np.sqrt(made.numel)
    return made.with_scale(2 * size * (max(1.0, noise / root) if root else 1.0))


def _updates(pair: Pair, step: int) -> Iterator[Group]:
    for name in _recorded(pair, UPDATE, step, pair.names()):  # others are frozen
        yield [_update(pair, step, name, replicas) for replicas in pair.replicas]


def _update(pair: Pair, step: int, name: str, replicas: tuple[int, int]) -> Quantity:
    sides, bound = _without_noise(pair, name, pair.assemble(UPDATE, step, name, replicas)), pair.bounds.parameter
    made = _quantity(pair, step, UPDATE, "optimizer", name, sides, bound=bound, replica=replicas[1])
    return made.with_scale(_moving_scale(pair, name, made))
