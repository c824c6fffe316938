"""What a model says about itself without any framework."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from crossframe.errors import UnitError, UsageError
from crossframe.layout import LAYOUT_KINDS, FlatLayout, Layout, PerParamLayout, RaggedLayout
from crossframe.names import MapEntry, ParamMap
from crossframe.params import ParamSpec, check_params
from crossframe.shown import shown
from crossframe.units import enclosing_unit
from experiments.data import Batch, digits_batch, text_batch

MakeTorch = Callable[[], tuple[Any, set[type]]]
"""Returns the torch module, and the classes of the modules that are units."""
MakeFlax = Callable[[str], Any]
"""dtype to the flax module."""


@dataclass(frozen=True)
class ModelShapes:
    """The parameters of a model and its units, without values and without any framework.

    Attributes:
        name: what it is called.
        params: in order of registration.
        units: modules that are units of their own, in the order of forward. The root "" is one besides, and not listed.

    Raises:
        ParamError: no tuple of ParamSpec, or a name that belongs to two.
        UnitError: a unit that stands twice, that no parameter lies under, or a parameter with a name in each of two units.

    >>> shapes = ModelShapes("m", (ParamSpec("a.w", (3,)), ParamSpec("b", (2,))), units=("a",))
    >>> [(unit, [param.name for param in params]) for unit, params in shapes.unit_params()]
    [('', ['b']), ('a', ['a.w'])]
    """

    name: str
    params: tuple[ParamSpec, ...]
    units: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UsageError(f"a model needs a name: expected a non-empty string, got {shown(self.name)}")
        check_params(self.params)
        if not isinstance(self.units, tuple) or not all(isinstance(unit, str) and unit for unit in self.units):
            raise UnitError(f"model {self.name!r}: expected the names of modules as units, got {shown(self.units)}")
        if double := sorted(unit for unit, times in Counter(self.units).items() if times > 1):
            raise UnitError(f"model {self.name!r}: units {shown(double)} stand twice; name each once")
        modules = {module for param in self.params for module in _ancestors(param.name)}
        if missing := [unit for unit in self.units if unit not in modules]:
            raise UnitError(
                f"model {self.name!r}: no parameter lies under units {shown(missing)}: expected names among "
                f"{shown(sorted(modules))}"
            )
        for param in self.params:
            for alias in param.aliases:
                if self.unit_of(alias) != self.unit_of(param.name):
                    raise UnitError(
                        f"model {self.name!r}: parameter {param.name!r} of unit {self.unit_of(param.name)!r} is shared "
                        f"with {alias!r} of unit {self.unit_of(alias)!r}: a parameter lives in one unit (R01)"
                    )

    @property
    def numel(self) -> int:
        """Number of parameters, counted in elements."""
        return sum(param.numel for param in self.params)

    def unit_of(self, name: str) -> str:
        """The unit to which a parameter of this name belongs (R01)."""
        return enclosing_unit(name.rpartition(".")[0], self._known)

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset({"", *self.units})

    def unit_params(self) -> tuple[tuple[str, tuple[ParamSpec, ...]], ...]:
        """Each unit and the parameters that it owns, in order: the root first, then the order of forward. A unit that owns
        nothing, as units inside it own all, is left out."""
        owned: dict[str, list[ParamSpec]] = {name: [] for name in ("", *self.units)}
        for param in self.params:
            owned[self.unit_of(param.name)].append(param)
        return tuple((unit, tuple(params)) for unit, params in owned.items() if params)

    def layouts(
        self, kind: str, world_size: int, *, keep_original: bool = True, compute_dtype: str | None = None
    ) -> tuple[tuple[str, Layout], ...]:
        """The layouts of all units, in the order of `unit_params`.

        Args:
            kind: "flat", "per_param" or "ragged". A per-parameter unit that mixes dtypes stands here once for each (R11).
            world_size: ranks of a shard group.
            keep_original, compute_dtype: as in FlatLayout; the other kinds have no such choice.

        Raises:
            UsageError: an unknown kind. And what the layout itself refuses.
        """
        if kind not in LAYOUT_KINDS:
            raise UsageError(f"unknown kind of layout {shown(kind)}: expected one of {', '.join(LAYOUT_KINDS)}")
        layouts: list[tuple[str, Layout]] = []
        for unit, params in self.unit_params():
            if kind == "flat":
                layouts.append((unit, FlatLayout(params, world_size, keep_original, compute_dtype)))
            elif kind == "ragged":
                layouts.append((unit, RaggedLayout(params, world_size)))
            else:
                layouts += [
                    (unit, PerParamLayout(tuple(param for param in params if param.dtype == dtype), world_size))
                    for dtype in dict.fromkeys(param.dtype for param in params)
                ]
        return tuple(layouts)


def _ancestors(name: str) -> Iterator[str]:
    """The modules that a parameter lies in, the nearest first, without the root."""
    while name := name.rpartition(".")[0]:
        yield name


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
    """Biases 0, the scales of norms 1, and all else of a size that keeps that of what goes through."""
    if len(shape) == 1:
        return np.zeros(shape) if name.endswith("bias") else np.ones(shape)
    return generator.normal(0.0, 1.0, shape) / np.sqrt(np.prod(shape[1:]))
