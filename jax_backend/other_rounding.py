"""The same loss with other rounding: sums in other orders, and results that fall to a neighbouring number.

What a perturbed run may do, and why, is in the note in `torch_backend.other_rounding`. Here the loss function is traced to its
jaxpr, and that is run again: products are summed in another order, and each result that rounds is moved to one of its neighbours
or left, by a hash of its bits and place. The cotangents that come back through it are moved by as much, so that backward rounds
otherwise too.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec

_ROUNDS = """
    dot_general conv_general_dilated reduce_sum reduce_prod cumsum cumprod cumlogsumexp reduce_window_sum
    div sqrt rsqrt cbrt pow exp exp2 expm1 log log1p tanh logistic erf erfc sin cos tan atan2
    custom_jvp_call custom_vjp_call scan while cond
"""
ROUNDING = frozenset(_ROUNDS.split())
"""Primitives whose results other implementations round otherwise: sums, quotients, elementary functions, and what holds
functions of its own. Not single additions and products: they round alike everywhere, and are too many to compile in good time."""
_BLOCK = 512
_INLINED = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")


def other_rounding(fun: Callable, seed: int | jax.Array) -> Callable:
    """`fun` as another implementation might round it. Differentiable as `fun` is.

    Args:
        fun: of pytrees of arrays, to one; in a step it is given full parameters.
        seed: which of many ways; 0 and on. It may be traced, so that perturbed runs share one compiled program.
    """

    @functools.wraps(fun)
    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        walk = _Walk(jnp.asarray(seed).astype(jnp.uint32))
        found = walk.run(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return run


class _Walk:
    def __init__(self, seed: jax.Array) -> None:
        self._seed, self._place = _mixed(seed + jnp.uint32(1)), 0
        self._numbers = jnp.zeros(0, jnp.uint32)

    def _drawn(self) -> jax.Array:
        """Another number at each place of the program, of which many are made at once."""
        block, place = divmod(self._place, _BLOCK)
        if place == 0:
            self._numbers = _mixed(self._seed + jnp.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=jnp.uint32))
        self._place += 1
        return jax.lax.index_in_dim(self._numbers, place, keepdims=False)

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr, each that rounds moved."""
        values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            name, operands = equation.primitive.name, [read(atom) for atom in equation.invars]
            if name in _INLINED:
                inner = equation.params["jaxpr"]
                closed = inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())
                found = self.run(closed.jaxpr, closed.consts, operands)
            else:
                if name == "dot_general":
                    operands = self._reordered(operands, equation.params["dimension_numbers"])
                found = self._on_ranks(equation, operands) if name == "shard_map" else _bound(equation, operands)
                if name in ROUNDING:
                    found = [self._moved(each) for each in found]
            values.update(zip(equation.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _reordered(self, operands: list[Any], numbers: Any) -> list[Any]:
        """The same product, the terms of its sums in another order."""
        dims = [contracted[0] for contracted in numbers[0] if contracted]
        if not dims:
            return operands
        order = self._order(operands[0].shape[dims[0]])
        return [jnp.take(operand, order, axis=dim) for operand, dim in zip(operands, dims, strict=True)]

    def _order(self, numel: int) -> jax.Array:
        """A permutation: steps of one length around a circle, from one place on, both drawn."""
        steps = _coprime(numel)
        step = jnp.asarray(steps)[self._drawn() % len(steps)]
        return (jnp.arange(numel, dtype=jnp.uint32) * step + self._drawn() % numel) % numel

    def _on_ranks(self, equation: core.JaxprEqn, operands: list[Any]) -> list[Any]:
        """What ranks do each for themselves rounds otherwise too; all of them alike."""
        params, inner = equation.params, equation.params["jaxpr"]
        # What JAX calls them differs between its versions; an empty set means all axes.
        axes = next((params[name] for name in ("newly_manual_axes", "manual_axes") if name in params), frozenset())
        run = jax.shard_map(
            lambda seed, *args: _Walk(seed).run(inner, (), args),
            mesh=params["mesh"],
            in_specs=(PartitionSpec(), *params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=axes,
            check_vma=params["check_vma"],
        )
        return run(self._drawn(), *operands)

    def _moved(self, array: Any) -> Any:
        if not jnp.issubdtype(array.dtype, jnp.floating) or not array.size:
            return array
        bits = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(array), f"uint{8 * array.dtype.itemsize}")
        keys = bits.astype(jnp.uint32) ^ self._drawn()
        keys = _mixed(keys)
        away = (keys >> 31).astype(jnp.int8) - (keys >> 30 & 1).astype(jnp.int8)
        return _neighbour(array, away.astype(array.dtype))


def _bound(equation: core.JaxprEqn, operands: list[Any]) -> list[Any]:
    result = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    return list(result) if equation.primitive.multiple_results else [result]


@functools.cache
def _coprime(numel: int) -> np.ndarray:
    """Some lengths of steps that go around a circle of so many places through all of them; their products fit 32 bits."""
    largest = min(numel, 2**32 // max(numel, 1)) - 1
    drawn = np.random.default_rng(numel).integers(1, max(largest, 1) + 1, 256)
    found = [int(each) for each in dict.fromkeys(drawn.tolist()) if math.gcd(int(each), numel) == 1]
    return np.array(found[:64] or [1], np.uint32)


def _mixed(keys: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3 (A. Appleby, 2011), which spreads each bit over all."""
    keys = (keys ^ (keys >> 16)) * jnp.uint32(0x85EBCA6B)
    keys = (keys ^ (keys >> 13)) * jnp.uint32(0xC2B2AE35)
    return keys ^ (keys >> 16)


@jax.custom_jvp
def _neighbour(array: jax.Array, away: jax.Array) -> jax.Array:
    """The next number away from zero where `away` is 1, towards it where it is -1; zeros and what is not finite stay."""
    integers = jax.lax.bitcast_convert_type(array, f"int{8 * array.dtype.itemsize}")
    stays = (array == 0) | ~jnp.isfinite(array)
    changed = integers + away.astype(integers.dtype) * ~stays
    return jax.lax.bitcast_convert_type(changed, array.dtype)


@_neighbour.defjvp
def _(primals: Any, tangents: Any) -> Any:
    array, away = primals
    factor = 1 + away * jnp.finfo(array.dtype).eps
    return _neighbour(array, away), tangents[0] * factor
