"""Opens stored models of every format that the core reads, and detects those that a backend reads."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from crossframe.checkpoint import INDEX, MODEL, STATE, read, whole_tensors
from crossframe.dtypes import numpy_dtype
from crossframe.errors import UsageError
from crossframe.quoting import quote_path
from crossframe.shapes.stored import STORED_DTYPES, SUFFIX
from crossframe.state import canonical_name

_STEP = "step"
_STATE_KEY = re.compile(r"(?:optim\w*|opt\w*)\.state\.(.+)\.([^.]+)")
_OTHERS = {
    "BOOL": "bool",
    **{f"{sign}{bits}": f"{name}{bits}" for sign, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
}
_LARGEST_HEADER = 100_000_000


class Format(Enum):
    """The format of a stored model."""

    OURS = "a checkpoint of crossframe"
    SAFETENSORS = "safetensors"
    DCP = "torch.distributed.checkpoint"
    TORCH = "torch.save"
    ORBAX = "orbax"


@dataclass(frozen=True)
class StoredModel:
    """A stored model.

    Attributes:
        name: of the file or folder.
        tensors: by name, functions that read a parameter, a buffer, or an entry of the optimizer state as "exp_avg:head.weight".
        values: numbers and texts that are no tensors, such as the learning rates of the optimizer.
        steps: the numbers of optimizer steps that parameters have taken; empty if unknown.
    """

    name: str
    tensors: Mapping[str, Callable[[], np.ndarray]]
    values: Mapping[str, Any] = field(default_factory=dict)
    steps: frozenset[int] = frozenset()

    def moments(self, parameter: str) -> Mapping[str, np.ndarray]:
        """The optimizer state of a parameter that has an entry for each of its elements, by entry."""
        found = {}
        for name, read_tensor in self.tensors.items():
            entry, colon, of = name.partition(":")
            if colon and of == parameter:
                found[entry] = read_tensor()
        return found

    @classmethod
    def of_keys(
        cls, name: str, tensors: Mapping[str, Callable[[], np.ndarray]], values: Mapping[str, Any] | None = None
    ) -> "StoredModel":
        """A model whose tensors have the dotted keys of a state dict: with or without "model.", and with an optimizer's state.

        Steps of the optimizer are those of its tensors or values that are called "step".
        """
        found, steps = {}, set()
        for key, read_tensor in tensors.items():
            if match := _STATE_KEY.fullmatch(key):
                parameter, entry = canonical_name(match[1]), match[2]
                if entry == _STEP:
                    steps.add(int(read_tensor().reshape(-1)[0]))
                else:
                    found[f"{entry}:{parameter}"] = read_tensor
            else:
                found[canonical_name(key)] = read_tensor
        others = {}
        for key, value in (values or {}).items():
            match = _STATE_KEY.fullmatch(key)
            if match and match[2] == _STEP and isinstance(value, int | float):
                steps.add(int(value))
            else:
                others[key] = value
        return cls(name, _without_prefix(found), others, frozenset(steps))


def format_of(path: Path) -> Format | None:
    """The format of a stored model; None if it is of none."""
    if (path / INDEX).is_file():
        return Format.OURS
    if (path / ".metadata").is_file():
        return Format.DCP
    if any((path / inner).exists() for inner in ("manifest.ocdbt", "_METADATA", "_CHECKPOINT_METADATA")):
        return Format.ORBAX
    if (path.suffix == SUFFIX and path.is_file()) or (path.is_dir() and any(path.glob(f"*{SUFFIX}"))):
        return Format.SAFETENSORS
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt") and path.is_file():
        return Format.TORCH
    return None


def open_stored(path: Path) -> StoredModel:
    """A checkpoint of crossframe, or safetensors files. Tensors are read on demand, except those of crossframe's format.

    Raises:
        CheckpointError: a damaged checkpoint.
        UsageError: another format, or a file that is not in its format.
    """
    found = format_of(path)
    if found is Format.OURS:
        return _ours(path)
    if found is Format.SAFETENSORS:
        files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
        return StoredModel.of_keys(path.name, {key: one for file in files for key, one in _safetensors(file).items()})
    raise UsageError(
        f"{quote_path(path)}: expected a checkpoint of save_checkpoint, a {SUFFIX} file or a folder of them, a folder of "
        "torch.distributed.checkpoint or of orbax, or a .pt file; there is none"
    )


def _ours(path: Path) -> StoredModel:
    saved = read(path)
    tensors = whole_tensors(saved, MODEL)
    if STATE in saved.sections:
        tensors |= whole_tensors(saved, STATE)
    values = {key: saved.value(key) for key in saved.values}
    steps = frozenset({int(values.pop(_STEP))}) if _STEP in values else frozenset()
    stated = {key: value.tolist() for key, value in values.items()} | {f"about.{k}": v for k, v in saved.about.items()}
    return StoredModel(path.name, {name: partial(_same, array) for name, array in tensors.items()}, stated, steps)


def _same(array: np.ndarray) -> np.ndarray:
    return array


def _safetensors(file: Path) -> dict[str, Callable[[], np.ndarray]]:
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > _LARGEST_HEADER:
                raise ValueError("its header is too long")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        size = file.stat().st_size - 8 - length
        return {key: _tensor_of(file, fields, 8 + length, size) for key, fields in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{quote_path(file)}: expected a safetensors file, cannot read it: {error}") from None


def _tensor_of(file: Path, fields: Any, first: int, size: int) -> Callable[[], np.ndarray]:
    tag, shape, (start, stop) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    dtype = numpy_dtype(STORED_DTYPES[tag]) if tag in STORED_DTYPES else np.dtype(_OTHERS[tag])
    if not 0 <= start <= stop <= size or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor lies outside of the file")

    def read_tensor() -> np.ndarray:
        content = np.fromfile(file, np.uint8, stop - start, offset=first + start)
        return content.view(dtype).reshape(shape) if content.size else np.zeros(shape, dtype)

    return read_tensor


def _without_prefix(tensors: dict[str, Callable[[], np.ndarray]]) -> dict[str, Callable[[], np.ndarray]]:
    """The tensors without "model." or a similar word, under which a script saved its state dict."""
    names = [name for name in tensors if ":" not in name]
    for prefix in ("model.", "state_dict.", "module.", "app.model."):
        # A model may also have a module of that name: its optimizer state then has it too.
        in_state = any(name.partition(":")[2].startswith(prefix) for name in tensors if ":" in name)
        if names and not in_state and all(name.startswith(prefix) for name in names):
            return {name.removeprefix(prefix): read_tensor for name, read_tensor in tensors.items()}
    return tensors
