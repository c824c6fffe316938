"""Condenses a recording and its perturbed runs to a golden of a limited size.

All tensors become sketches. The shards of a parameter are added up: the first rank of each replica has the sketch of the whole
parameter. Optimizer state is kept at dense steps and at the last recorded step; what goes wrong between them shows in the updated
parameters, which are kept at every recorded step.

[Note: spread of a golden] The number of sums of a sketch, and their rounding to float32, decide how closely a golden can be
compared. The spread is measured with the golden in place of the original run: it is the distance of each perturbed run from what
the file has. A later run is compared with the same numbers, so if it differs by rounding alone, it is one more draw of the same
distance, and the false-positive rate of `crossframe.verdict.perturbed_runs.spread` holds for any number of sums. Fewer sums cost
power.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from crossframe.dtypes import unit_roundoff
from crossframe.errors import UsageError
from crossframe.recording import Recording, RecordingWriter, create_recording
from crossframe.recording.dims import Order
from crossframe.recording.event_format import (
    BACKWARD,
    CHANGED,
    EVENTS_NAME,
    INITIAL,
    PARAMETERS,
    REDUCE,
    STATE,
    UNSHARDED,
    UPDATE,
    rank_folder,
)
from crossframe.recording.golden_file import Golden, distinct
from crossframe.recording.manifest import MANIFEST_NAME, SKETCH
from crossframe.recording.sketch import NUM_SUMS
from crossframe.verdict.measure.buffers import buffer_value
from crossframe.verdict.measure.values import activation_values, assemble, rank_values
from crossframe.verdict.perturbed_runs.spread import spread_of

LEAST_SUMS = 8
"""The smallest number of sums of a sketch in a golden."""
_SPREAD_BYTES = 6
"""About the bytes that the spread of a quantity takes in the file."""


def condense(
    recording: Recording, perturbed: Sequence[Recording], *, most_bytes: int, command: Sequence[str] = ()
) -> Golden:
    """The golden of a recording, with as many sums of each sketch as fit.

    Args:
        perturbed: its perturbed runs.
        most_bytes: maximum bytes of the file.
        command: words of the command that was recorded.

    Raises:
        RecordingError: too few perturbed runs, or tensors that are damaged.
        UsageError: the golden does not fit.
    """
    for number, each in enumerate(perturbed, 1):
        _check_repeats(recording, each, number)
    golden = replace(_reduced(recording), command=tuple(command))
    num_sums, size = NUM_SUMS, most_bytes + 1
    while num_sums >= LEAST_SUMS:
        folded = _folded(golden, num_sums)
        size = len(folded.to_bytes()) + _SPREAD_BYTES * len(folded.rows)
        if size <= most_bytes:
            made = with_spread(folded, perturbed, recording.directory)
            if (size := len(made.to_bytes())) <= most_bytes:
                return made
        num_sums //= 2
    schedule = recording.manifest.schedule
    raise UsageError(
        f"{recording.directory}: a golden takes {size:,} bytes with {LEAST_SUMS} sums in each sketch, more than {most_bytes:,}: "
        f"record fewer steps (now every {schedule.every}, and {schedule.dense} with activations), or pass a larger --max-kb"
    )


def with_spread(golden: Golden, perturbed: Sequence[Recording], directory: Path) -> Golden:
    """The golden with the spread of perturbed runs. See [Note: spread of a golden]."""
    return replace(golden, spread=spread_of(Recording.of_golden(directory, golden), perturbed).stored())


def _check_repeats(recording: Recording, perturbed: Recording, number: int) -> None:
    """Raise UsageError unless a perturbed run begins one unit in the last place away, with the same batches.

    A unit in the last place is at most 2 u of an element, and the estimate of a sketch is less than twice too large.
    """
    ends, again = f"perturbed run {number} of {recording.directory}", "seed everything that the run draws"
    if perturbed.num_steps != recording.num_steps:
        raise UsageError(f"{ends}: expected {recording.num_steps} steps, got {perturbed.num_steps}; {again}")
    for step in range(recording.num_steps):
        for rank in range(recording.manifest.world_size):
            if perturbed.batch(step, rank).digest != recording.batch(step, rank).digest:
                raise UsageError(f"{ends}: the batch of rank {rank} at step {step} is another one; {again}")
    for name, spec in recording.manifest.params.items():
        if not spec.numel or not recording.has(PARAMETERS, 0, name) or not perturbed.has(PARAMETERS, 0, name):
            continue
        own, other = (assemble(each, PARAMETERS, 0, name).sketched() for each in (recording, perturbed))
        if own.distance(other) > 4 * unit_roundoff(spec.dtype) * own.norm:
            raise UsageError(f"{ends}: begins with other values of {name!r}; {again}")


def _folded(golden: Golden, num_sums: int) -> Golden:
    own = golden.num_sums
    sums = golden.rows[:, :own].reshape(len(golden.rows), num_sums, -1).sum(axis=2)
    return replace(golden, rows=np.concatenate([sums, golden.rows[:, own:]], axis=1)).rounded()


def _reduced(recording: Recording) -> Golden:
    """The golden with all sums and without a spread."""
    manifest = replace(recording.manifest, detail=SKETCH, token="")
    wide = any(spec.dtype == "float64" for spec in manifest.params.values()) or manifest.dtype == "float64"
    with tempfile.TemporaryDirectory() as temporary:
        folder = create_recording(Path(temporary, "golden"), manifest)
        for rank in range(manifest.world_size):
            with RecordingWriter(folder, manifest, rank) as writer:
                for step in range(recording.num_steps):
                    _write_step(writer, recording, step)
        written = Recording.open(folder)
        at = [(rank, step) for rank in range(manifest.world_size) for step in range(recording.num_steps)]
        rows, places = distinct([written.sketch_rows(*each) for each in at])
        lines = tuple((folder / rank_folder(rank) / EVENTS_NAME).read_bytes() for rank in range(manifest.world_size))
        content = (folder / MANIFEST_NAME).read_bytes()
    by_rank = tuple(
        tuple(places[rank * recording.num_steps : (rank + 1) * recording.num_steps])
        for rank in range(manifest.world_size)
    )
    return Golden(content, lines, rows, by_rank, sums_dtype="float64" if wide else "float32")


def _write_step(writer: RecordingWriter, recording: Recording, step: int) -> None:
    """Write a step of a rank, with sketches in place of elements."""
    rank = writer.rank
    batch = recording.batch(step, rank)
    writer.batch(step, batch.digest, batch.sample_ids, batch.inputs)
    writer.loss(step, recording.losses()[step, rank], num_losses=recording.num_losses(step, rank))
    if (norm := recording.grad_norm(step, rank)) is not None:
        writer.grad_norm(step, norm)
    writer.collectives(step, recording.collectives(step, rank))
    if rank == 0:
        counts = {
            name: count for name in recording.manifest.params if (count := recording.count(step, name)) is not None
        }
        writer.counts(step, counts)
        for each in recording.disagreements(recording.num_steps):
            if each.step == step:
                at = (each.phase, each.unit, each.name, each.use)
                writer.disagreement(step, *at, each.difference, each.axis, each.ranks)
    if step == 0:
        _write_whole(writer, recording, step, PARAMETERS)
        _write_buffers(writer, recording, -1, recording.initial_buffers(), INITIAL)
    if step in recording.recorded_steps():
        _write_activations(writer, recording, step)
        _write_own(writer, recording, step)
        _write_whole(writer, recording, step, REDUCE)
        if writer.is_dense(step) or step == recording.recorded_steps()[-1]:
            _write_whole(writer, recording, step, STATE)
        _write_whole(writer, recording, step, UPDATE)
        _write_buffers(writer, recording, step, recording.buffers(step), CHANGED)
    writer.end_step(step, recording.learning_rates(step))


def _write_buffers(writer: RecordingWriter, recording: Recording, step: int, names: Sequence[str], use: str) -> None:
    """Write the buffers of a rank after a step, or before the first step for -1."""
    rank = writer.rank
    values = {
        name: (buffer_value(recording, step, rank, name).sketched(), recording.buffer_shape(step, rank, name))
        for name in names
        if recording.has_buffer(step, name)
    }
    writer.buffers(max(step, 0), values, use)


def _write_activations(writer: RecordingWriter, recording: Recording, step: int) -> None:
    rank = writer.rank
    for at in recording.activations(step):
        microbatch, module, use = at
        order = recording.activation_order(step, rank, *at)
        moved = None
        if order is not Order.TORCH:
            view = recording.with_channels_first([(module, use)])
            moved = activation_values(view, step, rank, at).sketched()
        writer.activation(
            step,
            microbatch,
            module,
            use,
            activation_values(recording, step, rank, at).sketched(),
            recording.activation_shape(step, rank, *at),
            order=order,
            moved=moved,
            operator=recording.activation_operator(step, rank, *at),
        )


def _write_own(writer: RecordingWriter, recording: Recording, step: int) -> None:
    """Write the unsharded parameters and the local gradients of a rank."""
    for phase, write in ((UNSHARDED, writer.unsharded), (BACKWARD, writer.local_grads)):
        for name, unit in recording.manifest.unit_of.items():
            if recording.has(phase, step, name, writer.rank):
                write(step, unit, {name: rank_values(recording, phase, step, writer.rank, name).sketched()})


def _write_whole(writer: RecordingWriter, recording: Recording, step: int, phase: str) -> None:
    """Write whole parameters, or tensors of their shape, of the replica whose first rank this is."""
    replica, of_replica = divmod(writer.rank, recording.manifest.mesh.shard)
    if of_replica:
        return
    writes = {PARAMETERS: writer.parameters, REDUCE: writer.reduced_grads, UPDATE: writer.updated}
    for name, unit in recording.manifest.unit_of.items():
        numel = recording.manifest.params[name].numel
        for slot in recording.state_slots(step, name) if phase == STATE else ("",):
            if not numel or not recording.has(phase, step, name, use=slot):
                continue
            pieces = {name: (0, numel, assemble(recording, phase, step, name, slot, replica).sketched())}
            if phase == STATE:
                writer.state(step, unit, slot, pieces)
            else:
                writes[phase](step, unit, pieces)
