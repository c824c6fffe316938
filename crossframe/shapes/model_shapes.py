"""A model's parameters and units as shapes, without values and without any framework."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from crossframe.errors import UnitError, UsageError
from crossframe.layout import LAYOUT_KINDS, FlatLayout, Layout, PerParamLayout, RaggedLayout
from crossframe.params import ParamSpec, check_params
from crossframe.quoting import quote
from crossframe.unit_assignment import enclosing_unit


@dataclass(frozen=True)
class ModelShapes:
    """The parameters of a model and its units, without values and without any framework.

    Attributes:
        name: what it is called.
        params: in order of registration, if `is_ordered`.
        units: modules that are units of their own, in the order of forward. The root "" is one besides, and not listed.
        is_ordered: False for parameters in another order, such as those of a safetensors file.

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
    is_ordered: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UsageError(f"a model needs a name: expected a non-empty string, got {quote(self.name)}")
        check_params(self.params)
        if not isinstance(self.units, tuple) or not all(isinstance(unit, str) and unit for unit in self.units):
            raise UnitError(f"model {self.name!r}: expected the names of modules as units, got {quote(self.units)}")
        if double := sorted(unit for unit, times in Counter(self.units).items() if times > 1):
            raise UnitError(f"model {self.name!r}: units {quote(double)} stand twice; name each once")
        modules = {module for param in self.params for module in _ancestors(param.name)}
        if missing := [unit for unit in self.units if unit not in modules]:
            raise UnitError(
                f"model {self.name!r}: no parameter lies under units {quote(missing)}: expected names among "
                f"{quote(sorted(modules))}"
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
        self,
        kind: str,
        world_size: int | Mapping[str, int],
        *,
        keep_original: bool = True,
        compute_dtype: str | None = None,
    ) -> tuple[tuple[str, Layout], ...]:
        """The layouts of all units, in the order of `unit_params`.

        Args:
            kind: "flat", "per_param" or "ragged". A per-parameter unit that mixes dtypes stands here once for each (R11).
            world_size: ranks of a shard group, or of that of each unit by name.
            keep_original, compute_dtype: as in FlatLayout; the other kinds have no such choice.

        Raises:
            UsageError: an unknown kind. And what the layout itself refuses.
        """
        if kind not in LAYOUT_KINDS:
            raise UsageError(f"unknown kind of layout {quote(kind)}: expected one of {', '.join(LAYOUT_KINDS)}")
        layouts: list[tuple[str, Layout]] = []
        for unit, params in self.unit_params():
            size = world_size[unit] if isinstance(world_size, Mapping) else world_size
            if kind == "flat":
                layouts.append((unit, FlatLayout(params, size, keep_original, compute_dtype)))
            elif kind == "ragged":
                layouts.append((unit, RaggedLayout(params, size)))
            else:
                layouts += [
                    (unit, PerParamLayout(tuple(param for param in params if param.dtype == dtype), size))
                    for dtype in dict.fromkeys(param.dtype for param in params)
                ]
        return tuple(layouts)


def _ancestors(name: str) -> Iterator[str]:
    """The modules that a parameter lies in, the nearest first, without the root."""
    while name := name.rpartition(".")[0]:
        yield name
