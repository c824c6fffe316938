"""Makes recorded steps of the taps of a script: a step begins with a gradient, and ends when its updates are applied.

[Note: updates that optax does not add] A script or a library may add updates by a function of its own, such as
`jax.tree.map(jnp.add, params, updates)`. Then the parameters after a step are those at which the next gradient is taken, or those
that the next update of the optimizer gets. After the last step there is neither, and its parameters are, in this order: what the
jitted function returned where it returned the next parameters in the step before; or the sum of parameters and updates, if that
sum was right at all earlier steps; or unknown, which is printed. What the script's own function does is not assumed without
having been seen.
"""

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from crossframe.errors import UsageError
from jax_backend.activations import Activations
from jax_backend.recorder._array_interior import ArrayInterior, by_rank
from jax_backend.recorder._device_ranks import Grid
from jax_backend.recorder._module_calls import canonical_module
from jax_backend.recorder._optimizer_settings import noted
from jax_backend.recorder._recorder import Recorder, batches_of, rates_in
from jax_backend.recorder._taps import APPLY, GRADIENT, UPDATE, PackedTap, Tap, Value, unrolled
from jax_backend.state._optimizer_state import COUNTS

USE_RECORDER = """record from inside the script:

    from jax_backend import Recorder

    with Recorder("runs/mine", params) as recorder:
        params = recorder.params
        for batch in batches:
            ...                                   # loss, grads, updates: as before
            recorder.step(params=params, grads=grads, loss=loss, opt_state=opt_state, batch=batch)"""
_MOST_WITHOUT_UPDATE = 4


@dataclass(frozen=True)
class _Gradient:
    """A gradient since the last step.

    Attributes:
        batch: the arrays of its batch.
        grads: its arrays that the script has got, which it may free.
    """

    tap: Tap
    batch: Sequence[Any]
    grads: tuple[weakref.ref, ...]

    def kept(self) -> "_Gradient":
        """The same, whatever the script later writes into arrays of its batch."""
        return replace(self, batch=[each.copy() if isinstance(each, np.ndarray) else each for each in self.batch])


@dataclass(frozen=True)
class _Step:
    """A step whose parameters after it may not be known yet.

    Attributes:
        gradients: those that its update got.
        in_scan: whether it is an iteration of a scan.
    """

    loss: Any
    update: Tap
    gradients: Sequence[_Gradient]
    in_scan: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return self.update.about[0]

    def before(self) -> "OrderedDict[str, Value]":
        """The parameters that the update got, or else those of the gradient."""
        if self.update.values["before"]:
            return _named(self.update, "before")
        tap = self.gradients[0].tap
        found = self.matching(dict(zip(tap.about[0], tap.values["diff"], strict=True)))
        return found or OrderedDict((name, Value(None)) for name in self.names)

    def matching(self, params: Mapping[str, Value]) -> "OrderedDict[str, Value] | None":
        """The parameters of this step among others, by names or else by order; None if their shapes are others, or unknown."""
        names, shapes = self.update.about
        if set(names) <= params.keys():
            found = [params[name] for name in names]
        elif len(params) == len(names):
            found = [*params.values()]
        else:
            return None
        if any(value.array is None for value in found):
            return None
        whole = [_whole(value) for value in found]
        if tuple(tuple(value.array.shape) for value in whole) != shapes:
            return None
        return OrderedDict(zip(names, whole, strict=True))


def _gradient(tap: Tap, batch: Sequence[Any]) -> _Gradient:
    values = dict(tap.values)
    grads = (value.array for value in values.pop("own_grads"))
    return _Gradient(
        replace(tap, values=values), batch, tuple(weakref.ref(grad) for grad in grads if isinstance(grad, jax.Array))
    )


