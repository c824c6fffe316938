"""Replaces `jax.pmap`: a mapped function runs as one that also returns taps.

[Note: a dim of devices] What a function of `jax.pmap` is given and returns has a leading dim of devices, and the function itself
sees one element of it. So its arguments and results are values by rank: what all devices have alike, such as parameters, is
recorded without this dim, and the samples of all devices are one batch, as in `jax.shard_map`.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_backend.recorder._script_session import JittedFunction, Root
from jax_backend.recorder._taps import Detail, Packed, PackedTap, collecting, current, innermost, pack, traced

_pmap = jax.pmap
_NOT_MAPPED = -1


class Mapped(JittedFunction):
    """A function of `jax.pmap`.

    Args:
        options: of `jax.pmap`.
    """

    def __init__(self, fun: Callable, options: dict[str, Any]) -> None:
        super().__init__(fun, _pmap(fun, **options), [options.get("donate_argnums")])
        static = options.get("static_broadcasted_argnums", ())
        self._options, self._static = options, (static,) if isinstance(static, int) else tuple(static)
        self._programs: dict[Detail, _Program] = {}

    def program(self, detail: Detail) -> "_Program":
        if detail not in self._programs:

            @functools.wraps(self._fun)
            def run(*args: Any, **kwargs: Any) -> tuple[Any, Packed]:
                above = innermost()
                assert above is not None
                inputs = jax.tree.leaves((args, kwargs))
                collector = traced(above, inputs, detail=detail, is_cached=True)
                with collecting(collector):
                    result = self._fun(*args, **kwargs)
                packed = pack(collector.taps, result, collector, lead=jnp.asarray)
                by_rank = {"in": self.by_rank(args, kwargs), "out": self.results_by_rank(result)}
                return result, replace(packed, taps=tuple(_by_rank(tap, by_rank) for tap in packed.taps))

            options = {name: value for name, value in self._options.items() if not detail or name != "donate_argnums"}
            options["out_axes"] = (self._options.get("out_axes", 0), 0)
            self._programs[detail] = _Program(_pmap(run, **options), self._static)
        return self._programs[detail]

    def by_rank(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        return _mapped(self._axes(args, kwargs))

    def results_by_rank(self, result: Any) -> frozenset[int]:
        return _mapped(_broadcast(self._options.get("out_axes", 0), result))

    def _axes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        axes, static = self._options.get("in_axes", 0), {i % len(args) for i in self._static if args}
        found = []
        for i, arg in enumerate(args):
            own = axes[i] if isinstance(axes, tuple | list) else axes
            found += _broadcast(None if i in static else own, arg)
        return found + _broadcast(0, kwargs)

    def _is_followed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether all dims of devices are leading ones, and this process has all devices."""
        axes = {*self._axes(args, kwargs), *_broadcast(self._options.get("out_axes", 0), 0, is_prefix=True)}
        return axes <= {0, _NOT_MAPPED} and jax.process_count() == 1

    def _placed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with one element of each dim of devices on its device, as JAX would place them."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        mapped = self.by_rank(args, kwargs)
        number = next((leaves[i].shape[0] for i in mapped if np.ndim(leaves[i])), 0)
        devices = self._options.get("devices") or jax.local_devices(backend=self._options.get("backend"))[:number]
        if not number or len(devices) != number:  # of which JAX complains
            return args, kwargs
        sharding = NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec("devices"))
        for i in mapped:
            if np.shape(leaves[i])[:1] == (number,) and not _is_placed(leaves[i], sharding):
                leaves[i] = jax.device_put(leaves[i], sharding)
        return jax.tree.unflatten(structure, leaves)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        collector = current()
        if not isinstance(collector, Root):
            return self._plain(*args, **kwargs)
        session = collector.session
        if not session.forward_only and self._is_followed(args, kwargs):
            return session.call(self, *self._placed(args, kwargs))
        result = self._plain(*args, **kwargs)
        session.mapped()
        return result


class _Program:
    """A mapped function.

    Args:
        static: positions of arguments that are no arrays.
    """

    def __init__(self, call: Callable, static: tuple[int, ...]) -> None:
        self._call, self._static = call, static

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The shapes of its results."""
        static = {i % len(args) for i in self._static if args}
        traced_args = {i: arg for i, arg in enumerate(args) if i not in static}

        def call(some: dict[int, Any], kwargs: dict[str, Any]) -> Any:
            return self._call(*(some.get(i, arg) for i, arg in enumerate(args)), **kwargs)

        return jax.eval_shape(call, traced_args, kwargs)


def _mapped(axes: list[int]) -> frozenset[int]:
    return frozenset(i for i, axis in enumerate(axes) if axis != _NOT_MAPPED)


def _broadcast(axes: Any, tree: Any, *, is_prefix: bool = False) -> list[int]:
    """The axis of each leaf.

    Args:
        axes: a prefix of the tree; None: not mapped.
        is_prefix: return the axes of the prefix instead.
    """
    numbers = jax.tree.map(lambda axis: _NOT_MAPPED if axis is None else axis, axes, is_leaf=lambda axis: axis is None)
    return jax.tree.leaves(numbers if is_prefix else jax.tree.broadcast(numbers, tree))


def _by_rank(tap: PackedTap, mapped: dict[str, frozenset[int]]) -> PackedTap:
    """A tap whose references say which arguments and results have a dim of devices."""
    references = tuple(
        (name, (*reference, True) if reference[1:] and reference[1] in mapped.get(reference[0], ()) else reference)
        for name, reference in tap.references
    )
    return replace(tap, references=references)


def _is_placed(leaf: Any, sharding: NamedSharding) -> bool:
    """Whether an array has each element of its first dim on another device."""
    if not isinstance(leaf, jax.Array) or not isinstance(leaf.sharding, NamedSharding):
        return False
    return leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def pmap(fun: Any = None, axis_name: Any = None, **options: Any) -> Any:
    """`jax.pmap`."""
    if fun is None:
        return functools.partial(pmap, axis_name=axis_name, **options)
    return Mapped(fun, {"axis_name": axis_name, **options})
