"""Clipping of sharded gradients by their norm over the whole model, each element once (R30)."""

import math

import jax
import jax.numpy as jnp

from crossframe.errors import UsageError
from crossframe.grad_norm import EPSILON, check_max_norm, check_norm_type, norm_dtype
from jax_backend.shards._sharded_params import ShardedParams


def clip_grad_norm(grads: ShardedParams, max_norm: float, norm_type: float = 2.0) -> tuple[ShardedParams, jax.Array]:
    """Scale gradients by max_norm / (norm + 1e-6), at most 1, as torch's clip_grad_norm_ does. Works in jit.

    `optax.clip_by_global_norm` divides by the norm without the epsilon, in the gradients' own dtype, for p = 2 only.

    Args:
        grads: gradients of `value_and_grad`, on any mesh and layout.
        max_norm: at least 0; inf clips nothing.
        norm_type: the p of the norm, above 0, or inf.

    Returns:
        The clipped gradients, in their dtypes, with 0 in the padding; and their norm before, a scalar in the widest dtype of
        float32 and the gradients. NaN and inf propagate.

    Raises:
        UsageError: `grads` are not ShardedParams, or an invalid max_norm or norm_type.
    """
    if not isinstance(grads, ShardedParams):
        raise UsageError(
            f"grads: expected ShardedParams, got {type(grads).__name__}; clip the gradients of a step of value_and_grad"
        )
    bound, order = check_max_norm(max_norm), check_norm_type(norm_type)
    tree = grads.tree
    clean = {name: tree.by_name[name].zero_padding(arrays) for name, arrays in grads.shards.items()}
    leaves = jax.tree.leaves(clean)
    dtype = norm_dtype(str(leaf.dtype) for leaf in leaves)
    norm = jnp.zeros((), dtype)
    for leaf in leaves:
        # The mesh's replicas hold one array: a sum over it counts each element once.
        sizes = jnp.abs(leaf.astype(dtype))
        if order == math.inf:
            # XLA may lose the NaN of one rank in a maximum over ranks.
            largest = jnp.where(jnp.isnan(sizes).any(), jnp.nan, jnp.max(sizes, initial=0))
            norm = jnp.maximum(norm, largest)
        else:
            norm = norm + jnp.sum(sizes if order == 1 else sizes * sizes if order == 2 else sizes**order)
    if order not in (1, math.inf):
        norm = jnp.sqrt(norm) if order == 2 else norm ** (1 / order)
    coefficient = jnp.minimum(bound / (norm + EPSILON), 1)
    scaled = {name: jax.tree.map(lambda leaf: (leaf.astype(dtype) * coefficient).astype(leaf.dtype), arrays)
              for name, arrays in clean.items()}  # fmt: skip
    # Again, since 0 times a non-finite coefficient is NaN.
    return ShardedParams({name: tree.by_name[name].zero_padding(arrays) for name, arrays in scaled.items()}, tree), norm
