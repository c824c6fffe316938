"""Replaces functions of optax: the update of an optimizer and the application of updates have taps."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from crossframe.replacing import replacing, setting
from jax_backend.optimizer._sharded_optimizer import to_shards
from jax_backend.recorder._gradients import DifferentiatedFunction
from jax_backend.recorder._optimizer_settings import noted, noting_optimizers
from jax_backend.recorder._script_session import Root, inside_update, root, seen_updates
from jax_backend.recorder._script_turns import of_parameters
from jax_backend.recorder._taps import APPLY, GRADIENT, UPDATE, Collector, Tap, Value, current, innermost
from jax_backend.shards._sharded_params import ShardedParams
from jax_backend.tree import path_name

_apply_updates, _value_and_grad_from_state = optax.apply_updates, optax.value_and_grad_from_state
accumulation: ContextVar["Accumulation | None"] = ContextVar("accumulation", default=None)
"""The accumulation of the optimizer that runs; None if every gradient updates the parameters."""


class Accumulation(NamedTuple):
    """An optimizer that adds the gradients of small steps, such as `optax.MultiSteps`.

    Attributes:
        num_steps: the number of small steps since the last update, after this one: 0 if it has updated parameters.
        grads: makes the gradients that its update gets, if this is the last of the small steps.
    """

    num_steps: Any
    grads: Callable[[], Any]


@contextmanager
def following_optimizers() -> Iterator[None]:
    """A context in which optax's functions are followed."""
    own = inspect.getattr_static(optax.GradientTransformation, "update")
    init = inspect.getattr_static(optax.GradientTransformation, "init")

    def tapped(self: optax.GradientTransformation) -> Callable:
        # By `__wrapped__` its parts are still known (`jax_backend.optimizer`).
        return functools.update_wrapper(functools.partial(updated, own.__get__(self)), own.__get__(self))

    noting = property(lambda self: functools.partial(_init, init.__get__(self)))
    with ExitStack() as stack:
        for owner, name, value in (
            (optax, "value_and_grad_from_state", value_and_grad_from_state),
            (optax, "apply_updates", apply_updates),
            (optax.GradientTransformation, "init", noting),
            (optax.GradientTransformation, "update", property(tapped)),
            (optax.GradientTransformation, "__iter__", _unpacked),
            (optax.MultiSteps, "update", _multi_steps_update(optax.MultiSteps.update)),
        ):
            stack.enter_context(replacing(owner, name, value))
        stack.enter_context(noting_optimizers())
        yield


def _unpacked(optimizer: optax.GradientTransformation) -> Iterator[Callable]:
    """Unpack `init, update = optax.adam(...)`: the functions that the attributes yield, which are followed."""
    return iter((optimizer.init, optimizer.update))


def value_and_grad_from_state(fun: Any) -> Any:
    """`optax.value_and_grad_from_state`, whose gradient is that of a condition: modules inside of it are not seen."""
    real, step = _value_and_grad_from_state(fun), DifferentiatedFunction(fun, 0, False, {})

    @functools.wraps(real)
    def call(params: Any, *args: Any, **kwargs: Any) -> Any:
        collector = current()
        if collector is None or collector.in_loss or inside_update.get():
            return real(params, *args, **kwargs)
        if isinstance(collector, Root):
            params = collector.session.replaced(params)
        result = real(params, *args, **kwargs)
        collector.add([step.tap(result, (params,), [])])
        return result

    return call


def apply_updates(params: Any, updates: Any) -> Any:
    """`optax.apply_updates`."""
    return applied(_apply_updates, params, updates)


def applied(own: Callable, params: Any, updates: Any) -> Any:
    """Call a function that adds updates to parameters, and add its tap; returns the new parameters."""
    collector = _of_step("apply_updates")
    if collector is None:
        return own(params, updates)
    if isinstance(collector, Root):
        params, updates = collector.session.replaced(params), collector.session.replaced(updates)
    result = own(params, updates)
    names = _inexact(updates)
    before, after = (
        {name: leaf for name, leaf in _inexact(each).items() if name in names} for each in (params, result)
    )
    values = {
        what: tuple(Value(leaf) for leaf in each.values()) for what, each in (("before", before), ("after", after))
    }
    tap = Tap(APPLY, (tuple(before),), values)
    if isinstance(collector, Root):
        collector.add([tap])
    else:
        _add_application(collector, tap)
    return result


