"""Writing a recording: the manifest by one process, then one `RecordingWriter` a rank."""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from crossframe.errors import RecordingError
from crossframe.mesh import check_rank
from crossframe.recording import lines
from crossframe.recording.manifest import MANIFEST_NAME, Manifest
from crossframe.recording.tensors import dtype_name, write_tensors
from crossframe.trace import Event

_FOLDERS = ("rank[0-9]*", "twin[0-9]*")
_MANIFESTS = (MANIFEST_NAME, MANIFEST_NAME + ".part")

Pieces = Mapping[str, tuple[int, int, np.ndarray]]
"""Parameter name to (start, stop, array): elements `start:stop` of the parameter taken as one row-major line."""


def create_recording(directory: str | Path, manifest: Manifest, *, overwrite: bool = False) -> Path:
    """Begin a recording: make the directory and write `manifest.json`. One process does this, before any writer opens.

    Args:
        overwrite: replace a recording that is there. Only what a recording consists of is deleted.

    Raises:
        RecordingError: a directory that holds something else, or a recording where `overwrite` is false.
    """
    path = Path(directory)
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise RecordingError(f"{path}: expected a directory to record into, or none, but it is a file or a link")
    try:
        json.dumps(manifest.to_json(), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordingError(f"manifest fields 'settings' and 'versions': expected JSON, but {error}") from None
    if path.is_dir() and any(path.iterdir()):
        _clear(path, overwrite)
    path.mkdir(parents=True, exist_ok=True)
    manifest.write(path)
    return path


def _clear(path: Path, overwrite: bool) -> None:
    """Delete a recording, or what is left of one that was interrupted while it was begun. The manifest stays until the new one
    takes its place, so that whatever interrupts this leaves something that can be cleared again."""
    try:
        Manifest.read(path)
    except RecordingError as error:
        begun = _MANIFESTS[1:]
        if not all(entry.name in begun or any(map(entry.match, _FOLDERS)) for entry in path.iterdir()):
            raise RecordingError(
                f"{path}: not empty and not a recording that can be read, so nothing in it is deleted; choose another "
                f"directory ({error})"
            ) from None
    if not overwrite:
        raise RecordingError(
            f"{path}: holds a recording already; choose another directory, or overwrite it (--overwrite, overwrite=True)"
        )
    twins = [entry for entry in path.glob(_FOLDERS[1]) if entry.is_dir() and not entry.is_symlink()]
    inside = [entry for folder in (path, *twins) for entry in folder.glob(_FOLDERS[0])]
    folders = [entry for entry in inside if entry.is_dir() and not entry.is_symlink()]
    foreign = [file for folder in folders for file in folder.iterdir() if not _is_ours(file)]
    foreign += [
        file for twin in twins for file in twin.iterdir() if file not in folders and file.name not in _MANIFESTS
    ]
    if foreign:
        raise RecordingError(f"{path}: {foreign[0].name!r} is no part of a recording; move it, nothing was deleted")
    for folder in (*folders, *twins):
        shutil.rmtree(folder)


def _is_ours(file: Path) -> bool:
    ours = file.name == lines.EVENTS_NAME or file.match("step*.safetensors") or file.match("step*.safetensors.part")
    return ours and file.is_file()


class RecordingWriter:
    """Writes what one rank saw, step by step. A context manager: leaving it normally finishes the recording, an
    exception leaves it without its end, so that a reader can tell.

    Within a step call what applies, in any order, then `end_step`. Arrays are copied at once. A step's tensors reach
    the disk before the lines that speak of them, so what a killed run leaves is whole up to some step.

    Raises:
        RecordingError: no manifest, or another than this; a rank that was written already; and in all methods: another
            step than the one that is open, a unit or parameter that the manifest has not, a shape, range or dtype that
            does not fit it, the same thing twice, a tensor at a step that the schedule does not record.
    """

    def __init__(self, directory: str | Path, manifest: Manifest, rank: int) -> None:
        check_rank(rank, manifest.world_size)
        self.manifest = manifest
        self.rank = rank
        root = Path(directory)
        if Manifest.read(root).to_json() != json.loads(json.dumps(manifest.to_json())):
            raise RecordingError(
                f"{root / MANIFEST_NAME}: not what rank {rank} is about to record; all ranks "
                "and the manifest must describe one run: use the same settings everywhere"
            )
        self.folder = root / lines.rank_folder(rank)
        try:
            self.folder.mkdir()
        except FileExistsError:
            raise RecordingError(f"{self.folder}: written already; begin with create_recording") from None
        self._params = manifest.params
        self._units = manifest.unit_of
        self._unit_names = {"", *(unit for unit, _ in manifest.units)}
        self._step = 0
        self._lines: list[str] = []
        self._seen: set[str] = set()
        self._tensors: dict[str, np.ndarray] = {}
        self._finished = False
        self._file = open(self.folder / lines.EVENTS_NAME, "xb")  # noqa: SIM115 (closed in __exit__ or finish)

    def records(self, step: int) -> bool:
        """Whether the schedule records tensors of this step."""
        return self.manifest.schedule.records(step, self.manifest.steps)

    def batch(self, step: int, digest: str, sample_ids: Iterable[int]) -> None:
        """What this rank is fed: sha256 of the batch in hex, and the number of each sample in the data."""
        lines.check_digest(digest)
        fields = {"digest": digest, "sample_ids": [int(i) for i in sample_ids]}
        self._add("batch", lines.place(step, self.rank, lines.BATCH, "batch") | fields, once=lines.BATCH)

    def loss(self, step: int, value: float) -> None:
        """This rank's loss, before any averaging over ranks."""
        fields = {"value": float(value)}
        self._add("loss", lines.place(step, self.rank, lines.FORWARD, "loss") | fields, once=lines.FORWARD)

    def output(self, step: int, microbatch: int, unit: str, output: np.ndarray) -> None:
        """What a unit's forward gave on this rank; of the root unit "" that of the whole model."""
        self._check_dense(step, "outputs")
        where = f"rank {self.rank}, step {step}, microbatch {microbatch}, output of unit {unit!r}"
        if unit not in self._unit_names:
            raise RecordingError(f"{where}: expected a unit among {sorted(self._unit_names)}, as the manifest has them")
        if type(microbatch) is not int or microbatch < 0:
            raise RecordingError(f"{where}: expected a microbatch of 0 or more")
        key = lines.output_key(unit, microbatch)
        fields = {"shape": list(output.shape), "dtype": dtype_name(output.dtype)}
        at = lines.place(step, self.rank, lines.FORWARD, "output", unit=unit, microbatch=microbatch)
        self._add("output", at | fields, once=key)
        self._tensors[key] = np.array(output, copy=True, order="C").reshape(-1)

    def parameters(self, step: int, unit: str, pieces: Pieces) -> None:
        """What this rank's shard holds of the unit's parameters before the step. Asked for before step 0 alone."""
        self._put(lines.PARAMETERS, step, unit, pieces)

    def local_grads(self, step: int, unit: str, grads: Mapping[str, np.ndarray]) -> None:
        """The full gradients that this rank's own batch gives, before any reduction, each in its parameter's shape."""
        self._check_dense(step, "local gradients")
        for name, grad in grads.items():
            if name in self._params and grad.shape != self._params[name].shape:
                raise RecordingError(
                    f"rank {self.rank}, step {step}: the local gradient of {name!r}: expected shape "
                    f"{self._params[name].shape}, got {grad.shape}"
                )
        self._put(lines.BACKWARD, step, unit, {name: (0, grad.size, grad) for name, grad in grads.items()})

    def reduced_grads(self, step: int, unit: str, pieces: Pieces) -> None:
        """This rank's pieces of the gradients that its optimizer sees."""
        self._put(lines.REDUCE, step, unit, pieces)

    def updated(self, step: int, unit: str, pieces: Pieces) -> None:
        """This rank's pieces of the parameters after the optimizer's step."""
        self._put(lines.UPDATE, step, unit, pieces)

    def collectives(self, step: int, events: Sequence[Event]) -> None:
        """The collectives that this rank took part in, in order."""
        for event in events:
            self._add(
                "collective",
                lines.place(step, self.rank, lines.COLLECTIVE, "collective", unit=event.unit)
                | {"collective": event.to_json()},
            )

    def end_step(self, step: int) -> None:
        """Write the step to disk. It needs a batch and a loss."""
        self._check_step(step)
        missing = [what for what, key in (("batch", lines.BATCH), ("loss", lines.FORWARD)) if key not in self._seen]
        if missing:
            raise RecordingError(f"rank {self.rank}, step {step} ends without its {' and '.join(missing)}")
        if self._tensors:
            write_tensors(self.folder / lines.step_file(step), self._tensors)
        self._lines.append(lines.encode("step", {"step": step}))
        self._file.write("".join(self._lines).encode())
        self._file.flush()
        self._lines, self._seen, self._tensors, self._step = [], set(), {}, step + 1

    def finish(self) -> None:
        """Write the end. RecordingError if steps are missing."""
        if self._finished:
            return
        if self._step != self.manifest.steps or self._lines:
            raise RecordingError(
                f"rank {self.rank}: expected {self.manifest.steps} whole steps, as the manifest says, "
                f"but {self._step} ended; call end_step for each"
            )
        self._file.write(lines.encode("end", {"steps": self._step}).encode())
        self._file.close()
        self._finished = True

    def __enter__(self) -> "RecordingWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self._file.close()

    def _check_dense(self, step: int, what: str) -> None:
        if not self.manifest.schedule.is_dense(step):
            raise RecordingError(
                f"step {step}: {what} are recorded at the first {self.manifest.schedule.dense} steps only, as "
                "'schedule.dense' says"
            )

    def _check_step(self, step: int) -> None:
        if step != self._step or step >= self.manifest.steps:
            raise RecordingError(
                f"rank {self.rank}: expected step {self._step} of {self.manifest.steps}, got {step}; "
                "steps are recorded in order, each closed by end_step"
            )

    def _add(self, event: str, fields: dict[str, Any], once: str = "") -> None:
        self._check_step(fields["step"])
        if once in self._seen:
            raise RecordingError(f"rank {self.rank}, step {fields['step']}: {once!r} recorded twice")
        if once:
            self._seen.add(once)
        self._lines.append(lines.encode(event, fields))

    def _put(self, phase: str, step: int, unit: str, pieces: Pieces) -> None:
        if not self.records(step):
            raise RecordingError(f"step {step}: the schedule records no tensors here; ask records(step) first")
        for name, (start, stop, array) in pieces.items():
            where = f"rank {self.rank}, step {step}, phase {phase!r}, parameter {name!r}"
            if self._units.get(name) != unit:
                raise RecordingError(f"{where}: expected a parameter of unit {unit!r}, as the manifest has them")
            spec = self._params[name]
            if not 0 <= start <= stop <= spec.numel or array.size != stop - start:
                raise RecordingError(
                    f"{where}: expected {stop - start} elements, {start}:{stop} of {spec.numel}, got "
                    f"an array of {array.size}"
                )
            dtype = dtype_name(array.dtype)
            if phase in (lines.PARAMETERS, lines.UPDATE) and dtype != spec.dtype:
                raise RecordingError(f"{where}: expected {spec.dtype} (shards stay so, R33), got {dtype}")
            if start == stop:
                continue
            key = lines.tensor_key(phase, name)
            fields = {"start": int(start), "stop": int(stop), "dtype": dtype}
            use = lines.TENSOR_USES[phase]
            self._add("tensor", lines.place(step, self.rank, phase, use, unit=unit, name=name) | fields, once=key)
            self._tensors[key] = np.array(array, copy=True, order="C").reshape(-1)
