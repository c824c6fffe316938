"""The step machine for one unit: its state, and the actions for each signal."""

from dataclasses import replace
from enum import IntEnum
from typing import Any, assert_never

from crossframe.errors import StateError
from crossframe.lifecycle import Activity, Exposure, Move, Residency, UnitState
from crossframe.step.settings import StepSettings


class Action(IntEnum):
    """An action that a backend executes for one unit.

    "Adopt" means to write the user's replacements of sharded parameters into the shards (R25).
    """

    GATHER = 0  # adopt, then issue the all-gather of the shards
    GATHER_FROM_GROUP = 1  # issue the all-gather of the reshard group's shards (R08)
    REUSE = 2  # the unsharded parameters are there; adopt where the shard itself is their storage (R14)
    WAIT = 3  # wait until the unsharded parameters are readable
    EXPOSE = 4  # register the unsharded parameters on the module
    EXPOSE_AGAIN = 5  # the same for a backward, where `requires_grad` stays as it was in the forward
    ADOPT_EXPOSE_AGAIN = 6  # adopt first: the unit kept its parameters, so no GATHER has adopted since the forward
    CONCEAL = 7  # register the sharded parameters on the module
    USE = 8  # let the module compute with the unsharded parameters, as part of a new graph
    USE_AGAIN = 9  # let a recomputation use the tensors of the last forward
    END_USE = 10  # the module has computed
    END_BACKWARD = 11  # no recomputation will follow
    BEGIN_BACKWARD = 12  # gradients begin to accumulate
    FREE = 13  # free the unsharded parameters
    FREE_GROUP_SHARD = 14  # free the reshard group's shard
    RESHARD_TO_GROUP = 15  # free the unsharded parameters, keep the reshard group's shard
    REDUCE = 16  # advance the reductions in flight by one collective, then issue this unit's
    SUMMON = 17  # all-gather in full precision, and show it where it is visible (R19)
    DISMISS = 18  # end a summon: write edits back and free what was shown, in the order of R24


Actions = tuple[Action, ...]
_NONE: Actions = ()


class StepCount:
    """A rank-consistent count of optimizer steps, used to detect stale unsharded parameters."""

    def __init__(self) -> None:
        self.num = 0

    def add(self) -> None:
        """Signal: an optimizer has stepped."""
        self.num += 1


