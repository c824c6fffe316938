"""Where every parameter lies: in the user's pytree, by canonical name, and in which unit. Static: no array."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossframe.errors import LayoutError, MappingError, UnsupportedError, UsageError
from crossframe.layout import FlatLayout, Layout, views
from crossframe.names import ParamMap, identity_map
from crossframe.params import ParamSpec
from crossframe.units import Slot, assign_units


@dataclass(frozen=True)
class ParamTree:
    """The static half of sharded parameters.

    Attributes:
        units: (unit name, layout) in the order of the plan: the root first where it owns a parameter.
        param_map: canonical names and axis orders of the pytree's paths.
        paths: the path of every leaf, its parts joined by ".", in the pytree's own order.
        treedef: the structure of the user's pytree.
    """

    units: tuple[tuple[str, Layout], ...]
    param_map: ParamMap
    paths: tuple[str, ...]
    treedef: Any

    # Every call of a jitted function hashes this; hashing the layouts of a large model anew each time would show.
    @cached_property
    def _hash(self) -> int:
        return hash((self.units, self.param_map, self.paths, self.treedef))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """Layouts by unit."""
        return dict(self.units)

    @cached_property
    def specs(self) -> Mapping[str, ParamSpec]:
        """Canonical descriptions by path."""
        by_name = {spec.name: spec for _, layout in self.units for spec in layout.params}
        return {path: by_name[self.param_map.by_path[path].name] for path in self.paths}

    @property
    def world_size(self) -> int:
        """The number of ranks that the units are laid out over."""
        return self.units[0][1].world_size

    def views(self, unit: str, gathered: Any) -> dict[str, Any]:
        """The parameters in a unit's gathered buffer, or in a buffer of gradients laid out like one.

        Args:
            unit: name of the unit.
            gathered: numpy or JAX array of shape (gathered_numel,).

        Returns:
            Arrays by canonical name, of canonical shape; padding is in none of them.
        """
        return views(self.layouts[unit], gathered)

    def params(self, gathered: Mapping[str, Any]) -> Any:
        """The user's pytree, in its own structure and axis order, out of the gathered buffers of all units."""
        named = {name: view for unit, _ in self.units for name, view in self.views(unit, gathered[unit]).items()}
        entries = [self.param_map.by_path[path] for path in self.paths]
        return jax.tree.unflatten(self.treedef, [entry.from_canonical(named[entry.name]) for entry in entries])

    def leaves(self, params: Any) -> dict[str, Any]:
        """The leaves of a pytree like the user's, by path, once each fits.

        Raises:
            UsageError: another structure, shape or dtype than the parameters had when they were sharded.
        """
        found = leaves_by_path(params)
        if set(found) != set(self.paths):
            missing, extra = sorted(set(self.paths) - set(found)), sorted(set(found) - set(self.paths))
            raise UsageError(
                f"the parameters are not the tree that was sharded: missing {missing}, unexpected {extra}; "
                "pass the tree that unshard returned, with other values"
            )
        for path, leaf in found.items():
            spec = self.specs[path]
            entry = self.param_map.by_path[path]
            expected = tuple(spec.shape[i] for i in entry.inverse_axes) if entry.inverse_axes else spec.shape
            if np.shape(leaf) != expected or dtype_name(leaf) != spec.dtype:
                raise UsageError(
                    f"parameter {path!r} ({spec.name!r}): expected shape {expected} and dtype {spec.dtype}, got "
                    f"{np.shape(leaf)} and {dtype_name(leaf)}; reshape or cast it first"
                )
        return found


def path_name(path: tuple[Any, ...]) -> str:
    """A key path of jax.tree_util as one name, its parts joined by ".".

    >>> path_name((jax.tree_util.DictKey("blocks"), jax.tree_util.SequenceKey(0), jax.tree_util.DictKey("kernel")))
    'blocks.0.kernel'
    """
    # A last attribute `value` is the box that flax puts around an array (nnx.Param), not a part of the name.
    if len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator=".")


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of any pytree by the name of their path, in the tree's order; UsageError if two share a name."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if (name := path_name(path)) in found:
            raise UsageError(f"two leaves have the path {name!r}, joined by '.': expected one each; rename a key")
        found[name] = leaf
    return found


def dtype_name(leaf: Any) -> str:
    """The dtype of an array, or of what is not one, by name."""
    return jnp.result_type(leaf).name if not hasattr(leaf, "dtype") else str(leaf.dtype)


