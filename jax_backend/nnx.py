"""flax's nnx at the edge: a module as parameters to shard and state to keep a rank.

graphdef, params, state = split(model)
sharded, state = shard(params, mesh, units=..., param_map=...), per_rank(state, mesh)

def loss_fn(params, state, batch):
    model = with_params(graphdef, params, state)
    ...
    return loss, state_of(model)
"""

from typing import Any

from flax import nnx


def split(module: nnx.Module) -> tuple[Any, dict, dict]:
    """A module as (graphdef, params, state).

    Returns:
        The static graphdef; `params_of(module)`; `state_of(module)`.
    """
    graphdef, params, state = nnx.split(module, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(state)


def params_of(module: nnx.Module) -> dict:
    """The arrays of every nnx.Param, as nested dicts whose paths, joined by ".", are those of a ParamMap."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def state_of(module: nnx.Module) -> dict:
    """The arrays of every other variable: running statistics, rng keys and counters."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))


def with_params(graphdef: Any, params: dict, state: dict | None = None) -> nnx.Module:
    """The module of a graphdef with these parameters and this state, both as `split` returns them."""
    return nnx.merge(graphdef, nnx.State(params), nnx.State(state or {}))
