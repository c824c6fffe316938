"""Checkpoints of orbax: sharded parameters and their optimizer state, restored onto any mesh, world size and layout.

with ocp.CheckpointManager(path) as manager:
    manager.save(step, args=ShardedSave(params, opt_state))
    ...
    params, opt_state = manager.restore(step, args=ShardedRestore(params, opt_state))

On disk each parameter is one array of its true shape under its canonical name, as in crossframe's own format: {"model":
{"blocks.0.w": ...}, "state": {"exp_avg:blocks.0.w": ...}, "values": {"step": ...}}. Tools that read orbax read it.
`ocp.args.Composite` takes the arguments next to others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from crossframe.checkpoint import LISTED, MODEL, STATE, CheckpointError
from crossframe.quoting import quote
from jax_backend.shards._sharded_params import ShardedParams, mesh_of
from jax_backend.state._canonical_arrays import canonical_arrays, canonical_structs, from_canonical_arrays
from jax_backend.state._checkpoint_parts import Part, model_parts
from jax_backend.state._optimizer_state import StateLeaves

if TYPE_CHECKING:
    from etils import epath

VALUES = "values"


class ShardedParamsHandler(ocp.PyTreeCheckpointHandler):
    """Saves and restores ShardedParams and an optimizer's state; the options are those of `ocp.PyTreeCheckpointHandler`.

    Saving and restoring need the memory of a second copy of the shards on the devices, and of one unit in full. A parameter none
    of whose dims is a multiple of the number of shards is in full on each device meanwhile.
    """

    async def async_save(self, directory: "epath.Path", args: "ShardedSave") -> list[ocp.future.Future] | None:  # type: ignore[override]
        """Copy the values to the host, and write them in the background; see `ShardedSave`."""
        mesh = mesh_of(args.params)
        leaves = StateLeaves(args.optimizer_state, args.params, mesh)
        sections = {
            MODEL: _arrays(model_parts(args.params, mesh)),
            STATE: _arrays(leaves.parts),
            VALUES: leaves.values(),
        }
        return await super().async_save(directory, args=ocp.args.PyTreeSave(_filled(sections)))

    def restore(self, directory: "epath.Path", args: "ShardedRestore") -> ShardedParams | tuple[ShardedParams, PyTree]:  # type: ignore[override]
        """Restore the values; see `ShardedRestore`."""
        like, mesh = args.like, mesh_of(args.like)
        parts, leaves = model_parts(like, mesh), StateLeaves(args.optimizer_state, like, mesh)
        stored = self.metadata(directory).tree
        targets: dict[str, Any] = {MODEL: _structs(parts), STATE: _structs(leaves.parts)}
        for section, structs in targets.items():
            _check(directory, section, structs, stored.get(section, {}))
        if args.optimizer_state is not None:
            targets[VALUES] = {name: np.empty(each.shape, each.dtype) for name, each in stored.get(VALUES, {}).items()}
        item = _filled(targets)
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        found = super().restore(directory, args=ocp.args.PyTreeRestore(item, restore_args, partial_restore=True))
        params = ShardedParams.of(
            like.tree, {part.bucket.name: from_canonical_arrays(part, found[MODEL]) for part in parts}
        )
        if args.optimizer_state is None:
            return params
        saved: Any = _Values(Path(directory), found.get(VALUES, {}))
        values = leaves.read_values(saved)
        return params, leaves.joined([from_canonical_arrays(part, found[STATE]) for part in leaves.parts], values)


@ocp.args.register_with_handler(ShardedParamsHandler, for_save=True)
@dataclass
class ShardedSave(ocp.args.CheckpointArgs):
    """What to save.

    Attributes:
        params: the parameters.
        optimizer_state: None, or the state of `sharded_optimizer`, or of optax on ShardedParams.
    """

    params: ShardedParams
    optimizer_state: PyTree = None


@ocp.args.register_with_handler(ShardedParamsHandler, for_restore=True)
@dataclass
class ShardedRestore(ocp.args.CheckpointArgs):
    """What to restore into; the result is parameters or, with a state, (parameters, state).

    Attributes:
        like: parameters of the model, on the mesh and in the layouts to restore into; their values do not matter.
        optimizer_state: None, or the state that `init` of the optimizer returns for `like`, to be restored too.

    Raises:
        CheckpointError: the checkpoint has other names, shapes or dtypes, which are listed, or the state of another optimizer.
    """

    like: ShardedParams
    optimizer_state: PyTree = None


@dataclass(frozen=True)
class _Values:
    """Restored values that belong to no parameter, as `crossframe.checkpoint.Saved` gives them."""

    path: Path
    values: Mapping[str, np.ndarray]

    def value(self, key: str) -> np.ndarray:
        return self.values[key]


def _arrays(parts: list[Part]) -> dict[str, jax.Array]:
    return {name: array for part in parts for name, array in canonical_arrays(part).items()}


def _structs(parts: list[Part]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: struct for part in parts for name, struct in canonical_structs(part).items()}


def _filled(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The sections that are not empty, which orbax would store as values of their own."""
    return {name: dict(section) for name, section in sections.items() if section}


def _check(
    directory: Any, section: str, expected: Mapping[str, jax.ShapeDtypeStruct], stored: Mapping[str, Any]
) -> None:
    """Raise CheckpointError unless a section has these names, shapes and dtypes; without any, it is not read."""
    if not expected:
        return

    def described(each: Any) -> str:
        return "nothing" if each is None else f"{each.dtype} {tuple(each.shape)}"

    wrong = [
        f"{quote(name)}: expected {a}, got {b}"
        for name in dict.fromkeys((*expected, *stored))
        if (a := described(expected.get(name))) != (b := described(stored.get(name)))
    ]
    if wrong:
        more = f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise CheckpointError(
            f"{directory}, of which nothing was restored: section {section!r}: {'; '.join(wrong[:LISTED])}{more}; pass "
            "parameters of the saved model, and the state of the saved optimizer"
        )
