"""Full parameters for the user to edit, unit by unit: `summon_full_params` (R18-R24).

with summon_full_params(sharded, unit="head") as summoned:
    summoned.params["head"]["bias"] += 1.0
sharded = summoned.sharded
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from crossframe.errors import ReplacedError, StateError, UnitError, UsageError
from crossframe.lifecycle import Exposure, Move, Residency, UnitState
from crossframe.quoting import quote
from crossframe.unshard import AuthoritativeStorage, UnshardRequest, authoritative_storage
from jax_backend.mesh._device_mesh import device_of, mesh_spec, num_ranks
from jax_backend.shards._bucket import Bucket
from jax_backend.shards._param_tree import ParamTree
from jax_backend.shards._sharded_params import ShardedParams, mesh_of
from jax_backend.shards._unshard import check_there, gathered, part_on, written
from jax_backend.tree import dtype_name, path_name


@dataclass(eq=False)
class Summoned:
    """What `summon_full_params` shows, and the new shards after it.

    Attributes:
        params: inside, the full parameters in the user's structure, shapes and axis order, with None for those not shown; its
            leaves, or all of it, may be replaced. None after exit, when its memory is freed.
        grads: the full gradients, likewise; None if there are none.
        module: for a holder, its module with full parameters, instead of `params`.
        sharded: the shards; after exit, the new ones.
        sharded_grads: the shards of the gradients; after exit, the new ones.
    """

    params: PyTree[jax.Array]
    grads: PyTree[jax.Array] | None
    module: Any
    sharded: ShardedParams
    sharded_grads: ShardedParams | None


class Holder(ABC):
    """A module whose attribute `sharded` has its parameters as shards."""

    sharded: ShardedParams

    @abstractmethod
    def show(self, params: PyTree[jax.Array]) -> Any:
        """The module with these full parameters, some of them None, for the user to edit."""

    @abstractmethod
    def read(self, module: Any) -> PyTree[jax.Array]:
        """The parameters of a module that `show` returned."""


@contextmanager
def summon_full_params(
    sharded: ShardedParams | Holder,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    grads: ShardedParams | None = None,
    unit: str = "",
) -> Iterator[Summoned]:
    """Inside, parameters are full and in full precision, under their own names and in their own shapes (R18-R24).

    Arrays are immutable in JAX: `summoned.sharded` has new shards after exit, and so has a holder's attribute `sharded`. An
    exception inside has the same effect as any other exit (R24).

    Args:
        sharded: the parameters, or a holder of them.
        recurse: show the units inside `unit` too. Parameters that are not shown are None, and must stay None.
        writeback: on exit each rank takes the slice of the edits that it owns, and nothing else; from a JAX array with different
            values on devices, each rank takes its own. Otherwise edits are lost, unless nothing is sharded.
        rank0_only: show arrays on the first device of each shard group alone; requires `writeback=False`.
        offload_to_cpu: show numpy arrays in host memory, which can be written into, instead of JAX arrays on every device, which
            are replaced.
        with_grads: show `grads` too; requires `keep_original=True`, and no `offload_to_cpu`.
        grads: gradients of a step; None: no rank has gradients (R22). Frozen parameters have none. A gradient that is set to None
            counts as zeros.
        unit: canonical name of the module to show. A module that is not a unit shows the units inside it, if `recurse`.

    Raises:
        StateError: inside jit or shard_map, during a step's forward or backward, or inside another summon of the same units of
            the same shards.
        UnsupportedError: a combination without meaning (R23).
        UnitError: `unit` is not a module.
        UsageError: an invalid argument, or gradients of other parameters.
        ReplacedError: on exit, parameters of another structure, shape or dtype, by name; nothing is written.
    """
    holder = sharded if isinstance(sharded, Holder) else None
    request = UnshardRequest(writeback, rank0_only, offload_to_cpu, with_grads)
    before = holder.sharded if holder else sharded
    if not isinstance(before, ShardedParams) or not isinstance(recurse, bool) or not isinstance(unit, str):
        raise UsageError(
            f"expected ShardedParams or a holder of them, recurse as True or False, and unit as a name; got "
            f"{type(before).__name__}, {quote(recurse)}, {quote(unit)}"
        )
    units = _units(before.tree, unit, recurse)
    _check_idle(before, units or [unit])
    buckets = [bucket for bucket in before.tree.buckets if bucket.unit in units]
    mesh = mesh_of(before)
    # The same for all buckets, since they have one mesh.
    authoritative = next((authoritative_storage(bucket.layout) for bucket in buckets), AuthoritativeStorage.SHARDS)
    for bucket in buckets:
        request.check(keeps_original=getattr(bucket.layout, "keep_original", True), authoritative=authoritative)
    check_there(before, buckets)
    _check_grads(before, with_grads, grads)
    if request.warning and jax.process_count() > 1:  # the ranks of one process see one copy
        warnings.warn(request.warning, stacklevel=3)
    show = _Show(mesh, request)
    params, found = show(before, buckets), show(grads, buckets) if grads is not None else None
    # By path, since the user may edit the tree itself.
    old, old_grads = _leaves(params), _leaves(found)
    summoned = Summoned(params, found, None, before, grads)
    if holder:
        summoned.params, summoned.module = None, holder.show(params)
    del params, found
    opened = {(id(before), name): before for name in units}
    _OPEN.update(opened)
    try:
        yield summoned
    finally:
        for each in opened:
            del _OPEN[each]
        edited, edited_grads = (holder.read(summoned.module) if holder else summoned.params), summoned.grads
        summoned.params = summoned.grads = summoned.module = None
        if request.persists(authoritative):
            written_params = show.persist(before, buckets, old, edited, "parameter")
            if grads is not None:
                summoned.sharded_grads = show.persist(grads, buckets, old_grads, edited_grads, "gradient of parameter")
            elif edited_grads is not None:
                raise UsageError("grads: none were given to be edited; pass with_grads=True, grads=...")
            summoned.sharded = written_params
            if holder:
                holder.sharded = written_params


_OPEN: dict[tuple[int, str], ShardedParams] = {}
"""The shards that are summoned, which stay alive, by their id and the unit."""


def _check_idle(sharded: ShardedParams, units: Sequence[str]) -> None:
    """Raise StateError unless these units can be summoned now (R18)."""
    for unit in units:
        if (id(sharded), unit) in _OPEN:
            UnitState(Residency.FULL, exposure=Exposure.SUMMONED).after(Move.SUMMON, unit)
        # While jit or shard_map traces, even a constant is a tracer. JAX does not tell forward from backward.
        if any(isinstance(leaf, Tracer) for leaf in (*jax.tree.leaves(sharded), jnp.asarray(0) + 0)):
            raise StateError(
                f"unit {unit!r}: cannot unshard the parameters for the user inside jit, grad or shard_map: not during forward or "
                "backward; wait until it is over"
            )


def _units(tree: ParamTree, unit: str, recurse: bool) -> list[str]:
    units = list(dict.fromkeys(bucket.unit for bucket in tree.buckets))
    inside = [name for name in units if unit == "" or name == unit or name.startswith(f"{unit}.")]
    if not inside and not any(name.startswith(f"{unit}.") for name in tree.bucket_of):
        raise UnitError(f"unit: {unit!r} is not a module with parameters; the units are {units}")
    return inside if recurse else [name for name in inside if name == unit]


def _check_grads(sharded: ShardedParams, with_grads: bool, grads: Any) -> None:
    if grads is not None and not with_grads:
        raise UsageError(
            "grads: expected None without with_grads, got gradients; pass with_grads=True to be shown them"
        )
    if grads is not None and (not isinstance(grads, ShardedParams) or grads.tree != sharded.tree):
        raise UsageError(
            f"grads: expected gradients of these parameters as ShardedParams, got {type(grads).__name__}; pass what a step of "
            "value_and_grad returned as grads"
        )


@dataclass(frozen=True)
class _Show:
    """Shows full values, and writes edits of them back."""

    mesh: Mesh
    request: UnshardRequest

    @property
    def ranks(self) -> list[int]:
        """The ranks that see full values (R19)."""
        spec = mesh_spec(self.mesh)
        return [rank for rank in range(num_ranks(self.mesh)) if self.request.visible(spec.group_rank(rank))]

    def __call__(self, sharded: ShardedParams, buckets: Sequence[Bucket]) -> Any:
        """The full values of these buckets, and None for others; the leaves of a shared parameter are one object."""
        names = [bucket.name for bucket in buckets if bucket.name in sharded.buckets]
        tree = sharded.tree
        found: dict[str, Any] = dict.fromkeys(tree.paths)
        # Offloaded bucket by bucket, so that no device holds all of them.
        for some in [(name,) for name in names] if self.request.offload_to_cpu else [tuple(names)]:
            full = _leaves(gathered(sharded, self.mesh, some))
            found |= {path: self._place(leaf) for path, leaf in full.items() if leaf is not None}
        owners = dict(tree.shared)
        return jax.tree.unflatten(tree.treedef, [found[owners.get(path, path)] for path in tree.paths])

    def _place(self, leaf: jax.Array) -> Any:
        if not (self.request.rank0_only or self.request.offload_to_cpu):
            return leaf
        devices = [device_of(self.mesh, rank) for rank in self.ranks]
        parts = [part_on(device, leaf) for device in devices if device in leaf.sharding.addressable_devices]
        if not parts:
            return None
        if self.request.offload_to_cpu:
            return np.array(parts[0])
        firsts = NamedSharding(Mesh(np.array(devices, dtype=object), ("first",)), P())
        return jax.make_array_from_single_device_arrays(leaf.shape, firsts, parts)

    def persist(
        self, sharded: ShardedParams, buckets: Sequence[Bucket], old: Mapping[str, Any], edited: Any, what: str
    ) -> ShardedParams:
        """The shards after each rank has taken the edits that it owns.

        Args:
            old: the values that were shown, by path.
            edited: the user's tree.
            what: the kind of values, for messages.
        """
        tree = sharded.tree
        new = _checked(tree, old, _leaves(edited), what)
        leaves = _of_owners(tree, old, new, what)
        # The same array object is unchanged, except in numpy, where it may have been written into.
        same = {path for path, leaf in leaves.items() if leaf is old[path] and not isinstance(leaf, np.ndarray)}
        names = [
            bucket.name
            for bucket in buckets
            if bucket.name in sharded.buckets
            and not {path for spec in bucket.layout.params for path in tree.param_map.by_name[spec.name].paths} <= same
        ]
        return written(sharded, self.mesh, names, leaves, self.ranks)


def _leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path, including None."""
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)[0]
    return {path_name(path): leaf for path, leaf in flat}