def _add_application(collector: Collector, application: Tap) -> None:
    """Add the tap of an application of updates, unless it is of a part of them: haliax adds those of each parameter by itself.

    The tap of the update then needs no parameters, which a scan would return twice.
    """
    updates = [(i, tap) for i, tap in enumerate(collector.taps) if tap.kind == UPDATE]
    own = [updates[i] for i, _ in of_parameters(application, [tap.about[0] for _, tap in updates])]
    if not own and updates and len(application.about[0]) < len(updates[-1][1].about[0]):
        return
    for i, tap in own or updates:
        collector.taps[i] = replace(tap, values={**tap.values, "before": (), "updates": ()})
    collector.add([application])


def _inexact(tree: Any) -> dict[str, Any]:
    """The floating and complex leaves by their paths."""
    return _leaves(tree, jnp.inexact)


def _leaves(tree: Any, kind: Any) -> dict[str, Any]:
    """The leaves of a kind of dtype, by their paths."""
    return {
        path_name(path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, kind)
    }


def _of_step(what: str) -> Collector | None:
    """The collector of an optimizer's function, unless another function of the optimizer, or a loss function, calls it."""
    if (seen := seen_updates.get()) is not None:
        seen.append(what)
    collector = innermost()
    if collector is None or collector.in_loss or inside_update.get():
        return None
    if collector.is_current():
        return collector
    if (found := root()) is not None:
        found.session.hidden(what)
    return None


def _init(own: Callable, params: Any) -> Any:
    """The initialisation of the state of a gradient transformation, by itself and not by another one or by a loss function."""
    collector = innermost()
    if collector is None or collector.in_loss or inside_update.get():
        return own(params)
    noted.initialised(_inexact(params))
    with setting(inside_update, True):
        return own(params)


def updated(own: Callable, grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    """Call the update function of an optimizer, and add its tap; returns the updates and the new state."""
    collector = _of_step("update")
    if collector is None:
        return own(grads, state, params, **extra)
    if isinstance(collector, Root):
        params = collector.session.replaced(params)
    with setting(inside_update, True), setting(accumulation, None):
        updates, after = own(grads, state, params, **extra)
        accumulates = accumulation.get()
    added = _inexact(updates)
    if isinstance(collector, Root):
        updates = collector.session.shifted(updates)
    reduced = grads
    values: dict[str, Any] = {}
    if accumulates is not None:
        values["mini_step"] = Value(accumulates.num_steps)
        if isinstance(collector, Root) or collector.detail:
            reduced = accumulates.grads()
            if isinstance(grads, ShardedParams) and not isinstance(reduced, ShardedParams):
                reduced = to_shards(reduced, grads.tree)
    named = _inexact(reduced)
    values |= {
        "grads": tuple(Value(leaf) for leaf in named.values()),
        "state": jax.tree.map(Value, after),
        "state_before": tuple(Value(leaf) for leaf in jax.tree.leaves((state, params))),
        "before": _values_of(named, _inexact(params)),
        "updates": _values_of(named, added),
    }
    if not _has_gradients(collector):
        values["loss"] = Value(optax.tree.norm(list(named.values())))
    shapes = tuple(tuple(leaf.shape) for leaf in named.values())
    structure = jax.tree.structure(reduced) if isinstance(reduced, ShardedParams) else None
    collector.add([Tap(UPDATE, (tuple(named), shapes, structure), values)])
    return updates, after


def _has_gradients(collector: Collector | None) -> bool:
    """Whether a gradient was taken before, as far as is seen."""
    found = root()
    if found is not None and found.session.has_gradients:
        return True
    while collector is not None:
        if any(tap.kind == GRADIENT for tap in collector.taps):
            return True
        collector = collector.above
    return False


def _values_of(names: Iterable[str], found: Mapping[str, Any]) -> tuple[Value, ...]:
    """The values of these names in their order; none if any is missing."""
    return tuple(Value(found[name]) for name in names) if all(name in found for name in names) else ()


def _multi_steps_update(own: Callable) -> Callable:
    @functools.wraps(own)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        def call(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            updates, after = own(self, grads, state, params, **extra)

            def accumulated() -> Any:
                return jax.tree.map(
                    lambda g, acc: self._acc_update(g, acc, n_acc=state.mini_step), grads, state.acc_grads
                )

            if isinstance(state, optax.MultiStepsState):
                accumulation.set(Accumulation(after.mini_step, accumulated))
            return updates, after

        return call(*args, **kwargs) if inside_update.get() else updated(call, *args, **kwargs)

    return update


def follow_equinox(stack: ExitStack) -> bool:
    """Follow `equinox.apply_updates` too, once the script has imported it."""
    if (equinox := sys.modules.get("equinox")) is None or not hasattr(equinox, "apply_updates"):
        return False
    own = equinox.apply_updates
    stack.enter_context(replacing(equinox, "apply_updates", lambda model, updates: applied(own, model, updates)))
    return True
