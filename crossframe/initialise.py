"""Deferred initialisation (R38): a model on the meta device gets the values that the model built in full has.

A module's constructor draws its values when it is built, so a model built in full consumes one stream of random numbers,
module after module. Every rank goes through the same stream: module by module it makes the full tensors, lets the module draw
them, copies what its shard holds and frees the rest. Only one module is ever there in full, wherever its unit's other
modules stand in the order.

What cannot be known from the model is refused, with the names of what would stay on meta: a tensor that no initialiser
reaches, a module of which only a part is on meta (drawing it would overwrite the rest), and a parameter that two modules draw,
unless the caller says whose values it keeps: the one that was there before the modules were tied. The other's draws are made
and thrown away, as they were when the model was built in full.

What cannot be seen is left to the caller: an initialiser has to draw what is registered in its own module and nothing below
it, as its constructor did; a constructor that draws in another way (twice, or through a function of its parent) has another
stream than its initialiser.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.errors import InitialisationError
from crossframe.layout import Piece, Sharding
from crossframe.shown import shown
from crossframe.units import Order, Slot, UnitSpec, post_order


@dataclass(frozen=True)
class Kept:
    """A parameter that a step gives its values: where it is drawn in the module, and in which unit's shard it is kept."""

    attribute: str
    name: str
    unit: str


@dataclass(frozen=True)
class InitStep:
    """One module: make its tensors in full, let it draw, keep, free.

    Attributes:
        module: the module whose initialiser is called.
        draws: the attributes of all parameters that it draws; those that are not kept are scratch.
        keeps: the parameters whose values these are.
        buffers: the attributes of its buffers, which every rank keeps in full.
    """

    module: str
    draws: tuple[str, ...]
    keeps: tuple[Kept, ...]
    buffers: tuple[str, ...]


def init_plan(
    modules: Sequence[str],
    slots: Sequence[Slot],
    units: Sequence[UnitSpec],
    *,
    meta: Collection[Hashable],
    initialisers: Collection[str],
    buffers: Sequence[Slot] = (),
    tied_to: Mapping[str, str] | None = None,
    order: Order = Order.POST_ORDER,
) -> tuple[InitStep, ...]:
    """The modules to initialise, in the order in which the model built in full initialises them.

    Args:
        modules: every module once, by its first name, in pre-order (that of registration).
        slots: every registration of every parameter.
        units: the units that own them, names and aliases included.
        meta: the identities of the parameters and buffers that are on meta. Modules without any are not called.
        initialisers: the modules that have an initialiser (torch: `reset_parameters`).
        buffers: every registration of every buffer.
        tied_to: for a parameter that several modules draw, by any of its names, the name whose values it keeps.
        order: POST_ORDER: a module draws after those inside it, as a constructor does that ends with drawing.

    Raises:
        InitialisationError: what cannot be initialised, all of it in one error; slots, units or names that are none.
    """
    _check_described(modules, (*slots, *buffers), units, tied_to)
    owners = {
        name: (unit.name, spec.name) for unit in units for spec in unit.params for name in (spec.name, *spec.aliases)
    }
    ordered = post_order(modules) if order is Order.POST_ORDER else list(modules)
    by_module, buffers_of = _by_module(modules, slots), _by_module(modules, buffers)
    on_meta = set(meta)
    called = [
        module
        for module in ordered
        if module in initialisers and any(slot.identity in on_meta for slot in by_module[module] + buffers_of[module])
    ]
    drawn: dict[Hashable, list[Slot]] = {}
    for module in called:
        for slot in by_module[module] + buffers_of[module]:
            drawn.setdefault(slot.identity, []).append(slot)
    problems = _unreached([*slots, *buffers], on_meta, drawn) + _overwritten(drawn, on_meta)
    survivors, undecided = _survivors(slots, drawn, tied_to or {})
    problems += undecided + [
        f"{slot.name} is a parameter of no unit"
        for slot in slots
        if slot.identity in on_meta and slot.name not in owners
    ]
    if problems:
        left = sorted({slot.name for slot in (*slots, *buffers) if slot.identity in on_meta})
        raise InitialisationError(
            f"the model cannot be initialised as if it had been built in full: {'; '.join(problems)}. Still on meta: "
            f"{', '.join(left)}"
        )
    return tuple(
        InitStep(
            module,
            tuple(slot.attribute for slot in by_module[module]),
            tuple(
                Kept(slot.attribute, owners[slot.name][1], owners[slot.name][0])
                for slot in by_module[module]
                if survivors[slot.identity] == slot
            ),
            tuple(slot.attribute for slot in buffers_of[module]),
        )
        for module in called
    )