def _checked(tree: ParamTree, old: Mapping[str, Any], new: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The edited leaves, with zeros for a gradient that was removed; ReplacedError if one does not fit."""
    if set(old) != set(new):
        raise ReplacedError(
            f"the tree of each {what} is not the one that was shown: missing {sorted(set(old) - set(new))}, unexpected "
            f"{sorted(set(new) - set(old))}; replace its leaves, and keep its structure"
        )
    found = {}
    for path, leaf in new.items():
        # The user's tree may have None at other leaves than those of parameters.
        was, name = old[path], tree.entry(path).name if path in tree.paths else path
        if was is None and leaf is not None:
            raise ReplacedError(
                f"{what} {name!r} ({path!r}): expected None, since it is not shown, got a value; summon it"
            )
        if leaf is None and was is not None and what != "parameter":
            leaf = np.zeros(was.shape, was.dtype)
        if was is not None:
            expected = was.shape, dtype_name(was)
            got = "None" if leaf is None else (np.shape(leaf), dtype_name(leaf))
            if expected != got:
                raise ReplacedError(
                    f"{what} {name!r} ({path!r}): expected the unsharded shape and dtype {expected}, got {got}; write into it "
                    "instead of replacing it, or replace it by the same shape and dtype"
                )
        found[path] = leaf
    return found


def _of_owners(tree: ParamTree, old: Mapping[str, Any], new: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The leaves by path; for a shared parameter, the leaf that was replaced, under any of its paths (R31)."""
    found = dict(new)
    for alias, owner in tree.shared:
        if new[alias] is old[alias]:
            continue
        if found[owner] is not old[owner] and not np.array_equal(found[owner], new[alias], equal_nan=True):
            raise ReplacedError(
                f"{what} {tree.entry(owner).name!r}: {owner!r} and {alias!r} are one, and were replaced by different values; "
                "replace one of them, or both by the same value"
            )
        found[owner] = new[alias]
    return found
