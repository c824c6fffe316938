"""The gather of a unit: forward gathers its shards, backward reduces its gradient as the core's plan says (R26).

[Note: why the gather has a backward of its own] Differentiating all_gather gives a plain sum over ranks, in the dtype
and at the place that JAX chooses. The reduction is part of what sharded training means: divide, reduce-scatter, divide,
with factors that the core computes and that torch's FSDP1 uses too, so that both agree bit for bit where a sum has one
order (R32: two ranks).
"""

import math

import jax
import jax.numpy as jnp

from crossframe import reduction
from jax_backend.collectives import all_gather, reduce_scatter


def gather(unit: str, shard: jax.Array, num_ranks: int, probe: jax.Array | None = None) -> jax.Array:
    """All shards of a unit, differentiable.

    Args:
        unit: its name.
        shard: this rank's, of shape (padded_shard_numel,).
        num_ranks: how many ranks the gradient is averaged over.
        probe: None, or zeros of shape (gathered_numel,) whose gradient is then this rank's own, before any reduction.

    Returns:
        Shape (gathered_numel,). Its cotangent reaches the shard as the mean over ranks, of shape (padded_shard_numel,).
    """

    @jax.custom_vjp
    def gathered(shard, probe):
        return forward(shard, probe)[0]

    # Not by calling `gathered`: the policy that saves no gathered parameter must find the primitive itself here.
    def forward(shard, probe):
        del probe
        return all_gather(shard, unit), None

    def backward(_, local_grad):
        return reduce_mean(unit, local_grad, num_ranks), None if probe is None else local_grad

    gathered.defvjp(forward, backward)
    return gathered(shard, probe)


def reduce_mean(unit: str, local_grad: jax.Array, num_ranks: int) -> jax.Array:
    """The mean over ranks of full gradients, this rank's part of it: (gathered_numel,) to (padded_shard_numel,)."""
    factors = reduction.divide_factors(num_ranks)
    total = reduce_scatter(divide(local_grad, factors.before), unit)
    return divide(total, factors.after)


def divide(array: jax.Array, factor: float) -> jax.Array:
    """`array / factor`, correctly rounded, in the array's dtype; below float32 divided in float32, as torch does.

    XLA turns a division by any scalar, constant or not, into a product with its rounded reciprocal: another number,
    unless the factor is a power of two. It leaves a division by an array alone, so other factors are given as an array
    that XLA cannot see through: what a NaN is divided by does not matter.
    """
    wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    divisor = jnp.asarray(factor, wide.dtype)
    if math.frexp(factor)[0] != 0.5:
        divisor = jnp.where(jnp.isnan(wide), jnp.ones_like(wide), divisor)
    return (wide / divisor).astype(array.dtype)
