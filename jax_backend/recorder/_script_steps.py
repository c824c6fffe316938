"""Makes recorded steps of the taps of a script: a step ends when each model has had its turn.

[Note: models that take turns] A generator and a discriminator, or an actor and its critics, have optimizers of their own. They
are one model with the names that they have in the script, and a step ends when all of them have been updated, some perhaps
several times. How many there are is known from the optimizers' states that the script has initialised, so that the first step
waits for all. Two critics have parameters of the same names and shapes: they are told apart by their arrays, which come from
their last updates.
"""

import functools
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from crossframe.errors import UsageError
from jax_backend.recorder._optimizer_settings import noted
from jax_backend.recorder._recorder import Recorder
from jax_backend.recorder._script_batch import Constants
from jax_backend.recorder._script_records import Records
from jax_backend.recorder._script_turns import (
    USE_RECORDER,
    Gradient,
    Model,
    Step,
    Turn,
    arrays_of,
    differ,
    listed,
    named,
    of_parameters,
)
from jax_backend.recorder._taps import APPLY, GRADIENT, UPDATE, PackedTap, Tap, Value, unrolled
from jax_backend.recorder._updates_by_hand import Tree, UpdatesByHand

_MOST_WITHOUT_UPDATE = 4
_MOST_TURNS = 100
"""Updates of other models in a step without one of a model. Critics of the first Wasserstein GANs have as many for one of the
generator."""
_MOST_TO_WAIT = 10
"""Turns of one model after which the first step waits for no other, since a model may be initialised and not trained."""


