"""Writes the events of one rank into a recording that exists (`crossframe.recording.create`)."""

import hashlib
import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from crossframe.errors import RecordingError
from crossframe.files import folder_lock
from crossframe.mesh import check_rank
from crossframe.quoting import quote_path
from crossframe.recording import event_format
from crossframe.recording.dims import LEAST_DIMS, Order, channels_first
from crossframe.recording.manifest import MANIFEST_NAME, Manifest
from crossframe.recording.sample import sample_of
from crossframe.recording.sketch import Sketch, sketches_of
from crossframe.recording.step_tensors import dtype_name, write_tensors
from crossframe.trace import Event

_STRUCTURES = 4
"""Number of earlier step structures that a step is compared with."""
_LEAST_BYTES = 256
"""Tensors of fewer bytes are always stored, since a reference would need a longer line than it saves."""
_DIGEST_BYTES = 20

Pieces = Mapping[str, tuple[int, int, np.ndarray | Sketch]]
"""Parameter name to (start, stop, value): elements `start:stop` of the flattened parameter."""


class RecordingWriter:
    """Writes the events of one rank, step by step.

    A context manager: a normal exit finishes the recording, and an exception leaves it without its end, so that readers can tell.

    In each step, call the methods that apply, then `end_step`. The order is free except for `activation`. Arrays are copied
    immediately. The tensors of a step are written before the lines that refer to them, so a killed run leaves complete steps.

    If the manifest's detail is "sketch", arrays of parameters and activations with more than `WHOLE` elements are sketched
    here. A backend that sketches on its device passes the `Sketch` instead of the array.

    Raises:
        RecordingError: the manifest is missing or another one, or the rank was written already. In all methods: the step is not
            the open one; the manifest lacks the unit or parameter; a shape, range or dtype does not fit; something is recorded
            twice; or a tensor is recorded at a step that the schedule does not record.
    """

    def __init__(self, directory: str | Path, manifest: Manifest, rank: int) -> None:
        check_rank(rank, manifest.world_size)
        self.manifest = manifest
        self.rank = rank
        self._root = Path(directory)
        self._step = 0
        self._manifest_stat: tuple[int, ...] | None = None
        self._check_ours()
        self.folder = self._root / event_format.rank_folder(rank)
        # A job that overwrites deletes folders under this lock. Without it, this folder could appear in that job's recording.
        with self._writes(), folder_lock(self._root, shared=True):
            self._check_ours()
            try:
                self.folder.mkdir()
            except FileExistsError:
                raise RecordingError(
                    f"{quote_path(self.folder)}: written already; begin with create_recording"
                ) from None
        self._params = manifest.params
        self._units = manifest.unit_of
        self._dense_until = 0
        self._forget_step()
        # The digest of each buffer before the first step, and the buffers that have changed since.
        self._constant: dict[str, object] = {}
        self._changed: set[str] = set()
        # Keys in the file of the previous step, by the digest of the bytes.
        self._stored_before: dict[object, str] = {}
        # The structures of earlier steps, each with the step that has its lines.
        self._structures: deque[tuple[int, list[tuple[str, dict[str, Any]]]]] = deque(maxlen=_STRUCTURES)
        self._finished = False
        with self._writes():
            self._file = open(self.folder / event_format.EVENTS_NAME, "xb")  # noqa: SIM115 (closed in __exit__ or finish)
        self._sha256, self._content = hashlib.sha256(), hashlib.sha256()
        begin = event_format.encode("begin", {"manifest": manifest.sha256}).encode()
        self._sha256.update(begin)
        self._append(begin)

    def records(self, step: int) -> bool:
        """Whether tensors of this step are recorded."""
        return step < self._dense_until or self.manifest.schedule.records(step, self.manifest.steps)

    def is_dense(self, step: int) -> bool:
        """Whether tensors that are specific to this rank are recorded too."""
        return step < self._dense_until or self.manifest.schedule.is_dense(step)

    def open_window(self, stop: int) -> None:
        """Make all steps from the open one up to `stop` dense. All ranks of a run call this at the same step."""
        if type(stop) is not int or stop <= self._step:
            raise RecordingError(
                f"rank {self.rank}: expected the end of a dense window after step {self._step}, got {stop!r}"
            )
        self._dense_until = max(self._dense_until, stop)

    def environment(self, content: bytes) -> None:
        """State the environment of this rank's process, as the content of a file (`crossframe.environment`)."""
        with self._writes(), open(self.folder / event_format.ENVIRONMENT_NAME, "xb") as file:
            file.write(content)

    def batch(self, step: int, digest: str, sample_ids: Iterable[int], inputs: Iterable[tuple[int, int]] = ()) -> None:
        """Record this rank's batch: its sha256 in hex, the id of each sample in the data, and two numbers for each array
        (`crossframe.recording.batches.inputs_of`), if known."""
        event_format.check_digest(digest)
        fields: dict[str, Any] = {"digest": digest, "sample_ids": [int(i) for i in sample_ids]}
        if stated := [list(each) for each in inputs]:
            fields["inputs"] = stated
        self._add("batch", self._at(step, event_format.BATCH, "batch") | fields, once=event_format.BATCH)

    def loss(
        self, step: int, value: float, backwards: Sequence[tuple[int, float]] = (), *, num_losses: int = 1
    ) -> None:
        """Record this rank's loss, before any average over ranks.

        Args:
            backwards: where optimizers take turns in the step, (number of forwards before it, loss) of each backward.
            num_losses: the number of losses of which it is the sum, one for each backward; 1 if the loop stated the sum.
        """
        fields: dict[str, Any] = {"value": float(value)} | ({"num_losses": num_losses} if num_losses > 1 else {})
        if backwards:
            fields["backwards"] = [[int(forwards), float(loss)] for forwards, loss in backwards]
        self._add("loss", self._at(step, event_format.FORWARD, "loss") | fields, once=event_format.FORWARD)

    def grad_norm(self, step: int, value: float) -> None:
        """Record the gradient norm that the loop computed, before clipping."""
        fields = self._at(step, event_format.NORM, "norm") | {"value": float(value)}
        self._add("norm", fields, once=event_format.NORM)

    def activation(
        self,
        step: int,
        microbatch: int,
        module: str,
        use: str,
        value: np.ndarray | Sketch,
        shape: Sequence[int] | None = None,
        *,
        order: Order = Order.TORCH,
        moved: Sketch | None = None,
        operator: str = "",
    ) -> None:
        """Record the input or output of a module in this rank's forward. Call this in the order of forward.

        Args:
            module: canonical name; "" is the model. A further call of a module has a name of its own
                (`crossframe.recording.module_calls`).
            use: "input" or "output".
            value: an array, or its sketch.
            shape: the shape, if `value` is a sketch.
            order: the known order of dims.
            moved: if `value` is a sketch and its order is unknown, the sketch with channels first.
            operator: the framework's name of the operator that computed it; "" if unknown.
        """
        where = f"rank {self.rank}, step {step}, microbatch {microbatch}, {use} of module {module!r}"
        self._check_dense(step, "activations")
        if type(microbatch) is not int or microbatch < 0:
            raise RecordingError(f"{where}: expected a microbatch of 0 or more")
        if use not in (event_format.INPUT, event_format.OUTPUT):
            raise RecordingError(f"{where}: expected 'input' or 'output', got {use!r}")
        if isinstance(value, Sketch) and (shape is None or math.prod(shape) != value.numel):
            raise RecordingError(f"{where}: expected the shape of {value.numel} sketched elements, got {shape}")
        sizes = list(value.shape if isinstance(value, np.ndarray) else shape or ())
        known = order is Order.TORCH
        if not known and len(sizes) < LEAST_DIMS:
            raise RecordingError(
                f"{where}: expected {LEAST_DIMS} dims or more in an order that is not known, got {sizes}"
            )
        if (moved is None) == (isinstance(value, Sketch) and not known):
            raise RecordingError(
                f"{where}: expected the sketch with channels first exactly where its order is not known"
            )
        key = event_format.activation_key(use, microbatch, module)
        if isinstance(value, np.ndarray) and not known and value.size > self.manifest.most_in_full:
            _dtype(value)
            moved = sketches_of([channels_first(value)])[0]
        unit = self.manifest.maker(module, use)
        fields = self._at(step, event_format.FORWARD, use, unit=unit, name=module, microbatch=microbatch)
        fields |= {"shape": [int(size) for size in sizes], "order": order.value}
        if operator:
            fields["operator"] = operator
        self._keep("activation", fields, key, value, 0, math.prod(sizes))
        if moved is not None:
            fields["channels_first"] = self._keep_sketch(moved)

    def turns(self, forwards: Mapping[str, int]) -> None:
        """State, before the tensors of a step in which optimizers take turns, how many forwards were before the optimizer of each
        parameter stepped."""
        self._turns = dict(forwards)

    def parameters(self, step: int, unit: str, pieces: Pieces) -> None:
        """Record this rank's pieces of the unit's parameters before the step. Required before step 0 only. A `Sketch` needs a
        sample (`crossframe.recording.sample`) to be found under another name."""
        self._put(event_format.PARAMETERS, step, unit, pieces)

    def unsharded(self, step: int, unit: str, params: Mapping[str, np.ndarray | Sketch]) -> None:
        """Record the full parameters of a unit in this rank's first forward of the step, each in its shape."""
        self._whole(event_format.UNSHARDED, "unsharded parameter", step, unit, params)

    def local_grads(self, step: int, unit: str, grads: Mapping[str, np.ndarray | Sketch]) -> None:
        """Record the full gradients of this rank's own batch, before any reduction, each in its parameter's shape."""
        self._whole(event_format.BACKWARD, "local gradient", step, unit, grads)

    def reduced_grads(self, step: int, unit: str, pieces: Pieces) -> None:
        """Record this rank's pieces of the gradients that its optimizer gets."""
        self._put(event_format.REDUCE, step, unit, pieces)

    def state(self, step: int, unit: str, slot: str, pieces: Pieces) -> None:
        """Record this rank's pieces of an optimizer state entry, after the optimizer's step.

        Args:
            slot: name of the entry in torch: "exp_avg", "exp_avg_sq", "momentum_buffer".
        """
        event_format.check_slot(slot)
        self._put(event_format.STATE, step, unit, pieces, slot)

    def counts(self, step: int, counts: Mapping[str, float]) -> None:
        """Record the optimizer's count of its steps for each parameter, after its step."""
        for name, value in counts.items():
            if name not in self._units:
                raise RecordingError(f"rank {self.rank}, step {step}: the manifest has no parameter {name!r}")
            fields = self._at(step, event_format.STATE, "step", unit=self._units[name], name=name)
            self._add("count", fields, once=f"count of {name}")
            self._counts.append(float(value))

    def updated(self, step: int, unit: str, pieces: Pieces) -> None:
        """Record this rank's pieces of the parameters after the optimizer's step."""
        self._put(event_format.UPDATE, step, unit, pieces)

    def buffers(
        self,
        step: int,
        values: Mapping[str, tuple[np.ndarray | Sketch, Sequence[int]]],
        use: str = event_format.CHANGED,
    ) -> None:
        """Record tensors of the model that are no parameters, such as the running mean of a batch norm, as this rank has them.

        Those that have never changed since the first step are left out.

        Args:
            values: (value, shape) by canonical name.
            use: `INITIAL` before the first step, `CHANGED` after a step.
        """
        if not self.records(step) and use != event_format.INITIAL:
            raise RecordingError(f"step {step}: the schedule records no buffers here; ask records(step) first")
        if use not in (event_format.INITIAL, event_format.CHANGED) or (use == event_format.INITIAL and step):
            raise RecordingError(f"rank {self.rank}, step {step}: expected buffers after the step, got {use!r} ones")
        self._has_buffers |= use == event_format.CHANGED
        for name, (value, shape) in values.items():
            numel = _numel(value)
            if math.prod(shape) != numel:
                raise RecordingError(
                    f"rank {self.rank}, step {step}, buffer {name!r}: expected {numel} elements, got shape {list(shape)}"
                )
            digest = _digest_of(value)
            if use == event_format.INITIAL:
                self._constant[name] = digest
            elif name not in self._changed:
                if self._constant.get(name) == digest:
                    continue
                self._changed.add(name)
            unit = self.manifest.maker(name, event_format.INPUT)
            fields = self._at(step, event_format.BUFFERS, use, unit=unit, name=name)
            fields |= {"shape": [int(size) for size in shape]}
            self._keep("buffer", fields, event_format.tensor_key(event_format.BUFFERS, name, use), value, 0, numel)

    def disagreement(
        self, step: int, phase: str, unit: str, name: str, use: str, difference: float, axis: str, ranks: Sequence[int]
    ) -> None:
        """Record that the ranks which compute this replica together have other values of a tensor.

        Args:
            use: "" for that of the phase, or the entry of the optimizer state.
            difference: the largest norm(other - first) / norm(first).
            axis: the mesh axis along which the ranks lie.
            ranks: those whose values are not those of the first one.
        """
        at = self._at(step, phase, use or event_format.TENSOR_USES[phase], unit=unit, name=name)
        self._add("disagreement", at | {"difference": float(difference), "axis": axis, "ranks": list(ranks)})

    def collectives(self, step: int, events: Sequence[Event]) -> None:
        """Record the collectives of this rank, in order."""
        for event in events:
            at = self._at(step, event_format.COLLECTIVE, "collective", unit=event.unit)
            self._add("collective", at | {"collective": event.to_json()})

    def end_step(self, step: int, rates: Sequence[float] = ()) -> None:
        """Write the step to disk. A step must have a batch and a loss.

        Args:
            rates: the learning rate of each parameter group at this step; empty if unknown.
        """
        self._check_step(step)
        missing = [
            what
            for what, key in (("batch", event_format.BATCH), ("loss", event_format.FORWARD))
            if key not in self._seen
        ]
        if missing:
            raise RecordingError(f"rank {self.rank}, step {step} ends without its {' and '.join(missing)}")
        self._check_ours()
        if self._sketches:
            self._tensors[event_format.SKETCHES_KEY] = np.concatenate(self._sketches)
        if self._samples:
            self._tensors[event_format.SAMPLES_KEY] = np.concatenate(self._samples)
        with self._writes():
            sha256 = write_tensors(self.folder / event_format.step_file(step), self._tensors) if self._tensors else ""
        summary: dict[str, Any] = {"step": step, "sha256": sha256}
        if (other := self._same_structure(step)) is not None:
            summary["as"] = other
            self._lines = [(event, fields) for event, fields in self._lines if event not in event_format.STRUCTURE]
        if rates:
            summary["rates"] = [float(rate) for rate in rates]
        if self._has_buffers and self._constant.keys() | self._changed:
            summary["buffers"] = True
        if self._counts:
            summary["counts"] = self._counts if len(set(self._counts)) > 1 else self._counts[0]
        self._write("".join(event_format.encode(event, fields) for event, fields in [*self._lines, ("step", summary)]))
        self._stored_before, self._step = self._stored, step + 1
        self._forget_step()

    def leave_step(self) -> None:
        """Forget a step that has begun and will not end, unless it is the first one."""
        if self._step:
            self._forget_step()

    def _forget_step(self) -> None:
        self._lines: list[tuple[str, dict[str, Any]]] = []
        self._seen: set[str] = set()
        self._tensors: dict[str, np.ndarray] = {}
        self._stored: dict[object, str] = {}  # keys in the file of this step, by the digest of the bytes
        self._sketches: list[np.ndarray] = []
        self._samples: list[np.ndarray] = []
        self._turns: dict[str, int] = {}
        self._counts: list[float] = []
        self._has_buffers = False

    def _same_structure(self, step: int) -> int | None:
        """An earlier step of the same structure as this step; None if there is none."""
        own = [
            (event, {name: value for name, value in fields.items() if name != "step"})
            for event, fields in self._lines
            if event in event_format.STRUCTURE
        ]
        if not own:
            return None
        for other, known in self._structures:
            if own == known:
                return other
        self._structures.append((step, own))
        return None

    def finish(self) -> None:
        """Write the end. RecordingError if steps are missing."""
        if self._finished:
            return
        wanted = self.manifest.steps
        if self._lines or self._step == 0 or wanted not in (None, self._step):
            raise RecordingError(
                f"rank {self.rank}: expected {'at least one' if wanted is None else wanted} whole steps, as the manifest says, "
                f"but {self._step} ended; call end_step for each"
            )
        self._check_ours()
        digests = {"sha256": self._sha256.hexdigest(), "content": self._content.hexdigest()}
        self._write(event_format.encode("end", {"steps": self._step} | digests))
        self._file.close()
        self._finished = True

    def _write(self, text: str) -> None:
        content = text.encode()
        self._sha256.update(content)
        self._content.update(content)
        self._append(content)

    def _append(self, content: bytes) -> None:
        with self._writes():
            self._file.write(content)
            self._file.flush()

    def _check_ours(self) -> None:
        """Raise RecordingError if the recording is not the one that this rank opened. Reads the manifest if it changed."""
        path = self._root / MANIFEST_NAME
        now = _identity(path)
        if now is None or now != self._manifest_stat:
            found = Manifest.read(self._root)
            if found.token != self.manifest.token:
                raise RecordingError(
                    f"{quote_path(path)}: this is the recording of another job, not the one that rank {self.rank} "
                    "writes; record this run again into another directory"
                )
            if found.to_json() != json.loads(json.dumps(self.manifest.to_json())):
                raise RecordingError(
                    f"{quote_path(path)}: not what rank {self.rank} is about to record; all ranks "
                    "and the manifest must describe one run: use the same settings everywhere"
                )
            self._manifest_stat = now

    @contextmanager
    def _writes(self) -> Iterator[None]:
        """Convert errors of the disk to RecordingError."""
        try:
            yield
        except OSError as error:
            self._check_ours()
            raise RecordingError(
                f"{quote_path(self.folder)}: rank {self.rank}, step {self._step}: cannot be written ({error.strerror or error}); "
                "make space there, or record into another directory"
            ) from error

    def __enter__(self) -> "RecordingWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            with suppress(OSError):  # content that could not be written is not written again
                self._file.close()

    def _check_dense(self, step: int, what: str) -> None:
        if not self.is_dense(step):
            raise RecordingError(
                f"step {step}: {what} are recorded at dense steps only: the first {self.manifest.schedule.dense}, as "
                "'schedule.dense' says, and windows"
            )

    def _check_step(self, step: int) -> None:
        steps = self.manifest.steps
        if step != self._step or (steps is not None and step >= steps):
            of = f" of {steps}" if steps is not None else ""
            raise RecordingError(
                f"rank {self.rank}: expected step {self._step}{of}, got {step}; "
                "steps are recorded in order, each closed by end_step"
            )

    def _at(self, step: int, phase: str, use: str, **of: Any) -> dict[str, Any]:
        """The fields of a line of this rank that identify its subject (`event_format.place`)."""
        return event_format.place(step, self.rank, phase, use, **of)

    def _add(self, event: str, fields: dict[str, Any], once: str = "") -> None:
        self._check_step(fields["step"])
        if once in self._seen:
            raise RecordingError(f"rank {self.rank}, step {fields['step']}: {once!r} recorded twice")
        if once:
            self._seen.add(once)
        self._lines.append((event, fields))

    def _whole(self, phase: str, what: str, step: int, unit: str, arrays: Mapping[str, np.ndarray | Sketch]) -> None:
        """Record parameters, or tensors of their shape, of which this rank has all elements."""
        self._check_dense(step, f"{what}s")
        pieces = {}
        for name, value in arrays.items():
            shape = self._params[name].shape if name in self._params else None
            if isinstance(value, np.ndarray) and shape not in (None, value.shape):
                raise RecordingError(
                    f"rank {self.rank}, step {step}: the {what} of {name!r}: expected shape {shape}, got {value.shape}"
                )
            pieces[name] = (0, _numel(value), value)
        self._put(phase, step, unit, pieces)

    def _put(self, phase: str, step: int, unit: str, pieces: Pieces, slot: str = "") -> None:
        if not self.records(step):
            raise RecordingError(f"step {step}: the schedule records no tensors here; ask records(step) first")
        for name, (start, stop, value) in pieces.items():
            where = f"rank {self.rank}, step {step}, phase {phase!r}, parameter {name!r}"
            if self._units.get(name) != unit:
                raise RecordingError(f"{where}: expected a parameter of unit {unit!r}, as the manifest has them")
            spec = self._params[name]
            size = _numel(value)
            if not 0 <= start <= stop <= spec.numel or size != stop - start:
                raise RecordingError(
                    f"{where}: expected {stop - start} elements, {start}:{stop} of {spec.numel}, got {size}"
                )
            dtype = _dtype(value)
            if phase in (event_format.PARAMETERS, event_format.UPDATE) and dtype != spec.dtype:
                raise RecordingError(f"{where}: expected {spec.dtype} (shards stay so, R33), got {dtype}")
            if start == stop:
                continue
            use, microbatch = slot or event_format.TENSOR_USES[phase], self._turns.get(name, 0)
            fields = self._at(step, phase, use, unit=unit, name=name, microbatch=microbatch)
            fields |= {"start": int(start), "stop": int(stop)}
            self._keep("tensor", fields, event_format.tensor_key(phase, name, slot), value, int(start), spec.numel)

    def _keep(
        self,
        event: str,
        fields: dict[str, Any],
        key: str,
        value: np.ndarray | Sketch,
        start: int,
        numel: int,
    ) -> None:
        """Add a tensor, or its sketch, to the step's file, and its line to the step's lines.

        Args:
            numel: number of elements of the whole tensor.
        """
        if isinstance(value, np.ndarray) and numel > self.manifest.most_in_full:
            _dtype(value)
            sample = sample_of(value, start) if fields["phase"] == event_format.PARAMETERS else None
            value = replace(sketches_of([value], start)[0], sample=sample)
        fields["dtype"] = _dtype(value)
        self._add(event, fields, once=key)
        if isinstance(value, Sketch):
            fields["sketch"] = self._keep_sketch(value)
            if value.sample is not None:
                items, num = value.sample.to_items(start), sum(map(len, self._samples))
                fields["sample"] = [num, num + len(items)]
                self._samples.append(items)
        else:
            fields |= self._store(key, np.array(value, copy=True, order="C").reshape(-1))

    def _keep_sketch(self, sketch: Sketch) -> int:
        """Add a sketch to the step's file; returns its row."""
        if sketch.seed:
            raise RecordingError(
                f"rank {self.rank}: expected a sketch whose keys depend on no name, got one of {sketch.seed!r}, as up to format "
                "6; record the run again"
            )
        self._sketches.append(sketch.to_row())
        return len(self._sketches) - 1

    def _store(self, key: str, flat: np.ndarray) -> dict[str, Any]:
        """Add elements to the step's file. If it has the same bytes already, or the file of the previous step has them, return
        the fields of a reference instead."""
        if flat.nbytes >= _LEAST_BYTES:
            digest = _digest_of(flat)
            if (at := self._stored.get(digest)) is not None:
                return {"at": at}
            if (at := self._stored_before.get(digest)) is not None:
                return {"at": at, "before": True}
            self._stored[digest] = key
        self._tensors[key] = flat
        return {}


def _numel(value: np.ndarray | Sketch) -> int:
    return value.numel if isinstance(value, Sketch) else value.size


def _dtype(value: np.ndarray | Sketch) -> str:
    """The dtype of the elements; ParamError if it is none that can be recorded."""
    return value.dtype if isinstance(value, Sketch) else dtype_name(value.dtype)


def _digest_of(value: np.ndarray | Sketch) -> object:
    """A value that two tensors share only if they have the same bits."""
    if isinstance(value, Sketch):
        return value.dtype, value.numel, value.fingerprint, value.num_not_finite
    flat = np.ascontiguousarray(value).reshape(-1)
    return value.dtype.name, hashlib.blake2b(flat.view(np.uint8).data, digest_size=_DIGEST_BYTES).digest()


def _identity(file: Path) -> tuple[int, ...] | None:
    """Values that change when a file is replaced; None if it does not exist."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
