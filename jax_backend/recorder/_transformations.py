"""Replaces loops and mapped functions of JAX: the taps of a body become taps of the function around it."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core
from jax.sharding import PartitionSpec

from jax_backend.recorder._jitted import Jitted
from jax_backend.recorder._model_state import carried
from jax_backend.recorder._module_calls import module_call
from jax_backend.recorder._script_session import Root, following
from jax_backend.recorder._taps import UPDATE, Tap, Value, collecting, current, of_scan, pack, traced, unpacked
from jax_backend.recorder._updates_by_hand import with_scan_updates

_OF_MODEL = ("diff", "before", "state_before", "state", "after")
"""The values of taps that are parameters, or state of an optimizer."""
_scan, _fori_loop, _lax_map = jax.lax.scan, jax.lax.fori_loop, jax.lax.map
_shard_map, _named_call = jax.shard_map, jax.named_call


def scan(f: Any, init: Any, xs: Any = None, length: int | None = None, *args: Any, **options: Any) -> Any:
    """`jax.lax.scan`."""
    if isinstance(top := current(), Root):
        jitted = _jitted_scan(f, length, *args, **options)
        follows = top.session.follows(jitted, (init, xs), {})
        return jitted(init, xs) if follows else _scan(f, init, xs, length, *args, **options)
    if (collector := following()) is None:
        return _scan(f, init, xs, length, *args, **options)

    def body(carry: Any, x: Any) -> Any:
        inner = traced(collector, carry, is_scan=True)
        with collecting(inner):
            after, y = f(carry, x)
        taps = with_scan_updates(inner.taps, carry, after)
        return after, (y, pack(_with_state(taps, carry, after), (), inner))

    carry, (ys, packed) = _scan(body, init, xs, length, *args, **options)
    if options.get("reverse", args[0] if args else False):
        packed = dataclasses.replace(packed, arrays=[jnp.flip(each, 0) for each in packed.arrays])
    leaves = jax.tree.leaves(xs)
    collector.add(of_scan(packed, leaves[0].shape[0] if leaves else length or 0, init, collector.inputs))
    return carry, ys


def _with_state(taps: Sequence[Tap], carry: Any, after: Any) -> list[Tap]:
    """The taps of the body of a scan; if it updates parameters, the last update has the state of the model that the scan carries.

    What is larger than the model, such as a replay buffer, is left out: the scan stacks it, once for each of its steps.
    """
    found = list(taps)
    at = max((i for i, tap in enumerate(found) if tap.kind == UPDATE and not tap.scans), default=None)
    if at is None:
        return found
    own = {id(leaf) for tap in found for name in _OF_MODEL for leaf in _leaves(tap.values.get(name, ()))}
    most = sum(math.prod(shape) for shape in next((tap.about[1] for tap in found if tap.kind == UPDATE), ()))
    before, returned = jax.tree.leaves(carry), jax.tree.leaves(after)
    state = carried((carry,), {}, after, {i for i, leaf in enumerate(before) if id(leaf) in own})
    state = {path: (i, j) for path, (i, j) in state.items() if before[i].size <= most}
    values = {
        "initial_state": {path: Value(before[i]) for path, (i, _) in state.items()},
        "model_state": {path: Value(returned[j]) for path, (_, j) in state.items()},
    }
    found[at] = dataclasses.replace(found[at], values={**found[at].values, **values})
    return found


def _leaves(values: Any) -> list[Any]:
    return [value.array for value in jax.tree.leaves(values)]


def _jitted_scan(f: Any, *args: Any, **options: Any) -> Jitted:
    """A scan outside of jit, which JAX compiles too, as a jitted function."""
    try:
        return _kept_scan(f, args, tuple(options.items()))
    except TypeError:  # not hashable
        return _kept_scan.__wrapped__(f, args, tuple(options.items()))


@functools.lru_cache(maxsize=64)
def _kept_scan(f: Any, args: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> Jitted:
    return Jitted(lambda init, xs: scan(f, init, xs, *args, **dict(options)), {})


@functools.lru_cache(maxsize=64)
def _loop_body(body_fun: Callable) -> Callable:
    def body(carry: Any, _: Any) -> Any:
        i, value = carry
        return (i + 1, body_fun(i, value)), None

    return body


def fori_loop(lower: Any, upper: Any, body_fun: Callable, init_val: Any, **options: Any) -> Any:
    """`jax.lax.fori_loop`, which is a scan if the number of iterations is known."""
    if current() is None or not (core.is_concrete(lower) and core.is_concrete(upper)):
        return _fori_loop(lower, upper, body_fun, init_val, **options)

    first, length = int(lower), max(int(upper) - int(lower), 0)
    return scan(_loop_body(body_fun), (first, init_val), None, length, unroll=options.get("unroll") or False)[0][1]


def lax_map(f: Callable, xs: Any, *, batch_size: int | None = None) -> Any:
    """`jax.lax.map`, which is a scan without a carry."""
    if current() is None or batch_size is not None:
        return _lax_map(f, xs, batch_size=batch_size)
    return scan(lambda carry, x: (carry, f(x)), (), xs)[1]


def _moving(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose results are its first argument with another sharding, through which values are followed."""

    first = next(iter(inspect.signature(function).parameters))

    @functools.wraps(function)
    def move(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        collector = current()
        if collector is not None and collector.trace is not None:
            collector.constrain(args[0] if args else options[first], result)
        return result

    return move


with_sharding_constraint, device_put, reshard = map(
    _moving, (jax.lax.with_sharding_constraint, jax.device_put, jax.sharding.reshard)
)


@functools.wraps(_shard_map)  # haliax reads its signature, for the name of an option that has changed
def shard_map(f: Any = None, /, **options: Any) -> Any:
    if f is None:
        return functools.partial(shard_map, **options)

    @functools.wraps(f)
    def call(*args: Any) -> Any:
        if (collector := following()) is None:
            return _shard_map(f, **options)(*args)

        def body(*args: Any) -> Any:
            inner = traced(collector, args)
            with collecting(inner):
                result = f(*args)
            return result, pack(inner.taps, result, inner, lead=lambda array: jnp.asarray(array)[None])

        axes = options.get("axis_names") or getattr(options.get("mesh"), "axis_names", None)
        if axes is None:  # the mesh of the context
            axes = jax.sharding.get_abstract_mesh().axis_names
        given: dict[str, Any] = options | {"out_specs": (options["out_specs"], PartitionSpec(tuple(axes)))}
        result, packed = _shard_map(body, **given)(*args)
        collector.add(unpacked(packed, args, result, collector.inputs))
        return result

    return call


def older_shard_map(f: Any, mesh: Any, in_specs: Any, out_specs: Any, check_rep: bool = True) -> Any:
    """`jax.experimental.shard_map.shard_map`."""
    return shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_rep)


def named_call(fun: Any, *, name: str | None = None) -> Any:
    """`jax.named_call`."""
    return functools.wraps(fun)(module_call(_named_call(fun, name=name), name or fun.__name__))
