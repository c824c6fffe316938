"""Unpacks a checkpoint of torch.distributed.checkpoint, or a file of torch.save, for `crossframe compare`.

Files of torch.save are read with `weights_only`. The metadata of torch.distributed.checkpoint is a pickle, as torch reads it.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from crossframe.checkpoint_comparison import Unpacked
from torch_backend.compat._dtypes import to_numpy


def unpack(path: Path, folder: Path) -> None:
    """Write all tensors and values of a checkpoint into an empty folder, one tensor after another."""
    unpacked = Unpacked(folder)
    for key, value in _distributed(path) if path.is_dir() else _flattened(_loaded(path)):
        if isinstance(value, Tensor):
            full = value.detach().cpu()
            unpacked.add(key, to_numpy(full.contiguous()) if full.is_floating_point() else full.numpy())
        else:
            unpacked.add(key, value)
    unpacked.finish()


def _loaded(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _distributed(path: Path) -> Iterator[tuple[str, Any]]:
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    for key, stored in metadata.items():
        state: dict[str, Any] = {key: None}
        if isinstance(stored, TensorStorageMetadata):
            state[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            load(state, checkpoint_id=path, no_dist=True)
        yield key, state[key]


def _flattened(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(x, Mapping) for x in value)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from _flattened(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def main() -> int:
    """The command: PATH FOLDER."""
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
    return 0
