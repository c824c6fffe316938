"""Splits a flax module by nnx, and loads initial values into its tree of parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.models.definition import ModelDefinition
from jax_backend.nnx import split
from jax_backend.tree import path_name


def split_model(definition: ModelDefinition, dtype: str) -> tuple[Any, Any, Any]:
    """A model's nnx graph, the shapes of its parameters, and its state, cast to float64 where the model computes in it.

    flax keeps running statistics in float32 whatever the dtype. Initial values are not drawn, since they are loaded later:
    compiling flax's random numbers takes longer than a short run.
    """
    graphdef, params, shapes = split(nnx.eval_shape(lambda: definition.make_flax(dtype)))
    state = jax.jit(lambda: split(definition.make_flax(dtype))[2])() if jax.tree.leaves(shapes) else shapes

    def cast(leaf: Any) -> Any:
        return leaf.astype(jnp.promote_types(leaf.dtype, dtype)) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return graphdef, params, jax.tree.map(cast, state)


def nnx_params(definition: ModelDefinition, params: Any, values: dict[str, np.ndarray]) -> Any:
    """A tree like `params` that holds `values`, which are given by canonical name."""

    def value(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
        name = path_name(path)
        entry = definition.param_map.by_path[name]
        return entry.from_canonical(values[entry.name], name)

    return jax.tree_util.tree_map_with_path(value, params)
