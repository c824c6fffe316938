"""Updates of the models of a script. A turn of a model begins with gradients, and ends when the optimizer's updates are applied.

[Note: updates that optax does not add] A script or a library may add updates by a function of its own, such as
`jax.tree.map(jnp.add, params, updates)`. Then the parameters after a turn are those at which the next gradient is taken, or those
that the next update of the optimizer gets. After the last turn there is neither, and its parameters are, in this order: what the
jitted function returned where it returned the next parameters in the turn before; or the sum of parameters and updates, if that
sum was right at all earlier turns; or unknown, which is printed. What the script's own function does is not assumed without
having been seen.
"""

import functools
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from crossframe.errors import UsageError
from jax_backend.recorder._params_as_shards import trained_names
from jax_backend.recorder._taps import RankStep, Tap, Value
from jax_backend.shards._param_tree import ParamTree
from jax_backend.shards._sharded_params import ShardedParams

_jit, _shard_map = jax.jit, jax.shard_map

USE_RECORDER = """record from inside the script:

    from jax_backend import Recorder

    with Recorder("runs/mine", params) as recorder:
        params = recorder.params
        for batch in batches:
            ...                                   # loss, grads, updates: as before
            recorder.step(params=params, grads=grads, loss=loss, opt_state=opt_state, batch=batch)"""

_SHARDS = "shards."
"""The prefix of the paths of trained shards in ShardedParams, which `jax_backend.value_and_grad` differentiates by."""
Params = OrderedDict[str, Value]
"""Parameters by name."""


@dataclass(frozen=True)
class Gradient:
    """A gradient since the last step.

    Attributes:
        batch: the arrays of its batch.
        grads: its arrays that the script has got, which it may free.
        at: the arrays at which it was taken, by their ids.
        parts: the arrays of each microbatch, where the step is known to cut these out of the batch.
    """

    tap: Tap
    batch: Sequence[Any]
    grads: tuple[weakref.ref, ...]
    at: Mapping[int, Any]
    parts: Sequence[Sequence[Any]] = ()

    @classmethod
    def of(cls, tap: Tap, batch: Sequence[Any], originals: Mapping[int, Any]) -> "Gradient":
        """A gradient that holds its own arrays no longer than the script does. For `originals` see `arrays_of`."""
        values = dict(tap.values)
        grads = (value.array for value in values.pop("own_grads"))
        kept = tuple(weakref.ref(grad) for grad in grads if isinstance(grad, jax.Array))
        return cls(replace(tap, values=values), batch, kept, arrays_of(tap, ("diff",), originals))

    @property
    def is_local(self) -> bool:
        """Whether it is a rank's own gradient, of a step with `reduces=False`. Such gradients are added, and the loss function
        divides by their number."""
        return self.rank_step is not None and not self.rank_step.reduces

    @property
    def rank_step(self) -> RankStep | None:
        """The step of `jax_backend.value_and_grad` that takes it."""
        return self.tap.about.rank_step

    @property
    def rank_steps(self) -> list[RankStep]:
        """The same for each microbatch."""
        return [self.rank_step] * self.num_microbatches if self.rank_step is not None else []

    @property
    def num_microbatches(self) -> int:
        """How often it is taken: a scan may do so for each microbatch."""
        return math.prod(scan.length for scan in self.tap.scans)

    @property
    def microbatches(self) -> list[Sequence[Any]]:
        """The arrays of each microbatch: a scan over microbatches cuts those that have its length."""
        if self.parts:
            return [*self.parts]
        if len(self.tap.scans) != 1:
            return [self.batch]
        number = self.tap.scans[0].length
        return [[leaf[i] if leaf.shape[:1] == (number,) else leaf for leaf in self.batch] for i in range(number)]


