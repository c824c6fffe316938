"""Writes the recorded steps of one process, with a writer for each rank."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from crossframe.mesh import MeshSpec
from crossframe.recording import Batch, Manifest, RecordingWriter, Sketch
from crossframe.recording.dims import Order, channels_first
from crossframe.recording.event_format import CHANGED, INITIAL
from crossframe.recording.program import COMPILED, PROGRAM
from crossframe.trace import Event
from jax_backend.recorder._environment import environment_of
from jax_backend.recorder._model_state import ByRank
from jax_backend.recorder._modules import Dims
from jax_backend.recorder._observed_loss import Interior
from jax_backend.recorder._params_as_arrays import ArrayPieces, Pieces
from jax_backend.recorder._params_as_shards import ShardPieces
from jax_backend.recorder._sketch import sketch_of
from jax_backend.shards._local_grads import LocalGrads


@dataclass
class StepData:
    """The data of a step. Gradients, state and parameters are pytrees like the parameters, or None.

    Attributes:
        batches: the batch of each rank.
        loss: of all ranks, or of each; it may still be on a device, as the other numbers.
        backwards: where models take turns in the step, (number of forwards before it, loss) of each turn.
        turns: the number of forwards before the update of each parameter, where models take turns.
        grad_norm: the norm of the gradients before clipping, if the loop computed it.
        rates: the learning rates of the step, if known.
        events: the collectives of rank 0.
        initial: each rank's pieces of the initial parameters, at the first step.
        grads: reduced gradients, before clipping.
        state: the optimizer state after the step.
        updated: the parameters after the step.
        interiors: one for each microbatch; none at steps that are not dense. The source of the recording reads their values.
        local_grads: each rank's own.
        initial_state, model_state: state of the model that is no parameter, before the first step and after the step.
    """

    batches: Mapping[int, Batch]
    loss: Any
    backwards: Sequence[tuple[int, Any]]
    turns: Mapping[str, int]
    grad_norm: Any
    rates: Sequence[Any]
    events: Sequence[Event]
    initial: Mapping[int, Pieces] | None = None
    grads: Any = None
    state: Any = None
    updated: Any = None
    interiors: Sequence[Interior] = ()
    local_grads: LocalGrads | None = None
    initial_state: ByRank = field(default_factory=dict)
    model_state: ByRank = field(default_factory=dict)


class Writers:
    """The writers of this process's ranks."""

    def __init__(
        self,
        directory: str | Path,
        manifest: Manifest,
        source: ArrayPieces | ShardPieces,
        channels_last: Collection[str | tuple[str, str]] | None,
    ) -> None:
        self.source, self._manifest = source, manifest
        self._dims = Dims(source.param_map, channels_last)
        self._sizes = {name: spec.numel for name, spec in manifest.params.items()}
        self.by_rank = {rank: RecordingWriter(directory, manifest, rank) for rank in source.grid.here}

    def records(self, step: int) -> bool:
        """Whether tensors of a step are recorded."""
        return any(writer.records(step) for writer in self.by_rank.values())

    def is_dense(self, step: int) -> bool:
        """Whether the interior of a step is recorded."""
        return any(writer.is_dense(step) for writer in self.by_rank.values())

    def state_environment(self, modules: Mapping[str, str], constants: Mapping[str, str]) -> None:
        """Write the environment of this process for each of its ranks.

        Args:
            modules: class and options of the model's modules by canonical name.
            constants: digests of arrays that the step gets beside the batch, by path.
        """
        program = dict(self._manifest.settings.get(PROGRAM) or {})
        compiled = bool(program.get(COMPILED, True))
        stated = environment_of(compiled=compiled, modules=modules, constants=constants).to_bytes()
        for writer in self.by_rank.values():
            writer.environment(stated)

    def write(self, step: int, data: StepData) -> None:
        """Write a step and end it; tensors only if the step is recorded."""
        records, spec = self.records(step), self._manifest.mesh
        losses = self.source.grid.numbers(data.loss)
        backwards = [(forwards, self.source.grid.numbers(each)) for forwards, each in data.backwards]
        if data.initial is not None:
            self._put("parameters", step, data.initial)
        for writer in self.by_rank.values():
            writer.turns(data.turns)
        if records and data.grads is not None:
            self._put("reduced_grads", step, self.source.pieces(data.grads))
        if records and data.updated is not None:
            self._put("updated", step, self.source.pieces(data.updated))
        slots, counts = self.source.state(data.state) if records and data.state is not None else ({}, {})
        for slot, by_rank in slots.items():
            self._put("state", step, by_rank, slot)
        for rank, writer in self.by_rank.items():
            batch = data.batches[rank]
            writer.batch(step, batch.digest, batch.sample_ids, batch.inputs)
            writer.loss(step, losses[rank], [(forwards, loss[rank]) for forwards, loss in backwards])
            writer.counts(step, counts)
            if data.grad_norm is not None:
                writer.grad_norm(step, float(data.grad_norm))
            writer.collectives(step, of_rank(data.events, spec, rank))
            writer.turns({})
            for state, use in ((data.initial_state, INITIAL), (data.model_state if records else {}, CHANGED)):
                if state:
                    own = {name: values[rank] for name, values in state.items()}
                    writer.buffers(step, {k: (self._kept(v, v.size), v.shape) for k, v in own.items()}, use)
            if data.interiors and writer.is_dense(step):
                self._put_interior(writer, step, rank, data)
            writer.end_step(step, [float(rate) for rate in data.rates])

    def _put(self, method: str, step: int, by_rank: Mapping[int, Pieces], *slot: str) -> None:
        for rank, by_unit in by_rank.items():
            for unit, pieces in by_unit.items():
                kept = {
                    name: (start, stop, self._kept(values, self._sizes[name], start))
                    for name, (start, stop, values) in pieces.items()
                }
                getattr(self.by_rank[rank], method)(step, unit, *slot, kept)

    def _kept(self, values: Any, numel: int, start: int = 0) -> Any:
        """An array as it is written: as a sketch, if it is large and the recording has sketches.

        Args:
            numel: number of elements of the full array.
        """
        if isinstance(values, Sketch) or numel <= self._manifest.most_in_full:
            return values
        return sketch_of(values, start)

    def _whole(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        return {name: self._kept(values, values.size) for name, values in arrays.items()}

    def _put_interior(self, writer: RecordingWriter, step: int, rank: int, data: StepData) -> None:
        for unit, full in self.source.unsharded(data.interiors[0].params, rank).items():
            writer.unsharded(step, unit, self._whole(full))
        for microbatch, interior in enumerate(data.interiors):
            activations = interior.activations
            for (module, use), value in zip(activations.names, activations.values, strict=True):
                array = self._dims.canonical(module, use, self.source.row(value, rank))
                order = self._dims.order(module, use, array)
                kept, moved = self._kept(array, array.size), None
                if isinstance(kept, Sketch) and order is not Order.TORCH:
                    moved = self._kept(channels_first(array), array.size)
                writer.activation(step, microbatch, module, use, kept, array.shape, order=order, moved=moved)
        if data.local_grads is not None:
            assert isinstance(self.source, ShardPieces)
            for bucket, lines in data.local_grads.lines.items():
                for unit, grads in self.source.whole(bucket, self.source.row(lines, rank)).items():
                    writer.local_grads(step, unit, self._whole(grads))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with ExitStack() as stack:  # each closes its file, even if another fails
            for writer in self.by_rank.values():
                stack.callback(writer.__exit__, kind, error, trace)


def of_rank(events: Sequence[Event], spec: MeshSpec, rank: int) -> list[Event]:
    """The events of another rank, from those of rank 0: the same, in its own groups."""
    groups = {tuple(of(0)): tuple(of(rank)) for of in (spec.replicate_group, spec.shard_group)}
    return [replace(event, group=groups.get(tuple(event.group), tuple(event.group))) for event in events]
