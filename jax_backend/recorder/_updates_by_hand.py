"""Finds the steps of a script that updates its parameters itself, without an optimizer of optax.

[Note: updates by hand] The parameters are the arrays at which gradients are taken, and which have other values when a gradient of
the same names and shapes is taken again. A step ends there: its gradients are those taken at the same values, which are its
microbatches, and the parameters after it are those of the next gradient. The code between them is not seen, so the optimizer and
its state are unknown. Gradients of other arrays are left out: those of a single array, such as an input, where the script takes
gradients of a pytree too, and those of numpy arrays, since an updated parameter is a `jax.Array`. Two sets of changing arrays are
refused, since it is not known which of them is the model.

[Note: two models of one shape] Gradients of two models of the same names and shapes look like those of one that changes. An
update makes new arrays, and a function that has returned the next parameters returns them at each step. So the script is refused
where a gradient is taken at arrays that were there before the last gradient, or at others than the step has returned.

A body of a scan shows its updates: the parameters are what the scan carries, so each iteration has the taps of an optimizer.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core
from jax.lax import pmean as _pmean

from crossframe.errors import UsageError
from jax_backend.recorder._model_state import named_leaves
from jax_backend.recorder._optimizer_settings import noted
from jax_backend.recorder._script_session import following
from jax_backend.recorder._script_turns import USE_RECORDER, differ, is_gone, listed
from jax_backend.recorder._taps import APPLY, GRADIENT, UPDATE, PackedTap, Tap, Value
from jax_backend.tree import path_name

Tree = tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]
"""Names and shapes of the arrays by which a function is differentiated."""
_SINGLE = (path_name(()),)
"""The names of a single array."""
_OF_NNX = "states.0."
"""What precedes the names of parameters in the pytree that `nnx.grad` makes of a module."""


@dataclass(eq=False)
class _Call:
    """A call of a function that takes a gradient, with the arrays that it has returned, which the script may free."""

    function: Any
    refs: Sequence[Callable[[], Any]] = ()

    @property
    def returned(self) -> list[Value]:
        """The arrays that it has returned; None for those that are gone."""
        return [Value(ref()) for ref in self.refs]

    def places(self, values: Sequence[Value]) -> list[int] | None:
        """Where it has returned these arrays; None if it has not returned all of them."""
        at = {id(value.array): i for i, value in enumerate(self.returned) if value.array is not None}
        found = [at.get(id(value.array)) for value in values]
        return None if None in found else [i for i in found if i is not None]


def parameter_arguments(args: Sequence[Any], positions: Sequence[int]) -> Sequence[int]:
    """The positions of those differentiated arguments that may be parameters. If some are pytrees, single arrays are not, such as
    a batch."""
    if noted.has_optimizer:
        return positions
    return [i for i in positions if not jax.tree_util.all_leaves([args[i]])] or positions


class UpdatesByHand:
    """The gradients of a script since its last update, and the updates that they show."""

    def __init__(self) -> None:
        self.params: Tree | None = None
        # Of each tree the calls that took its gradients since it has changed, and the arrays of its shapes before the first one.
        self._calls: dict[Tree, list[_Call]] = {}
        self._alive: dict[Tree, dict[int, Callable[[], Any]]] = {}
        self._open: list[_Call] = []
        self._returned: Sequence[Value] = ()
        # Where a function returns the next parameters, and the functions that took a gradient at every step.
        self._places: dict[tuple[Any, Tree], list[int]] = {}
        self._usual: set[Any] | None = None
        self._has_pytrees = False
        self._unclear: set[Tree] = set()
        # Of each tree where its first gradient was taken since it has changed, and the sum of those since the last step.
        self._at: dict[Tree, Sequence[Value]] = {}
        self._grads: dict[Tree, list[Value]] = {}

    def note(self, taps: Sequence[Tap]) -> None:
        """Note of which arrays a function of the script takes gradients."""
        self._has_pytrees |= any(tap.kind == GRADIENT and tap.about.names != _SINGLE for tap in taps)

    def add(self, tap: Tap) -> Tap:
        """A gradient was taken; returns its tap without the gradients themselves, of which the sum is kept."""
        tree, diff = tap.about[:2], tap.values["diff"]
        pairs = [*zip(self._at.setdefault(tree, diff), diff, strict=True)]
        if any((b.array is None and a.array is not None) or _differ(a, b) for a, b in pairs):
            self._unclear.add(tree)
        grads, sums = _reduced(tap), self._grads.get(tree)
        self._grads[tree] = grads if sums is None else [_sum(*each) for each in zip(sums, grads, strict=True)]
        return replace(tap, values={**tap.values, "grads": ()})

    def changed(self, params: Mapping[str, Value]) -> Tree | None:
        """A gradient is about to be taken at these values; returns which arrays have changed since the last one, if any."""
        tree = _tree_of(params)
        # Small arrays first, since the first difference is enough.
        pairs = sorted(
            zip(self._at.get(tree, ()), params.values(), strict=False), key=lambda pair: np.size(pair[1].array)
        )
        return tree if any(_differ(a, b) for a, b in pairs) else None

    def begin(self, params: Mapping[str, Value], function: Any) -> None:
        """A gradient is about to be taken at these values.

        Args:
            function: the one that takes it. Hashable.
        """
        tree = _tree_of(params)
        if tree not in self._at:
            shapes = {np.shape(value.array) for value in params.values()}
            self._alive[tree] = {id(each): weakref.ref(each) for each in jax.live_arrays() if each.shape in shapes}
        self._open = [call for call in self._open if call.function is function]
        self._open.append(_Call(function))
        self._calls.setdefault(tree, []).append(self._open[-1])

    def note_returned(self, values: Sequence[Value]) -> None:
        """The function that has taken the last gradients has returned these arrays."""
        for call in self._open:
            call.refs = [weakref.ref(value.array) for value in values]
        calls = self._calls.get(self.params, []) if self.params is not None else self._open
        if any(call in calls for call in self._open):  # not of other arrays, such as a saliency map after the step
            self._returned = values
        self._open = []

    def returned(self) -> dict[str, Value]:
        """The next parameters, where the last step returned them as the steps before it did."""
        if self.params is None:
            return {}
        call = next(reversed(self._calls.get(self.params, [])), None)
        places = self._places.get((call.function, self.params)) if call is not None else None
        if places is None or max(places) >= len(self._returned):
            return {}
        return {name: self._returned[i] for name, i in zip(self.params[0], places, strict=True)}

    def is_step(self) -> bool:
        """Whether the gradients at the end of a script are those of a step. If each step before has called a function that has
        not been called since, they are an evaluation."""
        functions = {call.function for call in self._calls.get(self.params, [])} if self.params is not None else set()
        return not self._usual or bool(self._usual & functions)

    def is_of_params(self, tree: Tree, values: Sequence[Value]) -> bool:
        """Whether changed arrays are the parameters.

        Raises:
            UsageError: other arrays change too, or one function changes them several times.
        """
        if self._is_left_out(tree[0]) or any(isinstance(value.array, np.ndarray) for value in values):
            for each in (self._at, self._grads, self._calls):
                each.pop(tree, None)
            return False
        if self.params not in (None, tree):
            raise UsageError(
                f"gradients are taken of {_named(self.params)} and of {_named(tree)}, both of which change, and no optimizer of "
                f"optax updates them: it is not known which are the parameters of the model; {USE_RECORDER}"
            )
        if tree in self._unclear:
            raise UsageError(
                f"a function of the script takes gradients of {_named(tree)} at values that it is given and at others, so that "
                "its updates cannot be told apart; let it make one update, or several in a jax.lax.scan, or, if these are two "
                f"models of the same names and shapes, {USE_RECORDER}"
            )
        self._check_is_one(tree, values)
        self.params = tree
        return True

    def _check_is_one(self, tree: Tree, values: Sequence[Value]) -> None:
        """Raise UsageError where the arrays are of two models ([Note: two models of one shape])."""
        before, alive = self._at[tree], self._alive.get(tree, {})

        def is_old(value: Value) -> bool:
            return id(value.array) in alive and alive[id(value.array)]() is value.array

        if any(is_old(value) and _differ(old, value) for old, value in zip(before, values, strict=True)):
            raise UsageError(_two_models(tree, "at arrays that were there before the last gradient"))
        calls = self._calls.get(tree, [])
        for call in calls:
            if (places := call.places(values)) is not None:
                self._places[call.function, tree] = places
                return
        known = [(call, self._places[key]) for call in calls if (key := (call.function, tree)) in self._places]
        same = any(
            not any(
                is_gone(call.returned[i].array) or _differ(call.returned[i], value)
                for i, value in zip(places, values, strict=True)
            )
            for call, places in known
            if max(places) < len(call.refs)
        )
        if known and not same:
            raise UsageError(_two_models(tree, "at others than the last step has returned"))
        returned = {id(value.array) for call in calls for value in call.returned}
        found = {id(b.array) in returned for a, b in zip(before, values, strict=True) if _differ(a, b)}
        if len(found) > 1 and not same:
            raise UsageError(
                f"gradients are taken of {_named(tree)}, and the step returns new values of some of these arrays, but not of "
                "others that have changed, such as a batch: it is not known which are the parameters of the model; "
                f"{USE_RECORDER}"
            )

    def update(self, tree: Tree, number: int) -> Tap:
        """The update of an optimizer that gets the mean of the gradients.

        Args:
            number: of gradients.
        """
        grads = [
            value if value.array is None or number == 1 else replace(value, array=value.array / number)
            for value in self._grads[tree]
        ]
        functions = {call.function for call in self._calls.get(tree, [])}
        self._usual = functions if self._usual is None else self._usual & functions
        self._grads = {}
        self._at.pop(tree, None)
        self._calls.pop(tree, None)
        return _update(tree, grads)

    def _is_left_out(self, names: Sequence[str]) -> bool:
        return self._has_pytrees and names == _SINGLE


def _update(tree: Tree, grads: Sequence[Value]) -> Tap:
    """The tap of an update without state."""
    names, shapes = tree
    values = {"grads": tuple(grads), "state": Value(None), "state_before": (), "before": (), "updates": ()}
    return Tap(UPDATE, (tuple(name.removeprefix(_OF_NNX) for name in names), shapes, None), values)


def _tree_of(params: Mapping[str, Value]) -> Tree:
    return tuple(params), tuple(tuple(np.shape(value.array)[value.by_rank :]) for value in params.values())


def _two_models(tree: Tree, where: str) -> str:
    return (
        f"gradients are taken of {_named(tree)} {where}, and no optimizer of optax updates them: these may be two models of the "
        f"same names and shapes, or copies of one, and it is not known which is trained; {USE_RECORDER}"
    )


def _named(tree: Tree | None) -> str:
    assert tree is not None
    return f"a single array of shape {tree[1][0]}" if tree[0] == _SINGLE else listed(tree[0])


def _differ(a: Value, b: Value) -> bool:
    return differ(a.array, b.array)


def _sum(a: Value, b: Value) -> Value:
    return Value(None) if is_gone(a.array) or is_gone(b.array) else replace(a, array=a.array + b.array)


def _reduced(tap: Tap) -> list[Value]:
    """The gradients of all ranks and of all iterations, as their mean. If ranks take gradients of losses of their own, their mean
    is known where the script has averaged them by `pmean`. Otherwise the script may add or average them later."""
    shapes, averaged = tap.about.shapes, tap.about.averaged
    grads: Sequence[Value] = tap.values["grads"] or (Value(None),) * len(shapes)
    is_of_rank = [value.by_rank and i not in averaged and not is_gone(value.array) for i, value in enumerate(grads)]
    is_of_all = not any(is_of_rank) or _is_alike(tap.values["loss"])
    found = []
    for i, (value, shape) in enumerate(zip(grads, shapes, strict=True)):
        lead = int(value.by_rank)
        # Vmaps and scans around the gradient have dims between those of ranks and of the parameter.
        axes = tuple(range(lead, np.ndim(value.array) - len(shape)))
        is_mean = not is_of_rank[i] or (is_of_all and _is_alike(value))
        if is_gone(value.array) or not is_mean or value.array.shape[lead + len(axes) :] != shape:
            found.append(Value(None))
        else:
            found.append(Value(jnp.mean(value.array, axes) if axes else value.array, value.by_rank))
    return found


def _is_alike(value: Value) -> bool:
    """Whether all ranks have the same."""
    if not value.by_rank or is_gone(value.array):
        return not value.by_rank
    parts = [np.asarray(part.data) for part in value.array.addressable_shards]
    return all(np.array_equal(part, parts[0]) for part in parts)


def optimizer_state_arguments(arguments: Any, params: Mapping[int, str]) -> set[int]:
    """The arguments with the shapes of parameters and their names, or without names: the state of an optimizer that the script
    writes itself.

    Args:
        params: names of the arguments that are parameters.
    """
    leaves = [(names[-1] if names else "0", np.shape(leaf)) for names, leaf in named_leaves(arguments)]
    named = {(name.rpartition(".")[2], leaves[i][1]) for i, name in params.items()}
    shapes = {shape for _, shape in named}
    return {
        i for i, (name, shape) in enumerate(leaves) if (name, shape) in named or (name.isdecimal() and shape in shapes)
    }


def pmean(x: Any, axis_name: Any, **options: Any) -> Any:
    """JAX's `pmean`. Of the gradients of one rank its results are those of all ranks."""
    result = _pmean(x, axis_name, **options)
    collector = following()
    if collector is None or collector.in_loss:
        return result
    means = {id(own): mean for own, mean in zip(jax.tree.leaves(x), jax.tree.leaves(result), strict=True)}
    for i, tap in enumerate(collector.taps):
        if tap.kind == GRADIENT and (
            at := {k for k, value in enumerate(tap.values["grads"]) if id(value.array) in means}
        ):
            grads = tuple(
                replace(value, array=means[id(value.array)]) if k in at else value
                for k, value in enumerate(tap.values["grads"])
            )
            about = tap.about._replace(averaged=tap.about.averaged | at)
            collector.taps[i] = replace(tap, about=about, values={**tap.values, "grads": grads})
    return result


