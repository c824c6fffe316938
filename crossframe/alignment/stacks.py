"""Stacked parameters: arrays that hold the parameters of many layers, each a slice along one or two dims.

A slice that is a parameter of the other model shows that an array is stacked; so does one whose rows are those of a single
parameter, where parameters are stacked and joined. In a module whose arrays all have as many slices along the same dim, all are
stacked, also those with one value, such as the biases of all layers.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from crossframe.alignment.module_names import enclosing, is_in
from crossframe.alignment.portions import Signatures
from crossframe.alignment.summary import varies


@dataclass(frozen=True)
class Slice:
    """One of the parameters of a stacked array.

    Attributes:
        path: of the array.
        indices: (dim, index, size) of the dims along which it is stacked, in order.
    """

    path: str
    indices: tuple[tuple[int, int, int], ...]

    def inside(self, outer: "Slice", num_dims: int) -> "Slice":
        """This slice of a slice as one of the whole array.

        Args:
            num_dims: of the slice that this one is of.
        """
        taken = {dim for dim, _, _ in outer.indices}
        left = [dim for dim in range(num_dims + len(taken)) if dim not in taken]
        own = ((left[dim], index, size) for dim, index, size in self.indices)
        return Slice(outer.path, tuple(sorted((*outer.indices, *own))))

    def of(self, array: np.ndarray) -> np.ndarray:
        """The slice of the array."""
        places = {dim: index for dim, index, _ in self.indices}
        return array[tuple(places.get(dim, slice(None)) for dim in range(array.ndim))]


def slices_of(
    first: Mapping[str, np.ndarray],
    second: Mapping[str, np.ndarray],
    ours: Mapping[str, Signatures],
    theirs: Mapping[str, Signatures],
) -> dict[str, Slice]:
    """The slices of the stacked arrays of the second model, by a path that has the index after the module that is stacked. Of
    arrays that are stacked along two dims these are the slices along the first one.

    Args:
        first, second: the parameters of both models.
        ours, theirs: the signatures of their slices.
    """
    varied = {name: array for name, array in first.items() if varies(array)}
    known = {(int(ours[name][()][0]), array.size) for name, array in varied.items()}
    whole = {path for path, array in second.items() if (int(theirs[path][()][0]), array.size) in known}
    modules: dict[str, int] = {}
    for path, array in second.items():
        if path in whole or not varies(array):
            continue
        axis = _stacked_axis(array, theirs[path], known)
        if axis is None:
            axis = _stacked_and_joined(array, theirs[path], varied, ours)
        if axis is not None:
            modules[_stacked_module(path, axis, second, whole)] = axis
    found: dict[str, Slice] = {}
    for path, array in second.items():
        inside = [each for each in modules if is_in(path, each)]
        if inside:
            module = max(inside)  # the innermost one
            axis = modules[module]
            for index in range(array.shape[axis]):
                found[f"{module}[{index}]{path[len(module) :]}"] = Slice(path, ((axis, index, array.shape[axis]),))
    return found


def _stacked_axis(array: np.ndarray, signatures: Signatures, known: set[tuple[int, int]]) -> int | None:
    """The first of one or two axes along which a slice is a parameter of the other model."""
    for axes in itertools.chain(*(itertools.combinations(range(array.ndim), count) for count in (1, 2))):
        count = math.prod(array.shape[axis] for axis in axes)
        is_slice = array.size > count  # not an element
        if is_slice and any((int(each), array.size // count) in known for each in signatures.get(axes, ())):
            return axes[0]
    return None


def _stacked_and_joined(
    array: np.ndarray, signatures: Signatures, varied: Mapping[str, np.ndarray], ours: Mapping[str, Signatures]
) -> int | None:
    """The axis along which each slice has rows of one parameter of the other model, or this one has rows of the slice."""
    for axis, dim in itertools.permutations(range(array.ndim), 2):
        pair = (min(axis, dim), max(axis, dim))
        if array.shape[axis] < 2 or array.shape[dim] < 2 or pair not in signatures:
            continue
        rows = signatures[pair].reshape(array.shape[pair[0]], array.shape[pair[1]])
        rows = rows if axis < dim else rows.T  # (slice, row)
        width = array.size // rows.size
        order = np.argsort(rows, axis=None)
        sorted_rows = rows.reshape(-1)[order]
        for name, other in varied.items():
            if other.size % width:
                continue
            for axes, slices in ours[name].items():
                if not axes or len(slices) * width != other.size or len(slices) < 2:
                    continue
                at = np.minimum(np.searchsorted(sorted_rows, slices), len(order) - 1)
                hits = sorted_rows[at] == slices
                places = order[at[hits]] // rows.shape[1]
                complete = hits.all() or hits.sum() == rows.shape[1]
                if complete and (places == places[0]).all():
                    return axis
    return None


def _stacked_module(path: str, axis: int, second: Mapping[str, np.ndarray], whole: set[str]) -> str:
    """The outermost module all of whose arrays have as many slices along the same dim, and none of which is a whole parameter of
    the other model; the path itself if there is none."""
    size = second[path].shape[axis]
    found = path
    for module in enclosing(path):
        inside = {other: array.shape for other, array in second.items() if is_in(other, module)}
        alike = (len(shape) > axis and shape[axis] == size for shape in inside.values())
        if not all(alike) or whole & inside.keys():
            break
        found = module
    return found
