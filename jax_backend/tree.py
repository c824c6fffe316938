"""The names of leaves of a pytree: their paths, joined by "."."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossframe.errors import UsageError


def path_name(path: tuple[Any, ...]) -> str:
    """A key path of jax.tree_util as one name, its parts joined by "."; a tree that is one leaf has the name "param".

    >>> path_name((jax.tree_util.DictKey("blocks"), jax.tree_util.SequenceKey(0), jax.tree_util.DictKey("kernel")))
    'blocks.0.kernel'
    """
    # A last attribute `value` is the box that flax puts around an array (nnx.Param), not a part of the name.
    if len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator=".") or "param"


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of any pytree by the name of their path, in the tree's order; UsageError if two share a name."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if (name := path_name(path)) in found:
            raise UsageError(f"two leaves have the path {name!r}, joined by '.': expected one each; rename a key")
        found[name] = leaf
    return found


def is_floating(leaf: Any) -> bool:
    """Whether a leaf is an array of a floating dtype."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of random keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def dtype_name(leaf: Any) -> str:
    """The name of the dtype of an array, or of the array that JAX would make of a value."""
    return jnp.result_type(leaf).name if not hasattr(leaf, "dtype") else str(leaf.dtype)


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is an array of a floating or complex dtype."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def as_real(leaf: Any) -> Any:
    """Complex numbers as pairs of real ones, with a last dim of 2, as `torch.view_as_real` gives them; else the leaf itself."""
    if not (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.complexfloating)):
        return leaf
    stack = jnp.stack if isinstance(leaf, jax.Array) else np.stack
    return stack([leaf.real, leaf.imag], -1)
