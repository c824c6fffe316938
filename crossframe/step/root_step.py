"""The step machine for all units under one root: which units a signal concerns, and the actions of each (`no_sync` included).

`prefetch.py` says which units are gathered early, `reduction_order.py` when gradients are reduced.
"""

from collections.abc import Iterable, Sequence

from crossframe.lifecycle import Activity, Move
from crossframe.step.prefetch import Prefetching
from crossframe.step.reduction_order import ReductionOrder
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
        self._prefetching = Prefetching()
        self._reductions = ReductionOrder()
        # Units of several modules: those of which some have computed; the others still need the parameters.
        self._in_part: dict[UnitStep, None] = {}

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
        self._prefetching.begin_step()
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
        self._prefetch(self._prefetching.in_forward(unit), "forward", do)
        do.append((unit, unit.enter_forward(), "forward"))
        self._prefetching.forward_begun(unit)
        return do

    def _prefetch(self, units: Iterable[UnitStep], phase: str, do: Do) -> None:
        """Prefetch units, except those that would not be used."""
        for unit in units:
            used = phase == "forward" or unit.settings.unshard_in_backward
            if used and unit.state.activity == Activity.IDLE and not unit.is_summoned:
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

    def has_run_in_part(self, unit: UnitStep) -> bool:
        """Whether modules of a unit have run in this forward, and others have not."""
        return unit in self._in_part

    def _after_forward(self, unit: UnitStep) -> tuple[UnitStep, Actions, str]:
        self._prefetching.forward_ended(unit)
        return unit, unit.after_forward(), "forward"

    def needs_no_backward(self, unit: UnitStep) -> None:
        """Signal: the output of a unit does not require a gradient, so backward will not reach it."""
        self._prefetching.needs_no_backward(unit)

    def leave_forward(self, unit: UnitStep) -> Do:
        """Signal: a unit below the root raised in forward. An outer module may catch the exception (R17)."""
        if unit.state.activity != Activity.FORWARD:
            return []
        return [(unit, unit.end_forward() + unit.reshard(), "forward")]

    # Backward

    def begin_backward(self, unit: UnitStep, *, whole: bool = True) -> Do:
        """Signal: a gradient of a unit's output is available.

        Args:
            whole: False if other modules of the unit had not run when the output was made.
        """
        if not self.in_backward:
            self.in_backward = True
            self._prefetching.backward_begun()
            self._reductions.begin(self._prefetching.begun)
        self._reductions.reach_output(whole=whole)
        do: Do = [(unit, unit.begin_backward(), "backward")]
        self._prefetch(self._prefetching.in_backward(unit, Prefetch.BACKWARD_PRE), "backward", do)
        return do

    def gradients_complete(self, unit: UnitStep) -> Do:
        """Signal: all gradients of a unit are available. Frees its parameters, and reduces when it is the unit's turn."""
        do: Do = [(unit, unit.after_backward(), "backward")]
        self._prefetch(self._prefetching.in_backward(unit, Prefetch.BACKWARD_POST), "backward", do)
        if unit.settings.reduce_grads:
            do += [(ready, ready.reduce(), "backward") for ready in self._reductions.complete(unit)]
        return do

    def inputs_complete(self, unit: UnitStep) -> Do:
        """Signal: the inputs of a unit without trained parameters have their gradients."""
        return [(unit, unit.after_backward(), "backward")]

    def end_backward(self) -> Do:
        """Signal: backward has ended. Reduces and then frees the remaining units.

        A unit in forward, which runs this backward inside it, does not change.
        """
        do: Do = []
        for unit, reduces in self._reductions.at_end(reversed(self.units)):
            if reduces:
                do.append((unit, unit.reduce(), "backward"))
            do.append((unit, unit.end_backward(), "backward"))
        return do

    def leave_backward(self) -> None:
        """Signal: the actions of `end_backward` are executed. An exception before this requires a reset."""
        self.in_backward = False
        self._reductions.clear()
        self._in_part.clear()

    # After an exception

    def reset(self) -> None:
        """Signal: an exception ended a step. All units return to their shards (R17); the backend frees its memory."""
        self.leave_backward()
        self._prefetching.clear()
        for unit in self.units:
            unit.reset()

    def check_summon(self) -> None:
        """Raise StateError if a forward or backward is running, so that parameters cannot be summoned (R18)."""
        for unit in self.units:
            if unit.state.activity:
                unit.check_summon()