def with_scan_updates(taps: Sequence[Tap], carry: Any, after: Any) -> list[Tap]:
    """The taps of the body of a scan, with those of its updates by hand: a gradient is taken at what the scan carries, and the
    body returns other values of it. Gradients of a single array, such as an input, are left out then.

    Args:
        carry, after: what the body gets and returns, pytrees.
    """
    check_scans(taps)
    if noted.has_optimizer or any(tap.kind == UPDATE for tap in taps):
        return [*taps]
    pairs = zip(jax.tree.leaves(carry), jax.tree.leaves(after), strict=True)
    changed = {id(before): its for before, its in pairs if before is not its}

    def is_updated(tap: Tap) -> bool:
        return tap.kind == GRADIENT and any(id(value.array) in changed for value in tap.values["diff"])

    found = [tap for tap in taps if tap.kind != GRADIENT or tap.about.names != _SINGLE or not is_updated(tap)]
    updated = [tap for tap in found if is_updated(tap)]
    if not updated:
        return found
    tree, diff = updated[0].about[:2], updated[0].values["diff"]
    if any(tap.about[:2] != tree for tap in updated) or any(id(value.array) not in changed for value in diff):
        raise UsageError(
            f"a jax.lax.scan updates {_named(updated[-1].about[:2])} without an optimizer of optax, and it is not known which of "
            f"the arrays that it carries are the parameters of the model; {USE_RECORDER}"
        )
    grads = [_mean_in_trace(i, tree[1][i], updated) for i in range(len(diff))]
    found = [replace(tap, values={**tap.values, "grads": ()}) if tap.kind == GRADIENT else tap for tap in found]
    applied = {"before": diff, "after": tuple(Value(changed[id(value.array)]) for value in diff)}
    update = _update(tree, grads)
    return [*found, update, Tap(APPLY, (update.about[0],), applied)]


