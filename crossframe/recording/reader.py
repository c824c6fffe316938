"""Reading a recording, whatever layout and world size it was made at."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.errors import CrossframeError, RecordingError
from crossframe.layout import Layout
from crossframe.mesh import check_rank
from crossframe.recording import lines
from crossframe.recording.index import Batch, RankIndex, read_index
from crossframe.recording.manifest import Manifest
from crossframe.recording.progress import Progress
from crossframe.recording.tensors import TensorFile
from crossframe.trace import Event

_OPEN_FILES = 64


@dataclass(frozen=True)
class Run:
    """A run of elements of one parameter, as one rank recorded it."""

    rank: int
    start: int
    stop: int
    dtype: str


class Recording:
    """A recording on disk, opened for reading. Lines are read when it is opened, tensors when they are asked for.

    File names are computed from ranks and steps and never read from the recording, and nothing in it is executed.
    """

    def __init__(self, directory: Path, manifest: Manifest, indexes: Sequence[RankIndex], num_steps: int) -> None:
        """Use `Recording.open`."""
        self.directory = directory
        self.manifest = manifest
        self.num_steps = num_steps
        self._indexes = tuple(indexes)
        self._progress = Progress(directory, manifest.world_size)
        self._files: dict[tuple[int, int], TensorFile] = {}

    @classmethod
    def open(cls, directory: str | Path, *, partial: bool = False) -> "Recording":
        """Open a recording.

        Args:
            partial: also accept one that is still being written or whose run was killed. Then what all ranks have as
                whole steps is there (`num_steps` of them), and nothing else.

        Raises:
            RecordingError: no such directory, no or a wrong manifest, a rank that is missing, no end, a damaged line.
        """
        path = Path(directory)
        if not path.is_dir():
            raise RecordingError(f"{path}: expected the directory of a recording, but there is none; check the path")
        manifest = Manifest.read(path)
        folders = [path / lines.rank_folder(rank) for rank in range(manifest.world_size)]
        absent = [folder.name for folder in folders if not (folder / lines.EVENTS_NAME).is_file()]
        if absent and not partial:
            raise RecordingError(
                f"{path}: expected {manifest.world_size} ranks, but {', '.join(absent[:4])} left no "
                f"{lines.EVENTS_NAME}; copy the whole directory, or record the run again"
            )
        indexes = [read_index(folder / lines.EVENTS_NAME, manifest, rank) for rank, folder in enumerate(folders)]
        num_steps = min(index.num_steps for index in indexes)
        unfinished = [rank for rank, index in enumerate(indexes) if not index.ended]
        if unfinished and not partial:
            raise RecordingError(
                f"{path}: cut off: rank {unfinished[0]} has no end, and {num_steps} of {manifest.steps} steps are "
                "whole on every rank; record the run again (Recording.open(..., partial=True) reads what is whole)"
            )
        return cls(path, manifest, indexes, num_steps)

    def twins(self) -> tuple["Recording", ...]:
        """The twins that were recorded with this run, in order (`crossframe.recording.twins`)."""
        found = []
        while (folder := self.directory / lines.twin_folder(len(found) + 1)).is_dir():
            found.append(Recording.open(folder))
        return tuple(found)

    def losses(self) -> np.ndarray:
        """Every rank's loss at every step: float64 of shape (num_steps, world_size)."""
        rows = [[index.losses[step] for index in self._indexes] for step in range(self.num_steps)]
        return np.array(rows, np.float64).reshape(self.num_steps, self.manifest.world_size)

    def steps_done(self) -> int:
        """How many steps all ranks have on disk by now. Cheap: each call reads only what was written since the last."""
        return self._progress.steps_done()

    def recorded_steps(self) -> tuple[int, ...]:
        """The steps whose tensors were recorded."""
        schedule = self.manifest.schedule
        return tuple(step for step in range(self.num_steps) if schedule.records(step, self.manifest.steps))

    def layouts(self) -> list[tuple[str, Layout]]:
        """(unit, layout) in the order of forward, the root first."""
        return list(self.manifest.units)

    def batch(self, step: int, rank: int) -> Batch:
        """What a rank was fed at a step."""
        self._check(step, rank)
        return self._indexes[rank].batches[step]

    def collectives(self, step: int, rank: int) -> list[Event]:
        """The collectives that a rank recorded at a step, in order."""
        self._check(step, rank)
        return list(self._indexes[rank].collectives.get(step, ()))

    def has(self, phase: str, step: int, name: str, rank: int | None = None) -> bool:
        """Whether any rank (or this one) recorded something of a parameter: an unused one has no gradient (R29)."""
        ranks = range(self.manifest.world_size) if rank is None else (rank,)
        return any((phase, step, name) in self._indexes[r].tensors for r in ranks)

    def runs(self, phase: str, step: int, name: str) -> list[Run]:
        """Which elements of a parameter each rank recorded, in rank order."""
        found = []
        for rank, index in enumerate(self._indexes):
            if line := index.tensors.get((phase, step, name)):
                found.append(Run(rank, line["start"], line["stop"], line["dtype"]))
        return found

    def full(self, phase: str, step: int, name: str, *, replica: int = 0) -> np.ndarray:
        """A parameter-shaped array, put together from the pieces of all ranks of one copy of the model.

        Args:
            phase: "parameters", "reduce" or "update".
            replica: which copy, on a mesh that replicates.

        Raises:
            RecordingError: pieces that do not hold every element exactly once, or that differ in dtype.
        """
        self._check(step, 0)
        spec = self.manifest.params[name]
        where = f"{self.directory}: step {step}, phase {phase!r}, parameter {name!r}"
        group = self.manifest.mesh.shard_group(replica * self.manifest.mesh.shard)
        runs = [run for run in self.runs(phase, step, name) if run.rank in group]
        dtypes = sorted({run.dtype for run in runs}) or [spec.dtype]
        if len(dtypes) > 1:
            raise RecordingError(f"{where}: expected one dtype on all ranks, got {dtypes}; record the run again")
        flat = np.empty(spec.numel, numpy_dtype(dtypes[0]))
        count = np.zeros(spec.numel, np.int64)
        for run in runs:
            flat[run.start : run.stop] = self._read(phase, step, name, run)
            count[run.start : run.stop] += 1
        if (count != 1).any():
            bad = int(np.flatnonzero(count != 1)[0])
            raise RecordingError(
                f"{where}: expected each of {spec.numel} elements from exactly one of ranks {list(group)}, but element "
                f"{bad} comes from {int(count[bad])}; the recorder's pieces are wrong, or a rank did not record it"
            )
        return flat.reshape(spec.shape)

    def local(self, step: int, rank: int, name: str) -> np.ndarray:
        """The gradient that one rank's own batch gave, parameter-shaped; RecordingError where it was not recorded."""
        self._check(step, rank)
        run = next((run for run in self.runs(lines.BACKWARD, step, name) if run.rank == rank), None)
        if run is None:
            raise RecordingError(
                f"{self.directory}: rank {rank} recorded no local gradient of {name!r} at step "
                f"{step}: they are recorded at the first {self.manifest.schedule.dense} steps"
            )
        return self._read(lines.BACKWARD, step, name, run).reshape(self.manifest.params[name].shape)

    def outputs(self, step: int) -> list[tuple[int, str]]:
        """(microbatch, unit) of every output that all ranks recorded at a step, in the order of forward."""
        self._check(step, 0)
        own = [{at[1:] for at in index.outputs if at[0] == step} for index in self._indexes]
        # The root, which is the whole model, ends last.
        order = {unit: place for place, (unit, _) in enumerate(self.manifest.units)} | {"": len(self.manifest.units)}
        return sorted(set.intersection(*own), key=lambda at: (at[0], order[at[1]]))

    def output(self, step: int, rank: int, microbatch: int, unit: str) -> np.ndarray:
        """What a unit's forward gave on a rank; RecordingError where it was not recorded."""
        self._check(step, rank)
        line = self._indexes[rank].outputs.get((step, microbatch, unit))
        if line is None:
            raise RecordingError(
                f"{self.directory}: rank {rank} recorded no output of unit {unit!r} at step {step}, microbatch {microbatch}"
            )
        flat = self._file(rank, step).read(lines.output_key(unit, microbatch), line["dtype"], math.prod(line["shape"]))
        return flat.reshape(line["shape"])

    def _read(self, phase: str, step: int, name: str, run: Run) -> np.ndarray:
        return self._file(run.rank, step).read(lines.tensor_key(phase, name), run.dtype, run.stop - run.start)

    def _file(self, rank: int, step: int) -> TensorFile:
        key = (rank, step)
        if key not in self._files:
            if len(self._files) >= _OPEN_FILES:
                self._files.clear()
            path = self.directory / lines.rank_folder(rank) / lines.step_file(step)
            self._files[key] = TensorFile(path)
        return self._files[key]

    def _check(self, step: int, rank: int) -> None:
        try:
            check_rank(rank, self.manifest.world_size)
        except CrossframeError as error:
            raise RecordingError(f"{self.directory}: {error}") from None
        if type(step) is not int or not 0 <= step < self.num_steps:
            raise RecordingError(f"{self.directory}: expected a step from 0 to {self.num_steps - 1}, got {step!r}")
