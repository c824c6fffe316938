"""Builds the static description of a pytree of full parameters: the bucket and unit of each leaf (R01, R11)."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from crossframe.errors import LayoutError, MappingError, UnitError, UsageError
from crossframe.layout import Layout
from crossframe.param_map import MapEntry, ParamMap, identity_map
from crossframe.params import ParamSpec
from crossframe.precision import PrecisionPolicy
from crossframe.unit_assignment import Slot, assign_units
from jax_backend.shards._bucket import Bucket, make_bucket
from jax_backend.shards._layers import ONE_LAYER, Layers, OneLayer
from jax_backend.shards._model_partition import divided
from jax_backend.shards._options import Options
from jax_backend.shards._param_tree import ParamTree
from jax_backend.tree import dtype_name, leaves_by_path


def build_tree(
    params: Any, world_size: int, options: Options, model_axes: Mapping[str, int] = MappingProxyType({})
) -> ParamTree:
    """The static description of a pytree of parameters.

    Args:
        params: arrays, or jax.ShapeDtypeStruct.
        world_size: the number of ranks in a shard group.
        model_axes: the sizes of the mesh's model axes.

    Raises:
        UsageError, MappingError, UnitError, LayoutError: see `jax_backend.shard`.
    """
    leaves = leaves_by_path(params)
    if not leaves:
        raise UsageError("expected a pytree with at least one parameter, got none")
    _check_leaves(leaves)
    shared = _checked_shared(options.shared or {}, leaves)
    own = {path: leaf for path, leaf in leaves.items() if path not in shared}
    param_map = identity_map(own) if options.param_map is None else options.param_map
    param_map.check(param_map.by_name, own)
    _check_whole(param_map)
    stacked = tuple(options.stacked)
    layers = {unit: Layers(_num_layers(unit, param_map, leaves)) for unit in stacked}
    aliases: dict[str, tuple[str, ...]] = {}
    for path, owner in shared.items():
        aliases[owner] = (*aliases.get(owner, ()), path)
    slots = [_slot(entry, [leaves[path] for path in entry.paths], options, stacked) for entry in param_map.entries]
    place = {slot.name: i for i, slot in enumerate(slots)}
    buckets: list[Bucket] = []
    for unit in assign_units(_modules(place), slots, (*options.units, *stacked)):
        # The map has torch's order, in which the parameters of a module need not be consecutive.
        specs = [
            replace(
                spec, aliases=tuple(a for path in param_map.by_name[spec.name].paths for a in aliases.get(path, ()))
            )
            for spec in sorted(unit.params, key=lambda spec: place[spec.name])
        ]
        buckets += _buckets(unit.name, specs, world_size, options, layers.get(unit.name, ONE_LAYER))
    buckets = [divided(bucket, options.model_partition, model_axes, param_map) for bucket in buckets]
    names = [bucket.name for bucket in buckets]
    if unknown := sorted(set(options.unit_layouts or ()) - set(names)):
        raise LayoutError(f"unit_layouts: {unknown} are not units that own parameters: expected among {names}")
    return ParamTree(
        tuple(buckets),
        param_map,
        tuple(leaves),
        jax.tree.structure(params),
        options.mp_policy or PrecisionPolicy(),
        options.reshard_after_forward,
        tuple(shared.items()),
    )


def _buckets(
    unit: str, specs: list[ParamSpec], world_size: int, options: Options, layers: OneLayer | Layers
) -> list[Bucket]:
    members: dict[tuple[str, ...], list[ParamSpec]] = {}
    for spec in specs:
        # A flat unit of two dtypes raises an error (R11).
        dtype = () if options.layout == "flat" else (spec.dtype,)
        members.setdefault((*dtype, *(() if spec.requires_grad else ("frozen",))), []).append(spec)
    buckets = []
    for index, (what, owned) in enumerate(sorted(members.items(), key=lambda item: not item[1][0].requires_grad)):
        name = unit if index == 0 else ":".join((unit, *what))
        given = (options.unit_layouts or {}).get(name)
        layout = (
            options.layout_of(tuple(owned), world_size) if given is None else _checked(given, name, owned, world_size)
        )
        trainable = owned[0].requires_grad
        buckets.append(make_bucket(layout, name=name, unit=unit, index=index, trainable=trainable, layers=layers))
    return buckets


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


def _check_whole(param_map: ParamMap) -> None:
    if portions := [entry.name for entry in param_map.entries if entry.selects or entry.pads]:
        raise MappingError(
            f"shard: expected a map of whole leaves, but {portions[:4]} are portions of leaves or padded; shard the model "
            "under its own names (param_map=None, and stacked=... for stacked layers), and pass the map to crossframe "
            "compare --map"
        )


def _checked_shared(shared: Mapping[str, str], leaves: Mapping[str, Any]) -> dict[str, str]:
    for path, owner in shared.items():
        if missing := sorted({path, owner} - set(leaves)):
            raise UsageError(f"shared: {missing} are not leaves of the parameters: expected among {list(leaves)}")
        if owner in shared:
            raise UsageError(f"shared: {path!r} shares {owner!r}, which is shared itself; name {shared[owner]!r}")
        one, other = ((tuple(leaves[p].shape), dtype_name(leaves[p])) for p in (path, owner))
        if one != other:
            raise UsageError(
                f"shared: expected {path!r} and {owner!r} to have one shape and dtype, got {one} and {other}"
            )
    return dict(shared)


def _num_layers(unit: str, param_map: ParamMap, leaves: Mapping[str, Any]) -> int:
    entries = [entry for entry in param_map.entries if entry.name.startswith(f"{unit}.")]
    if joined := [entry.name for entry in entries if len(entry.paths) > 1]:
        raise UnitError(
            f"stacked unit {unit!r}: expected parameters of one leaf each, but several are joined in {joined}"
        )
    sizes = {path: leaves[path].shape[:1] for entry in entries for path in entry.paths}
    if not sizes:
        raise UnitError(f"stacked: {unit!r} is not a module with parameters")
    if len(set(sizes.values())) > 1 or () in sizes.values():
        raise UnitError(f"stacked unit {unit!r}: expected one leading dim, the layers, at all its leaves, got {sizes}")
    return next(iter(sizes.values()))[0]


def _slot(entry: MapEntry, leaves: list[Any], options: Options, stacked: tuple[str, ...]) -> Slot:
    is_stacked = any(entry.name.startswith(f"{unit}.") for unit in stacked)
    shape = entry.canonical_shape(*(tuple(leaf.shape)[is_stacked:] for leaf in leaves))
    if len(dtypes := {dtype_name(leaf) for leaf in leaves}) > 1:
        raise MappingError(
            f"parameter {entry.name!r}: expected one dtype at all of {entry.paths}, got {sorted(dtypes)}"
        )
    module, _, attribute = entry.name.rpartition(".")
    trained = not options.is_frozen(entry.name)
    return Slot(module, attribute, entry.name, shape, dtypes.pop(), trained)


def _modules(names: Iterable[str]) -> list[str]:
    """All modules that enclose a parameter, in order of first appearance, the root first."""
    modules = {"": None}
    for name in names:
        parts = name.split(".")[:-1]
        modules |= {".".join(parts[: i + 1]): None for i in range(len(parts))}
    return list(modules)


def _checked(layout: Layout, unit: str, specs: list[ParamSpec], world_size: int) -> Layout:
    if layout.world_size != world_size:
        raise LayoutError(f"unit {unit!r}: expected a layout over {world_size} ranks, got one over {layout.world_size}")
    expected, got = ({_key(spec) for spec in some} for some in (specs, layout.params))
    if expected != got:
        raise LayoutError(
            f"unit {unit!r}: expected a layout of {sorted(expected - got)}, got one of {sorted(got - expected)}; names, shapes "
            "and dtypes are the canonical ones, and whether it is trained"
        )
    return layout


def _key(spec: ParamSpec) -> tuple[str, tuple[int, ...], str, bool]:
    return spec.name, spec.shape, spec.dtype, spec.requires_grad
