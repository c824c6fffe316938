"""Modules by their canonical names: which of JAX's they are, and how what goes through them lies in torch's order of dims."""

from collections.abc import Iterable

import numpy as np

from crossframe.names import MapEntry, ParamMap
from jax_backend.activations import INPUT, OUTPUT

# An image as JAX's convolutions have it: (batch, height, width, channels).
_IMAGE_DIMS = 4


def module_paths(param_map: ParamMap, units: Iterable[str] = ()) -> dict[str, str]:
    """Of the model, of units and of modules that own parameters the path in JAX, by canonical name, as far as each is one module
    there too: torch's attention that keeps query, key and value in one parameter is none.

    >>> from crossframe.names import linear
    >>> module_paths(ParamMap.of(linear("layers.0.fc", "blocks.0.fc")), ["layers.0"])
    {'': '', 'layers.0': 'blocks.0', 'layers.0.fc': 'blocks.0.fc'}
    """
    joined = {entry.name.rpartition(".")[0] for entry in param_map.entries if len(entry.paths) > 1}
    owners = dict.fromkeys(entry.name.rpartition(".")[0] for entry in param_map.entries)
    paths: dict[str, set[str]] = {}
    for entry in param_map.entries:
        module = entry.name.rpartition(".")[0] if len(entry.paths) == 1 else ""
        while module:
            paths.setdefault(module, set()).add(_path_of(module, entry))
            module = module.rpartition(".")[0]
    found = {"": ""}
    for module in dict.fromkeys([*units, *(owner for owner in owners if owner not in joined)]):
        if len(there := paths.get(module, ())) == 1 and (path := next(iter(there))):
            found[module] = path
    return found


def _path_of(module: str, entry: MapEntry) -> str:
    """The path of a module around a parameter: as many parts shorter than the parameter's as its name is. "": there is none."""
    depth = entry.name.count(".") - module.count(".")
    return ".".join(entry.paths[0].split(".")[:-depth])


class Dims:
    """How activations lie in torch.

    Args:
        param_map: tells which modules keep heads apart in JAX: (..., num_heads, head_width), where torch has (..., width).
    """

    def __init__(self, param_map: ParamMap) -> None:
        self._heads: set[tuple[str, str]] = set()
        for entry in param_map.entries:
            if entry.split is not None and len(entry.paths) == 1:
                module = entry.name.rpartition(".")[0]
                # The rows of a weight are what comes out, its columns what goes in.
                self._heads.add((module, OUTPUT if entry.split[0] == 0 else INPUT))

    def canonical(self, module: str, use: str, array: np.ndarray) -> np.ndarray:
        """One rank's activation as torch has it: heads as one dim, and an image's channels behind the batch."""
        if (module, use) in self._heads:
            return array.reshape(*array.shape[:-2], -1)
        return np.moveaxis(array, -1, 1) if array.ndim == _IMAGE_DIMS else array
