"""Makes recorded steps of the taps of a script: a step begins with a gradient, and ends when its updates are applied."""

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
from jax_backend.recorder._grid import Grid
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


def _gradient(tap: Tap, batch: Sequence[Any]) -> _Gradient:
    values = dict(tap.values)
    grads = (value.array for value in values.pop("own_grads"))
    return _Gradient(
        replace(tap, values=values), batch, tuple(weakref.ref(grad) for grad in grads if isinstance(grad, jax.Array))
    )


class Steps:
    """The steps of a script.

    Args:
        begin: makes the recorder, from the initial parameters, at the end of the first step; None: nothing is recorded.
        finished: called at the end of each step with its loss.
    """

    def __init__(self, begin: Callable[[Any], Recorder] | None, finished: Callable[[Any], None]) -> None:
        self._begin, self._finished = begin, finished
        self.recorder: Recorder | None = None
        self.number = 0
        self._gradients: list[_Gradient] = []
        self._update: Tap | None = None
        self._names: tuple[str, ...] = ()
        self._after: OrderedDict[str, Value] = OrderedDict()

    def number_in(self, taps: Iterable[PackedTap]) -> int:
        """The number of steps that a function with these taps makes."""
        return sum(tap.num_iterations for tap in taps if tap.kind == APPLY)

    def add(self, taps: Sequence[Tap], batch: Sequence[Any]) -> None:
        """Add taps in the order of the program.

        Args:
            batch: the arrays of the batch of their gradients.
        """
        for at, tap in unrolled(taps, (UPDATE, APPLY)):
            if tap.kind == GRADIENT:
                self._check_updated(tap)
                self._gradients.append(_gradient(tap, _batch_at(at, batch)))
            elif tap.kind == UPDATE:
                self._check_update(tap)
                self._update = tap
            elif self._update is not None and (applied := _of_parameters(tap, self._update.about[0])) is not None:
                self._end(self._update, applied, in_scan=bool(at))

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
                f"updates of the optimizer were not added to the parameters by optax.apply_updates; add them by it, or "
                f"{USE_RECORDER}"
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

    def _end(self, update: Tap, apply: Tap, *, in_scan: bool) -> None:
        if "mini_step" in update.values and int(update.values["mini_step"].array):
            self._update = None  # its gradient is only accumulated
            return
        gradients = self._matching(update)
        losses = [_mean(each.tap) for each in gradients]
        loss = sum(losses[1:], losses[0]) / len(losses) if len(losses) > 1 else losses[0]
        self._gradients, self._update, self._names = [], None, update.about[0]
        if self._begin is not None:
            self._record(loss, update, apply, gradients, in_scan)
        self.number += 1
        self._finished(loss)

    def _record(self, loss: Any, update: Tap, apply: Tap, gradients: "list[_Gradient]", in_scan: bool) -> None:
        before, after = _named(apply, "before"), _named(apply, "after")
        if in_scan:  # an iteration begins with the parameters of the one before
            before = OrderedDict((name, _known(value, self._after.get(name))) for name, value in before.items())
        self._after = after if in_scan else OrderedDict()
        if self.recorder is None:
            assert self._begin is not None
            if missing := [name for name, value in before.items() if value.array is None]:
                raise UsageError(
                    f"the initial values of {listed(missing)} are no arguments of the step, so that they are not known; pass "
                    f"them to the jitted function, or {USE_RECORDER}"
                )
            initial = ((name, _placed(value.array, after[name].array)) for name, value in before.items())
            self.recorder = self._begin(OrderedDict(initial))
        grid = self.recorder.grid
        params = _arrays(after)
        grads = _arrays(
            OrderedDict(
                (name, _reduced(value, after[name].array))
                for name, value in zip(update.about[0], update.values["grads"], strict=True)
            )
        )
        microbatches = [_microbatches(each.tap, each.batch) for each in gradients]
        if self.recorder.is_dense() and (values := _arrays(before)) is not None:
            for tap, parts in zip((each.tap for each in gradients), microbatches, strict=True):
                for interior in _interiors(tap, parts, values, grid, update.about[0]):
                    self.recorder.add_interior(interior)
        state = _state(update.values["state"])
        # Arrays count once: a call may take several gradients of its batch, or cut it into microbatches itself.
        each = {tuple(map(id, part)): part for parts in microbatches for part in parts}
        batches = list(batches_of(grid, list(each.values())).values())
        self.recorder.step(
            loss=loss if np.shape(loss) in ((), (grid.spec.world_size,)) else jnp.mean(loss),
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
    return [[leaf[i] if leaf.shape[0] == number else leaf for leaf in batch] for i in range(number)]


def _interiors(
    tap: Tap, microbatches: Sequence[Sequence[Any]], params: Any, grid: Grid, names: Sequence[str]
) -> "list[ArrayInterior]":
    """The interior of each microbatch of a gradient."""
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
            key = canonical_module(raw, paths, names), use
            values.setdefault(key, by_rank(Value(array, value.by_rank), batch, grid))
        found.append(ArrayInterior(params, Activations(tuple(values.values()), tuple(values))))
    return found
