"""Checkpoints in crossframe's format: saved by one mesh, layout and backend, loaded by any other."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload

import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from crossframe.checkpoint import MODEL, STATE, AsyncSaver, Contents, Saved, read, save
from crossframe.layout import Sharding
from crossframe.mesh import MeshSpec
from jax_backend.mesh._device_mesh import mesh_spec, ranks_here
from jax_backend.ranks._processes import AllProcesses, together
from jax_backend.shards._sharded_params import ShardedParams, mesh_of
from jax_backend.state._checkpoint_parts import Part, model_parts
from jax_backend.state._optimizer_state import StateLeaves


def save_checkpoint(
    path: Path | str,
    sharded: ShardedParams,
    optimizer_state: PyTree = None,
    *,
    about: Mapping[str, object] | None = None,
    saver: AsyncSaver | None = None,
) -> None:
    """Save parameters, and an optimizer's state, to a new folder that all processes share. All processes call it.

    `torch_backend.load_checkpoint` reads it, and `load_checkpoint` here, at any world size and layout. It has no padding. No full
    parameter is made. If a process is killed, or the save fails, nothing remains under the name `path`.

    Args:
        optimizer_state: the state of `sharded_optimizer`, or of optax on ShardedParams. That of Adam and momentum has torch's
            names.
        about: JSON to save with it, such as the step; `crossframe.checkpoint.read(path).about` returns it.
        saver: writes the files while training continues, after the values are copied to the host; errors are then raised by the
            next save with it, or by its `wait`. None: write them now.

    Raises:
        CheckpointError: `path` exists, another job has saved there in the meantime, or a process wrote to another disk;
            AgreementError in other processes.
        UsageError: not ShardedParams, or arrays on no mesh.
    """
    mesh = mesh_of(sharded)
    parts = model_parts(sharded, mesh)
    leaves = StateLeaves(optimizer_state, sharded, mesh)
    sections = {MODEL: _sharding(parts, mesh)}
    if optimizer_state is not None:
        sections[STATE] = _sharding(leaves.parts, mesh)
    values = leaves.values()
    places = [rank for rank in ranks_here(mesh) if rank < mesh_spec(mesh).shard]

    def lines(place: int) -> dict[str, list[np.ndarray]]:
        both = ((MODEL, parts), (STATE, leaves.parts))
        return {section: [line for part in own for line in part.lines(place)] for section, own in both}

    start = save if saver is None else saver.save
    start(path, AllProcesses(), lambda: Contents(sections, values, places, lines), about)


@overload
def load_checkpoint(path: Path | str, like: ShardedParams, optimizer_state: None = None) -> ShardedParams: ...


@overload
def load_checkpoint(path: Path | str, like: ShardedParams, optimizer_state: PyTree) -> tuple[ShardedParams, PyTree]: ...


def load_checkpoint(
    path: Path | str, like: ShardedParams, optimizer_state: PyTree = None
) -> ShardedParams | tuple[ShardedParams, PyTree]:
    """Load parameters into the mesh and the layouts of other parameters. All processes call it.

    Args:
        like: parameters of the model; their values do not matter and do not change.
        optimizer_state: None, or the state that `init` of the optimizer returns for `like`, to be loaded too.

    Returns:
        The parameters; with a state, (parameters, state).

    Raises:
        CheckpointError: the checkpoint is missing or damaged, has other names, shapes or dtypes, which are listed, or has no
            state, or that of another optimizer; AgreementError in processes that found no error.
        UsageError: not ShardedParams, or arrays on no mesh.
    """
    mesh = mesh_of(like)
    leaves = StateLeaves(optimizer_state, like, mesh)
    parts = model_parts(like, mesh)

    def found() -> tuple[list[Any], list[Any], dict[str, np.ndarray]]:
        saved = read(path)
        made = _read(saved, MODEL, parts, mesh)
        if optimizer_state is None:
            return made, [], {}
        values = leaves.read_values(saved)
        return made, _read(saved, STATE, leaves.parts, mesh), values

    made, of_state, values = together("reading of a checkpoint", found)
    params = ShardedParams.of(like.tree, {part.bucket.name: arrays for part, arrays in zip(parts, made, strict=True)})
    return params if optimizer_state is None else (params, leaves.joined(of_state, values))


def _sharding(parts: list[Part], mesh: Mesh) -> Sharding:
    return Sharding(tuple(unit for part in parts for unit in part.units), MeshSpec(mesh_spec(mesh).shard))


def _read(saved: Saved, section: str, parts: list[Part], mesh: Mesh) -> list[Any]:
    """The arrays of each part."""
    target, spec = _sharding(parts, mesh), mesh_spec(mesh)
    here = {spec.coordinate(rank)[1] for rank in ranks_here(mesh)}
    by_place = {place: saved.lines(section, target, place) for place in sorted(here)}
    found, at = [], 0
    for part in parts:
        stop = at + len(part.units)
        found.append(part.joined({place: lines[at:stop] for place, lines in by_place.items()}))
        at = stop
    return found