class UnitStep:
    """The step machine of one unit on one rank.

    Each method is a signal and returns its actions in order. An illegal signal raises StateError and changes nothing.

    Attributes:
        name: its module's path from the root; "" for the root.
        settings: see StepSettings.
        state: its lifecycle state (R12). Only this class writes it.
        trained: whether any of its parameters requires a gradient. The backend updates it when it exposes the parameters.
        has_grads: whether there are unreduced gradients. The backend updates it when gradients arrive.
        forward_prefetch_units, backward_prefetch_units: units to prefetch in forward and backward; if not empty, they override
            `settings`.
        mixed: whether it computes with a low-precision copy, which a summon replaces (R21).
    """

    def __init__(self, name: str, settings: StepSettings, *, trained: bool = True, mixed: bool = False) -> None:
        self.name, self.settings = name, settings
        self.state = UnitState()
        self.trained, self.mixed = trained, mixed
        self.has_grads = False
        self.forward_prefetch_units: tuple[UnitStep, ...] = ()
        self.backward_prefetch_units: tuple[UnitStep, ...] = ()
        self._steps = StepCount()
        self._steps_seen = self._steps.num
        # Whether the unsharded parameters in memory are meant for the next forward.
        self._kept = False
        # What memory held before a summon.
        self._before = Residency.SHARD

    def choose(self, **settings: Any) -> None:
        """Replace some settings."""
        self.settings = replace(self.settings, **settings)

    def count_steps(self, steps: StepCount) -> None:
        """Use this count of optimizer steps from now on. Parameters that missed steps of the count before stay stale."""
        missed = self._steps.num - self._steps_seen
        self._steps, self._steps_seen = steps, steps.num - missed

    def move(self, move: Move) -> None:
        """Apply one move of the lifecycle, or raise StateError."""
        self.state = self.state.after(move, self.name)

    @property
    def is_unsharded(self) -> bool:
        """Whether the unsharded parameters are in memory or their all-gather is pending."""
        return self.state.residency == Residency.FULL

    @property
    def is_summoned(self) -> bool:
        """Whether the parameters are summoned."""
        return self.state.exposure == Exposure.SUMMONED

    @property
    def snapshot(self) -> tuple[Any, ...]:
        """A snapshot of everything that signals change, for `restore`."""
        return self.state, self.has_grads, self._kept, self._before, self._steps_seen, self._steps.num

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Return to a snapshot."""
        self.state, self.has_grads, self._kept, self._before, self._steps_seen, self._steps.num = snapshot

    # Parameters in memory

    def gather(self) -> Actions:
        """The unsharded parameters will be needed."""
        state = self.state
        if state.residency == Residency.FULL and not state.freshness:
            return _REUSE if state.exposure == Exposure.SHARDED else _NONE
        self.move(Move.GATHER)
        self._steps_seen, self._kept = self._steps.num, False
        return _GATHER_FROM_GROUP if state.residency == Residency.RESHARD_GROUP and not state.freshness else _GATHER

    def gather_failed(self) -> None:
        """Signal: the all-gather could not be issued, so only the shard is in memory. Drops pending actions."""
        self.state = UnitState(activity=self.state.activity)

    def unshard(self) -> Actions:
        """The unsharded parameters are needed now."""
        return self.gather() + _WAIT

    def expose(self) -> Actions:
        """The module must show the unsharded parameters, which are in memory."""
        if self.state.exposure == Exposure.FULL:
            return _NONE
        self.move(Move.EXPOSE)
        return _EXPOSE

    def conceal(self) -> Actions:
        """The module must show the sharded parameters, whatever memory holds."""
        if self.state.exposure != Exposure.FULL:
            return _NONE
        self.move(Move.CONCEAL)
        return _CONCEAL

    def reshard(self) -> Actions:
        """The unsharded parameters, or the reshard group's shard, are no longer needed.

        Raises:
            StateError: while the user is shown unsharded parameters.
        """
        if self.state.exposure == Exposure.SUMMONED:
            raise StateError(
                f"unit {self.name!r}: cannot reshard {self.state.describe()}: leave summon_full_params, which reshards"
            )
        concealed = self.conceal()
        residency = self.state.residency
        if residency == Residency.SHARD:
            return concealed
        self.move(Move.RESHARD)
        freed = _FREE if residency == Residency.FULL else _FREE_GROUP_SHARD
        return concealed + freed if concealed else freed

    def reshard_to_group(self) -> Actions:
        """Only the reshard group's shard is needed from now on (R08)."""
        concealed = self.conceal()
        self.move(Move.RESHARD_TO_GROUP)
        return concealed + _RESHARD_TO_GROUP

    def keep(self) -> None:
        """The next forward uses the unsharded parameters as they are: the user asked for them, or a backward that reduced
        nothing left them (R15)."""
        self._kept = True

    def free_outdated(self, *, training: bool) -> Actions:
        """Signal: a forward begins. Frees unsharded parameters of an earlier forward that may be stale.

        All ranks must decide equally, or they would issue different all-gathers. So the decision depends on optimizer steps, not
        on writes to this rank's shard, which may have no elements. A forward for training always all-gathers again.
        """
        if self.state.residency == Residency.SHARD:
            return _NONE
        stale = self._steps_seen != self._steps.num
        return self.reshard() if stale or (training and not self._kept) else _NONE

    def free_before_edit(self) -> Actions:
        """Signal: all ranks are about to write into their shards. Frees unsharded parameters, which become stale, unless the unit
        is in use."""
        return self.reshard() if self.state.activity == Activity.IDLE and not self.is_summoned else _NONE

    def check_edit(self) -> None:
        """Raise the StateError of `edit`, if any."""
        state = self.state
        if state.exposure != Exposure.FULL or state.activity != Activity.IDLE:
            state.after(Move.EDIT_SHARDS, self.name)

    def edit(self) -> Actions:
        """The shards were written: unsharded parameters in memory are stale (R12).

        Raises:
            StateError: in a forward or backward, or while parameters are summoned.
        """
        self.check_edit()
        concealed = self.conceal()
        self.move(Move.EDIT_SHARDS)
        return concealed

    # A step

    def begin_forward(self) -> Actions:
        """Signal: the module is about to compute. Prefetches and then `enter_forward` follow."""
        if self.state.activity == Activity.IDLE:
            self.move(Move.BEGIN_FORWARD)
        return self.unshard()

    def enter_forward(self) -> Actions:
        """The unsharded parameters are in memory: use them."""
        return self.expose() + _USE

    def end_forward(self) -> Actions:
        """The module has computed."""
        self.move(Move.END_FORWARD)
        return _END_USE

    def after_forward(self) -> Actions:
        """All modules of the unit have computed: keep or free the unsharded parameters (R08, R13, R14)."""
        reshard = self.settings.reshard_after_forward
        if reshard is True:
            return self.reshard()
        if reshard is False:
            return self.conceal() if self.settings.conceal_after_forward else _NONE
        return self.reshard_to_group()

    def begin_backward(self) -> Actions:
        """Signal: a gradient of the unit's output is available, or its forward is recomputed in backward."""
        actions = _NONE
        if self.state.activity != Activity.BACKWARD:
            self.move(Move.BEGIN_BACKWARD)
            actions = _BEGIN_BACKWARD
        if not self.settings.unshard_in_backward and not self.is_unsharded:
            return actions
        actions += self.unshard()
        if self.state.exposure != Exposure.FULL:
            self.move(Move.EXPOSE)
            actions += _EXPOSE_AGAIN if self.settings.reshard_after_forward else _ADOPT_EXPOSE_AGAIN
        return actions + _USE_AGAIN

    def after_backward(self) -> Actions:
        """Signal: all gradients of the unit (or of its inputs if it is frozen) are available. Frees its parameters (R15)."""
        if self.state.activity == Activity.BACKWARD and self.settings.frees_after_backward:
            return self.reshard()
        return _NONE

    def end_backward(self) -> Actions:
        """The whole backward is over."""
        if self.settings.frees_after_backward:
            actions = self.reshard()
        else:
            self.keep()
            actions = self.conceal() if self.settings.conceal_after_forward else _NONE
        return actions + (self.leave_backward() if self.state.activity == Activity.BACKWARD else _END_BACKWARD)

    def leave_backward(self) -> Actions:
        """The unit's backward is over; its parameters stay as they are."""
        self.move(Move.END_BACKWARD)
        return _END_BACKWARD

    def reduce(self) -> Actions:
        """It is this unit's turn to reduce its gradients (R15)."""
        self.has_grads = False
        return _REDUCE

    def reset(self) -> None:
        """Signal: an exception ended a step. Returns to the shard without pending reductions (R17); the backend frees its
        memory."""
        self.move(Move.RESET)
        self.has_grads = False

    # Unsharded parameters for the user

    def check_summon(self) -> None:
        """Raise StateError if the parameters cannot be summoned now (R18)."""
        if self.state.activity != Activity.IDLE or self.is_summoned:
            self.state.after(Move.SUMMON, self.name)

    def summon(self, *, visible: bool) -> Actions:
        """Signal: the user summons parameters in full precision (R18, R19). Always all-gathers the current shards. The backend
        adopts before this signal.

        Args:
            visible: whether they are summoned on this rank.
        """
        self.check_summon()
        self._before = Residency.SHARD if self.mixed else self.state.residency
        actions = self.reshard()
        self.move(Move.GATHER)
        self._steps_seen, self._kept = self._steps.num, False
        self.move(Move.SUMMON)
        if not visible:
            self.move(Move.RESHARD)
        return actions + _SUMMON

    def dismiss(self) -> Actions:
        """Signal: the summon ends. Writes back edits if requested and frees the summoned parameters (R20, R24)."""
        if not self.is_summoned:
            raise StateError(f"unit {self.name!r}: there is no unsharding to end {self.state.describe()}")
        self.move(Move.DISMISS)
        if self.is_unsharded:
            self.move(Move.RESHARD)
        return _DISMISS

    def return_memory(self) -> Actions:
        """Signal: a summon ended without an exception. Returns to the previous residency (R21), with a new all-gather of
        unsharded parameters so that they include the edits of all ranks. Not sent after an exception of the user's code, because
        other ranks may not join the all-gather."""
        match self._before:
            case Residency.SHARD:
                return _NONE
            case Residency.FULL:
                return self.unshard()
            case Residency.RESHARD_GROUP:
                return self.unshard() + self.reshard_to_group()
            case _:
                assert_never(self._before)


def _single(action: Action) -> Actions:
    return (action,)


_GATHER, _GATHER_FROM_GROUP, _REUSE = map(_single, (Action.GATHER, Action.GATHER_FROM_GROUP, Action.REUSE))
_WAIT = _single(Action.WAIT)
_EXPOSE, _EXPOSE_AGAIN, _CONCEAL = map(_single, (Action.EXPOSE, Action.EXPOSE_AGAIN, Action.CONCEAL))
_ADOPT_EXPOSE_AGAIN = _single(Action.ADOPT_EXPOSE_AGAIN)
_USE, _USE_AGAIN, _END_USE = map(_single, (Action.USE, Action.USE_AGAIN, Action.END_USE))
_BEGIN_BACKWARD, _END_BACKWARD = map(_single, (Action.BEGIN_BACKWARD, Action.END_BACKWARD))
_FREE, _FREE_GROUP_SHARD = map(_single, (Action.FREE, Action.FREE_GROUP_SHARD))
_RESHARD_TO_GROUP, _REDUCE = map(_single, (Action.RESHARD_TO_GROUP, Action.REDUCE))
_SUMMON, _DISMISS = map(_single, (Action.SUMMON, Action.DISMISS))
