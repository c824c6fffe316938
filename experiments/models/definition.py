"""What a model says about itself without any framework."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossframe.layout import FlatLayout
from crossframe.names import ParamMap
from crossframe.params import ParamSpec
from crossframe.units import enclosing_unit


@dataclass(frozen=True)
class ModelDefinition:
    """A model in both frameworks.

    Attributes:
        name: what the command line calls it.
        config: its sizes.
        shapes: canonical parameter names and shapes, in torch's order of registration.
        param_map: those names and flax's paths.
        units: modules that are units of their own, in the order of forward. The root "" is one besides.
        initial: (parameter name, shape, generator) to its initial values in float64.
        make_torch: the torch module, and the classes of the modules that are units. Imports torch when called.
        make_flax: dtype to the flax module. Imports flax when called.
    """

    name: str
    config: Any
    shapes: dict[str, tuple[int, ...]]
    param_map: ParamMap
    units: tuple[str, ...]
    initial: Callable[[str, tuple[int, ...], np.random.Generator], np.ndarray]
    make_torch: Callable[[], tuple[Any, set[type]]]
    make_flax: Callable[[str], Any]

    @property
    def numel(self) -> int:
        """Number of parameters, counted in elements."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def initial_params(self, seed: int, dtype: str) -> dict[str, np.ndarray]:
        """Initial values by canonical name, from one seed: drawn in float64, then rounded to `dtype`."""
        generator = np.random.default_rng(seed)
        return {name: self.initial(name, shape, generator).astype(dtype) for name, shape in self.shapes.items()}

    def unit_layouts(self, world_size: int, dtype: str) -> tuple[tuple[str, FlatLayout], ...]:
        """The flat layouts of all units, the root first and the others in the order of forward."""
        known = frozenset({"", *self.units})
        owned: dict[str, list[ParamSpec]] = {name: [] for name in ("", *self.units)}
        for name, shape in self.shapes.items():
            owned[enclosing_unit(name.rpartition(".")[0], known)].append(ParamSpec(name, shape, dtype))
        return tuple(
            (unit, FlatLayout(tuple(params), world_size, keep_original=True))
            for unit, params in owned.items()
            if params
        )
