"""Unpacks a checkpoint of orbax, for `crossframe compare`."""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from crossframe.checkpoint_comparison import Unpacked
from jax_backend.tree import path_name


def unpack(path: Path, folder: Path) -> None:
    """Write all arrays and values of a checkpoint, or of each item of one step of a CheckpointManager, into an empty folder."""
    unpacked = Unpacked(folder)
    items = sorted(each.parent for each in path.glob("*/_METADATA"))
    for item in items or [path]:
        prefix = f"{item.name}." if items and len(items) > 1 else ""
        for key, value in jax.tree_util.tree_flatten_with_path(_restored(item))[0]:
            unpacked.add(prefix + path_name(key), np.asarray(value) if hasattr(value, "dtype") else value)
    unpacked.finish()


def _restored(path: Path) -> Any:
    """A pytree of numpy arrays, whatever devices it was saved from."""
    handler = ocp.PyTreeCheckpointHandler()
    with ocp.Checkpointer(handler) as checkpointer:
        tree = checkpointer.metadata(path.resolve()).item_metadata.tree
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return checkpointer.restore(path.resolve(), ocp.args.PyTreeRestore(restore_args=arguments))


def main() -> int:
    """The command: PATH FOLDER."""
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
    return 0
