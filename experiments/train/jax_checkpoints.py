"""Checkpoints of `experiments.train_jax`: folders that are whole or not there at all, with a file of safetensors for each rank.

All processes call every method, and see one file system. A file holds what a rank's device holds, leaf by leaf: a checkpoint is
of one mesh and layout, but how ranks are shared out among processes does not matter. If a process fails on the way, the folder
keeps the name under which it was written, and jax.distributed ends the others.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from crossframe.errors import UsageError
from jax_backend.tree import leaves_by_path

MANIFEST = "manifest.json"
_FINAL = re.compile(r"step-(\d{8})")


class JaxCheckpoints:
    """The checkpoints of one run.

    Args:
        folder: of the checkpoints; it is made.
        mesh: of the run.
        keep: how many of the newest stay.
    """

    def __init__(self, folder: Path, mesh: Mesh, keep: int) -> None:
        self.folder, self.mesh, self.keep = folder, mesh, keep
        self._first = jax.process_index() == 0
        if self._first:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("writing-*"):
                shutil.rmtree(path)
        _wait("made")

    def save(self, step: int, state: Any, settings: dict[str, Any]) -> None:
        """Write a pytree of arrays, and remove checkpoints that are too many.

        Args:
            settings: what is computed, JSON.
        """
        final = self.folder / f"step-{step:08d}"
        writing = self.folder / f"writing-{final.name}"
        if self._first:
            writing.mkdir()
        _wait("begun")
        for rank, device in enumerate(self.mesh.devices.flat):
            if device.process_index == jax.process_index():
                path = writing / _file(rank)
                save_file({name: _on(leaf, device) for name, leaf in leaves_by_path(state).items()}, path)
                _flush(path)
        _wait("written")
        if self._first:
            files = {path.name: _checksum(path) for path in sorted(writing.iterdir())}
            manifest = {"step": step, "mesh": self._mesh_sizes(), "settings": settings, "files": files}
            (writing / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
            _flush(writing / MANIFEST)
            _flush(writing)
            writing.rename(final)
            _flush(self.folder)
            for path in self._finals()[self.keep :]:
                path.rename(removing := path.with_name(f"writing-{path.name}"))
                shutil.rmtree(removing)
        _wait("renamed")

    def newest(self) -> dict[str, Any] | None:
        """The manifest of the newest checkpoint that is whole; None if there is none.

        Raises:
            UsageError: it is of another mesh.
        """
        # The first process looks, so that all find the same.
        step = next((_step(path) for path in self._finals() if _is_whole(path)), -1) if self._first else -1
        step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
        if step < 0:
            return None
        manifest = json.loads((self.folder / f"step-{step:08d}" / MANIFEST).read_text())
        if manifest["mesh"] != self._mesh_sizes():
            raise UsageError(
                f"{self.folder}: its checkpoints are of a mesh of {manifest['mesh']}, and this run has {self._mesh_sizes()}; "
                "use as many devices, or pass another --output"
            )
        if self._first:  # what is newer and not whole is in the way
            for path in self._finals():
                if _step(path) > step:
                    path.rename(path.with_name(f"damaged-{path.name}"))
        _wait("found")
        return manifest

    def load(self, step: int, state: Any) -> Any:
        """A pytree like `state`, on its devices, with the values of a checkpoint.

        Raises:
            UsageError: the checkpoint is of other arrays.
        """
        folder, names = self.folder / f"step-{step:08d}", list(leaves_by_path(state))
        own = {
            device: load_file(folder / _file(rank))
            for rank, device in enumerate(self.mesh.devices.flat)
            if device.process_index == jax.process_index()
        }
        for arrays in own.values():
            if set(arrays) != set(names):
                raise UsageError(
                    f"{folder}: it is of other arrays than this run's: {sorted(set(arrays) ^ set(names))[:4]}"
                )

        def read(name: str, leaf: jax.Array) -> jax.Array:
            parts = [jax.device_put(arrays[name], device) for device, arrays in own.items()]
            return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)

        leaves = [read(name, leaf) for name, leaf in zip(names, jax.tree.leaves(state), strict=True)]
        return jax.tree.unflatten(jax.tree.structure(state), leaves)

    def _finals(self) -> list[Path]:
        """The finished ones, the newest first."""
        return sorted((path for path in self.folder.iterdir() if _FINAL.fullmatch(path.name)), reverse=True)

    def _mesh_sizes(self) -> dict[str, int]:
        return {str(axis): size for axis, size in self.mesh.shape.items()}


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _on(leaf: jax.Array, device: Any) -> np.ndarray:
    return next(np.array(part.data) for part in leaf.addressable_shards if part.device == device)


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _is_whole(path: Path) -> bool:
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
        return all(_checksum(path / name) == checksum for name, checksum in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _wait(what: str) -> None:
    multihost_utils.sync_global_devices(f"checkpoint {what}")
