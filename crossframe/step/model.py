"""All units under one root: whose forward and backward comes when, what is gathered ahead, and the order of reductions.

[Note: order of reductions] Every rank must issue the same reductions in the same order, also where ranks leave different
parameters unused and autograd reaches the units in other orders (R29). A unit whose gradients are complete therefore waits for
those units that began their forward after it and are in their backward. What is left is reduced at the end of the backward, in
that same order. Units that count unused parameters as zeros are waited for in any case: on another rank they may have been
reached.
"""

import itertools
from collections.abc import Sequence

from crossframe.lifecycle import Activity, Move
from crossframe.step.unit import Actions, UnitStep
from crossframe.strategy import Prefetch

Do = list[tuple[UnitStep, Actions, str]]  # unit, its actions in order, and their phase: "forward" or "backward"


class ModelStep:
    """The units under one root, and where they are in a step.

    Methods are signals and return, in order, which unit executes which actions in which phase ("forward" or "backward").

    Attributes:
        units: in pre-order of modules; the root's comes first.
        in_backward: whether a backward is under way.
    """

    def __init__(self, units: Sequence[UnitStep]) -> None:
        self.units = list(units)
        self.root = self.units[0]
        self.root.settings = self.root.settings.as_root()
        self.in_backward = False
        # Units in the order in which their forwards began, and ended; and the unit that began after each in the step before.
        self._begun: dict[UnitStep, None] = {}
        self._ended: dict[UnitStep, int] = {}
        self._next: dict[UnitStep, UnitStep] = {}
        # Units whose last output needs no gradient, so that no backward reaches them.
        self._without_backward: set[UnitStep] = set()
        # Units of several modules: those of which some have computed; the others still need the parameters.
        self._in_part: dict[UnitStep, None] = {}
        # During a backward: the units in the order in which their forwards ended.
        self._order: list[UnitStep] = []
        # During a backward: units that have begun and are not reduced, the last one first; those of them whose gradients are
        # complete; and those that were reduced. See [Note: order of reductions].
        self._waiting: list[UnitStep] = []
        self._complete: set[UnitStep] = set()
        self._reduced: set[UnitStep] = set()

    # Forward

    @property
    def interrupted(self) -> bool:
        """Whether an earlier step ended in an exception, so that the next one needs a reset."""
        return self.in_backward or any(unit.state.activity != Activity.IDLE for unit in self.units)

    def check_begin(self) -> None:
        """Raise StateError if a unit is summoned: no step can begin then."""
        for unit in self.units:
            if unit.is_summoned:
                unit.state.after(Move.BEGIN_FORWARD, unit.name)

    def begin_step(self, *, training: bool) -> Do:
        """The root's forward is about to begin.

        Args:
            training: whether gradients are computed.
        """
        if self._begun:
            self._next = dict(itertools.pairwise(self._begun))
        self._begun.clear()
        self._ended.clear()
        self._without_backward.clear()
        return [(unit, unit.free_outdated(training=training), "forward") for unit in self.units]

    def runs_alone(self, unit: UnitStep) -> bool:
        """Whether a unit that is about to compute is used by itself: neither the root nor another unit around it computes."""
        forward = Activity.FORWARD
        return self.root.state.activity != forward and all(other.state.activity != forward for other in self.units)

    def begin_forward(self, unit: UnitStep) -> Do:
        """A unit's module is about to compute."""
        if unit.state.activity == Activity.BACKWARD:  # recomputed, with the parameters that its backward has
            return [(unit, unit.begin_backward(), "backward")]
        do: Do = [(unit, unit.begin_forward(), "forward")]
        if unit.settings.forward_prefetch and (following := self._next.get(unit)) is not None:
            self._prefetch(following, "forward", do)
        for other in unit.forward_prefetch_units:
            self._prefetch(other, "forward", do)
        do.append((unit, unit.enter_forward(), "forward"))
        self._begun.setdefault(unit)
        return do

    def _prefetch(self, unit: UnitStep, phase: str, do: Do) -> None:
        """Issue an all-gather ahead of its need, unless nothing would use it."""
        if unit.state.activity != Activity.IDLE or unit.is_summoned:
            return
        if phase == "forward" or unit.settings.unshard_in_backward:
            do.append((unit, unit.gather(), phase))

    def end_forward(self, unit: UnitStep, *, whole: bool = True) -> Do:
        """A unit's module has computed; nothing to do if it was recomputed.

        Args:
            whole: False if other modules of the unit are still to compute, which need the parameters.
        """
        if unit.state.activity != Activity.FORWARD:
            return []
        do: Do = [(unit, unit.end_forward(), "forward")]
        if whole:
            self._in_part.pop(unit, None)
            do.append(self._after_forward(unit))
        else:
            self._in_part.setdefault(unit)
        if unit is self.root:
            do += [self._after_forward(part) for part in self._in_part]
            self._in_part.clear()
        return do

    def _after_forward(self, unit: UnitStep) -> tuple[UnitStep, Actions, str]:
        self._ended.setdefault(unit, len(self._ended))
        return unit, unit.after_forward(), "forward"

    def needs_no_backward(self, unit: UnitStep) -> None:
        """The output of a unit needs no gradient, so that no backward will reach it."""
        self._without_backward.add(unit)

    def leave_forward(self, unit: UnitStep) -> Do:
        """A unit below the root raised in its forward. A module around it may catch the exception and go on (R17)."""
        if unit.state.activity != Activity.FORWARD:
            return []
        return [(unit, unit.end_forward() + unit.reshard(), "forward")]

    # Backward

    def begin_backward(self, unit: UnitStep) -> Do:
        """A gradient of a unit's output has arrived."""
        if not self.in_backward:
            self.in_backward = True
            self._waiting = list(reversed(self._begun))
            self._order = list(self._ended)
        do: Do = [(unit, unit.begin_backward(), "backward")]
        if unit.backward_prefetch_units:
            for other in unit.backward_prefetch_units:
                self._prefetch(other, "backward", do)
        elif unit.settings.backward_prefetch is Prefetch.BACKWARD_PRE:
            self._prefetch_before(unit, do)
        return do

    def _prefetch_before(self, unit: UnitStep, do: Do) -> None:
        """Gather for backward the unit whose forward ended before this one's (R16)."""
        position = self._ended.get(unit, 0)
        if position > 0 and (before := self._order[position - 1]) not in self._without_backward:
            self._prefetch(before, "backward", do)

    def gradients_complete(self, unit: UnitStep) -> Do:
        """All gradients of a unit's parameters are there: free the parameters, and reduce as soon as it is the unit's turn."""
        do: Do = [(unit, unit.after_backward(), "backward")]
        if unit.settings.backward_prefetch is Prefetch.BACKWARD_POST:
            self._prefetch_before(unit, do)
        if unit.settings.reduce_grads:
            self._complete.add(unit)
            if unit not in self._waiting:  # it ran in an earlier step of several that share one backward
                self._waiting.insert(0, unit)
            self._reduce_in_turn(do)
        return do

    def _reduce_in_turn(self, do: Do) -> None:
        """See [Note: order of reductions]."""
        for first in list(self._waiting):
            if not self._complete:
                return
            if first in self._complete:
                self._complete.discard(first)
                self._waiting.remove(first)
                self._reduce(first, do)
            elif first.trained and (first.state.activity == Activity.BACKWARD or first.settings.reduce_unused):
                return

    def _reduce(self, unit: UnitStep, do: Do) -> None:
        """Reduce a unit's gradients, if it has any or missing ones count as zeros."""
        zeros = unit.settings.reduce_unused and unit.trained and unit not in self._reduced
        if unit.has_grads or zeros:
            self._reduced.add(unit)
            do.append((unit, unit.reduce(), "backward"))

    def inputs_complete(self, unit: UnitStep) -> Do:
        """The inputs of a unit without trained parameters have their gradients."""
        return [(unit, unit.after_backward(), "backward")]

    def end_backward(self) -> Do:
        """The whole backward is over: reduce what is left, then free what is left, unit by unit.

        A unit in its forward has called for a backward inside it, and is left alone.
        """
        do: Do = []
        waiting = dict.fromkeys(self._waiting)
        late = [unit for unit in reversed(self.units) if unit not in waiting]
        for unit in itertools.chain(waiting, late):
            if unit.state.activity == Activity.FORWARD:
                continue
            if unit.settings.reduce_grads:
                self._reduce(unit, do)
            do.append((unit, unit.end_backward(), "backward"))
        return do

    def leave_backward(self) -> None:
        """The actions of `end_backward` are executed. Until then an exception would ask for a reset."""
        self.in_backward = False
        self._order, self._waiting = [], []
        self._complete.clear()
        self._reduced.clear()

    # After an exception

    def reset(self) -> None:
        """An exception has ended a step: every unit is back at its shard (R17). The backend frees whatever it has."""
        self.leave_backward()
        self._begun.clear()
        self._ended.clear()
        self._in_part.clear()
        for unit in self.units:
            unit.reset()

    def check_summon(self) -> None:
        """Raise StateError if the user cannot be shown unsharded parameters, because a forward or backward is under way (R18)."""
        for unit in self.units:
            if unit.state.activity:
                unit.check_summon()