@dataclass
class Turn:
    """An update of a model, whose parameters after it may not be known yet.

    Attributes:
        gradients: those that its update got.
        in_scan: whether it is an iteration of a scan.
        before, after: the parameters, once it has ended; an unknown one has no array.
        successor: the next turn of the same model, if it is recorded later than that one begins.
    """

    model: "Model"
    loss: Any
    update: Tap
    gradients: Sequence[Gradient]
    in_scan: bool
    has_ended: bool = False
    successor: "Turn | None" = None
    before: Params = field(default_factory=OrderedDict)
    after: Params = field(default_factory=OrderedDict)

    def given(self) -> Params:
        """The parameters that the update got, or else those of the gradient."""
        if self.update.values["before"]:
            return named(self.update, "before")
        return self._params_of_gradient() or OrderedDict((name, Value(None)) for name in self.model.names)

    def _params_of_gradient(self) -> Params | None:
        """The parameters at which the first gradient was taken; None if they are not those of the model."""
        if not self.gradients:
            return None
        tap = self.gradients[0].tap
        return self.model.matching(dict(zip(tap.about.names, tap.values["diff"], strict=True)))

    def end(self, before: Params, after: Params | None) -> None:
        """The parameters after it are known, or will never be."""
        model, self.has_ended = self.model, True
        if self.in_scan:  # an iteration begins with the parameters of the one before
            before = OrderedDict((name, _known(value, model.after.get(name))) for name, value in before.items())
        elif any(value.array is None for value in before.values()):
            # The model gave the optimizer copies, as where nnx.remat returns the state of layers.
            given = self._params_of_gradient() or {}
            given = {} if any(value.by_rank for value in given.values()) else given
            before = OrderedDict((name, _known(value, given.get(name))) for name, value in before.items())
        if after is None:
            after = OrderedDict((name, Value(None)) for name in before)
        elif not model.is_added_by_optax and (added := self._sums(before)) is not None:
            is_sum = all(_is_same(added[name].array, value.array) for name, value in after.items())
            model.is_sum = is_sum and model.is_sum is not False
        model.after = after if self.in_scan else OrderedDict()
        self.before, self.after = before, after

    @property
    def is_known(self) -> bool:
        """Whether the parameters before and after it are known, or will never be."""
        return self.has_ended and (self.successor is None or self.successor.has_ended)

    @property
    def kept_after(self) -> Params:
        """The parameters after it. Those that the script has donated since are what the successor began with."""
        is_donated = any(is_gone(value.array) for value in self.after.values())
        return self.successor.before if is_donated and self.successor is not None else self.after

    def drop(self) -> None:
        """Let the values go, but for the loss and what gradients have."""
        self.before, self.after = OrderedDict(), OrderedDict()
        self.update = replace(self.update, values={})

    def end_without_gradient(self, returned: Params | None) -> bool:
        """End the last turn of a script; returns whether the parameters after it are known.

        Args:
            returned: what the last step returned where the steps before it returned the next parameters.
        """
        before = self.given()
        after = self._sums(before) if returned is None and self.model.is_sum else returned
        self.end(before, after)
        return after is not None

    def _sums(self, before: Params) -> Params | None:
        """The sums of parameters and updates, as optax adds them; None if either is unknown."""
        updates = self.update.values["updates"]
        arrays = [value.array for value in (*before.values(), *updates)]
        if not updates or any(is_gone(array) for array in arrays) or any(value.by_rank for value in updates):
            return None
        pairs = zip(before.items(), updates, strict=True)
        return OrderedDict(
            (name, Value((value.array + each.array).astype(value.array.dtype))) for (name, value), each in pairs
        )


