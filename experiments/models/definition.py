"""What a model says about itself without any framework."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossframe.layout import Layout
from crossframe.param_map import MapEntry, ParamMap
from crossframe.params import ParamSpec
from crossframe.shapes import ModelShapes
from experiments.data import Batch, digits_batch, text_batch

MakeTorch = Callable[[], tuple[Any, set[type]]]
"""Returns the torch module, and the classes of the modules that are units."""
MakeFlax = Callable[[str], Any]
"""dtype to the flax module."""


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
        context: how many tokens of text a sample has; None: a sample is an image of a digit.
        terms: how many terms one sample has in the sum behind an element of a gradient: tokens, patches, places of an image.
        per_rank_statistics: modules that normalise over all samples of their rank, as batch norm does.
    """

    name: str
    config: Any
    shapes: dict[str, tuple[int, ...]]
    param_map: ParamMap
    units: tuple[str, ...]
    initial: Callable[[str, tuple[int, ...], np.random.Generator], np.ndarray]
    make_torch: MakeTorch
    make_flax: MakeFlax
    context: int | None = None
    terms: int = 1
    per_rank_statistics: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of parameters, counted in elements."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def initial_params(self, seed: int, dtype: str) -> dict[str, np.ndarray]:
        """Initial values by canonical name, from one seed: drawn in float64, then rounded to `dtype`."""
        generator = np.random.default_rng(seed)
        return {name: self.initial(name, shape, generator).astype(dtype) for name, shape in self.shapes.items()}

    def batch(self, seed: int, step: int, rank: int, world_size: int, batch_size: int, dtype: str) -> Batch:
        """What a rank is fed at a step; images are of `dtype`. The model turns inputs into logits, with a last dim of classes."""
        if self.context is None:
            return digits_batch(seed, step, rank, world_size, batch_size, dtype)
        return text_batch(seed, step, rank, world_size, batch_size, self.context)

    def model_shapes(self, dtype: str) -> ModelShapes:
        """Its parameters and units, stored in `dtype`."""
        params = tuple(ParamSpec(name, shape, dtype) for name, shape in self.shapes.items())
        return ModelShapes(self.name, params, self.units)

    def unit_layouts(
        self, world_size: int, dtype: str, compute_dtype: str | None = None
    ) -> tuple[tuple[str, Layout], ...]:
        """The flat layouts of all units, the root first and the others in the order of forward.

        Args:
            compute_dtype: what parameters stored in `dtype` are computed with; None: the same.
        """
        return self.model_shapes(dtype).layouts("flat", world_size, compute_dtype=compute_dtype)


Row = tuple[MapEntry, tuple[int, ...]]


def rows(entries: tuple[MapEntry, ...], *shapes: tuple[int, ...]) -> tuple[Row, ...]:
    """The parameters of one module: what they are called, and their canonical shapes."""
    return tuple(zip(entries, shapes, strict=True))


def define(
    name: str,
    config: Any,
    table: Iterable[Row],
    units: tuple[str, ...],
    make_torch: MakeTorch,
    make_flax: MakeFlax,
    context: int | None = None,
    terms: int = 1,
    per_rank_statistics: tuple[str, ...] = (),
) -> ModelDefinition:
    """The model whose parameters stand in a table, in torch's order of registration; the rest as in `ModelDefinition`."""
    table = tuple(table)
    shapes = {entry.name: shape for entry, shape in table}
    param_map = ParamMap(tuple(entry for entry, _ in table))
    return ModelDefinition(
        name,
        config,
        shapes,
        param_map,
        units,
        initial_by_shape,
        make_torch,
        make_flax,
        context,
        terms,
        per_rank_statistics,
    )


def initial_by_shape(name: str, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Biases 0, scales of norms 1, and weights of a size that preserves the size of activations."""
    if len(shape) == 1:
        return np.zeros(shape) if name.endswith("bias") else np.ones(shape)
    return generator.normal(0.0, 1.0, shape) / np.sqrt(np.prod(shape[1:]))