class Steps:
    """The steps of a script.

    Args:
        begin: makes the recorder, from the initial parameters and the number of gradients of a step, at the end of the first
            step; None: nothing is recorded.
        finished: called at the end of each step with its loss.
    """

    def __init__(self, begin: Callable[[Any, int], Recorder] | None, finished: Callable[[Any], None]) -> None:
        self._begin, self._finished = begin, finished
        self.recorder: Recorder | None = None
        self.number = 0
        self._gradients: list[_Gradient] = []
        self._update: Tap | None = None
        self._names: tuple[str, ...] = ()
        self._after: OrderedDict[str, Value] = OrderedDict()
        self._update_in_scan = False
        self._is_added_by_optax = False
        self._unadded: _Step | None = None
        self._is_sum: bool | None = None

    def number_in(self, taps: Iterable[PackedTap]) -> int:
        """The number of steps that a function with these taps makes."""
        found = list(taps)
        if any(tap.kind == APPLY for tap in found):
            return sum(tap.num_iterations for tap in found if tap.kind == APPLY)
        return sum(tap.num_iterations for tap in found if tap.kind == UPDATE and tap.scans)

    def add(self, taps: Sequence[Tap], batch: Sequence[Any]) -> None:
        """Add taps in the order of the program.

        Args:
            batch: the arrays of the batch of their gradients.
        """
        for at, tap in unrolled(taps, (UPDATE, APPLY)):
            if tap.kind == GRADIENT:
                self._begin_gradient(dict(zip(tap.about[0], tap.values["diff"], strict=True)))
                self._check_updated(tap)
                self._gradients.append(_gradient(tap, _batch_at(at, batch)))
            elif tap.kind == UPDATE:
                self._check_update(tap)
                if self._unadded is not None:
                    self._end_unadded(self._unadded, tap)
                self._update, self._update_in_scan = tap, bool(at)
            elif self._update is not None and (applied := _of_parameters(tap, self._update.about[0])) is not None:
                self._is_added_by_optax = True
                if (step := self._closed(self._update)) is not None:
                    self._record(replace(step, in_scan=bool(at)), _named(applied, "before"), _named(applied, "after"))
        if self._update is not None and not self._is_added_by_optax:
            self._gradients = [each.kept() for each in self._matching(self._update)]

    def begin_gradient(self, params: Mapping[str, Any]) -> None:
        """A gradient is about to be taken at these parameters, before what the step is given may be donated."""
        self._begin_gradient({name: Value(leaf) for name, leaf in params.items()})

    def _begin_gradient(self, params: Mapping[str, Value]) -> None:
        if self._update is not None and not self._is_added_by_optax:
            self._unadded = self._closed(self._update)
        if self._unadded is not None and (after := self._unadded.matching(params)) is not None:
            step, self._unadded = self._unadded, None
            self._record(step, step.before(), after)

    def _end_unadded(self, step: _Step, update: Tap) -> None:
        """End a step before the next update, which may get the parameters after it."""
        given = dict(zip(update.about[0], update.values["before"], strict=False))
        after = step.matching(given)
        if after is None and not (given and step.in_scan):  # in a scan values are returned of recorded steps alone
            raise UsageError(
                f"the parameters after an update of {listed(step.names)} are not known: neither optax.apply_updates nor the next "
                f"gradient or update got them; pass them to the update (params=...), or {USE_RECORDER}"
            )
        self._unadded = None
        self._record(step, step.before(), after)

    def end(self, returned: Mapping[str, Any]) -> None:
        """The script has ended.

        Args:
            returned: what the last step returned where the steps before it returned the next parameters.
        """
        if self._update is not None and not self._is_added_by_optax:
            self._unadded = self._closed(self._update)
        if self._unadded is None:
            return
        step, self._unadded = self._unadded, None
        before = step.before()
        after = step.matching({name: Value(leaf) for name, leaf in returned.items()})
        if after is None and self._is_sum:
            after = _sums(step, before)
        if after is None and self._begin is not None:
            print(
                "crossframe: the parameters after the last step are not recorded: the script added its updates by a function of "
                "its own, and took no gradient afterwards",
                file=sys.stderr,
            )
        self._record(step, before, after)

    def _check_updated(self, tap: Tap) -> None:
        """Raise UsageError if parameters change, but not by optax."""
        if len(self._gradients) < _MOST_WITHOUT_UPDATE or self._update is not None:
            return
        first = self._gradients[0].tap
        if first.about[0] != tap.about[0]:
            return
        pairs = zip(first.values["diff"], tap.values["diff"], strict=True)
        if any(_differ(a.array, b.array) for a, b in pairs):
            raise UsageError(
                f"{len(self._gradients)} gradients were taken of changing parameters, but no optimizer of optax updated them; "
                f"{USE_RECORDER}"
            )

    def _check_update(self, tap: Tap) -> None:
        names, _ = tap.about
        known = self._names if self._update is None else self._update.about[0]
        if known and names != known:
            raise UsageError(
                f"the script trains more than one model: an optimizer updated {listed(names)} after one that updated "
                f"{listed(known)}; {USE_RECORDER}"
            )
        if self._update is not None:
            raise UsageError(
                "an optimizer of optax made updates twice, and between them neither optax.apply_updates nor a gradient got the "
                f"parameters; add updates by optax.apply_updates, or {USE_RECORDER}"
            )
        if not self._matching(tap):
            what = f"{len(self._gradients)} gradients of other shapes were" if self._gradients else "no gradient was"
            raise UsageError(
                f"an optimizer of optax updated {listed(names)}, but before it {what} taken by jax.grad or "
                "jax.value_and_grad where it can be seen (jax.lax.scan is followed, but not jax.vjp, jax.pmap and "
                f"jax.lax.while_loop); {USE_RECORDER}"
            )

    def _matching(self, update: Tap) -> "list[_Gradient]":
        """The gradients of this step that are of the parameters: those that the optimizer gets as they are, or else all with the
        shapes of the parameters, which the script adds up."""
        given = {id(value.array) for value in update.values["grads"] if value.array is not None}
        if own := [each for each in self._gradients if any(id(grad()) in given for grad in each.grads)]:
            return own
        shapes = sorted(update.about[1])
        found = [each for each in self._gradients if sorted(each.tap.about[1]) == shapes]
        return found or (self._gradients if len(self._gradients) == 1 else [])

    def _closed(self, update: Tap) -> _Step | None:
        """The step of an update; None if its gradient is only accumulated."""
        self._update = None
        if "mini_step" in update.values and int(update.values["mini_step"].array):
            return None
        gradients = self._matching(update)
        losses = [_mean(each.tap) for each in gradients]
        loss = sum(losses[1:], losses[0]) / len(losses) if len(losses) > 1 else losses[0]
        self._gradients, self._names = [], update.about[0]
        self.number += 1
        self._finished(loss)
        return _Step(loss, update, gradients, self._update_in_scan)

    def _record(self, step: _Step, before: "OrderedDict[str, Value]", after: "OrderedDict[str, Value] | None") -> None:
        if self._begin is None:
            return
        update, gradients = step.update, step.gradients
        if step.in_scan:  # an iteration begins with the parameters of the one before
            before = OrderedDict((name, _known(value, self._after.get(name))) for name, value in before.items())
        if after is None:
            after = OrderedDict((name, Value(None)) for name in before)
        elif not self._is_added_by_optax and (added := _sums(step, before)) is not None:
            is_sum = all(_is_same(added[name].array, value.array) for name, value in after.items())
            self._is_sum = is_sum and self._is_sum is not False
        self._after = after if step.in_scan else OrderedDict()
        placed = OrderedDict((name, before[name] if value.array is None else value) for name, value in after.items())
        microbatches = [_microbatches(each.tap, each.batch) for each in gradients]
        if self.recorder is None:
            assert self._begin is not None
            if missing := [name for name, value in before.items() if value.array is None]:
                raise UsageError(
                    f"the initial values of {listed(missing)} are no arguments of the step, so that they are not known; pass "
                    f"them to the jitted function, or {USE_RECORDER}"
                )
            initial = ((name, _placed(value.array, placed[name].array)) for name, value in before.items())
            self.recorder = self._begin(OrderedDict(initial), sum(map(len, microbatches)))
        grid = self.recorder.grid
        params = _arrays(after)
        grads = _arrays(
            OrderedDict(
                (name, _reduced(value, placed[name].array))
                for name, value in zip(update.about[0], update.values["grads"], strict=True)
            )
        )
        # Arrays count once: a call may take several gradients of its batch, or cut it into microbatches itself.
        each = {tuple(map(id, part)): part for parts in microbatches for part in parts}
        cut = _Cut.of([part for part in each.values() if part], sum(map(len, microbatches)), grid)
        if self.recorder.is_dense() and (values := _arrays(before)) is not None:
            for tap, parts in zip((each.tap for each in gradients), microbatches, strict=True):
                for interior in _interiors(tap, parts, values, grid, update.about[0], cut):
                    self.recorder.add_interior(interior)
        state = _state(update.values["state"])
        batches = list(batches_of(grid, list(each.values())).values())
        self.recorder.step(
            loss=step.loss if np.shape(step.loss) in ((), (grid.spec.world_size,)) else jnp.mean(step.loss),
            params=params,
            grads=grads,
            opt_state=state,
            batch=batches,
            learning_rate=_rate(update.values["state"], state),
        )


