"""A recording again, as a program with other names and other orders of dims would have recorded it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from crossframe.layout import layouts_by_rows
from crossframe.param_map import identity_map
from crossframe.params import ParamSpec
from crossframe.recording import Recording, RecordingWriter, create_recording
from crossframe.recording.event_format import CHANGED, INITIAL, PARAMETERS, REDUCE, STATE, UPDATE
from tests.core.helpers.synthetic import pieces_of

Change = Callable[[str, np.ndarray], np.ndarray]
"""(name, array) -> the array in the other program."""


def translate(
    recording: Recording,
    directory: Path,
    paths: Mapping[str, str],
    *,
    params: Change = lambda name, array: array,
    modules: Mapping[str, str] | None = None,
    activations: Change = lambda name, array: array,
    framework: str = "jax",
    detail: str = "full",
    settings: Mapping[str, Any] | None = None,
) -> Recording:
    """Write the recording again.

    Args:
        paths: the other name of each parameter that the other program has.
        params: the other form of a parameter, its gradients and moments.
        modules: the other names of modules whose inputs and outputs are recorded; None: the same.
        activations: the other form of "MODULE.input" and "MODULE.output".
        settings: of the other manifest; None: the same.
    """
    old = recording.manifest
    specs = [
        ParamSpec(paths[name], params(name, np.zeros(spec.shape)).shape, spec.dtype)
        for name, spec in old.params.items()
        if name in paths
    ]
    units = tuple(("", layout) for layout in layouts_by_rows(specs, old.mesh.shard))
    made = replace(
        old, framework=framework, model="other", param_map=identity_map(paths.values()), units=units, detail=detail
    )
    made = made if settings is None else replace(made, settings=settings)
    create_recording(directory, made)
    for rank in range(made.world_size):
        with RecordingWriter(directory, made, rank) as writer:
            for step in range(recording.num_steps):
                _write(recording, writer, step, rank, paths, params, modules, activations)
                for after, use in ((-1, INITIAL), (0, CHANGED)) if step == 0 else ((step, CHANGED),):
                    _write_buffers(recording, writer, after, use, modules or {})
                writer.end_step(step)
    return Recording.open(directory)


def _write(recording, writer, step, rank, paths, params, modules, activations):
    made, names = writer.manifest, [name for name in recording.manifest.params if name in paths]
    batch = recording.batch(step, rank)
    writer.batch(step, batch.digest, list(batch.sample_ids))
    writer.loss(step, recording.losses()[step, rank])
    for microbatch, module, use in recording.activations(step):
        if modules is None or module in modules:
            array = activations(f"{module}.{use}", recording.activation(step, rank, microbatch, module, use))
            writer.activation(
                step, microbatch, modules[module] if modules else module, use, np.ascontiguousarray(array)
            )
    if (norm := recording.grad_norm(step, rank)) is not None:
        writer.grad_norm(step, norm)

    def whole(phase, use=""):
        values = {name: recording.full(phase, step, name, use=use, replica=rank // made.mesh.shard) for name in names}
        return {paths[name]: np.ascontiguousarray(params(name, array)) for name, array in values.items()}

    for unit, layout in made.units:
        own = [param.name for param in layout.params]

        def pieces(phase, use="", layout=layout, own=own):
            arrays = whole(phase, use)
            return pieces_of(layout, rank % made.mesh.shard, {name: arrays[name] for name in own})

        if step == 0:
            writer.parameters(0, unit, pieces(PARAMETERS))
        if made.schedule.is_dense(step):
            back = {path: name for name, path in paths.items()}
            for read, write in ((recording.unsharded, writer.unsharded), (recording.local, writer.local_grads)):
                arrays = {path: params(back[path], read(step, rank, back[path])) for path in own}
                write(step, unit, {path: np.ascontiguousarray(array) for path, array in arrays.items()})
        writer.reduced_grads(step, unit, pieces(REDUCE))
        writer.state(step, unit, "exp_avg", pieces(STATE, "exp_avg"))
        writer.counts(step, dict.fromkeys(own, float(step + 1)))
        writer.updated(step, unit, pieces(UPDATE))


def _write_buffers(
    recording: Recording, writer: RecordingWriter, step: int, use: str, modules: Mapping[str, str]
) -> None:
    found = {}
    for name in recording.buffers(step) if use == CHANGED else recording.initial_buffers():
        module, _, last = name.rpartition(".")
        path = ".".join(filter(None, (modules.get(module, module), last)))
        found[path] = recording.buffer(step, writer.rank, name), recording.buffer_shape(step, writer.rank, name)
    writer.buffers(max(step, 0), found, use)
