"""Reads recordings of any layout and world size."""

import copy
import functools
import math
import operator
import os
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.errors import CrossframeError, RecordingError
from crossframe.layout import Layout
from crossframe.mesh import check_rank
from crossframe.quoting import quote, quote_path
from crossframe.recording import event_format
from crossframe.recording.batches import Batch
from crossframe.recording.dims import Order, channels_first, channels_first_shape
from crossframe.recording.element_ranges import ElementRange, StepRanges, SummedSketches
from crossframe.recording.event_index import RankIndex, UnequalRanks, parse_index, read_index
from crossframe.recording.golden_file import Golden, GoldenStep, StoredSpread
from crossframe.recording.manifest import Manifest
from crossframe.recording.progress import Progress
from crossframe.recording.sample import Sample, merged
from crossframe.recording.sketch import NUM_SUMS, ROW, Sketch, sketches_of
from crossframe.recording.step_tensors import TensorFile
from crossframe.trace import Event

_OPEN_FILES = 64
"""Number of verified step files that are kept, or those of three steps if there are more ranks."""
_NAMED = 8
"""The number of unfinished ranks that are named."""
_STEPS = 4
"""Number of steps whose ranges and summed sketches are kept."""


class Recording:
    """A recording on disk, opened for reading. Lines are read when it is opened, and tensors on demand.

    File names are computed from ranks and steps, never read from the recording, and nothing in it is executed.

    Attributes:
        golden: the content of the file, if this is a golden.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        indexes: Sequence[RankIndex],
        num_steps: int,
        golden: Golden | None = None,
    ) -> None:
        """Use `Recording.open`."""
        self.directory = directory
        self.golden = golden
        self.manifest = manifest
        self.num_steps = num_steps
        self._indexes = tuple(indexes)
        self._progress = Progress(directory, manifest.world_size)
        self._files: dict[tuple[int, int], TensorFile] = {}
        self._ranges: dict[int, StepRanges] = {}
        self._kinds: dict[tuple[int, ...], StepRanges] = {}
        self._summed: dict[tuple[int, int], SummedSketches] = {}
        self._moved: frozenset[tuple[str, str]] = frozenset()
        self._views: dict[frozenset[tuple[str, str]], Recording] = {}

    @classmethod
    def open(cls, directory: str | Path, *, partial: bool = False) -> "Recording":
        """Open a recording or a golden, and verify the checksums of its manifest and lines.

        Args:
            partial: also accept a recording that is being written or whose run was killed. It then has the `num_steps` steps
                that are complete on all ranks.

        Raises:
            RecordingError: there is no such directory, the manifest is missing or invalid, a rank or the end is missing, or a
                line is damaged.
        """
        path = Path(directory)
        at = quote_path(path)
        if os.path.isfile(path):
            return cls.of_golden(path, Golden.read(path))
        if not os.path.isdir(path):
            raise RecordingError(f"{at}: expected the directory of a recording, but there is none; check the path")
        manifest = Manifest.read(path)
        files = [
            path / event_format.rank_folder(rank) / event_format.EVENTS_NAME for rank in range(manifest.world_size)
        ]
        absent = list(islice((file.parent.name for file in files if not os.path.isfile(file)), 4))
        if absent and not partial:
            raise RecordingError(
                f"{at}: expected {manifest.world_size} ranks, but {', '.join(absent)} left no {event_format.EVENTS_NAME}; copy "
                "the whole directory, or record the run again"
            )
        indexes = [read_index(file, manifest, rank) for rank, file in enumerate(files)]
        num_steps = min(index.num_steps for index in indexes)
        unfinished = [rank for rank, index in enumerate(indexes) if not index.ended]
        if unfinished and not partial:
            raise RecordingError(
                f"{at}: cut off: {_without_end(indexes, unfinished)}, and {num_steps} of {manifest.steps or 'all'} steps are "
                "whole on every rank; record the run again (Recording.open(..., partial=True) reads what is whole)"
            )
        if not partial and any(index.num_steps != num_steps for index in indexes):
            steps = [index.num_steps for index in indexes]
            raise RecordingError(
                f"{at}: ranks ended after {quote(steps)} steps; all must record the same, record it again"
            )
        return cls(path, manifest, indexes, num_steps)

    @classmethod
    def of_golden(cls, path: Path, golden: Golden) -> "Recording":
        """A recording whose content is that of a golden.

        Args:
            path: of its file, for names and messages.
        """
        manifest = Manifest.from_bytes(golden.manifest, quote_path(path))
        indexes = [parse_index(content, path, manifest, rank) for rank, content in enumerate(golden.lines)]
        num_steps = min((index.num_steps for index in indexes), default=0)
        if len(indexes) != manifest.world_size or any(
            not index.ended or len(places) != num_steps for index, places in zip(indexes, golden.places, strict=True)
        ):
            raise RecordingError(f"{quote_path(path)}: damaged: not all steps of all ranks; restore the file")
        return cls(path, manifest, indexes, num_steps, golden)

    @property
    def stored_spread(self) -> StoredSpread | None:
        """The spread of perturbed runs that a golden has instead of them; None if there is none."""
        return None if self.golden is None else self.golden.spread

    def perturbed_runs(self) -> tuple["Recording", ...]:
        """The perturbed runs that were recorded with this run, by number (`crossframe.recording.perturbed_runs`)."""
        found = []
        while (folder := self.directory / event_format.perturbed_run_folder(len(found) + 1)).is_dir():
            found.append(Recording.open(folder).with_channels_first(self._moved))
        return tuple(found)

    def with_channels_first(self, activations: Collection[tuple[str, str]]) -> "Recording":
        """A view of this recording in which these activations, given as (module, use), have channels moved from the last dim to
        dim 1, also in its perturbed runs. Their order of dims must be unknown."""
        moved = self._moved | frozenset(activations)
        if moved == self._moved:
            return self
        if moved not in self._views:
            self._views[moved] = view = copy.copy(self)
            view._moved, view._views = moved, {}
        return self._views[moved]

    def first(self, num_steps: int) -> "Recording":
        """A view of the first steps of this recording.

        Args:
            num_steps: number of steps; all if there are fewer.

        Raises:
            RecordingError: `num_steps` is not an int of at least 1.
        """
        if type(num_steps) is not int or num_steps < 1:
            raise RecordingError(f"steps: expected an int of at least 1, got {quote(num_steps)}")
        return self if num_steps >= self.num_steps else self.with_num_steps(num_steps)

    def with_num_steps(self, num_steps: int) -> "Recording":
        """A view of another number of steps of this recording, all of which have been read."""
        view = copy.copy(self)
        view.num_steps, view._views = num_steps, {}
        for name, cached in vars(Recording).items():
            if isinstance(cached, functools.cached_property):
                view.__dict__.pop(name, None)
        return view

    def losses_at(self, step: int) -> np.ndarray:
        """Every rank's loss at a step: float64 of shape (world_size,)."""
        self._check(step, 0)
        return np.array([index.losses[step] for index in self._indexes], np.float64)

    def losses(self) -> np.ndarray:
        """Every rank's loss at every step: float64 of shape (num_steps, world_size)."""
        rows = [[index.losses[step] for index in self._indexes] for step in range(self.num_steps)]
        return np.array(rows, np.float64).reshape(self.num_steps, self.manifest.world_size)

    def num_losses(self, step: int, rank: int) -> int:
        """The number of losses that the recorder has added at a step, one for each backward; 1 if the loop stated the sum."""
        self._check(step, rank)
        return self._indexes[rank].num_losses.get(step, 1)

    def backwards(self, step: int, rank: int) -> tuple[tuple[int, float], ...]:
        """(Number of forwards before it, loss) of each backward of a step in which optimizers take turns; else ()."""
        self._check(step, rank)
        return self._indexes[rank].backwards.get(step, ())

    def turn(self, step: int, name: str) -> int:
        """The number of forwards of a step before the optimizer of a parameter stepped; 0 unless optimizers take turns."""
        key = (event_format.UPDATE, name, "")
        return max(index.lines[step].tensors.get(key, {}).get("microbatch", 0) for index in self._indexes)

    def steps_done(self) -> int:
        """The number of steps that all ranks have on disk now. Each call reads only what was written since the previous one."""
        return self._progress.steps_done()

    @functools.cached_property
    def _steps(self) -> tuple[int, ...]:
        return tuple(filter(self.is_recorded, range(min(index.num_steps for index in self._indexes))))

    def is_recorded(self, step: int) -> bool:
        """Whether the tensors of a step were recorded, by all ranks."""
        # In a golden, the first rank of a replica has the tensors of all its ranks.
        ranks = all if self.golden is None else any
        return ranks(index.lines[step].has_tensors for index in self._indexes)

    def recorded_steps(self) -> tuple[int, ...]:
        """The steps whose tensors were recorded, by all ranks."""
        return tuple(step for step in self._steps if step < self.num_steps)

    def layouts(self) -> list[tuple[str, Layout]]:
        """(unit, layout) in the order of forward, the root first."""
        return list(self.manifest.units)

    def batch(self, step: int, rank: int) -> Batch:
        """The batch of a rank at a step."""
        self._check(step, rank)
        return self._indexes[rank].batches[step]

    def collectives(self, step: int, rank: int) -> list[Event]:
        """The collectives that a rank recorded at a step, in order."""
        self._check(step, rank)
        return list(self._indexes[rank].lines[step].collectives)

    def has(self, phase: str, step: int, name: str, rank: int | None = None, use: str = "") -> bool:
        """Whether any rank, or this rank, recorded a quantity of a parameter. An unused parameter has no gradient (R29).

        Args:
            use: for the phase "state", the name of the optimizer state entry.
        """
        ranges = self._step_ranges(step).of.get((phase, name, use), ())
        return bool(ranges) if rank is None else any(part.rank == rank for part in ranges)

    def ranges(self, phase: str, step: int, name: str, use: str = "") -> list[ElementRange]:
        """The elements of a parameter that each rank recorded, in rank order."""
        return list(self._step_ranges(step).of.get((phase, name, use), ()))

    def _step_ranges(self, step: int) -> StepRanges:
        if step not in self._ranges:
            if not all(0 <= step < len(index.lines) for index in self._indexes):
                return StepRanges([])
            own = [index.lines[step] for index in self._indexes]
            alike = tuple(map(id, own))  # the indexes keep them alive
            if alike not in self._kinds:
                _make_room(self._kinds, _STEPS)
                self._kinds[alike] = StepRanges(own)
            _make_room(self._ranges, _STEPS)
            self._ranges[step] = self._kinds[alike]
        return self._ranges[step]

    def full(self, phase: str, step: int, name: str, *, use: str = "", replica: int = 0) -> np.ndarray:
        """An array of the parameter's shape, assembled from the pieces of all ranks of one replica.

        Args:
            phase: "parameters", "reduce", "state" or "update".
            use: for "state", the name of the optimizer state entry.
            replica: index of the replica.

        Raises:
            RecordingError: the pieces do not have every element exactly once, differ in dtype, or are sketches.
        """
        ranges = self._of_replica(phase, step, name, use, replica)
        spec = self.manifest.params[name]
        if any(part.sketch is not None for part in ranges):
            raise RecordingError(
                f"{self._where(phase, step, name, use)} was recorded as a sketch, which does not have its elements; record the "
                "step densely, in full (detail='full')"
            )
        pieces = [(part, self.elements(step, part)) for part in ranges]
        flat = np.empty(spec.numel, numpy_dtype(ranges[0].dtype if ranges else spec.dtype))
        for part, values in pieces:
            flat[part.start : part.stop] = values
        return flat.reshape(spec.shape)

    def is_sketched(self, phase: str, step: int, name: str, use: str = "") -> bool:
        """Whether any rank recorded it as a sketch."""
        return any(part.sketch is not None for part in self.ranges(phase, step, name, use))

    def sketch(self, phase: str, step: int, name: str, *, use: str = "", replica: int = 0) -> Sketch:
        """The sketch of the array that `full` returns, summed over the ranks of one replica; RecordingError as for `full`."""
        ranges = self._of_replica(phase, step, name, use, replica)
        if not ranges:
            raise RecordingError(f"{self._where(phase, step, name, use)}: nothing was recorded")
        if all(type(part.sketch) is int for part in ranges):
            what, seed = (phase, name, use), self._seed(name)
            replica = ranges[0].rank // self.manifest.mesh.shard
            return self._summed_sketches(step, replica).sketch(what, ranges[0].dtype, seed)
        return functools.reduce(operator.add, (self.sketch_of(step, name, part) for part in ranges))

    def sample(self, name: str) -> Sample | None:
        """The sample of a parameter before the first step; None if it was not recorded as a sketch, or before format 7."""
        if not self.has(event_format.PARAMETERS, 0, name):
            return None
        ranges = self._of_replica(event_format.PARAMETERS, 0, name, "", 0)
        parts = []
        for part in ranges:
            if part.sample is None:
                return None
            num = self._indexes[part.rank].lines[0].num_sample_items
            items = self._file(part.rank, 0).read(event_format.SAMPLES_KEY, "float64", num)
            try:
                parts.append(Sample.from_items(items[slice(*part.sample)], part.start, part.stop))
            except ValueError as error:
                where = self._where(event_format.PARAMETERS, 0, name, "")
                raise RecordingError(f"{where}: {error}; record the run again") from None
        return merged(parts)

    def _summed_sketches(self, step: int, replica: int) -> SummedSketches:
        at = (step, replica)
        if at not in self._summed:
            group = self._shard_group(replica)
            sums = self._step_ranges(step).sums(group)
            _make_room(self._summed, _STEPS)
            self._summed[at] = SummedSketches(sums, {rank: self.sketch_rows(rank, step) for rank in sums.rows})
        return self._summed[at]

    def _shard_group(self, replica: int) -> range:
        """The ranks of one replica."""
        ranks = self.manifest.mesh.shard_group(replica * self.manifest.mesh.shard)
        return range(ranks[0], ranks[-1] + 1)

    def sketch_of(self, step: int, name: str, part: ElementRange) -> Sketch:
        """The sketch of one rank's elements, which may have been recorded in full."""
        if part.sketch is None:
            return sketches_of([self.elements(step, part)], part.start, seed=self._seed(name))[0]
        numel = part.stop - part.start
        return self._sketch(part.rank, step, part.key, part.sketch, numel, part.dtype, self._seed(name))

    def _seed(self, name: str) -> str:
        """The name on which the keys of a sketch depend."""
        return name if self.manifest.sketches_by_name else ""

    def _sketch(
        self, rank: int, step: int, key: str, stored: dict[str, Any] | int, numel: int, dtype: str, seed: str
    ) -> Sketch:
        """A sketch of one rank; `stored` is its row, or up to format 4 the object in the line."""
        if isinstance(stored, int):
            return Sketch.from_row(self.sketch_rows(rank, step)[stored], numel, dtype, seed)
        return Sketch.from_json(stored, numel, dtype, self._file(rank, step).read(key, "float64", NUM_SUMS), seed)

    def sketch_rows(self, rank: int, step: int) -> np.ndarray:
        """The rows of all sketches of a rank at a step (`Sketch.to_row`)."""
        num = self._indexes[rank].lines[step].num_sketches
        return self._file(rank, step).rows(num) if num else np.zeros((0, ROW))

    def _of_replica(self, phase: str, step: int, name: str, use: str, replica: int) -> list[ElementRange]:
        """The ranges of one replica, which together are the parameter. Optimizer state that it does not keep, as with
        ZeroRedundancyOptimizer, is that of the first replica that does."""
        self._check(step, 0)
        kind, at = self._step_ranges(step), ((phase, name, use), replica)
        if at not in kind.whole:
            kind.whole[at] = self._checked_ranges(phase, step, name, use, replica)
        return kind.whole[at]

    def _checked_ranges(self, phase: str, step: int, name: str, use: str, replica: int) -> list[ElementRange]:
        numel = self.manifest.params[name].numel
        group = self._shard_group(replica)
        recorded = self.ranges(phase, step, name, use)
        if phase == event_format.STATE and recorded and not any(part.rank in group for part in recorded):
            group = self._shard_group(recorded[0].rank // self.manifest.mesh.shard)
        ranges = [part for part in recorded if part.rank in group]
        where = self._where(phase, step, name, use)
        dtypes = sorted({part.dtype for part in ranges})
        if len(dtypes) > 1:
            raise RecordingError(f"{where}: expected one dtype on all ranks, got {dtypes}; record the run again")
        reached = 0
        for part in sorted(ranges, key=lambda part: part.start):
            if part.start != reached:
                break
            reached = part.stop
        if reached != numel or sum(part.stop - part.start for part in ranges) != numel:
            raise RecordingError(
                f"{where}: expected each of {numel} elements from exactly one of ranks {list(group)}, but the pieces are "
                f"{[(part.rank, part.start, part.stop) for part in ranges][:8]} (rank, start, stop), and element {reached} is "
                "the first in none or in two; the recorder's pieces are wrong, or a rank did not record it"
            )
        return ranges

    def local(self, step: int, rank: int, name: str) -> np.ndarray:
        """The gradient of one rank's own batch, in the parameter's shape; RecordingError if it was not recorded."""
        return self._own(event_format.BACKWARD, "local gradient", step, rank, name)

    def unsharded(self, step: int, rank: int, name: str) -> np.ndarray:
        """A parameter in one rank's forward; RecordingError if it was not recorded."""
        return self._own(event_format.UNSHARDED, "unsharded parameter", step, rank, name)

    def _own(self, phase: str, what: str, step: int, rank: int, name: str) -> np.ndarray:
        part = self.own_range(phase, step, rank, name)
        if part is None or part.sketch is not None:
            raise RecordingError(
                f"{self.directory}: rank {rank} recorded no {what} of {name!r} {'in full ' if part else ''}at step {step}: they "
                f"are recorded at dense steps, of which the first {self.manifest.schedule.dense} are"
            )
        return self.elements(step, part).reshape(self.manifest.params[name].shape)

    def own_range(self, phase: str, step: int, rank: int, name: str) -> ElementRange | None:
        """The elements of a parameter that one rank recorded; None if there are none."""
        self._check(step, rank)
        return next((part for part in self.ranges(phase, step, name) if part.rank == rank), None)

    def state_slots(self, step: int, name: str) -> tuple[str, ...]:
        """The names of the optimizer state entries of a parameter that any rank recorded after a step, as in torch."""
        self._check(step, 0)
        return self._step_ranges(step).slots.get(name, ())

    def count(self, step: int, name: str) -> float | None:
        """The optimizer's count of its steps for a parameter, from the first rank that recorded it; None if there is none."""
        self._check(step, 0)
        rank = self._step_ranges(step).counted.get(name)
        return None if rank is None else self._indexes[rank].count(step, name)

    def learning_rates(self, step: int) -> tuple[float, ...]:
        """The learning rate of each parameter group at a step; empty if it was not recorded."""
        self._check(step, 0)
        return self._indexes[0].rates.get(step, ())

    def grad_norm(self, step: int, rank: int) -> float | None:
        """The gradient norm that the loop computed; None if it was not recorded."""
        self._check(step, rank)
        return self._indexes[rank].norms.get(step)

    def disagreements(self, steps: int) -> list[UnequalRanks]:
        """Tensors of the first `steps` steps that are not the same on all ranks that compute one replica together, in causal
        order: gradients as backward computes them."""
        found: dict[tuple[int, str, str, str], UnequalRanks] = {}
        for each in (each for index in self._indexes for each in index.disagreements if each.step < steps):
            key = (each.step, each.phase, each.name, each.use)
            found[key] = each.with_those_of(found[key]) if key in found else each
        params, backward = list(self.manifest.params), self.backward_order
        phases = [event_format.PARAMETERS, event_format.FORWARD, *event_format.TENSOR_USES]

        def order(each: UnequalRanks) -> tuple[int, int, int]:
            names = backward if each.phase == event_format.REDUCE else params
            place = names.index(each.name) if each.phase != event_format.FORWARD else 0  # its lines are in order
            return each.step, phases.index(each.phase), place

        return sorted(found.values(), key=order)

    @functools.cached_property
    def backward_order(self) -> list[str]:
        """All parameters in the order of backward: those of the root unit that forward uses after all other units, as the first
        dense step shows, then the units in reverse order, and the rest of the root unit. Within a unit, those of modules that
        forward calls last come first, if it calls all of them."""
        unit_of, params = self.manifest.unit_of, list(self.manifest.params)[::-1]
        step = self.first_step_with_activations
        called = [] if step is None else list(dict.fromkeys(module for _, module, _ in self.activations(step)))
        place = {module: i for i, module in enumerate(called)}
        of_unit: dict[str, list[str]] = {}
        for name in params:
            of_unit.setdefault(unit_of[name], []).append(name)
        for names in of_unit.values():
            if all(name.rpartition(".")[0] in place for name in names):
                names.sort(key=lambda name: -place[name.rpartition(".")[0]])
        params = [name for names in of_unit.values() for name in names]
        units = [i for i, module in enumerate(called) if module and module in self.manifest.unit_names]
        late = {*called[units[-1] + 1 :]} - {""} if units else set()
        first = {name for name in params if not unit_of[name] and name.rpartition(".")[0] in late}
        return [name for name in params if name in first] + [name for name in params if name not in first]

    @functools.cached_property
    def first_step_with_activations(self) -> int | None:
        """The first recorded step with activations; None if no step has any."""
        return next((step for step in self.recorded_steps() if self.activations(step)), None)

    @functools.cached_property
    def num_microbatches(self) -> int:
        """The number of microbatches that a step accumulates: as stated, or as the first step with activations has."""
        step = self.first_step_with_activations
        recorded = 1 if step is None else 1 + max(microbatch for microbatch, _, _ in self.activations(step))
        return max(self.manifest.settings.get("accumulate") or 1, recorded)

    def activations(self, step: int) -> list[tuple[int, str, str]]:
        """(microbatch, module, use) of the activations that every rank recorded at a step, in the order of rank 0's forward."""
        self._check(step, 0)
        own = [index.lines[step].activations for index in self._indexes]
        return [at for at in own[0] if all(at in each for each in own)]

    def activation(self, step: int, rank: int, microbatch: int, module: str, use: str) -> np.ndarray:
        """The input or output of a module on a rank; RecordingError if it was not recorded, or only as a sketch."""
        line = self._activation(step, rank, microbatch, module, use)
        if line.get("sketch") is not None:
            raise RecordingError(f"{self.directory}: the {use} of {module!r} at step {step} was recorded as a sketch")
        values = self._array(rank, step, event_format.activation_key(use, microbatch, module), line)
        return channels_first(values) if (module, use) in self._moved else values

    def activation_shape(self, step: int, rank: int, microbatch: int, module: str, use: str) -> tuple[int, ...]:
        """The shape of an activation."""
        shape = tuple(self._activation(step, rank, microbatch, module, use)["shape"])
        return channels_first_shape(shape) if (module, use) in self._moved else shape

    def activation_order(self, step: int, rank: int, microbatch: int, module: str, use: str) -> Order:
        """The known order of dims of an activation."""
        line = self._activation(step, rank, microbatch, module, use)
        return Order.TORCH if (module, use) in self._moved else Order(line["order"])

    def activation_sketch(self, step: int, rank: int, microbatch: int, module: str, use: str) -> Sketch | None:
        """The sketch of an activation; None if it was recorded in full."""
        line = self._activation(step, rank, microbatch, module, use)
        if line.get("sketch") is None:
            return None
        key, of = event_format.activation_key(use, microbatch, module), "sketch"
        seed = self._seed(key)
        if (module, use) in self._moved:
            key, of = event_format.channels_first_key(key), "channels_first"
        if line.get(of) is None:
            raise RecordingError(
                f"{self.directory}: the {use} of {module!r} at step {step} has no sketch with channels first; record again"
            )
        return self._sketch(rank, step, key, line[of], math.prod(line["shape"]), line["dtype"], seed)

    def activation_operator(self, step: int, rank: int, microbatch: int, module: str, use: str) -> str:
        """The framework's name of the operator that computed an activation; "" if it was not recorded."""
        return self._activation(step, rank, microbatch, module, use).get("operator", "")

    def _activation(self, step: int, rank: int, microbatch: int, module: str, use: str) -> dict[str, Any]:
        self._check(step, rank)
        line = self._indexes[rank].lines[step].activations.get((microbatch, module, use))
        if line is None:
            raise RecordingError(
                f"{self.directory}: rank {rank} recorded no {use} of module {module!r} at step {step}, microbatch {microbatch}"
            )
        return line

    def buffers(self, step: int) -> list[str]:
        """The tensors of the model that are no parameters and that any rank recorded after a step, since they have changed."""
        self._check(step, 0)
        lines = [index.lines[step].buffers for index in self._indexes]
        return list(dict.fromkeys(name for own in lines for name, use in own if use == event_format.CHANGED))

    def initial_buffers(self) -> list[str]:
        """The tensors of the model that are no parameters and that all ranks recorded before the first step."""
        lines = [index.lines[0].buffers for index in self._indexes if index.lines]
        return [
            name for name, use in lines[0] if use == event_format.INITIAL and all((name, use) in own for own in lines)
        ]

    def has_buffer(self, step: int, name: str) -> bool:
        """Whether the value of a buffer after a step is known on all ranks; before the first step for -1."""
        return all(self._buffer_line(step, rank, name) is not None for rank in range(self.manifest.world_size))

    def buffer_shape(self, step: int, rank: int, name: str) -> tuple[int, ...]:
        """The shape of a buffer after a step."""
        return tuple(self._buffer(step, rank, name)[1]["shape"])

    def buffer(self, step: int, rank: int, name: str) -> np.ndarray | Sketch:
        """A buffer after a step on a rank: its elements, or the sketch that was recorded instead. -1 is before the first step.

        Raises:
            RecordingError: it was not recorded.
        """
        at, line = self._buffer(step, rank, name)
        key = event_format.tensor_key(event_format.BUFFERS, name, line["use"])
        if line.get("sketch") is not None:
            return self._sketch(rank, at, key, line["sketch"], math.prod(line["shape"]), line["dtype"], "")
        return self._array(rank, at, key, line)

    def _array(self, rank: int, step: int, key: str, line: dict[str, Any]) -> np.ndarray:
        """The array of a line that states a shape; `key` is its key unless other bytes are the same."""
        file = self._file(rank, step, line.get("before", False))
        return file.read(line.get("at", key), line["dtype"], math.prod(line["shape"])).reshape(line["shape"])

    def _buffer(self, step: int, rank: int, name: str) -> tuple[int, dict[str, Any]]:
        self._check(max(step, 0), rank)
        if (found := self._buffer_line(step, rank, name)) is None:
            raise RecordingError(
                f"{quote_path(self.directory)}: rank {rank} recorded no buffer {quote(name)} by step {step}"
            )
        return found

    def _buffer_line(self, step: int, rank: int, name: str) -> tuple[int, dict[str, Any]] | None:
        """(the step that has it, its line)."""
        index = self._indexes[rank]
        lines = index.lines
        if step >= 0 and (line := lines[step].buffers.get((name, event_format.CHANGED))) is not None:
            return step, line
        if step >= 0 and (step not in index.with_buffers or index.changed.get(name, step) < step):
            return None  # not recorded, or the model has it no longer
        line = lines[0].buffers.get((name, event_format.INITIAL))
        return None if line is None else (0, line)

    def _where(self, phase: str, step: int, name: str, use: str) -> str:
        of = f"{use} of " if use else ""
        return f"{quote_path(self.directory)}: step {step}, phase {phase!r}, {of}parameter {quote(name)}"

    def elements(self, step: int, part: ElementRange) -> np.ndarray:
        """The elements of a range that was recorded in full, as a 1-D array."""
        return self._file(part.rank, step, part.before).read(part.key, part.dtype, part.stop - part.start)

    def _file(self, rank: int, step: int, before: bool = False) -> TensorFile | GoldenStep:
        """The tensors of a rank at a step, or at the previous step."""
        if self.golden is not None:
            return GoldenStep(self.directory, self.golden.rows_of(rank, step))
        key = (rank, step - before)
        if key[1] < 0:
            folder = quote_path(self.directory / event_format.rank_folder(rank))
            raise RecordingError(f"{folder}: step 0 refers to tensors of a step before it; record the run again")
        if key not in self._files:
            _make_room(self._files, max(_OPEN_FILES, 3 * self.manifest.world_size))
            path = self.directory / event_format.rank_folder(rank) / event_format.step_file(key[1])
            index = self._indexes[rank]
            own = index.lines[key[1]]
            self._files[key] = TensorFile(path, index.sha256[key[1]], own.most_bytes, in_memory=own.num_sketches > 0)
        return self._files[key]

    def _check(self, step: int, rank: int) -> None:
        try:
            check_rank(rank, self.manifest.world_size)
        except CrossframeError as error:
            raise RecordingError(f"{self.directory}: {error}") from None
        if type(step) is not int or not 0 <= step < self.num_steps:
            raise RecordingError(f"{self.directory}: expected a step from 0 to {self.num_steps - 1}, got {step!r}")


def common_steps(a: Recording, b: Recording) -> range:
    """The steps that both recordings have completed."""
    return range(min(a.num_steps, b.num_steps))


def _without_end(indexes: Sequence[RankIndex], ranks: Sequence[int]) -> str:
    """The ranks whose recordings have no end, each with its last whole step, as a clause."""
    last = [indexes[rank].num_steps - 1 for rank in ranks[:_NAMED]]
    named = [
        f"{rank} ({f'last step {step}' if step >= 0 else 'no step'})"
        for rank, step in zip(ranks[:_NAMED], last, strict=True)
    ]
    if len(ranks) == 1:
        return f"rank {named[0]} has no end"
    more = [f"{len(ranks) - _NAMED} more"] if len(ranks) > _NAMED else []
    listed = [*named, *more]
    return f"ranks {', '.join(listed[:-1])} and {listed[-1]} have no end"


def _make_room(cache: dict[Any, Any], most: int) -> None:
    """Drop the oldest entry of a full cache."""
    if len(cache) >= most:
        cache.pop(next(iter(cache)))