def _of_parameters(apply: Tap, names: Sequence[str]) -> Tap | None:
    """An application of updates to the parameters of these names alone; None if it is of others. Optimizers such as
    `optax.lookahead` update a tree that has the parameters of the loss function as its first part."""
    found = {name: i for i, name in enumerate(apply.about[0])}
    leads = {""} | {name.removesuffix(names[0]) for name in found if name.endswith(f".{names[0]}")}
    for lead in sorted(leads, key=lambda lead: found.get(f"{lead}{names[0]}", len(found))):
        if all(f"{lead}{name}" in found for name in names) and (lead or len(found) == len(names)):
            at = [found[f"{lead}{name}"] for name in names]
            values = {what: tuple(each[i] for i in at) for what, each in apply.values.items()}
            return replace(apply, about=(tuple(names),), values=values)
    return None


def listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def _differ(a: Any, b: Any) -> bool:
    """Whether two parameters have other values; one that was donated has changed since."""
    if a is b or a is None or b is None:
        return False
    if any(isinstance(each, jax.Array) and each.is_deleted() for each in (a, b)):
        return True
    return not np.array_equal(a, b, equal_nan=True)


def _sums(step: _Step, before: Mapping[str, Value]) -> "OrderedDict[str, Value] | None":
    """The sums of parameters and updates, as optax adds them; None if either is unknown."""
    updates = step.update.values["updates"]
    arrays = [value.array for value in (*before.values(), *updates)]
    if not updates or any(_is_gone(array) for array in arrays) or any(value.by_rank for value in updates):
        return None
    pairs = zip(before.items(), updates, strict=True)
    return OrderedDict(
        (name, Value((value.array + each.array).astype(value.array.dtype))) for (name, value), each in pairs
    )


