"""Record a run in JAX: one process, one device a rank, `value_and_grad` over sharded parameters."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from crossframe.errors import UsageError
from crossframe.mesh import MeshSpec
from crossframe.plan import Strategy
from crossframe.recording import Manifest, RecordingWriter, create_recording
from experiments.models.definition import ModelDefinition
from experiments.parity.faults import fault_in_effect
from experiments.parity.settings import RunSettings, choose_device
from jax_backend import ShardedParams, make_mesh, shard, shards_of, trace_of, value_and_grad
from jax_backend.nnx import split, with_params


def record_jax(settings: RunSettings, output: Path, *, overwrite: bool = False) -> None:
    """Train and record. JAX must not have been used before in this process, since its devices are made here.

    Raises:
        UsageError: fewer devices than ranks.
        RecordingError: an output that cannot be written to.
    """
    _make_devices(settings)
    manifest = settings.manifest("jax", ("jax", "flax", "optax", "numpy"))
    create_recording(output, manifest, overwrite=overwrite)
    with fault_in_effect(settings.fault):
        writers = [RecordingWriter(output, manifest, rank) for rank in range(settings.world_size)]
        _train(settings, manifest, writers)
        # Only a run that came this far gets its end.
        for writer in writers:
            writer.finish()


def _make_devices(settings: RunSettings) -> None:
    """One device a rank: GPUs if there are enough, otherwise parts of the CPU."""
    jax.config.update("jax_enable_x64", settings.dtype == "float64")
    # Matrix products of float32 may otherwise be taken in less.
    jax.config.update("jax_default_matmul_precision", "highest")
    if settings.device != "cuda":
        jax.config.update("jax_num_cpu_devices", settings.world_size)
    device = choose_device(settings.device, _num_gpus() if settings.device != "cpu" else 0, settings.world_size)
    if device == "cpu":
        jax.config.update("jax_default_device", jax.devices("cpu")[0])
    if len(_devices(device)) < settings.world_size:
        raise UsageError(
            f"world-size: expected {settings.world_size} {device} devices, JAX has {len(_devices(device))}; it was used "
            "before the run in this process, so record in a process of its own"
        )


def _num_gpus() -> int:
    try:
        return len(jax.devices("cuda"))
    except RuntimeError:  # JAX was installed without CUDA, or there is no GPU
        return 0


def _devices(device: str) -> list[Any]:
    return jax.devices(device)


def _mesh(settings: RunSettings):
    device = "cuda" if settings.device != "cpu" and _num_gpus() >= settings.world_size else "cpu"
    return make_mesh(MeshSpec(shard=settings.world_size), _devices(device))


def nnx_params(definition: ModelDefinition, params: Any, values: dict[str, np.ndarray]) -> Any:
    """A tree like `params` with these values, given by canonical name."""

    def value(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
        entry = definition.param_map.by_path[".".join(str(getattr(key, "key", key)) for key in path)]
        return entry.from_canonical(values[entry.name])

    return jax.tree_util.tree_map_with_path(value, params)


def _train(settings: RunSettings, manifest: Manifest, writers: list[RecordingWriter]) -> None:
    definition, mesh = settings.definition, _mesh(settings)
    graphdef, params, state = split(definition.make_flax(settings.dtype))
    params = nnx_params(definition, params, definition.initial_params(settings.seed, settings.dtype))
    sharded = shard(params, mesh, units=definition.units, param_map=definition.param_map)
    if tuple(sharded.tree.units) != manifest.units:
        raise UsageError("the layouts of the model's definition are not those that jax_backend computed")

    def loss_fn(params, batch):
        tokens, targets = batch
        logits = with_params(graphdef, params, state)(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    optimizer = optax.adamw(settings.learning_rate, weight_decay=settings.weight_decay)
    opt_state = optimizer.init(sharded)  # type: ignore[arg-type]
    steps = {
        dense: value_and_grad(loss_fn, mesh, strategy=Strategy(settings.strategy), local_grads=dense)
        for dense in (True, False)
    }

    @jax.jit
    def update(sharded: ShardedParams, opt_state: Any, grads: ShardedParams) -> tuple[ShardedParams, Any]:
        updates, opt_state = optimizer.update(grads, opt_state, sharded)  # type: ignore[arg-type]
        return optax.apply_updates(sharded, updates), opt_state  # type: ignore[arg-type,return-value]

    events = None
    for step in range(settings.steps):
        batches = [settings.batch(step, rank) for rank in range(settings.world_size)]
        arrays = tuple(
            jnp.asarray(np.concatenate([getattr(b, part) for b in batches])) for part in ("tokens", "targets")
        )
        dense = manifest.schedule.is_dense(step)
        if events is None:
            events = trace_of(steps[False], sharded, arrays, mesh=mesh)
        result = steps[dense](sharded, arrays)
        updated, opt_state = update(sharded, opt_state, result.grads)
        losses = np.asarray(result.losses)
        for rank, writer in enumerate(writers):
            writer.batch(step, batches[rank].digest, batches[rank].sample_ids)
            if step == 0:
                _record_pieces(writer.parameters, step, sharded, rank)
            writer.loss(step, float(losses[rank]))
            writer.collectives(step, events)
            if dense:
                _record_local_grads(writer, step, sharded, result.local_grads, rank)
            if writer.records(step):
                _record_pieces(writer.reduced_grads, step, result.grads, rank)
                _record_pieces(writer.updated, step, updated, rank)
            writer.end_step(step)
        sharded = updated


def _record_local_grads(writer: RecordingWriter, step: int, sharded: ShardedParams, grads: Any, rank: int) -> None:
    for unit, rows in grads.items():
        writer.local_grads(step, unit, sharded.tree.views(unit, np.asarray(rows[rank])))


def _record_pieces(write: Any, step: int, sharded: ShardedParams, rank: int) -> None:
    """Write a rank's pieces of parameters or of reduced gradients, unit by unit."""
    shards = shards_of(sharded, rank)
    for unit, layout in sharded.tree.units:
        pieces = {
            p.name: (p.param_start, p.param_stop, shards[unit][p.shard_start : p.shard_stop])
            for p in layout.pieces(rank)
        }
        write(step, unit, pieces)
