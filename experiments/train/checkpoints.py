"""Checkpoints that are whole or not there at all.

A checkpoint is written into a folder of another name, flushed, given a manifest with the size and the checksum of each file, and
renamed by rank 0 once all ranks are through. Whatever kills whichever rank whenever, a folder `step-00000100` is whole; what
became of the disk since then, its manifest shows.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from crossframe.errors import UsageError
from experiments.train.settings import AUTO, NONE
from experiments.train.together import CheckpointError, on_first, together

MANIFEST = "manifest.json"
_FINAL = re.compile(r"step-(\d{8})")
_UNFINISHED = ("writing-", "removing-")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        path: its folder.
        step: how many steps had been taken.
        settings: of the run, as `TrainSettings.what` gives them.
    """

    path: Path
    step: int
    settings: dict[str, Any]

    def load(self, state: dict[str, Any]) -> None:
        """Load into the tensors of a state dict; all ranks call it, of any number.

        Raises:
            CheckpointError: it cannot be read, or is of another model; nothing else was changed than tensors of `state`.
        """
        together(f"loading {self.path}", lambda: load(state, checkpoint_id=self.path))


class Checkpoints:
    """The checkpoints of one run, in a folder that all ranks see. Every method is called by all ranks.

    Args:
        folder: of the checkpoints. It is made; what a killed run left half-written in it is removed.
        keep: how many of the newest stay.
        say: how rank 0 tells the user something.
    """

    def __init__(self, folder: Path, keep: int, say: Callable[[str], None]) -> None:
        self.folder, self.keep, self.say = folder, keep, say
        on_first(f"preparing {folder}", self._prepare)

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.name.startswith(_UNFINISHED):
                shutil.rmtree(path)

    def save(self, step: int, state: dict[str, Any], settings: dict[str, Any]) -> Checkpoint:
        """Write a checkpoint, and remove those that are too many.

        Args:
            state: what `torch.distributed.checkpoint` saves.

        Raises:
            CheckpointError: it cannot be written. The folder is as it was before.
        """
        final = self.folder / f"step-{step:08d}"
        writing = self.folder / f"writing-{final.name}"
        try:
            on_first(f"making {writing}", lambda: _make(writing))
            together(f"writing {writing}", lambda: save(state, checkpoint_id=writing))
            names = on_first(f"listing {writing}", lambda: sorted(path.name for path in writing.iterdir()))
            described = _dealt(
                f"reading back {writing}, which all ranks must see", names, lambda name: _describe(writing / name)
            )
            manifest = {"format": 1, "step": step, "settings": settings, "files": described}
            on_first(f"finishing {final}", lambda: _finish(writing, final, manifest))
        except CheckpointError:
            on_first(f"removing {writing}", lambda: shutil.rmtree(writing, ignore_errors=True))
            raise
        try:
            on_first(f"removing old checkpoints in {self.folder}", self._prune)
        except CheckpointError as error:  # this one is saved all the same
            self.say(f"{error}; remove them by hand")
        return Checkpoint(final, step, settings)

    def _prune(self) -> None:
        for path in self._finals()[self.keep :]:
            removing = path.with_name(f"removing-{path.name}")
            path.rename(removing)  # no checkpoint is ever there in part under its name
            shutil.rmtree(removing)

    def _finals(self) -> list[Path]:
        """The finished ones, the newest first."""
        return sorted((path for path in self.folder.iterdir() if _FINAL.fullmatch(path.name)), reverse=True)

    def find(self, resume: str) -> Checkpoint | None:
        """The checkpoint to resume from.

        Args:
            resume: "auto": the newest whole one, or None if there is none at all. Damaged ones that are newer are named and set
                aside, under names that begin with `damaged-`. "none": None. Else the folder of one.

        Raises:
            CheckpointError: none of those that are there is whole, or the one that was asked for is not.
            UsageError: the run would come by newer checkpoints, which it does not write over.
        """
        finals = on_first(f"listing {self.folder}", self._finals)
        if resume == AUTO:
            return self._newest_whole(finals)
        found = None
        if resume != NONE:
            found, wrong = read(Path(resume))
            if found is None:
                raise CheckpointError(f"--resume {resume}: {'; '.join(wrong)}")
        ahead = [path.name for path in reversed(finals) if found is None or _step_of(path) > found.step]
        if ahead:
            raise UsageError(
                f"{self.folder} has {', '.join(ahead)}, over which a run from step {found.step if found else 0} would write; "
                "pass --resume auto to go on from them, or another --output"
            )
        return found

    def _newest_whole(self, finals: list[Path]) -> Checkpoint | None:
        damaged: dict[Path, list[str]] = {}
        for path in finals:
            checkpoint, wrong = read(path)
            if checkpoint is not None:
                for other, why in damaged.items():
                    aside = other.with_name(f"damaged-{other.name}")
                    on_first(f"setting {other} aside", lambda other=other, aside=aside: _set_aside(other, aside))
                    self.say(
                        f"DAMAGED: {other}: {'; '.join(why)}. Set aside as {aside.name}; using {path.name} instead"
                    )
                return checkpoint
            damaged[path] = wrong
        if damaged:
            said = "; ".join(f"{path.name}: {', '.join(wrong)}" for path, wrong in damaged.items())
            raise CheckpointError(
                f"{self.folder}: no checkpoint is whole: {said}; restore one, or pass another --output"
            )
        return None


