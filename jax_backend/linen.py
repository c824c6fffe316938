"""Variables of flax's linen: parameters to shard, and the rest as state for each rank.

params, state = split(model.init(rng, x))
sharded, state = shard(params, mesh, units=..., param_map=...), per_rank(state, mesh)

def loss_fn(params, batch, state):
    out, state = apply(model, params, state, batch["x"])
    ...
    return LossOutput(loss, state=state)
"""

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen
from jaxtyping import PyTree


def split(variables: Mapping[str, PyTree]) -> tuple[PyTree[jax.Array], dict[str, PyTree]]:
    """Variables as (params, state): the collection "params", and all others by name, such as "batch_stats"."""
    rest = dict(variables)
    return rest.pop("params"), rest


def with_params(params: PyTree[jax.Array], state: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The variables of parameters and state as `split` returns them."""
    return {"params": params, **state}


def apply(
    module: linen.Module, params: PyTree[jax.Array], state: Mapping[str, PyTree], *args: Any, **kwargs: Any
) -> tuple[Any, dict]:
    """`module.apply` in which all state may change: (the module's result, the new state)."""
    out, changed = module.apply(with_params(params, state), *args, mutable=list(state), **kwargs)
    return out, {**state, **changed}
