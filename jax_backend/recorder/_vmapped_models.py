"""Replaces `jax.vmap` around training: the first of several models is followed, or an ensemble as one model.

[Note: the first of several models] `jax.vmap` maps a function that makes a model and trains it over seeds or learning rates. Each
model is then trained by itself, and each value has a dim of models. The recording is that of the first one: what all models have
in common shows there, and it can be compared with a run of this model alone.

[Note: ensembles] `jax.vmap` maps a step whose parameters or optimizer state are arguments with a leading dim of members. They are
one model, which is recorded with this dim, as where the gradients of members are taken in a vmap and one optimizer outside of it
updates all of them.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakSet

import jax
import jax.numpy as jnp

from crossframe.replacing import setting
from jax_backend.recorder._script_session import following, inside_update, root, seen_updates
from jax_backend.recorder._taps import (
    BY_REFERENCE,
    GRADIENT,
    UPDATE,
    Packed,
    Tap,
    Value,
    collecting,
    not_collecting,
    pack,
    traced,
    unpacked,
)

_vmap = jax.vmap
_without_updates: set[CodeType] = set()
_with_updates: WeakSet[FunctionType] = WeakSet()


@functools.wraps(_vmap)
def vmap(fun: Any, in_axes: Any = 0, out_axes: Any = 0, *more: Any, **options: Any) -> Any:
    real = _vmap(fun, in_axes, out_axes, *more, **options)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        collector = following()
        if collector is None or collector.in_loss or inside_update.get() or not _trains(fun, real, args, kwargs):
            return real(*args, **kwargs)

        def body(*args: Any, **kwargs: Any) -> Any:
            inner = traced(collector, (args, kwargs))
            with collecting(inner):
                result = fun(*args, **kwargs)
            return result, pack(inner.taps, result, inner)

        result, packed = _vmap(body, in_axes, (out_axes, 0), *more, **options)(*args, **kwargs)
        if not packed.taps:  # it has trained with other arguments
            return result
        session = root().session  # type: ignore[union-attr]
        if _trains_arguments(packed):
            given, returned = _mapped_leaves((args, kwargs), (in_axes, 0)), _mapped_leaves(result, out_axes)
            has_scans = any(tap.scans for tap in packed.taps)  # whose dim comes after that of members
            if given is not None and returned is not None and not has_scans:
                collector.add(_of_ensemble(unpacked(packed, (args, kwargs), result), given[0].shape[0]))
            else:
                session.hidden("update")
            return result
        session.first_of(packed.arrays[0].shape[0] if packed.arrays else 1)
        axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
        given = _first(args, axes), _first(kwargs, 0)
        first = replace(packed, arrays=_first(packed.arrays, 0))
        leading, *others = unpacked(first, given, _first(result, out_axes))
        leading = replace(leading, values={**leading.values, "of_models": _own_elements((args, kwargs), given)})
        collector.add([leading, *others])
        return result

    return call


def _trains(fun: Any, mapped: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function updates parameters by an optimizer of optax.

    A trial trace tells. It may be a simulation that takes long to trace: a function that updates nothing is traced once, unless
    what it does depends on other functions, as in a closure, of which a library may wrap any function.
    """
    # Another trial would not trace the bodies of its loops again.
    if isinstance(fun, FunctionType) and fun in _with_updates:
        return True
    code = fun.__code__ if isinstance(fun, FunctionType) and not fun.__closure__ else None
    if seen_updates.get() is not None or code in _without_updates:  # an outer trial finds those inside
        return False
    seen: list[str] = []
    try:
        with setting(seen_updates, seen), not_collecting():
            # As a new function, which JAX has not traced yet.
            jax.eval_shape(lambda *args, **kwargs: mapped(*args, **kwargs), *args, **kwargs)
    except Exception:  # which the function itself raises
        return False
    if seen and isinstance(fun, FunctionType):
        _with_updates.add(fun)
    elif not seen and code is not None:
        _without_updates.add(code)
    return bool(seen)


def _trains_arguments(packed: Packed) -> bool:
    """Whether parameters or optimizer state are arguments of the function, so that a step follows in another call of it."""
    return any(
        name in BY_REFERENCE and reference[0] == "in" for tap in packed.taps for name, reference in tap.references
    )


def _mapped_leaves(tree: Any, axes: Any) -> list[Any] | None:
    """The leaves that `jax.vmap` maps by their leading dims; None if it maps others.

    Args:
        axes: a prefix of the pytree.
    """
    axes = (tuple(axes[0]) if isinstance(axes[0], list) else axes[0], *axes[1:]) if isinstance(axes, tuple) else axes
    every = jax.tree.broadcast(jax.tree.map(_Axis, axes, is_leaf=lambda axis: axis is None), tree)
    both = [*zip(jax.tree.leaves(tree), jax.tree.leaves(every), strict=True)]
    return None if any(axis.number for _, axis in both) else [leaf for leaf, axis in both if axis.number == 0]


def _of_ensemble(taps: Sequence[Tap], members: int) -> list[Tap]:
    """Taps of a mapped function as those of one model, whose parameters have a dim of members. Numbers of steps are those of the
    first member."""
    found = []
    for tap in taps:
        values = dict(tap.values)
        for name in {"mini_step", "state", "state_before"} & values.keys():
            values[name] = jax.tree.map(_first_number, values[name])
        about = tap.about
        if tap.kind == GRADIENT:
            about = about._replace(shapes=tuple((members, *shape) for shape in about.shapes))
        elif tap.kind == UPDATE:
            names, shapes, *others = about
            about = (names, tuple((members, *shape) for shape in shapes), *others)
        found.append(replace(tap, about=about, values=values))
    return found


def _first_number(value: Value) -> Value:
    """The value of the first member, if each member has an integer."""
    is_integer = hasattr(value.array, "dtype") and jnp.issubdtype(value.array.dtype, jnp.integer)
    return replace(value, array=value.array[0]) if is_integer and value.array.ndim == 1 else value


def _own_elements(args: Any, first: Any) -> tuple[Value, ...]:
    """The arguments of which each model gets its own element."""
    both = zip(jax.tree.leaves(args), jax.tree.leaves(first), strict=True)
    return tuple(Value(leaf) for leaf, its in both if leaf is not its)


def _first(tree: Any, axes: Any) -> Any:
    """A pytree with the first element along the mapped axis of each leaf.

    Args:
        axes: a prefix of the pytree, as of `jax.vmap`.
    """
    every = jax.tree.broadcast(jax.tree.map(_Axis, axes, is_leaf=lambda axis: axis is None), tree)
    return jax.tree.map(lambda leaf, axis: axis.first(leaf), tree, every)


@dataclass(frozen=True)
class _Axis:
    """An axis of `jax.vmap`; None: the value is the same for all models."""

    number: int | None

    def first(self, array: Any) -> Any:
        return array if self.number is None else jax.lax.index_in_dim(array, 0, self.number, keepdims=False)
