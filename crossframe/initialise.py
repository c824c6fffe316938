"""Deferred initialisation (R38): a model on the meta device gets the values of the same model built in full.

The constructor of a module draws its values, so a model that is built in full consumes one stream of random numbers, module
after module. Every rank consumes the same stream: for each module it allocates the full tensors, lets the module draw them,
copies the part of its shard and frees the rest. At most one module is in memory in full, whatever the order of the modules of a
unit.

Three cases are rejected, with the names of everything that would stay on meta: a tensor that no initialiser draws; a module of
which only a part is on meta, since drawing would overwrite the rest; and a parameter that two modules draw, unless the caller
says whose values it keeps, which are those of the module that had it before the modules were tied. The values of the other
module are drawn and discarded, as they were when the model was built in full.

The following cannot be checked and is up to the caller: an initialiser must draw the parameters that its own module registers
and no others, as its constructor did. A constructor that draws differently (twice, or in a function of its parent) consumes
another stream than its initialiser.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.errors import InitialisationError
from crossframe.layout import Piece, Sharding
from crossframe.quoting import quote
from crossframe.unit_assignment import Order, Slot, UnitSpec, post_order


@dataclass(frozen=True)
class Kept:
    """A parameter that gets its values in a step: its attribute in the module that draws it, and the unit that shards it."""

    attribute: str
    name: str
    unit: str


@dataclass(frozen=True)
class InitStep:
    """The initialisation of one module: allocate its full tensors, draw them, keep the shards and free the rest.

    Attributes:
        module: the module whose initialiser is called.
        draws: the attributes of all parameters that it draws; values that are not kept are discarded.
        keeps: the parameters that get these values.
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
        modules: every module once, by its first name, in pre-order.
        slots: every registration of every parameter.
        units: the units that own the parameters, with names and aliases.
        meta: identities of the parameters and buffers on meta. Modules without any of them are not initialised.
        initialisers: names of modules that have an initialiser (torch: `reset_parameters`).
        buffers: every registration of every buffer.
        tied_to: for a parameter that several modules draw, by any of its names, the name whose values it keeps.
        order: POST_ORDER: a module draws after the modules inside it, like a constructor that draws at its end.

    Raises:
        InitialisationError: tensors that cannot be initialised, all in one error; or invalid slots, units or names.
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
            raise InitialisationError(f"expected Slots of the modules {quote(sorted(known))}, got {quote(slot)}")
    if wrong := [unit for unit in units if not isinstance(unit, UnitSpec)]:
        raise InitialisationError(f"expected units as UnitSpecs, got {quote(wrong[0])}")
    names = {slot.name for slot in slots}
    ties = {} if tied_to is None else tied_to
    if not isinstance(ties, Mapping) or any(name not in names for name in (*ties, *map(str, ties.values()))):
        raise InitialisationError(f"tied_to: expected names of parameters by names, got {quote(tied_to)}")


def _by_module(modules: Sequence[str], slots: Sequence[Slot]) -> dict[str, list[Slot]]:
    found: dict[str, list[Slot]] = {module: [] for module in modules}
    for slot in slots:
        found[slot.module].append(slot)
    return found


def _unreached(slots: Sequence[Slot], on_meta: set[Hashable], drawn: Mapping[Hashable, list[Slot]]) -> list[str]:
    """Complaints about tensors on meta that no module draws under any of their names."""
    names: dict[Hashable, list[str]] = {}
    for slot in slots:
        if slot.identity in on_meta and slot.identity not in drawn:
            names.setdefault(slot.identity, []).append(slot.name)
    return [
        f"{' = '.join(same)} has no initialiser: give its module a reset_parameters, or pass a function that draws it"
        for same in names.values()
    ]


def _overwritten(drawn: Mapping[Hashable, list[Slot]], on_meta: set[Hashable]) -> list[str]:
    """Complaints about tensors that have values and would be drawn again with the rest of their module."""
    return [
        f"{same[0].name} has values, and would be drawn again with the rest of {same[0].module!r}: put all of the module on "
        "meta, or none of it"
        for identity, same in drawn.items()
        if identity not in on_meta
    ]


def _survivors(
    slots: Sequence[Slot], drawn: Mapping[Hashable, list[Slot]], tied_to: Mapping[str, str]
) -> tuple[dict[Hashable, Slot], list[str]]:
    """The registration whose values each tensor keeps, and complaints about tensors for which this is undecided."""
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
        plan: from `init_plan`.
        sharding: the sharding of the model.
        rank: a rank of the mesh.
        draw: calls a module's initialiser on full tensors and returns them by attribute. All ranks draw from the same stream of
            random numbers.

    Returns:
        For each bucket of the sharding an array of shape (padded_shard_numel,); padding is 0.

    Raises:
        InitialisationError: the sharding lacks a parameter, or its module drew nothing or another shape for it.
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
