"""The checkpoints of a run, which either framework goes on from: whole or not there at all.

`crossframe.checkpoint` has the format: a folder is written under another name, flushed, given an index with the size and the
checksum of each file, and renamed once all ranks are through. Whatever kills whichever rank whenever, a folder `step-00000100` is
whole; what became of the disk since then, its index shows.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from crossframe import checkpoint
from crossframe.checkpoint import CheckpointError
from crossframe.errors import UsageError
from experiments.train.settings import AUTO, NONE
from experiments.train.together import Ranks, on_first, together

_FINAL = re.compile(r"step-(\d{8})")
_REMOVING = re.compile(r"removing-step-\d{8}")

# (folder, what belongs to the checkpoint): writes one; all ranks call it.
Write = Callable[[Path, dict[str, Any]], None]


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


class Checkpoints:
    """The checkpoints of one run, in a folder that all ranks see. Every method is called by all ranks.

    Args:
        folder: of the checkpoints. It is made; what a killed run left half-written in it is removed.
        keep: how many of the newest stay.
        ranks: of the run.
        say: how rank 0 tells the user something.
    """

    def __init__(self, folder: Path, keep: int, ranks: Ranks, say: Callable[[str], None]) -> None:
        self.folder, self.keep, self.ranks, self.say = folder, keep, ranks, say
        on_first(ranks, f"preparing {folder}", self._prepare)

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # The journal's lock is held: no other run writes to this folder.
        checkpoint.remove_unfinished(self.folder)
        for path in self.folder.iterdir():
            if _REMOVING.fullmatch(path.name):
                with suppress(CheckpointError):
                    checkpoint.remove(path)

    def save(self, step: int, write: Write, settings: dict[str, Any]) -> None:
        """Write a checkpoint, and remove those that are too many.

        Raises:
            CheckpointError: it cannot be written. The folder is as it was before.
        """
        final = self._final(step)
        together(self.ranks, f"writing {final}", lambda: write(final, {"step": step, "settings": settings}))
        self._remove_old()

    def wait(self, step: int, wait: Callable[[], None]) -> None:
        """Wait for a checkpoint that is written while training continues, and remove those that are too many.

        Args:
            wait: waits for it.

        Raises:
            CheckpointError: it cannot be written. The folder is as it was before.
        """
        together(self.ranks, f"writing {self._final(step)}", wait)
        self._remove_old()

    def _final(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _remove_old(self) -> None:
        try:
            on_first(self.ranks, f"removing old checkpoints in {self.folder}", self._prune)
        except CheckpointError as error:  # this one is saved all the same
            self.say(f"{error}; remove them by hand")

    def _prune(self) -> None:
        for name in self._finals()[self.keep :]:
            path = self.folder / name
            removing = path.with_name(f"removing-{name}")
            path.rename(removing)  # no checkpoint is ever there in part under its name
            checkpoint.remove(removing)

    def _finals(self) -> list[str]:
        """The names of the finished ones, the newest first."""
        return sorted((path.name for path in self.folder.iterdir() if _FINAL.fullmatch(path.name)), reverse=True)

    def find(self, resume: str) -> Checkpoint | None:
        """The checkpoint to resume from.

        Args:
            resume: "auto": the newest whole one, or None if there is none at all. Damaged ones that are newer are named and set
                aside, under names that begin with `damaged-`. "none": None. Else the folder of one.

        Raises:
            CheckpointError: none of those that are there is whole, or the one that was asked for is not.
            UsageError: the run would come by newer checkpoints, which it does not write over.
        """
        names = on_first(self.ranks, f"listing {self.folder}", self._finals)
        finals = [self.folder / name for name in names]
        if resume == AUTO:
            return self._newest_whole(finals)
        found = None
        if resume != NONE:
            found, wrong = read(self.ranks, Path(resume))
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
            found, wrong = read(self.ranks, path)
            if found is not None:
                for other, why in damaged.items():
                    aside = on_first(self.ranks, f"setting {other} aside", lambda a=other: _set_aside(a))
                    self.say(f"DAMAGED: {other}: {'; '.join(why)}. Set aside as {aside}; using {path.name} instead")
                return found
            damaged[path] = wrong
        if damaged:
            said = "; ".join(f"{path.name}: {', '.join(wrong)}" for path, wrong in damaged.items())
            raise CheckpointError(
                f"{self.folder}: no checkpoint is whole: {said}; restore one, or pass another --output"
            )
        return None


def read(ranks: Ranks, path: Path) -> tuple[Checkpoint | None, list[str]]:
    """A checkpoint, if it is whole, and what is wrong with it, in words that name the files. All ranks call it; each reads its
    part of the files."""

    def complaints() -> list[str]:
        try:
            saved = checkpoint.read(path)
        except CheckpointError as error:
            return [str(error)]
        if not {"step", "settings"} <= saved.about.keys():
            return ["it is of no training run: its writer told of no step and settings"]
        mine = saved.files[ranks.rank :: ranks.size]
        return [f"{name} {complaint}" for name in mine if (complaint := saved.complaint(name))]

    wrong = [words for part in together(ranks, f"checking {path}", complaints) for words in part]
    if wrong:
        return None, list(dict.fromkeys(wrong))
    about = checkpoint.read(path).about
    return Checkpoint(path, about["step"], about["settings"]), []


def _set_aside(path: Path) -> str:
    """Rename a damaged checkpoint; returns its new name, under which nothing was before."""
    names = chain([f"damaged-{path.name}"], (f"damaged-{path.name}-{n}" for n in count(2)))
    name = next(name for name in names if not os.path.lexists(path.with_name(name)))
    path.rename(path.with_name(name))
    return name


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
