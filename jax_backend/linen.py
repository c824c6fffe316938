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

from flax import linen


def split(variables: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Variables as (params, state): the collection "params", and all others by name, such as "batch_stats"."""
    rest = dict(variables)
    return rest.pop("params"), rest


def with_params(params: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of parameters and state as `split` returns them."""
    return {"params": params, **state}


def apply(module: linen.Module, params: Any, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> tuple[Any, dict]:
    """`module.apply` in which all state may change: (the module's result, the new state)."""
    out, changed = module.apply(with_params(params, state), *args, mutable=list(state), **kwargs)
    return out, {**state, **changed}
