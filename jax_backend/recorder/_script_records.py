"""Gives the steps of a script that have ended to a Recorder: all models as one, with the names that they have in the script."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossframe.errors import UsageError
from jax_backend.recorder._array_interior import compute_dtype
from jax_backend.recorder._cut_batches import CutBatches
from jax_backend.recorder._device_ranks import Grid
from jax_backend.recorder._model_state import ByRank, canonical_names, of_ranks, statistics_of_ranks
from jax_backend.recorder._models_as_shards import joined, named_state
from jax_backend.recorder._models_in_script import names_in_script
from jax_backend.recorder._optimizer_settings import noted
from jax_backend.recorder._recorder import Recorder, rates_in
from jax_backend.recorder._script_batch import Constants
from jax_backend.recorder._script_interiors import collectives_of, interiors_of, local_grads_of
from jax_backend.recorder._script_turns import (
    USE_RECORDER,
    Gradient,
    Model,
    Params,
    Step,
    Turn,
    is_gone,
    listed,
    wholes,
)
from jax_backend.recorder._taps import Value
from jax_backend.shards._sharded_params import ShardedParams
from jax_backend.state._optimizer_state import COUNTS


class Records:
    """The recorded steps of a script.

    Args:
        begin: makes the recorder, from the initial parameters, the half precision in which modules compute, the number of
            gradients of a step, and whether several models are one.
        constants: of the script, known before the first step is added.

    Attributes:
        recorder: None before the first step.
        leads: what precedes the names of each model in the recording; none before the first step.
    """

    def __init__(self, begin: Callable[..., Recorder], constants: Constants) -> None:
        self._begin, self._constants, self._cut_batches = begin, constants, CutBatches()
        self.recorder: Recorder | None = None
        self.leads: dict[Model, str] = {}

    def add(self, step: Step, models: Sequence[Model]) -> None:
        """Record a step.

        Args:
            models: all models of the script, in the order of the recording.
        """
        if self.recorder is None:
            self._name_models(models)
            for turn in step.turns:
                turn.gradients = [replace(each, batch=self._constants.others(each.batch)) for each in turn.gradients]
            self._constants.forget_copies()
        for turn in step.turns:
            turn.gradients = self._cut_batches.cut(turn.model, turn.gradients)
        before = self._all({model: turn.before for model, turn in step.first.items()})
        after = self._all({model: turn.kept_after for model, turn in step.last.items()})
        has_tensors = self.recorder is None or self.recorder.records()
        if has_tensors:  # at other steps copies would take time and memory for nothing
            before, after = (OrderedDict(zip(each, wholes([*each.values()]), strict=True)) for each in (before, after))
        placed = OrderedDict((name, before[name] if value.array is None else value) for name, value in after.items())
        gradients = [each for turn in step.turns for each in turn.gradients]
        if self.recorder is None:
            self.recorder = self._make_recorder(before, placed, gradients)
        self._add_interior(self.recorder, step, before)
        if has_tensors and len(models) == 1:
            _add_state(self.recorder, step, models[0])
        if len(models) > 1:
            self._add_turns(self.recorder, step)
        # Arrays count once: a call may take several gradients of its batch, or cut it into microbatches itself.
        parts = {tuple(map(id, part)): part for each in gradients for part in each.microbatches}
        state, rate = self._optimizer_state(step, of_arrays=has_tensors)
        grads = None
        if has_tensors:
            grads = self._known({model: _grads(turn, self.leads[model], placed) for model, turn in step.last.items()})
        self.recorder.step(
            loss=_loss(step.loss, self.recorder.grid),
            params=self._as_trained(self._known({model: self._part_of(after, model) for model in step.last})),
            grads=self._as_trained(grads),
            opt_state=state,
            batch=[*self.recorder.grid.batches([*parts.values()]).values()],
            learning_rate=rate,
        )

    def _name_models(self, models: Sequence[Model]) -> None:
        """Give each model the name of the script's variable, if there are several."""
        names = names_in_script([model.first_params for model in models]) if len(models) > 1 else []
        self.leads = dict(zip(models, [f"{name}." for name in names] or [""], strict=True))
        for model in models:
            model.first_params = {}
        noted.initial = {}

    def _make_recorder(self, before: Params, placed: Params, gradients: Sequence[Gradient]) -> Recorder:
        """Make the recorder of the parameters before the first step, on the devices on which that step leaves them."""
        if missing := [name for name, value in before.items() if value.array is None]:
            raise UsageError(
                f"the initial values of {listed(missing)} are no arguments of the step, so that they are not known; pass "
                f"them to the jitted function, or {USE_RECORDER}"
            )
        initial = OrderedDict((name, _placed(value.array, placed[name].array)) for name, value in before.items())
        num_gradients = sum(len(each.microbatches) for each in gradients)
        dtype = compute_dtype(value for each in gradients for value in each.tap.values["inside"])
        recorder = self._begin(self._as_trained(initial), dtype, num_gradients, len(self.leads) > 1)
        recorder.constants = self._constants.digests
        return recorder

    def _add_interior(self, recorder: Recorder, step: Step, before: Params) -> None:
        """Add the collectives of a step, and at dense ones what ranks computed inside."""
        if recorder.is_dense() and (values := _arrays(before)) is not None:
            trained, names = self._as_trained(values), recorder.module_names
            for turn in step.turns:
                for interior in interiors_of(turn, trained, recorder.grid, self.leads, names):
                    recorder.add_interior(interior)
            if (local := local_grads_of(step.last, self.leads)) is not None:
                recorder.add_local_grads(local)
        recorder.add_collectives(collectives_of(step.turns, self.leads))

    def _optimizer_state(self, step: Step, *, of_arrays: bool) -> tuple[Any, Any]:
        """The state of the optimizer, or of several by the names of their models, and the learning rate, if known."""
        states = {model: _state(turn.update.values["state"], of_arrays=of_arrays) for model, turn in step.last.items()}
        if len(self.leads) == 1:
            [(model, state)] = states.items()
            return state, _rate(step.last[model].update.values["state"], state)
        of_models = {self.leads[model].removesuffix("."): each for model, each in states.items() if each is not None}
        return {name: named_state(name, each) for name, each in of_models.items()}, None

    def _all(self, of_models: Mapping[Model, Params]) -> Params:
        """Values of all models, by the names that they have in the recording."""
        return OrderedDict(
            (f"{lead}{name}", value) for model, lead in self.leads.items() for name, value in of_models[model].items()
        )

    def _part_of(self, values: Params, model: Model) -> Params:
        """The values of a model, by its own names."""
        found = ((name, values.get(f"{self.leads[model]}{name}", Value(None))) for name in model.names)
        return OrderedDict(found)

    def _known(self, of_models: Mapping[Model, Params]) -> "OrderedDict[str, Any] | None":
        """The arrays of models of which all are known; None if there is none."""
        known = {model: each if _arrays(each) is not None else OrderedDict() for model, each in of_models.items()}
        return _arrays(self._all(known)) or None

    @property
    def _is_by_name(self) -> bool:
        """Whether any of the models is no ShardedParams, so that all are recorded as arrays by name."""
        return any(model.structure is None for model in self.leads)

    def _as_trained(self, values: "OrderedDict[str, Any] | None") -> Any:
        """Values of all models, or of some, as the recorder takes them: as ShardedParams, if the script trains these alone, or by
        name."""
        if values is None or self._is_by_name:
            return values
        found: dict[str, ShardedParams] = {}
        for model, lead in self.leads.items():
            own = [values[name] for name in (f"{lead}{each}" for each in model.names) if name in values]
            if own:
                found[lead.removesuffix(".")] = jax.tree.unflatten(model.structure, own)
        return joined(found) if len(self.leads) > 1 else found[""]

    def _add_turns(self, recorder: Recorder, step: Step) -> None:
        """Say after how many forwards each model was updated, and the losses."""
        forwards, losses, number = {}, [], 0
        for turn in step.turns:
            number += sum(len(each.microbatches) for each in turn.gradients)
            losses.append((number, _loss(turn.loss, recorder.grid)))
            names = turn.model.names if self._is_by_name else turn.model.param_names
            forwards |= {f"{self.leads[turn.model]}{name}": number for name in names}
        recorder.add_turns(forwards, losses)