def read(path: Path) -> tuple[Checkpoint | None, list[str]]:
    """A checkpoint, if it is whole, and what is wrong with it, in words that name the files. All ranks call it; each reads its
    part of the files."""
    manifest, wrong = on_first(f"reading {path}", lambda: _manifest(path))
    if manifest is None:
        return None, [wrong]
    expected = manifest["files"]
    found = _dealt(f"checking {path}", sorted(expected), lambda name: _complaint(path / name, expected[name]))
    complaints = [f"{name} {complaint}" for name, complaint in found.items() if complaint]
    return (None if complaints else Checkpoint(path, manifest["step"], manifest["settings"])), complaints


def _dealt(what: str, names: list[str], act: Callable[[str], Any]) -> dict[str, Any]:
    """What `act` says of each name, each asked by one rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = together(what, lambda: {name: act(name) for name in names[rank::world_size]})
    return {name: said for part in parts for name, said in part.items()}


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _complaint(path: Path, expected: dict[str, Any]) -> str:
    if not path.exists():
        return "is missing"
    if (size := path.stat().st_size) != expected["bytes"]:
        return f"has {size} bytes, not {expected['bytes']}"
    return "" if _describe(path) == expected else "has other content than was written (its checksum differs)"


def _manifest(path: Path) -> tuple[dict[str, Any] | None, str]:
    """The manifest of a checkpoint, and what is wrong with it."""
    try:
        wrapped = json.loads((path / MANIFEST).read_bytes())
        content = wrapped["content"]
    except FileNotFoundError:
        return None, f"{path / MANIFEST} is missing: expected the folder of a checkpoint, such as .../step-00000100"
    except (ValueError, KeyError, TypeError):
        return None, f"{MANIFEST} is no manifest"
    if wrapped.get("sha256") != _digest(content):
        return None, f"{MANIFEST} has other content than was written (its checksum differs)"
    return content, ""


def _make(writing: Path) -> None:
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir()


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _finish(writing: Path, final: Path, content: dict[str, Any]) -> None:
    """Write the manifest, flush everything, and give the checkpoint its name."""
    with (writing / MANIFEST).open("w") as file:
        json.dump({"content": content, "sha256": _digest(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    flush_folder(writing)
    writing.rename(final)
    flush_folder(final.parent)


def flush_folder(path: Path) -> None:
    """Have the disk hold the names in a folder, and not the machine's memory alone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _set_aside(path: Path, aside: Path) -> None:
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
