"""Modules by canonical name: their paths in JAX, their options, and the order of dims of their activations in torch."""

import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np

from crossframe.errors import UsageError
from crossframe.param_map import MapEntry, ParamMap
from crossframe.recording.dims import LEAST_DIMS, Order, channels_first
from crossframe.recording.module_calls import called_module
from jax_backend.activations import INPUT, OUTPUT
from jax_backend.recorder._module_calls import description, parts_of

# An image with its batch, even if no convolution of the map has as many dims: a model may cut it into patches itself.
_IMAGE_DIMS = 4


def module_paths(param_map: ParamMap, units: Iterable[str] = ()) -> dict[str, str]:
    """The paths in JAX of the model, of units and of modules that own parameters, by canonical name. Modules that are not one
    module in JAX, such as torch's attention with query, key and value in one parameter, are left out.

    >>> from crossframe.param_map import linear
    >>> module_paths(ParamMap.of(linear("layers.0.fc", "blocks.0.fc")), ["layers.0"])
    {'': '', 'layers.0': 'blocks.0', 'layers.0.fc': 'blocks.0.fc'}
    """
    joined = {entry.name.rpartition(".")[0] for entry in param_map.entries if _is_several(entry)}
    owners = dict.fromkeys(entry.name.rpartition(".")[0] for entry in param_map.entries)
    paths: dict[str, set[str]] = {}
    for entry in param_map.entries:
        module = "" if _is_several(entry) else entry.name.rpartition(".")[0]
        while module:
            paths.setdefault(module, set()).add(_path_of(module, entry))
            module = module.rpartition(".")[0]
    found = {"": ""}
    for module in dict.fromkeys([*units, *(owner for owner in owners if owner not in joined)]):
        if len(there := paths.get(module, ())) == 1 and (path := next(iter(there))):
            found[module] = path
    return found


def is_module(value: Any) -> bool:
    """Whether a value is a module of flax or equinox."""
    libraries = (sys.modules.get(name) for name in ("flax.nnx", "flax.linen", "equinox"))
    return any(library is not None and isinstance(value, library.Module) for library in libraries)


def describe_modules(model: Any, param_map: ParamMap, units: Iterable[str]) -> dict[str, str]:
    """Class and options of a model's modules by canonical name, and by path where no name is known; "(root)" is the model.

    Args:
        model: a module of flax or equinox. Of linen, modules that are made while it is called are not described.
    """
    names = {path: name for name, path in module_paths(param_map, units).items()}
    found: dict[str, str] = {}
    for path, module in _modules_in(model):
        found.setdefault(names.get(path, path) or "(root)", description(module))
    return found


def _modules_in(model: Any) -> Iterator[tuple[str, Any]]:
    """A model and the modules inside it by path. A shared module has one path alone."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(model, nnx.Module):
        for path, part in reversed(list(nnx.iter_modules(model))):  # outer modules first
            if not isinstance(part, Collection):  # nnx.List and nnx.Dict
                yield ".".join(map(str, path)), part
        return
    seen, waiting = set(), [("", model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module
            inside = [(own, part) for own, part in parts_of(vars(module)) if is_module(part)]
            waiting += [(f"{path}.{own}" if path else own, part) for own, part in reversed(inside)]


def _is_several(entry: MapEntry) -> bool:
    """Whether a parameter is in several paths, or a path, such as one of stacked layers, has several parameters."""
    return len(entry.paths) > 1 or entry.selects


def _path_of(module: str, entry: MapEntry) -> str:
    """The path of a module that encloses a parameter: the parameter's, shorter by as many parts as the name; "" if none."""
    depth = entry.name.count(".") - module.count(".")
    return ".".join(entry.paths[0].split(".")[:-depth])


class Dims:
    """The order of dims of activations in torch.

    Args:
        param_map: says which modules split heads in JAX, (..., num_heads, head_width), where torch has (..., width); and which
            are convolutions, whose channels are the last dim in JAX and dim 1 in torch.
        channels_last: modules, or (module, "input" or "output"), whose activations have channels last; all others have torch's
            order. None: those of convolutions have; for others with as many dims as an image or a convolution it is not known.
    """

    def __init__(self, param_map: ParamMap, channels_last: Collection[str | tuple[str, str]] | None = None) -> None:
        self._heads: set[tuple[str, str]] = set()
        self._convolutions: dict[str, int] = {}
        for entry in param_map.entries:
            module = entry.name.rpartition(".")[0]
            if entry.joined_dim is not None and len(entry.paths) == 1:
                # The rows of a weight are outputs, its columns inputs.
                self._heads.add((module, OUTPUT if entry.joined_dim == 0 else INPUT))
            elif entry.axes and entry.axes == _kernel_axes(len(entry.axes)):
                self._convolutions[module] = len(entry.axes)
        self._num_dims = {_IMAGE_DIMS, *self._convolutions.values()}
        self._stated = None if channels_last is None else frozenset(channels_last)

    def canonical(self, module: str, use: str, array: np.ndarray) -> np.ndarray:
        """One rank's activation in torch's order, as far as it is known: heads as one dim, stated last channels as dim 1."""
        module = called_module(module)
        if (module, use) in self._heads:
            return array.reshape(*array.shape[:-2], -1)
        is_last = self._stated is not None and (module in self._stated or (module, use) in self._stated)
        return channels_first(array) if is_last and array.ndim >= LEAST_DIMS else array

    def order(self, module: str, use: str, array: np.ndarray) -> Order:
        """The order of dims of a result of `canonical`, as far as it is known."""
        module = called_module(module)
        if self._stated is not None or (module, use) in self._heads or array.ndim < LEAST_DIMS:
            return Order.TORCH
        if self._convolutions.get(module) == array.ndim:
            return Order.CONVOLUTION
        return Order.UNSTATED if array.ndim in self._num_dims else Order.TORCH


def check_channels_last(stated: Any) -> frozenset[str | tuple[str, str]] | None:
    """The user's `channels_last`, checked.

    Raises:
        UsageError: neither None nor names of modules, or (name, "input" or "output") of them.
    """
    if stated is None:
        return None
    given = list(stated) if isinstance(stated, Iterable) and not isinstance(stated, str) else [stated]
    for each in given:
        is_pair = isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) and each[1] in (INPUT, OUTPUT)
        if isinstance(stated, str) or not (isinstance(each, str) or is_pair):
            raise UsageError(
                f"channels_last: expected names of modules, or (name, {INPUT!r} or {OUTPUT!r}), in a list, got {stated!r}"
            )
    return frozenset(given)


def _kernel_axes(num_dims: int) -> tuple[int, ...] | None:
    """The axes of a convolution's kernel (`crossframe.param_map.conv`) of so many dims."""
    return (num_dims - 1, num_dims - 2, *range(num_dims - 2)) if num_dims >= LEAST_DIMS else None