def _add_state(recorder: Recorder, step: Step, model: Model) -> None:
    """Add the state of a model that is alone: of several, the paths do not tell whose it is."""
    grid, names = recorder.grid, recorder.param_names
    initial, after = step.initial_state, step.model_state
    if model.tree is not None:
        initial, after = _with_ranks(initial, grid), _with_ranks(after, grid)
    if initial:  # the first step
        of_each = {path: value.array for path, value in after.items() if value.by_rank}
        recorder.per_rank_statistics = statistics_of_ranks(of_each)

    def by_rank(state: Mapping[str, Value]) -> ByRank:
        return {
            name: of_ranks(state[path].array, grid, by_rank=state[path].by_rank)
            for path, name in canonical_names(state, names).items()
            if not is_gone(state[path].array)
        }

    kept = by_rank(after)
    recorder.add_state(by_rank(initial) if kept else {}, kept)


def _with_ranks(state: Mapping[str, Value], grid: Grid) -> dict[str, Value]:
    """State that `jax_backend` steps carry: arrays of which each rank has one row, as `per_rank` makes them."""

    def has_ranks(array: Any) -> bool:
        if is_gone(array) or not isinstance(array, jax.Array) or array.shape[:1] != (grid.spec.world_size,):
            return False
        return array.sharding.shard_shape(array.shape) == (1, *array.shape[1:])

    return {path: Value(value.array, value.by_rank or has_ranks(value.array)) for path, value in state.items()}