def build_tree(
    params: Any,
    world_size: int,
    *,
    units: Iterable[str],
    param_map: ParamMap | None,
    keep_original: bool,
    unit_layouts: Mapping[str, Layout] | None,
) -> ParamTree:
    """Describe a pytree of parameters; see `jax_backend.shard` for the arguments and errors."""
    leaves = leaves_by_path(params)
    if not leaves:
        raise UsageError("expected a pytree with at least one parameter, got none")
    _check_leaves(leaves)
    param_map = identity_map(leaves) if param_map is None else param_map
    param_map.check(param_map.by_name, leaves)
    slots = [_slot(entry, leaves[entry.path]) for entry in param_map.entries]
    place = {slot.name: i for i, slot in enumerate(slots)}

    def layout_of(name: str, specs: tuple[ParamSpec, ...]) -> Layout:
        # The map's order is torch's, and holds also where a module's parameters do not stand together in it.
        ordered = tuple(sorted(specs, key=lambda spec: place[spec.name]))
        if unit_layouts is None or name not in unit_layouts:
            return FlatLayout(ordered, world_size, keep_original)
        return _checked(unit_layouts[name], name, ordered, world_size)

    owned = assign_units(_modules(place), slots, units)
    if unknown := sorted(set(unit_layouts or ()) - {unit.name for unit in owned}):
        raise LayoutError(
            f"unit_layouts: {unknown} are not units that own parameters: expected among {[unit.name for unit in owned]}"
        )
    laid_out = tuple((unit.name, layout_of(unit.name, unit.params)) for unit in owned)
    return ParamTree(laid_out, param_map, tuple(leaves), jax.tree.structure(params))


def _check_leaves(leaves: Mapping[str, Any]) -> None:
    if strange := sorted(path for path, leaf in leaves.items() if not hasattr(leaf, "shape")):
        raise UsageError(f"expected an array at every leaf, got other objects at {strange}; wrap them in jnp.asarray")
    if integer := sorted(path for path, leaf in leaves.items() if not jnp.issubdtype(leaf.dtype, jnp.floating)):
        kinds = {path: str(leaves[path].dtype) for path in integer}
        raise UsageError(f"expected floating parameters, got {kinds}; integers, counters and rng keys go with state")
    if wide := sorted(p for p, leaf in leaves.items() if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype):
        raise UsageError(
            f"parameters {wide} are float64, which JAX would silently round; "
            "call jax.config.update('jax_enable_x64', True), or cast them to float32"
        )


def _slot(entry: Any, leaf: Any) -> Slot:
    if entry.axes is not None and len(entry.axes) != len(leaf.shape):
        raise MappingError(
            f"parameter {entry.name!r}: expected {len(leaf.shape)} axes for {entry.path!r} of shape "
            f"{tuple(leaf.shape)}, got {entry.axes}; correct the map"
        )
    module, _, attribute = entry.name.rpartition(".")
    return Slot(module, attribute, entry.name, entry.canonical_shape(tuple(leaf.shape)), dtype_name(leaf))


def _modules(names: Iterable[str]) -> list[str]:
    """Every module that encloses a parameter, in the order of first appearance, the root first."""
    modules = {"": None}
    for name in names:
        parts = name.split(".")[:-1]
        modules |= {".".join(parts[: i + 1]): None for i in range(len(parts))}
    return list(modules)


def _checked(layout: Layout, unit: str, specs: tuple[ParamSpec, ...], world_size: int) -> Layout:
    if layout.world_size != world_size:
        raise LayoutError(f"unit {unit!r}: expected a layout over {world_size} ranks, got one over {layout.world_size}")
    key: Callable[[ParamSpec], tuple] = lambda spec: (spec.name, spec.shape, spec.dtype)  # noqa: E731
    expected, got = sorted(map(key, specs)), sorted(map(key, layout.params))
    if expected != got:
        raise LayoutError(
            f"unit {unit!r}: expected a layout of {[row for row in expected if row not in got]}, got one of "
            f"{[row for row in got if row not in expected]}; names, shapes and dtypes are the canonical ones"
        )
    if frozen := [spec.name for spec in layout.params if not spec.requires_grad]:
        raise UnsupportedError(f"unit {unit!r}: frozen parameters {frozen} cannot be sharded here; pass them as state")
    return layout
