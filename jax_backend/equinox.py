"""Modules of equinox: their parameters to shard, and their other arrays as state for each rank.

static, params, state = split(model)
sharded, state = shard(params, mesh, units=...), per_rank(state, mesh)

def loss_fn(params, batch, state):
    model = with_params(static, params, state)
    ...
    return LossOutput(loss, state=state_of(model))

equinox has torch's names and axis order, so that most models need no ParamMap.
"""

import equinox as eqx
from jaxtyping import PyTree


def split(module: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """A module as (static, params, state), each with the module's structure and None elsewhere.

    Returns:
        All that is not an array; the arrays of inexact dtype; all other arrays, such as counters and rng keys.
    """
    params, rest = eqx.partition(module, eqx.is_inexact_array)
    state, static = eqx.partition(rest, eqx.is_array)
    return static, params, state


def state_of(module: PyTree) -> PyTree:
    """The arrays of a module that are not parameters."""
    return split(module)[2]


def with_params(static: PyTree, params: PyTree, state: PyTree = None) -> PyTree:
    """The module of parts as `split` returns them."""
    return eqx.combine(params, static) if state is None else eqx.combine(params, state, static)
