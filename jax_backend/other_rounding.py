"""Perturbed runs: the same loss with other rounding. Sums in another order, and results moved to a neighbouring number.

See [Note: what a perturbed run may do] in `torch_backend.other_rounding`. Here the jaxpr of the loss function is evaluated with
changes: products are summed in another order, and each result that rounds is moved to one of its neighbours or left, by a hash of
its bits and its place. Results of integers alone are left, such as the places that a division gives. Cotangents are scaled by the
same relative change, so that backward has other rounding too.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec

from jax_backend.programs._jaxpr import CALLS, Evaluation, bind, inner_jaxprs, manual_axes, opened, transformed

_ROUNDS = """
    dot_general conv_general_dilated reduce_sum reduce_prod cumsum cumprod cumlogsumexp reduce_window_sum
    div sqrt rsqrt cbrt pow exp exp2 expm1 log log1p tanh logistic erf erfc sin cos tan atan2
"""
HOLDING = frozenset(["custom_jvp_call", "custom_vjp_call", "scan", "while", "cond"])
"""Primitives that hold functions, whose results round if anything inside does."""
ROUNDING = frozenset(_ROUNDS.split()) | HOLDING
"""Primitives whose results depend on the implementation's rounding: sums, quotients, elementary functions, and `HOLDING`. Not
single additions and products, which round alike everywhere, and are too many to compile in reasonable time."""
_BLOCK = 512


def other_rounding(fun: Callable, seed: int | jax.Array) -> Callable:
    """`fun` with the rounding of another implementation. Differentiable if `fun` is.

    Args:
        fun: a function of pytrees of arrays to a pytree of arrays.
        seed: selects the rounding; an integer from 0. It may be traced, so that perturbed runs share one compiled program.
    """

    @functools.wraps(fun)
    def run(*args: Any) -> Any:
        draws = _Draws(jnp.asarray(seed).astype(jnp.uint32))
        return transformed(fun, lambda jaxpr: _Rounding(jaxpr, draws))(*args)

    return run


class _Draws:
    """A different number at each place of a program. Many are made at once."""

    def __init__(self, seed: jax.Array) -> None:
        self._seed, self._place = _mixed(seed + jnp.uint32(1)), 0
        self._numbers = jnp.zeros(0, jnp.uint32)

    def __call__(self) -> jax.Array:
        block, place = divmod(self._place, _BLOCK)
        if place == 0:
            self._numbers = _mixed(self._seed + jnp.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=jnp.uint32))
        self._place += 1
        return jax.lax.index_in_dim(self._numbers, place, keepdims=False)


class _Rounding(Evaluation):
    """A program whose results are moved wherever they round."""

    def __init__(self, jaxpr: core.Jaxpr, draws: _Draws) -> None:
        super().__init__(jaxpr)
        self._drawn = draws

    def evaluate(self, equation: core.JaxprEqn, operands: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if name in CALLS:
            jaxpr, consts = opened(params["jaxpr"])
            return _Rounding(jaxpr, self._drawn).run(consts, operands)
        if name == "dot_general":
            operands = self._reordered(operands, params["dimension_numbers"])
        if name == "shard_map":
            found = self._on_ranks(params, operands)
        else:
            found = bind(equation.primitive, equation.primitive.get_bind_params(params), operands)
        return [self._moved(each) for each in found] if name in ROUNDING and _rounds(equation) else found

    def _reordered(self, operands: list[Any], numbers: Any) -> list[Any]:
        """The operands of the same product, with the terms of its sums in another order."""
        dims = [contracted[0] for contracted in numbers[0] if contracted]
        if not dims:
            return operands
        order = self._order(operands[0].shape[dims[0]])
        return [jnp.take(operand, order, axis=dim) for operand, dim in zip(operands, dims, strict=True)]

    def _order(self, numel: int) -> jax.Array:
        """A random permutation: steps of one length around a circle from one start."""
        steps = _coprime(numel)
        step = jnp.asarray(steps)[self._drawn() % len(steps)]
        return (jnp.arange(numel, dtype=jnp.uint32) * step + self._drawn() % numel) % numel

    def _on_ranks(self, params: dict[str, Any], operands: list[Any]) -> list[Any]:
        """A shard_map, whose ranks have other rounding too, all the same."""
        run = jax.shard_map(
            lambda seed, *args: _Rounding(params["jaxpr"], _Draws(seed)).run((), args),
            mesh=params["mesh"],
            in_specs=(PartitionSpec(), *params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=manual_axes(params),
            check_vma=params["check_vma"],
        )
        return run(self._drawn(), *operands)

    def _moved(self, array: Any) -> Any:
        if not jnp.issubdtype(array.dtype, jnp.floating) or not array.size:
            return array
        fixed = jax.lax.stop_gradient(array)
        is_rounded = (fixed != jnp.round(fixed)).any()
        bits = jax.lax.bitcast_convert_type(fixed, f"uint{8 * array.dtype.itemsize}")
        keys = bits.astype(jnp.uint32) ^ self._drawn()
        keys = _mixed(keys)
        away = (keys >> 31).astype(jnp.int8) - (keys >> 30 & 1).astype(jnp.int8)
        return _neighbour(array, (away * is_rounded).astype(array.dtype))


def _rounds(equation: core.JaxprEqn) -> bool:
    """Whether an equation rounds, or anything inside of the functions that it holds."""
    inside = [each for jaxpr in inner_jaxprs(equation) for each in jaxpr.eqns]
    return any(map(_rounds, inside)) if inside else equation.primitive.name in ROUNDING - HOLDING


@functools.cache
def _coprime(numel: int) -> np.ndarray:
    """Lengths of steps that visit all of so many places around a circle; their products fit into 32 bits."""
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
    """The next number away from zero where `away` is 1, towards zero where it is -1; zeros and non-finite numbers stay."""
    integers = jax.lax.bitcast_convert_type(array, f"int{8 * array.dtype.itemsize}")
    stays = (array == 0) | ~jnp.isfinite(array)
    changed = integers + away.astype(integers.dtype) * ~stays
    return jax.lax.bitcast_convert_type(changed, array.dtype)


@_neighbour.defjvp
def _(primals: Any, tangents: Any) -> Any:
    array, away = primals
    factor = 1 + away * jnp.finfo(array.dtype).eps
    return _neighbour(array, away), tangents[0] * factor
