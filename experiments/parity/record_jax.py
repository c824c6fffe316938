"""Record a run in JAX: one process, one device a rank, `value_and_grad` over sharded parameters."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from crossframe.errors import UsageError
from crossframe.mesh import MeshSpec
from crossframe.recording import Manifest, RecordingWriter, create_recording
from crossframe.strategy import Strategy
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
    jax.config.update("jax_enable_x64", settings.dtype == "float64")
    # Accelerators may otherwise round the operands of a float32 product to less.
    jax.config.update("jax_default_matmul_precision", "highest")
    record_on_devices(settings, output, _devices(settings), overwrite=overwrite)


def _devices(settings: RunSettings) -> list[Any]:
    """One device a rank: GPUs if there are enough, otherwise parts of the CPU."""
    jax.config.update("jax_num_cpu_devices", settings.world_size)
    if settings.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    num_gpus = sum(device.platform == "gpu" for device in jax.devices())
    return jax.devices("gpu" if choose_device(settings.device, num_gpus, settings.world_size) == "cuda" else "cpu")


def record_on_devices(settings: RunSettings, output: Path, devices: list[Any], *, overwrite: bool = False) -> None:
    """Train and record on these devices, in rank order."""
    mesh = make_mesh(MeshSpec(shard=settings.world_size), devices)
    manifest = settings.manifest("jax", ("jax", "flax", "optax", "numpy"))
    create_recording(output, manifest, overwrite=overwrite)
    # If the run fails, no writer is finished: a recording without its end is not taken for a whole one.
    with fault_in_effect(settings.fault):
        writers = [RecordingWriter(output, manifest, rank) for rank in range(settings.world_size)]
        with jax.default_device(devices[0]):
            _train(settings, manifest, writers, mesh)
    for writer in writers:
        writer.finish()


def shard_initial(settings: RunSettings, mesh: Mesh) -> tuple[ShardedParams, Any, Any]:
    """The model's initial values, sharded; its nnx graph and the state that is no parameter."""
    definition = settings.definition
    graphdef, params, state = split(definition.make_flax(settings.dtype))
    params = nnx_params(definition, params, definition.initial_params(settings.seed, settings.dtype))
    return shard(params, mesh, units=definition.units, param_map=definition.param_map), graphdef, state


def nnx_params(definition: ModelDefinition, params: Any, values: dict[str, np.ndarray]) -> Any:
    """A tree like `params` with these values, given by canonical name."""

    def value(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
        entry = definition.param_map.by_path[".".join(str(getattr(key, "key", key)) for key in path)]
        return entry.from_canonical(values[entry.name])

    return jax.tree_util.tree_map_with_path(value, params)


def _train(settings: RunSettings, manifest: Manifest, writers: list[RecordingWriter], mesh: Mesh) -> None:
    sharded, graphdef, state = shard_initial(settings, mesh)
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
    for unit, rows in grads.lines.items():
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