class Steps:
    """The steps of a script.

    Args:
        begin: makes the recorder, from the initial parameters, the half precision in which modules compute, the number of
            gradients of a step, and whether several models are one, at the end of the first step; None: nothing is recorded.
        finished: called at the end of each step with its loss.
    """

    def __init__(self, begin: Callable[..., Recorder] | None, finished: Callable[[Any], None]) -> None:
        self._finished = finished
        self.number = 0
        # By path the state that is no parameter: what the functions of the first step got, and what those of this one returned.
        self._initial_state: Mapping[str, Value] = {}
        self._model_state: Mapping[str, Value] = {}
        self._gradients: list[Gradient] = []
        self._models: list[Model] = []
        self._by_hand = UpdatesByHand()
        self._are_all_known = self.are_unseen = False
        self._steps: deque[Step] = deque()
        self.constants = Constants()
        self._records = Records(begin, self.constants) if begin is not None else None

    @property
    def recorder(self) -> Recorder | None:
        """The recorder; None before the first step has ended, and where nothing is recorded."""
        return self._records.recorder if self._records is not None else None

    @property
    def are_by_hand(self) -> bool:
        """Whether the script updates its parameters without an optimizer, as far as is known."""
        return not noted.has_optimizer and all(model.is_by_hand for model in self._models)

    def number_in(self, taps: Iterable[PackedTap]) -> int:
        """The number of steps that a function with these taps makes."""
        found = list(taps)
        if any(tap.kind == APPLY for tap in found):
            return sum(tap.num_iterations for tap in found if tap.kind == APPLY)
        return sum(tap.num_iterations for tap in found if tap.kind == UPDATE and tap.scans)

    def has(self, leaf: Any) -> bool:
        """Whether an array is of one of several models."""
        return id(leaf) in noted.initial or self.has_updated(leaf)

    def has_updated(self, leaf: Any) -> bool:
        """Whether an array is of one of several models, after an update of it."""
        return any(id(leaf) in model.arrays for model in self._models)

    def add(self, taps: Sequence[Tap], batch: Sequence[Any], originals: Mapping[int, Any]) -> None:
        """Add taps in the order of the program.

        Args:
            batch: the arrays of the batch of their gradients.
            originals: the script's arrays by the ids of their copies.
        """
        applications = [tap for tap in taps if tap.kind == APPLY]
        ends = applications or (self._models and all(model.is_added_by_optax for model in self._models))
        if not ends or not self.constants.are_known:
            # The step is recorded later, whatever the script has written into arrays of its batch by then.
            copies = [each.copy() if isinstance(each, np.ndarray) else each for each in batch]
            self.constants.note_copies(copies, batch)
            batch = copies
        self._by_hand.note(taps)
        of_iteration = functools.cache(lambda at: _batch_at(at, batch))  # which gradients share
        for at, tap in unrolled(taps, (UPDATE, APPLY)):
            self.note_state(*(_known(tap.values.get(name, {})) for name in ("initial_state", "model_state")))
            if tap.kind == GRADIENT:
                self._begin_gradient(dict(zip(tap.about.names, tap.values["diff"], strict=True)))
                if self.are_by_hand:
                    tap = self._by_hand.add(tap)
                else:
                    self._check_updated(tap)
                self._gradients.append(Gradient.of(tap, of_iteration(at), originals))
            elif tap.kind == UPDATE:
                model = self._begin_update(tap, originals, in_scan=bool(at))
                model.is_added_by_optax |= any(of_parameters(each, [model.names]) for each in applications)
            else:
                self._apply(tap, originals, in_scan=bool(at))
            self._record_ended()

    def note_state(self, before: Mapping[str, Value], after: Mapping[str, Value]) -> None:
        """Note the state that is no parameter, which a function of the step got and returned, by path."""
        if self.number == 0:
            self._initial_state = {**before, **self._initial_state}
        self._model_state = {**self._model_state, **after}

    @property
    def _is_alone(self) -> bool:
        """Whether there is one model, as far as is known."""
        return len(self._models) < 2 and (self._are_all_known or noted.num_models < 2)

    @property
    def _needs_names(self) -> bool:
        """Whether models get names later."""
        return self._records is not None and not self._records.leads

    def begin_batch(self, arrays: Sequence[Any], given: Any) -> Sequence[Any]:
        """A gradient is about to be taken, before what the step is given may be donated; returns those of the arrays that are its
        batch.

        Args:
            given: a pytree of all arguments.
        """
        self.constants.begin(arrays, given, self.number)
        self._record_ended()
        return self.constants.others(arrays)

    def begin_gradient(self, params: Mapping[str, Value], function: Any) -> None:
        """A gradient is about to be taken at these parameters, before what the step is given may be donated.

        Args:
            function: the one that takes it. Hashable.
        """
        if self.are_by_hand:
            if (tree := self._by_hand.changed(params)) is not None:
                if self._by_hand.is_of_params(tree, [*params.values()]):
                    self._update_by_hand(tree)
                else:
                    self._gradients = [each for each in self._gradients if each.tap.about[:2] != tree]
            self._by_hand.begin(params, function)
        self._begin_gradient(params)

    def note_returned(self, values: Sequence[Value]) -> None:
        """The function that has taken the last gradients has returned these arrays."""
        if self.are_by_hand:
            self._by_hand.note_returned(values)

    def _update_by_hand(self, tree: Tree) -> None:
        """The script has updated these parameters without an optimizer."""
        gradients = [each for each in self._gradients if each.tap.about[:2] == tree]
        update = self._by_hand.update(tree, len(gradients))
        if not self._models:
            self._models.append(Model(update, is_by_hand=True))
            print(
                f"crossframe: no optimizer of optax is used: the parameters are the arrays {listed(tree[0])} at which gradients "
                "are taken, and a step ends where a gradient is taken at other values of them",
                file=sys.stderr,
            )
        [model] = self._models
        model.update, model.update_in_scan, model.gradients = update, False, gradients

    def _begin_gradient(self, params: Mapping[str, Value]) -> None:
        if self.are_unseen:
            self._check_unseen(params)
        self._close_updates()
        if (model := next((each for each in self._models if each.begin_gradient(params)), None)) is not None:
            self._note(model, {id(value.array): value.array for value in params.values()})
            self._record_ended()

    def _note(self, model: Model, params: Mapping[int, Any]) -> None:
        """Note the arrays of a model's parameters, by which it is known again, and by which it gets a name."""
        if not self._is_alone:
            model.arrays |= params
            model.first_params |= params if self._needs_names else {}

    def follow(self, given: Any, result: Any) -> None:
        """A function has returned an array that it was given, which is another object then."""
        for known in (known for model in self._models for known in (model.arrays, model.first_params)):
            if id(given) in known:
                known[id(result)] = result

    def _close_updates(self) -> None:
        """End the updates that optax does not add, but for the parameters after them."""
        for model in self._models:
            if model.update is not None and not model.is_added_by_optax:
                model.open_turn = self._closed(model)

    def _begin_update(self, tap: Tap, originals: Mapping[int, Any], *, in_scan: bool) -> Model:
        if any(model.is_by_hand for model in self._models):
            raise UsageError(
                f"an optimizer of optax or a jax.lax.scan updated {listed(tap.about[0])} after the script had updated parameters "
                f"without an optimizer; {USE_RECORDER}"
            )
        if not noted.has_optimizer and not self._models:
            print(
                f"crossframe: no optimizer of optax is used: the parameters are the arrays {listed(tap.about[0])} that a "
                "jax.lax.scan changes after it has taken gradients at them, and each of its iterations is a step",
                file=sys.stderr,
            )
        self._by_hand = UpdatesByHand()  # let its arrays go
        model = self._model_of(tap, originals)
        if model.update is not None:
            raise UsageError(
                "an optimizer of optax made updates twice, and between them neither optax.apply_updates nor a gradient got the "
                f"parameters; add updates by optax.apply_updates, or {USE_RECORDER}"
            )
        model.update, model.update_in_scan = tap, in_scan
        model.arrays = {} if self._is_alone else arrays_of(tap, ("before", "state_before", "state"), originals)
        if self._needs_names:
            at = arrays_of(tap, ("before", "state_before"), originals)
            model.first_params |= arrays_of(tap, ("before",), originals)
            model.first_params |= {i: noted.initial[i] for i in at.keys() & noted.initial.keys()}
        model.gradients = model.gradients_among(self._gradients, is_alone=self._is_alone)
        if not model.gradients and "loss" in tap.values:
            self._say_unseen()
        elif not model.gradients:
            what = f"{len(self._gradients)} gradients of other shapes were" if self._gradients else "no gradient was"
            raise UsageError(
                f"an optimizer of optax updated {listed(model.names)}, but before it {what} taken by jax.grad or "
                "jax.value_and_grad where it can be seen (jax.lax.scan is followed, but not jax.vjp and jax.lax.while_loop); "
                f"{USE_RECORDER}"
            )
        model.begin_update(tap)
        return model

    def _check_unseen(self, params: Mapping[str, Value]) -> None:
        """A gradient of `jax.grad` is about to be taken: forget an update before it, as of a call that compiles, whose gradients
        were made in another way."""
        if all(model.matching(params) is None for model in self._models):
            return
        if self.number or self._steps:
            raise UsageError(
                f"gradients of {listed([*params])} are taken by jax.grad or jax.value_and_grad after updates with gradients that "
                f"were not; {USE_RECORDER}"
            )
        self._models, self.are_unseen = [], False

    def _say_unseen(self) -> None:
        """Say once what is recorded of gradients that are made in another way than by `jax.grad` of a loss."""
        if not self.are_unseen:
            self.are_unseen = True
            print(
                "crossframe: no gradient of jax.grad or jax.value_and_grad was seen before the update of an optimizer: the loss "
                "of a step is the norm of the gradients that the optimizer gets, and there are no batches",
                file=sys.stderr,
            )

    def _model_of(self, update: Tap, originals: Mapping[int, Any]) -> Model:
        """The model that is updated. Before all are known, it may be a new one."""
        alike = [model for model in self._models if (model.names, model.shapes) == update.about[:2]]
        if len(alike) == 1 and self._are_all_known:
            return alike[0]
        own = arrays_of(update, ("before", "state_before"), originals).keys()
        if found := [model for model in alike if own & model.arrays.keys()]:
            return found[0]
        if not self._are_all_known and (not alike or (own and all(model.arrays for model in alike))):
            self._models.append(Model(update))
            return self._models[-1]
        if not alike:
            raise UsageError(
                f"the script trains more than one model: an optimizer updated {listed(update.about[0])} after one that updated "
                f"{listed(self._models[0].names)}; {USE_RECORDER}"
            )
        return min(alike, key=lambda model: model.num_turns)

    def _apply(self, tap: Tap, originals: Mapping[int, Any], *, in_scan: bool) -> None:
        """An update is added to the parameters."""
        updated = [each for each in self._models if each.update is not None or each.open_turn is not None]
        if not (found := of_parameters(tap, [each.names for each in updated])):
            return
        pending = [(updated[i], applied) for i, applied in found]
        own = arrays_of(tap, ("before",), originals).keys()
        model, applied = next((each for each in pending if own & each[0].arrays.keys()), pending[0])
        model.is_added_by_optax = True
        turn, model.open_turn = model.open_turn, None  # another model's gradient was taken first
        if model.update is not None:
            turn = self._closed(model)
        if turn is not None:
            turn.in_scan = in_scan
            turn.end(named(applied, "before"), named(applied, "after"))
            self._note(model, arrays_of(applied, ("before", "after"), originals))

    def end(self, returned: Mapping[str, Value]) -> None:
        """The script has ended.

        Args:
            returned: what the last step returned where the steps before it returned the next parameters.
        """
        tree = self._by_hand.params
        if self.are_by_hand and tree is not None:
            returned = self._by_hand.returned()
            if self._by_hand.is_step() and any(each.tap.about[:2] == tree for each in self._gradients):
                self._update_by_hand(tree)
        self._close_updates()
        if not self.constants.are_known:
            self.constants.end()
        if not self._are_all_known:
            self._wait_no_longer()
        are_known = True
        for model in self._models:
            if (turn := model.open_turn) is not None:
                are_known &= turn.end_without_gradient(model.matching(returned))
        if not are_known and self._records is not None:
            print(
                "crossframe: the parameters after the last step are not recorded: the script added its updates by a function of "
                "its own, and took no gradient afterwards",
                file=sys.stderr,
            )
        self._record_ended()

    def _check_updated(self, tap: Tap) -> None:
        """Raise UsageError if parameters change, but not by optax."""
        if len(self._gradients) < _MOST_WITHOUT_UPDATE or any(model.update is not None for model in self._models):
            return
        first = self._gradients[0].tap
        if first.about.names != tap.about.names:
            return
        pairs = zip(first.values["diff"], tap.values["diff"], strict=True)
        if any(differ(a.array, b.array) for a, b in pairs):
            raise UsageError(
                f"{len(self._gradients)} gradients were taken of changing parameters, but no optimizer of optax updated them; "
                f"{USE_RECORDER}"
            )

    def _closed(self, model: Model) -> Turn | None:
        """The turn of a model that is updated; None if its gradient is only accumulated."""
        update, model.update = model.update, None
        gradients, model.gradients = model.gradients, ()
        assert update is not None
        if "mini_step" in update.values and int(update.values["mini_step"].of_a_rank):
            return None
        losses = [_mean(each.tap) for each in gradients] or [_mean(update)]
        if model.tree is not None and any(each.is_local for each in gradients):
            loss = sum(loss * each.num_microbatches for loss, each in zip(losses, gradients, strict=True))
        else:
            loss = sum(losses[1:], losses[0]) / len(losses) if len(losses) > 1 else losses[0]
        own = {id(each) for each in gradients}
        self._gradients = [] if self._is_alone else [each for each in self._gradients if id(each) not in own]
        model.num_turns += 1
        model.arrays = {} if self._is_alone else arrays_of(update, ("state",), {})
        turn = Turn(model, loss, update, gradients, model.update_in_scan)
        self._add_turn(turn)
        return turn

    def _add_turn(self, turn: Turn) -> None:
        if not self._steps or self._steps[-1].is_complete:
            self._steps.append(Step())
        step = self._steps[-1]
        step.turns.append(turn)
        if not self._are_all_known:
            self._are_all_known = len({model.shapes for model in self._models}) >= noted.num_models
            if not self._are_all_known:
                if turn.model.num_turns >= _MOST_TO_WAIT:
                    self._wait_no_longer()
                return
        step.drop_between(turn.model)
        missing = [model for model in self._models if model not in step.last]
        if not missing:
            self._complete(step)
        elif len(step.turns) > _MOST_TURNS:
            raise UsageError(
                f"{_MOST_TURNS} updates of other parameters passed without one of {listed(missing[0].names)}, which were "
                f"updated before; {USE_RECORDER}"
            )

    def _complete(self, step: Step) -> None:
        step.is_complete = True
        step.initial_state, self._initial_state = self._initial_state, {}
        step.model_state, self._model_state = self._model_state, {}
        self.number += 1
        self._gradients = []
        self._finished(step.loss)

    def _wait_no_longer(self) -> None:
        """The models that have had a turn are all. If there is one, each of its turns was a step."""
        self._are_all_known = True
        if not self._steps or self._steps[-1].is_complete:
            return
        step = self._steps.pop()
        steps = [step]
        if len(self._models) == 1:
            steps = [Step([turn]) for turn in step.turns]
            for turn, successor in itertools.pairwise(step.turns):
                turn.successor = successor
        for each in steps:
            self._steps.append(each)
            self._complete(each)

    def _record_ended(self) -> None:
        if self.number > 1 and not self.constants.are_known:  # one call has made several steps
            self.constants.end()
        while self._steps and self._steps[0].has_ended and self.constants.are_known:
            step = self._steps.popleft()
            if self._records is not None:
                self._records.add(step, self._models)


def _known(values: Mapping[str, Value]) -> dict[str, Value]:
    """Those that the program returns."""
    return {path: value for path, value in values.items() if value.array is not None}


def _mean(tap: Tap) -> Any:
    """The mean loss of a gradient, or that of each rank: a new array, which the script cannot donate."""
    value: Value = tap.values["loss"]
    return jnp.mean(value.array, axis=tuple(range(int(value.by_rank), np.ndim(value.array))))


def _batch_at(at: Sequence[tuple[int, int]], batch: Sequence[Any]) -> Sequence[Any]:
    """The arrays of an iteration of scans over steps, which cut those that have their length. Others, such as a data set from
    which the scan takes samples itself, count at the first step."""
    found = list(batch)
    for i, length in at:
        cut = [leaf[i] for leaf in found if leaf.ndim and leaf.shape[0] == length]
        found = cut or ([] if i else found)
    return found