class Model:
    """Parameters that one optimizer of the script updates.

    Attributes:
        names, shapes: of the parameters, as the optimizer has them.
        structure: of ShardedParams; None: the parameters are any other pytree.
        is_added_by_optax: whether a function of optax has added its updates.
        is_by_hand: whether the script updates it without an optimizer.
        update: one whose parameters are not known yet, and which may be one of several small ones; `gradients` are its.
        open_turn: one of which only the parameters after it are not known.
        is_sum: whether the parameters after all turns so far were the sums of parameters and updates; None: not known.
        after: the parameters after the last iteration of a scan.
        num_turns: the number of its turns.
        arrays: its arrays in its last turn, by their ids, which tell it from other models with parameters of the same names.
        first_params: its parameters before and after its turns in the first step, by their ids, as the script's variables have
            them.
    """

    def __init__(self, update: Tap, *, is_by_hand: bool = False) -> None:
        self.names, self.shapes, self.structure = update.about
        self.is_by_hand = is_by_hand
        self.is_added_by_optax = False
        self.update: Tap | None = None
        self.update_in_scan = False
        self.gradients: Sequence[Gradient] = ()
        self.open_turn: Turn | None = None
        self.is_sum: bool | None = None
        self.after: Params = OrderedDict()
        self.num_turns = 0
        self.arrays: dict[int, Any] = {}
        self.first_params: dict[int, Any] = {}

    @functools.cached_property
    def tree(self) -> ParamTree | None:
        """That of ShardedParams."""
        if self.structure is None:
            return None
        sharded: ShardedParams = jax.tree.unflatten(self.structure, self.names)
        return sharded.tree

    @functools.cached_property
    def of_ranks(self) -> set[str]:
        """The paths of its shards among the arguments of a step of `jax_backend.value_and_grad`."""
        return {name.removeprefix(_SHARDS) for name in self.names}

    @property
    def param_names(self) -> Sequence[str]:
        """The canonical names of its parameters."""
        return self.names if self.tree is None else trained_names(self.tree)

    @property
    def paths(self) -> Sequence[str]:
        """The paths of its parameters in the loss function, which gets full parameters instead of shards."""
        return self.names if self.tree is None else self.tree.paths

    def lead_of(self, params: Iterable[tuple[str, tuple[int, ...]]]) -> str | None:
        """What precedes the paths of parameters, given with their shapes, in this model; None if they are not parts of it."""
        shapes = dict(zip(self.names, self.shapes, strict=True)) if self.tree is None else {}
        given = [*params]
        first = given[0][0]
        leads = (name.removesuffix(first) for name in shapes if f".{name}".endswith(f".{first}"))
        return next((lead for lead in leads if all(shapes.get(lead + path) == shape for path, shape in given)), None)

    def matching(self, params: Mapping[str, Value]) -> Params | None:
        """The parameters of this model among others, by names or else by order; None if their shapes are others, or unknown."""
        if set(self.names) <= params.keys():
            found = [params[name] for name in self.names]
        elif len(params) == len(self.names):
            found = [*params.values()]
        else:
            return None
        if any(value.array is None for value in found):
            return None
        shapes = tuple(tuple(np.shape(value.array)[value.by_rank :]) for value in found)
        return OrderedDict(zip(self.names, found, strict=True)) if shapes == self.shapes else None

    def gradients_among(self, gradients: Sequence[Gradient], *, is_alone: bool) -> Sequence[Gradient]:
        """The gradients that the update gets: those of its arrays, or else all with the shapes of the parameters, which the
        script adds up. If there are other models, those that are known to be taken at other parameters are not its."""
        assert self.update is not None
        given = {id(value.array) for value in self.update.values["grads"] if value.array is not None}
        if own := [each for each in gradients if any(id(grad()) in given for grad in each.grads)]:
            return own
        if self.tree is None:
            shapes = sorted(self.shapes)
            alike = [each for each in gradients if sorted(each.tap.about.shapes) == shapes]
        else:  # a rank's gradients have other shapes
            alike = [each for each in gradients if self.of_ranks <= set(each.tap.about.names)]
        if not is_alone and any(each.at.keys() & self.arrays.keys() for each in alike):
            return [each for each in alike if not each.at or each.at.keys() & self.arrays.keys()]
        return alike or (gradients if len(gradients) == 1 else [])

    def begin_gradient(self, params: Mapping[str, Value]) -> bool:
        """A gradient is about to be taken at these parameters; returns whether they end a turn."""
        if self.open_turn is None or (after := self.matching(params)) is None:
            return False
        turn, self.open_turn = self.open_turn, None
        turn.end(turn.given(), after)
        return True

    def begin_update(self, update: Tap) -> None:
        """End a turn before the next update, which may get the parameters after it."""
        turn, self.open_turn = self.open_turn, None
        if turn is None:
            return
        given = dict(zip(update.about[0], update.values["before"], strict=False))
        after = self.matching(given)
        if after is None and not (given and turn.in_scan):  # in a scan values are returned of recorded steps alone
            raise UsageError(
                f"the parameters after an update of {listed(self.names)} are not known: neither optax.apply_updates nor the next "
                f"gradient or update got them; pass them to the update (params=...), or {USE_RECORDER}"
            )
        turn.end(turn.given(), after)


@dataclass
class Step:
    """The turns of all models.

    Attributes:
        is_complete: whether each model has had its turn.
        initial_state, model_state: state of the model that is no parameter, by path: what the functions of the first step got,
            and what those of this one returned, if it is recorded.
    """

    turns: list[Turn] = field(default_factory=list)
    is_complete: bool = False
    initial_state: Mapping[str, Value] = field(default_factory=dict)
    model_state: Mapping[str, Value] = field(default_factory=dict)

    @property
    def first(self) -> dict[Model, Turn]:
        """The first turn of each model."""
        return {turn.model: turn for turn in reversed(self.turns)}

    @property
    def last(self) -> dict[Model, Turn]:
        """The last turn of each model."""
        return {turn.model: turn for turn in self.turns}

    @property
    def loss(self) -> Any:
        """The sum of the losses of all turns."""
        losses = [turn.loss for turn in self.turns]
        return sum(losses[1:], losses[0])

    @property
    def has_ended(self) -> bool:
        """Whether the parameters after all turns are known, or will never be."""
        return self.is_complete and all(turn.is_known for turn in (*self.first.values(), *self.last.values()))

    def drop_between(self, model: Model) -> None:
        """Let the values of the turns of a model go, but for its first and last one."""
        for turn in [turn for turn in self.turns if turn.model is model][1:-1]:
            turn.drop()