def check_scans(taps: Sequence[Tap | PackedTap]) -> None:
    """Raise UsageError if a scan in a function updates arrays by hand, and the function takes gradients outside of it too: the
    scan may be a sampler in a step that trains a model."""
    updated: list[Tree] = []
    others: list[Tree] = []
    rest = [] if noted.has_optimizer else [*taps]
    while rest:
        number = rest[0].scans[0].num_taps if rest[0].scans else 1
        body, rest = rest[:number], rest[number:]
        updates = [tap.about[:2] for tap in body if tap.kind == UPDATE]
        updated += updates
        others += [tap.about[:2] for tap in body if tap.kind == GRADIENT and not updates]
    if updated and others:
        raise UsageError(
            f"a jax.lax.scan updates {_named(updated[0])} without an optimizer of optax, and the function around it takes "
            f"gradients of {_named(others[0])}: it is not known which are the parameters of the model; {USE_RECORDER}"
        )


def _mean_in_trace(i: int, shape: tuple[int, ...], taps: Sequence[Tap]) -> Value:
    """The mean of a gradient of taps in the current trace, as `_reduced`: of ranks it is known where all are averaged."""
    if core.get_axis_env().axis_sizes and any(i not in tap.about.averaged for tap in taps):
        return Value(None)
    arrays = [tap.values["grads"][i].array for tap in taps]
    means = [
        jnp.mean(each, tuple(range(each.ndim - len(shape)))) if each.ndim > len(shape) else each for each in arrays
    ]
    return Value(means[0] if len(means) == 1 else sum(means) / len(means))
