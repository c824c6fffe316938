"""The options of `jax_backend.shard`, checked."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from crossframe.errors import UsageError
from crossframe.layout import LAYOUT_KINDS, FlatLayout, Layout, PerParamLayout, RaggedLayout
from crossframe.param_map import ParamMap
from crossframe.params import ParamSpec
from crossframe.precision import PrecisionPolicy
from crossframe.quoting import quote


@dataclass(frozen=True)
class Options:
    """The arguments of `jax_backend.shard`, which documents them."""

    units: Iterable[str] = ()
    param_map: ParamMap | None = None
    layout: str = "per_param"
    mp_policy: PrecisionPolicy | None = None
    reshard_after_forward: bool | None = None
    frozen: Collection[str] | Callable[[str], bool] = ()
    shared: Mapping[str, str] | None = None
    stacked: Iterable[str] = ()
    dims: Callable[[ParamSpec], int] | None = None
    blocks: Callable[[ParamSpec], int] | None = None
    keep_original: bool = True
    unit_layouts: Mapping[str, Layout] | None = None
    model_partition: Callable[[ParamSpec], PartitionSpec | None] | None = None

    def __post_init__(self) -> None:
        for name in ("units", "stacked"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        if not callable(self.frozen):
            object.__setattr__(self, "frozen", _names("frozen", self.frozen, " or a predicate"))
        kinds: dict[str, tuple[str, bool]] = {
            "shared": ("a mapping of paths, or None", self.shared is None or isinstance(self.shared, Mapping)),
            "unit_layouts": (
                "a mapping of units to layouts, or None",
                self.unit_layouts is None or isinstance(self.unit_layouts, Mapping),
            ),
            "param_map": ("a ParamMap, or None", self.param_map is None or isinstance(self.param_map, ParamMap)),
            "dims": ("a function of a ParamSpec, or None", self.dims is None or callable(self.dims)),
            "blocks": ("a function of a ParamSpec, or None", self.blocks is None or callable(self.blocks)),
            "model_partition": (
                "a function of a ParamSpec, or None",
                self.model_partition is None or callable(self.model_partition),
            ),
            "keep_original": ("a bool", isinstance(self.keep_original, bool)),
            "layout": (f"one of {LAYOUT_KINDS}", isinstance(self.layout, str)),
        }
        for name, (expected, holds) in kinds.items():
            if not holds:
                raise UsageError(f"{name}: expected {expected}, got {quote(getattr(self, name))}")
        if self.layout not in LAYOUT_KINDS:
            raise UsageError(f"layout: expected one of {LAYOUT_KINDS}, got {self.layout!r}")
        if self.mp_policy is not None and not isinstance(self.mp_policy, PrecisionPolicy):
            raise UsageError(
                f"mp_policy: expected a PrecisionPolicy, got {type(self.mp_policy).__name__}; for bfloat16 compute "
                "pass crossframe.precision.PrecisionPolicy('bfloat16', reduce_dtype='float32')"
            )
        if self.reshard_after_forward not in (None, True, False) or isinstance(self.reshard_after_forward, float):
            raise UsageError(
                f"reshard_after_forward: expected None, True or False, got {self.reshard_after_forward!r}; resharding to a "
                "group has no counterpart in JAX, where backward gathers from the shards"
            )
        for name, kind in (("dims", "per_param"), ("blocks", "ragged")):
            if getattr(self, name) is not None and self.layout != kind:
                raise UsageError(f"{name}: expected None with layout={self.layout!r}; it requires layout={kind!r}")

    def is_frozen(self, name: str) -> bool:
        """Whether a parameter is frozen: by its name or that of an enclosing module."""
        if callable(self.frozen):
            return bool(self.frozen(name))
        return any(name == given or name.startswith(f"{given}.") for given in self.frozen)

    def layout_of(self, specs: tuple[ParamSpec, ...], world_size: int) -> Layout:
        """The layout of one bucket."""
        if self.layout == "per_param":
            return PerParamLayout(specs, world_size, tuple(map(self.dims, specs)) if self.dims else None)
        if self.layout == "ragged":
            return RaggedLayout(specs, world_size, tuple(map(self.blocks, specs)) if self.blocks else None)
        compute_dtype = self.mp_policy.param_dtype if self.mp_policy is not None else None
        return FlatLayout(specs, world_size, self.keep_original, compute_dtype)


def _names(option: str, given: Any, also: str = "") -> tuple[str, ...]:
    """The names passed as an option; UsageError if it is something else."""
    if isinstance(given, str):
        raise UsageError(
            f"{option}: expected names in a tuple or list{also}, got the string {quote(given)}; pass ({quote(given)},)"
        )
    names = tuple(given) if isinstance(given, Iterable) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"{option}: expected names in a tuple or list{also}, got {quote(given if names is None else names)}"
        )
    return names