def arrays_of(tap: Tap, names: Iterable[str], originals: Mapping[int, Any]) -> dict[int, Any]:
    """The arrays of values of a tap, by their ids.

    Args:
        originals: the script's arrays by the ids of their copies.
    """
    leaves = (value.array for name in names for value in jax.tree.leaves(tap.values.get(name, ())))
    own = (originals.get(id(leaf), leaf) for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray))
    return {id(leaf): leaf for leaf in own}


def of_parameters(apply: Tap, updated: Sequence[Sequence[str]]) -> list[tuple[int, Tap]]:
    """Which updates an application adds: those that have the names of all its parameters, or else of a part of them. By index,
    each with the application to its parameters alone. Optimizers such as `optax.lookahead` update a tree that has the parameters
    of the loss function as its first part.

    Args:
        updated: the names of the parameters of each update.
    """
    whole = [i for i, names in enumerate(updated) if set(names) == set(apply.about[0])]
    parts = ((i, _part_of(apply, updated[i], is_whole=bool(whole))) for i in whole or range(len(updated)))
    return [(i, part) for i, part in parts if part is not None]


def _part_of(apply: Tap, names: Sequence[str], *, is_whole: bool) -> Tap | None:
    found = {name: i for i, name in enumerate(apply.about[0])}
    leads = {""} if is_whole else {name.removesuffix(names[0]) for name in found if name.endswith(f".{names[0]}")}
    for lead in sorted(leads, key=lambda lead: found[f"{lead}{names[0]}"]):
        if all(f"{lead}{name}" in found for name in names):
            at = [found[f"{lead}{name}"] for name in names]
            values = {what: tuple(each[i] for i in at) for what, each in apply.values.items()}
            return replace(apply, about=(tuple(names),), values=values)
    return None


def listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def differ(a: Any, b: Any) -> bool:
    """Whether two parameters have other values; one that was donated has changed since."""
    if a is b or a is None or b is None:
        return False
    if any(isinstance(each, jax.Array) and each.is_deleted() for each in (a, b)):
        return True
    pairs = zip(_in_this_process(a), _in_this_process(b), strict=True)
    return not all(np.array_equal(x, y) for x, y in pairs)


def _in_this_process(array: Any) -> list[np.ndarray]:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return [np.asarray(part.data) for part in array.addressable_shards]
    return [np.asarray(array)]


def is_gone(array: Any) -> bool:
    return array is None or (isinstance(array, jax.Array) and array.is_deleted())


def _is_same(a: Any, b: Any) -> bool:
    return bool(jnp.array_equal(a, b, equal_nan=True))


def named(tap: Tap, what: str) -> "OrderedDict[str, Value]":
    return OrderedDict(zip(tap.about[0], tap.values[what], strict=True))


def _known(value: Value, otherwise: Value | None) -> Value:
    return otherwise if value.array is None and otherwise is not None else value


def wholes(values: Sequence[Value]) -> list[Value]:
    """Values that all ranks have alike, as arrays on their devices. What the script has donated has no array."""
    found = [Value(None) if value.by_rank and is_gone(value.array) else value for value in values]
    at = [i for i, value in enumerate(found) if value.by_rank]
    if at:
        sharding = found[at[0]].array.sharding
        rows = _rows(sharding.mesh, sharding.spec[0])([found[i].array for i in at])
        for i, row in zip(at, rows, strict=True):
            found[i] = Value(row)
    return found


@functools.lru_cache(maxsize=8)
def _rows(mesh: Any, ranks: Any) -> Callable[[list[Any]], list[Any]]:
    """Takes the only row of each device of arrays with a leading dim of ranks, in one program for all."""
    return _jit(
        _shard_map(
            lambda arrays: [array[0] for array in arrays],
            mesh=mesh,
            in_specs=PartitionSpec(ranks),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
