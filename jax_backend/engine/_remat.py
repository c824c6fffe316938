"""Resharding after forward: what backward must gather again instead of finding it saved (R14).

[Note: resharding is a rule about what is saved] JAX has no moment at which a buffer is freed. A unit is resharded
after forward exactly if nothing of full size is kept for backward. jax.checkpoint with a policy says what is kept:
activations are, gathered parameters and whatever merely lays them out anew are not, so backward gathers again from the
shards, which live anyway.

The policy goes by primitive. A policy by name (`checkpoint_name`) does not do it: the name is an operation behind the
all-gather, and the output of the all-gather itself is then saved in its stead. A policy sees no origins: an activation
that is only laid out anew is computed again too, from a saved one, which costs a copy; and a parameter that the model
itself computes with (`1 + scale`) is saved like an activation.

XLA has the last word. Its CPU compiler drops the barrier that jax.checkpoint puts before backward and would merge each second
gather with the first: see `when_needed`.
"""

from collections.abc import Callable
from typing import Any

import jax

LAYOUT_PRIMITIVES = frozenset(
    {
        "bitcast_convert_type",
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "copy_p",
        "dynamic_slice",
        "expand_dims",
        "name",
        "optimization_barrier",
        "pad",
        "reduce_precision",
        "reshape",
        "rev",
        "sharding_constraint",
        "slice",
        "split",
        "squeeze",
        "stack",
        "tile",
        "transpose",
        "unstack",
    }
)
"""Primitives that move or cast elements without computing: their output is the parameter in another guise."""


def keeps_activations(primitive: Any, *_: Any, **__: Any) -> bool:
    """The checkpoint policy: save what was computed, never what was gathered or merely laid out anew."""
    return primitive.name != "all_gather" and primitive.name not in LAYOUT_PRIMITIVES


def reshard_after_forward(fun: Callable) -> Callable:
    """`fun`, whose gathers run again in backward."""
    # prevent_cse stays on, as is its default: XLA should not merge the second gather with the first.
    return jax.checkpoint(fun, policy=keeps_activations)
