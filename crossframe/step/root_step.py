"""The step machine for all units under one root: execution order, prefetching, reductions, and the end of backward (`no_sync`).

[Note: order of reductions] All ranks must issue the same reductions in the same order, even if ranks leave different parameters
unused and autograd reaches units in different orders (R29). So a unit whose gradients are complete waits for the units that began
their forward after it and are in backward. Remaining units are reduced at the end of backward, in the same order. Units whose
unused parameters count as zeros are always waited for, because another rank may have used them.
"""

import itertools
from collections.abc import Sequence

from crossframe.lifecycle import Activity, Move
from crossframe.step.unit import Actions, UnitStep
from crossframe.strategy import Prefetch

Do = list[tuple[UnitStep, Actions, str]]  # unit, its actions in order, and their phase: "forward" or "backward"


class ModelStep:
    """The step machine of all units under one root.

    Methods are signals and return (unit, actions, phase) in order, with the phase "forward" or "backward".

    Attributes:
        units: in pre-order of modules; the root's comes first.
        in_backward: whether backward is running.
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
        """Raise StateError if a unit is summoned, so that no step can begin."""
        for unit in self.units:
            if unit.is_summoned:
                unit.state.after(Move.BEGIN_FORWARD, unit.name)

    def begin_step(self, *, training: bool) -> Do:
        """Signal: the root's forward begins.

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
        """Whether a unit runs outside of the forward of the root and other units."""
        forward = Activity.FORWARD
        return self.root.state.activity != forward and all(other.state.activity != forward for other in self.units)

    def begin_forward(self, unit: UnitStep) -> Do:
        """Signal: a unit's forward begins."""
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
        """Prefetch a unit, unless nothing would use it."""
        if unit.state.activity != Activity.IDLE or unit.is_summoned:
            return
        if phase == "forward" or unit.settings.unshard_in_backward:
            do.append((unit, unit.gather(), phase))

    def end_forward(self, unit: UnitStep, *, whole: bool = True) -> Do:
        """Signal: a unit's forward has ended. Returns no actions for a recomputation.

        Args:
            whole: False if other modules of the unit have not run yet and need the parameters.
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
        """Signal: the output of a unit does not require a gradient, so backward will not reach it."""
        self._without_backward.add(unit)

    def leave_forward(self, unit: UnitStep) -> Do:
        """Signal: a unit below the root raised in forward. An outer module may catch the exception (R17)."""
        if unit.state.activity != Activity.FORWARD:
            return []
        return [(unit, unit.end_forward() + unit.reshard(), "forward")]

    # Backward

    def begin_backward(self, unit: UnitStep) -> Do:
        """Signal: a gradient of a unit's output is available."""
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
        """Prefetch the unit whose forward ended before this one's (R16)."""
        position = self._ended.get(unit, 0)
        if position > 0 and (before := self._order[position - 1]) not in self._without_backward:
            self._prefetch(before, "backward", do)

    def gradients_complete(self, unit: UnitStep) -> Do:
        """Signal: all gradients of a unit are available. Frees its parameters, and reduces when it is the unit's turn."""
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
        """Signal: the inputs of a unit without trained parameters have their gradients."""
        return [(unit, unit.after_backward(), "backward")]

    def end_backward(self) -> Do:
        """Signal: backward has ended. Reduces and then frees the remaining units.

        A unit in forward, which runs this backward inside it, does not change.
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
        """Signal: the actions of `end_backward` are executed. An exception before this requires a reset."""
        self.in_backward = False
        self._order, self._waiting = [], []
        self._complete.clear()
        self._reduced.clear()

    # After an exception

    def reset(self) -> None:
        """Signal: an exception ended a step. All units return to their shards (R17); the backend frees its memory."""
        self.leave_backward()
        self._begun.clear()
        self._ended.clear()
        self._in_part.clear()
        for unit in self.units:
            unit.reset()

    def check_summon(self) -> None:
        """Raise StateError if a forward or backward is running, so that parameters cannot be summoned (R18)."""
        for unit in self.units:
            if unit.state.activity:
                unit.check_summon()