def _is_gone(array: Any) -> bool:
    return array is None or (isinstance(array, jax.Array) and array.is_deleted())


def _is_same(a: Any, b: Any) -> bool:
    return bool(jnp.array_equal(a, b, equal_nan=True))


def _mean(tap: Tap) -> Any:
    """The mean loss of a gradient, or that of each rank: a new array, which the script cannot donate."""
    value: Value = tap.values["loss"]
    return jnp.mean(value.array, axis=tuple(range(int(value.by_rank), np.ndim(value.array))))


def _named(tap: Tap, what: str) -> "OrderedDict[str, Value]":
    return OrderedDict(zip(tap.about[0], map(_whole, tap.values[what]), strict=True))


def _known(value: Value, otherwise: Value | None) -> Value:
    return otherwise if value.array is None and otherwise is not None else value


def _whole(value: Value) -> Value:
    """A value that all ranks have alike, as an array on their devices."""
    if value.array is None or not value.by_rank:
        return value
    rows = [part.data[0] for part in value.array.addressable_shards]
    sharding = NamedSharding(value.array.sharding.mesh, PartitionSpec())
    return Value(jax.make_array_from_single_device_arrays(value.array.shape[1:], sharding, rows))


def _arrays(values: Mapping[str, Value]) -> Any:
    """The arrays, in order; None if any is missing."""
    if any(value.array is None for value in values.values()):
        return None
    return OrderedDict((name, value.array) for name, value in values.items())