def _loss(loss: Any, grid: Grid) -> Any:
    """A scalar, or a loss for each rank."""
    return loss if np.shape(loss) in ((), (grid.spec.world_size,)) else jnp.mean(loss)


def _arrays(values: Mapping[str, Value]) -> Any:
    """The arrays, in order; None if any is missing, or donated."""
    if any(is_gone(value.array) for value in values.values()):
        return None
    return OrderedDict((name, value.array) for name, value in values.items())


def _placed(before: Any, after: Any) -> Any:
    """Initial parameters on the devices on which the first step left them."""
    if not isinstance(after, jax.Array):
        return before
    if isinstance(before, jax.Array) and before.sharding.is_equivalent_to(after.sharding, before.ndim):
        return before  # replicas may differ
    if isinstance(before, jax.Array) and not (before.is_fully_addressable or before.is_fully_replicated):
        return jax.jit(lambda array: array, out_shardings=after.sharding)(before)
    values = np.asarray(before)
    return jax.make_array_from_callback(values.shape, after.sharding, lambda index: values[index])


def _reduced(value: Value, like: Any) -> Value:
    """A gradient as an array with the sharding of its parameter."""
    if value.array is None or not value.by_rank:
        return value
    if like is None or {part.device for part in value.array.addressable_shards} != set(like.sharding.device_set):
        return Value(None)
    rows = [part.data[0] for part in value.array.addressable_shards]
    return Value(jax.make_array_from_single_device_arrays(like.shape, like.sharding, rows))


def _grads(turn: Turn, lead: str, placed: Params) -> Params:
    """The gradients that the optimizer got, with the shardings of the parameters."""
    return OrderedDict(
        (name, _reduced(value, placed[f"{lead}{name}"].array))
        for name, value in zip(turn.model.names, turn.update.values["grads"], strict=True)
    )


def _state(values: Any, *, of_arrays: bool) -> Any:
    """The optimizer state; None if the program does not return all of it, or the script has donated it.

    Args:
        of_arrays: whether more than its numbers, such as learning rates, is used.
    """
    leaves, structure = jax.tree.flatten(values)
    if any(is_gone(leaf.array) for leaf in leaves):
        return None
    taken = [leaf if of_arrays or np.ndim(leaf.array) == 1 else Value(leaf.array) for leaf in leaves]
    return jax.tree.unflatten(structure, [leaf.array for leaf in wholes(taken)])


def _rate(values: Any, state: Any) -> Any:
    """The learning rate of a step, if the state or the schedule has it."""
    if (schedule := noted.schedule()) is not None:
        nodes = jax.tree.leaves(values, is_leaf=lambda node: isinstance(node, COUNTS))
        counts: list[Any] = [node.count for node in nodes if isinstance(node, COUNTS)]
        if len(counts) == 1 and counts[0].array is not None:
            return schedule(counts[0].of_a_rank - 1)
    rates = rates_in(state)
    return jnp.copy(rates[0]) if len(rates) == 1 else None
