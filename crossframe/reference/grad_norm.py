"""The gradient norm and clipping of the numpy reference (R30): each element once, by the all-reduces of each rank's partials.

Every rank computes a *partial* over the elements that it holds: the sum of |g|**p, or the largest |g| if p = inf. One all-reduce
over each shard group takes the sum (or the maximum) of the partials. Replicas hold equal gradients, so there is no reduction over
replicas, and a parameter that is not sharded needs no collective. The totals of the groups are added, and the root is taken. The
partial of a rank without gradients is 0.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.errors import MeshError
from crossframe.grad_norm import EPSILON, check_max_norm, check_norm_type
from crossframe.mesh import MeshSpec
from crossframe.quoting import quote


class Op(Enum):
    """How an all-reduce combines the partials of ranks. MAX must propagate NaN."""

    SUM = "sum"
    MAX = "max"


@dataclass(frozen=True)
class NormReduction:
    """An all-reduce of the partials of some units over a group of ranks. A group of one rank needs no collective."""

    units: tuple[str, ...]
    group: Sequence[int]
    op: Op


def norm_reductions(meshes: Mapping[str, MeshSpec], rank: int, norm_type: float = 2.0) -> tuple[NormReduction, ...]:
    """The all-reduces of one rank, one for each mesh of units, in an order that all ranks share.

    Args:
        meshes: the mesh of each unit by name, in the model's order. Parameters outside of units are replicated, so pass a mesh
            of one shard for them.

    Raises:
        MeshError: `meshes` is not a mapping of meshes, their world sizes differ, or `rank` is outside of them.

    >>> mixed = {"": MeshSpec(shard=4), "experts": MeshSpec(shard=2, replicate=2), "head": MeshSpec(shard=4)}
    >>> [(reduction.units, list(reduction.group)) for reduction in norm_reductions(mixed, rank=2)]
    [(('', 'head'), [0, 1, 2, 3]), (('experts',), [2, 3])]
    """
    op = Op.MAX if check_norm_type(norm_type) == math.inf else Op.SUM
    if not isinstance(meshes, Mapping) or not all(isinstance(mesh, MeshSpec) for mesh in meshes.values()):
        raise MeshError(f"expected the MeshSpec of every unit by its name, got {quote(meshes)}")
    units: dict[MeshSpec, list[str]] = {}
    for name, mesh in meshes.items():
        units.setdefault(mesh, []).append(name)
    sizes = {mesh.world_size: names[0] for mesh, names in units.items()}
    if len(sizes) > 1:
        raise MeshError(
            f"units of one model live on the same ranks: expected one world size, got {quote(sizes)} (size: unit)"
        )
    return tuple(NormReduction(tuple(names), mesh.shard_group(rank), op) for mesh, names in units.items())


def partial(arrays: Iterable[np.ndarray], norm_type: float, dtype: str) -> np.ndarray:
    """One rank's part of the norm, without the root.

    Args:
        arrays: gradients, or pieces of them without padding, of any shape.
        dtype: the result of `norm_dtype`.

    Returns:
        A scalar of that dtype: the sum of |g|**p, or the largest |g|; 0 if there are no elements.
    """
    order, total = check_norm_type(norm_type), numpy_dtype(dtype).type(0)
    with np.errstate(all="ignore"):
        for array in arrays:
            sizes = np.abs(array.astype(total.dtype))
            if order == math.inf:
                total = np.maximum(total, sizes.max(initial=0))
            else:
                total = total + (sizes**order).sum()
    return total


def combine(totals: Iterable[np.ndarray], norm_type: float, dtype: str) -> np.ndarray:
    """The norm, of shape (), from the totals of all reductions: the root of their sum, or their maximum."""
    order, norm = check_norm_type(norm_type), numpy_dtype(dtype).type(0)
    with np.errstate(all="ignore"):
        for total in totals:
            norm = np.maximum(norm, total) if order == math.inf else norm + total
        return norm if order == math.inf else norm ** (1 / order)


def clip_coefficient(norm: np.ndarray, max_norm: float) -> np.ndarray:
    """The factor for every gradient, in the dtype of the norm: max_norm / (norm + 1e-6), at most 1 (R30).

    A norm of NaN gives NaN, and so does inf / inf: values that are not finite are propagated.

    >>> float(clip_coefficient(np.float32(4), max_norm=1.0)), float(clip_coefficient(np.float32(4), max_norm=5.0))
    (0.24999994039535522, 1.0)
    """
    bound = check_max_norm(max_norm)
    with np.errstate(all="ignore"):
        return np.minimum(bound / (norm + EPSILON), 1)