def _placed(before: Any, after: Any) -> Any:
    """Initial parameters on the devices on which the first step left them."""
    if not isinstance(after, jax.Array) or (isinstance(before, jax.Array) and before.sharding == after.sharding):
        return before
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


def _state(values: Any) -> Any:
    """The optimizer state; None if the program does not return all of it."""
    leaves, structure = jax.tree.flatten(values)
    if any(leaf.array is None for leaf in leaves):
        return None
    return jax.tree.unflatten(structure, [leaf.array[0] if leaf.by_rank else leaf.array for leaf in leaves])


def _rate(values: Any, state: Any) -> Any:
    """The learning rate of a step, if the state or the schedule says it."""
    if (schedule := noted.schedule()) is not None:
        nodes = jax.tree.leaves(values, is_leaf=lambda node: isinstance(node, COUNTS))
        counts: list[Any] = [node.count for node in nodes if isinstance(node, COUNTS)]
        if len(counts) == 1 and counts[0].array is not None:
            return schedule(counts[0].array - 1)
    rates = rates_in(state)
    return jnp.copy(rates[0]) if len(rates) == 1 else None


def _batch_at(at: Sequence[tuple[int, int]], batch: Sequence[Any]) -> Sequence[Any]:
    """The arrays of an iteration of scans over steps, which cut those that have their length. Others, such as a data set from
    which the scan takes samples itself, count at the first step."""
    found = list(batch)
    for i, length in at:
        cut = [leaf[i] for leaf in found if leaf.ndim and leaf.shape[0] == length]
        found = cut or ([] if i else found)
    return found


def _microbatches(tap: Tap, batch: Sequence[Any]) -> list[Sequence[Any]]:
    """The arrays of each microbatch of a gradient: a scan over microbatches cuts those that have its length."""
    if len(tap.scans) != 1:
        return [batch]
    number = tap.scans[0].length
    return [[leaf[i] if leaf.shape[:1] == (number,) else leaf for leaf in batch] for i in range(number)]


@dataclass(frozen=True)
class _Cut:
    """A batch that a step on several ranks cuts into parts itself, inside of the recorded function, which may give a rank other
    samples than its batch has.

    Attributes:
        num_samples: of the batch.
        num_parts: gradients, of one part each.
    """

    num_samples: int
    num_parts: int

    @classmethod
    def of(cls, batches: Sequence[Sequence[Any]], num_parts: int, grid: Grid) -> "_Cut | None":
        """The batch of several gradients, if there is only one, and several ranks."""
        if num_parts == 1 or len(batches) != 1 or grid.spec.world_size == 1:
            return None
        return cls(batches[0][0].shape[0], num_parts)

    def has_part(self, array: Any) -> bool:
        """Whether the rows of an array belong to a part."""
        rows = array.shape[0] if array.ndim else 0
        return rows > 0 and rows % self.num_samples != 0 and rows * self.num_parts % self.num_samples == 0


def _interiors(
    tap: Tap,
    microbatches: Sequence[Sequence[Any]],
    params: Any,
    grid: Grid,
    names: Sequence[str],
    cut: _Cut | None,
) -> "list[ArrayInterior]":
    """The interior of each microbatch of a gradient, without activations of the parts of a batch that is cut."""
    if len(tap.scans) > 1:
        return []
    paths, _, about = tap.about
    found = []
    for i, batch in enumerate(microbatches):
        values: dict[tuple[str, str], Any] = {}
        for (raw, use), value in zip(about, tap.values["inside"], strict=True):
            array = value.array
            if tap.scans:
                array = array[:, i] if value.by_rank else array[i]
            if cut is not None and not value.by_rank and cut.has_part(array):
                continue
            key = canonical_module(raw, paths, names), use
            values.setdefault(key, by_rank(Value(array, value.by_rank), batch, grid))
        found.append(ArrayInterior(params, Activations(tuple(values.values()), tuple(values))))
    return found