def _check_described(
    modules: Sequence[str], slots: Sequence[Slot], units: Sequence[UnitSpec], tied_to: Mapping[str, str] | None
) -> None:
    known = set(modules)
    for slot in slots:
        if not isinstance(slot, Slot) or slot.module not in known:
            raise InitialisationError(f"expected Slots of the modules {shown(sorted(known))}, got {shown(slot)}")
    if wrong := [unit for unit in units if not isinstance(unit, UnitSpec)]:
        raise InitialisationError(f"expected units as UnitSpecs, got {shown(wrong[0])}")
    names = {slot.name for slot in slots}
    ties = {} if tied_to is None else tied_to
    if not isinstance(ties, Mapping) or any(name not in names for name in (*ties, *map(str, ties.values()))):
        raise InitialisationError(f"tied_to: expected names of parameters by names, got {shown(tied_to)}")


def _by_module(modules: Sequence[str], slots: Sequence[Slot]) -> dict[str, list[Slot]]:
    found: dict[str, list[Slot]] = {module: [] for module in modules}
    for slot in slots:
        found[slot.module].append(slot)
    return found


def _unreached(slots: Sequence[Slot], on_meta: set[Hashable], drawn: Mapping[Hashable, list[Slot]]) -> list[str]:
    """What is on meta and drawn by no module under any of its names."""
    names: dict[Hashable, list[str]] = {}
    for slot in slots:
        if slot.identity in on_meta and slot.identity not in drawn:
            names.setdefault(slot.identity, []).append(slot.name)
    return [
        f"{' = '.join(same)} has no initialiser: give its module a reset_parameters, or pass a function that draws it"
        for same in names.values()
    ]


def _overwritten(drawn: Mapping[Hashable, list[Slot]], on_meta: set[Hashable]) -> list[str]:
    """What has values already and would be drawn again, because its module is called for something else."""
    return [
        f"{same[0].name} has values, and would be drawn again with the rest of {same[0].module!r}: put all of the module on "
        "meta, or none of it"
        for identity, same in drawn.items()
        if identity not in on_meta
    ]


def _survivors(
    slots: Sequence[Slot], drawn: Mapping[Hashable, list[Slot]], tied_to: Mapping[str, str]
) -> tuple[dict[Hashable, Slot], list[str]]:
    """For each tensor the registration whose values it keeps, and what is undecided."""
    names: dict[Hashable, set[str]] = {}
    for slot in slots:
        names.setdefault(slot.identity, set()).add(slot.name)
    survivors, undecided = {}, []
    for identity, same in drawn.items():
        asked = {tied_to[name] for name in names.get(identity, ()) if name in tied_to}
        choice = [slot for slot in same if slot.name in asked] if asked else same
        if len(choice) == 1:
            survivors[identity] = choice[0]
        else:
            drawers = ", ".join(slot.name for slot in same)
            undecided.append(
                f"one parameter is drawn as {drawers}, and the model built in full keeps the values of one: say which in "
                f"tied_to{f', not {sorted(asked)}' if asked else ''}"
            )
    return survivors, undecided


def initialise(
    plan: Sequence[InitStep],
    sharding: Sharding,
    rank: int,
    draw: Callable[[str], Mapping[str, np.ndarray]],
) -> list[np.ndarray]:
    """One rank's shards of a model, drawn by a plan (R38).

    Args:
        rank: of the mesh.
        draw: calls a module's initialiser on full tensors, and returns them by attribute. Its random numbers come from one
            stream, the same on every rank.

    Returns:
        For each bucket of the sharding an array of shape (padded_shard_numel,); padding is 0.

    Raises:
        InitialisationError: a parameter that the sharding has not, or a module that drew nothing for it, or another shape.
    """
    layouts = [layout for _, layout in sharding.units]
    shards = [np.zeros(layout.padded_shard_numel, numpy_dtype(layout.dtype)) for layout in layouts]
    pieces: dict[str, list[Piece]] = {}
    for _, piece in sharding.pieces(rank):
        pieces.setdefault(piece.name, []).append(piece)
    for step in plan:
        values = draw(step.module)
        for kept in step.keeps:
            place = sharding.find(kept.name)
            if place is None:
                raise InitialisationError(
                    f"module {step.module!r} draws {kept.name!r}, and no unit of the sharding has it"
                )
            spec, full = layouts[place[0]].params[place[1]], values.get(kept.attribute)
            if full is None or full.shape != spec.shape:
                got = "nothing" if full is None else f"shape {full.shape}"
                raise InitialisationError(
                    f"parameter {kept.name!r}: expected the initialiser of module {step.module!r} to draw shape {spec.shape} "
                    f"as {kept.attribute!r}, got {got}"
                )
            line = full.reshape(-1)
            for run in (run for piece in pieces.get(spec.name, ()) for run in piece.runs()):
                shards[place[0]][run.shard_start : run.shard_start + run.numel] = line[
                    run.param_start : run.param_start + run.numel
                ]
    return shards
