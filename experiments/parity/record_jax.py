"""Record a run in JAX: one process, one device a rank, `value_and_grad` over sharded parameters."""

from collections.abc import Callable
from dataclasses import dataclass, replace
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
from crossframe.trace import Event
from experiments.data import Batch
from experiments.models.definition import ModelDefinition
from experiments.parity.faults import fault_in_effect
from experiments.parity.settings import MOMENTUM, RunSettings, choose_device
from jax_backend import (
    Result,
    ShardedParams,
    clip_grad_norm,
    make_mesh,
    per_rank,
    shard,
    sharded_optimizer,
    shards_of,
    trace_of,
    value_and_grad,
)
from jax_backend.mesh import mesh_spec
from jax_backend.nnx import keep_outputs, split, state_of, with_params
from jax_backend.other_rounding import other_rounding
from jax_backend.sharded import mesh_of
from jax_backend.tree import path_name


def record_jax(settings: RunSettings, output: Path, *, twins: int = 0, overwrite: bool = False) -> None:
    """Train and record. JAX must not have been used before in this process, since its devices are made here.

    Args:
        twins: how many twins of the run are recorded behind it, inside its folder.

    Raises:
        UsageError: fewer devices than ranks.
        RecordingError: an output that cannot be written to.
    """
    jax.config.update("jax_enable_x64", settings.dtype == "float64")
    # Accelerators may otherwise round the operands of a float32 product to less.
    jax.config.update("jax_default_matmul_precision", "highest")
    devices = _devices(settings)
    for run, path in settings.runs(output, twins):
        record_on_devices(run, path, devices, overwrite=overwrite)


def _devices(settings: RunSettings) -> list[Any]:
    """One device a rank: GPUs if there are enough, otherwise parts of the CPU."""
    jax.config.update("jax_num_cpu_devices", settings.world_size)
    if settings.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    num_gpus = sum(device.platform == "gpu" for device in jax.devices())
    return jax.devices("gpu" if choose_device(settings.device, num_gpus, settings.world_size) == "cuda" else "cpu")


def record_on_devices(settings: RunSettings, output: Path, devices: list[Any], *, overwrite: bool = False) -> None:
    """Train and record on these devices, in rank order."""
    mesh = make_mesh(settings.spec, devices)
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
    graphdef, params, state = split_model(definition, settings.dtype)
    params = nnx_params(definition, params, settings.initial_params)
    sharded = shard(params, mesh, units=definition.units, param_map=definition.param_map, mp_policy=settings.policy)
    return sharded, graphdef, state


def split_model(definition: ModelDefinition, dtype: str) -> tuple[Any, Any, Any]:
    """Its nnx graph, parameters and state, that in float64 too: flax makes running statistics float32, whatever comes in."""
    graphdef, params, state = split(definition.make_flax(dtype))

    def cast(leaf: Any) -> Any:
        return leaf.astype(jnp.promote_types(leaf.dtype, dtype)) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return graphdef, params, jax.tree.map(cast, state)


def nnx_params(definition: ModelDefinition, params: Any, values: dict[str, np.ndarray]) -> Any:
    """A tree like `params` with these values, given by canonical name."""

    def value(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
        name = path_name(path)
        entry = definition.param_map.by_path[name]
        return entry.from_canonical(values[entry.name], name)

    return jax.tree_util.tree_map_with_path(value, params)


def optimizer_of(settings: RunSettings) -> optax.GradientTransformation:
    """The optimizer of a run, on shards."""
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer == "sgd":
        return sharded_optimizer(optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate, momentum=MOMENTUM)))
    return sharded_optimizer(optax.adamw(rate, weight_decay=decay))


@dataclass(frozen=True)
class _Steps:
    """What a step of the optimizer runs: microbatches that reduce nothing, and one that reduces what all have left.

    Attributes:
        waits, reduces: steps of value_and_grad.
        dense_waits, dense: the same, and they give what is a rank's own: the outputs of units, and its gradient.
    """

    waits: Callable[..., Result]
    reduces: Callable[..., Result]
    dense_waits: Callable[..., Result]
    dense: Callable[..., Result]

    def __call__(
        self, sharded: ShardedParams, parts: list[Any], state: Any, *, dense: bool
    ) -> tuple[np.ndarray, list[Any], Result]:
        """The ranks' mean losses, the outputs of each microbatch, and the result of the last."""
        losses, waiting, outputs = 0.0, None, []
        waits, reduces = (self.dense_waits, self.dense) if dense else (self.waits, self.reduces)
        for part in parts[:-1]:
            result = waits(sharded, part, state)
            outputs.append(result.aux)
            losses, state = losses + np.asarray(result.losses), result.state
            waiting = result.grads if waiting is None else waiting + result.grads
        result = reduces(sharded, parts[-1], state, accumulated=waiting)
        return losses + np.asarray(result.losses), [*outputs, result.aux], result

    def events(self, sharded: ShardedParams, parts: list[Any], state: Any, mesh: Mesh) -> list[Event]:
        """The collectives of a step."""
        found: list[Event] = []
        for i, part in enumerate(parts[:-1]):
            events = trace_of(self.waits, sharded, part, state, mesh=mesh)
            found += [replace(event, microbatch=i) for event in events]
        events = trace_of(self.reduces, sharded, parts[-1], state, mesh=mesh)
        return found + [replace(event, microbatch=len(parts) - 1) for event in events]


def _steps(settings: RunSettings, graphdef: Any, state: Any, mesh: Mesh) -> _Steps:
    def loss_of(dense: bool) -> Callable[..., Any]:
        def loss_fn(params: Any, *rest: Any) -> Any:
            *states, (inputs, targets) = rest
            model: Any = with_params(graphdef, params, *states)
            outputs = keep_outputs(model, ("", *settings.definition.units)) if dense else {}
            losses = optax.softmax_cross_entropy_with_integer_labels(model(inputs), targets)
            loss = losses.mean() / settings.accumulate
            own = {unit: output for unit, (output,) in outputs.items()}
            also: list[Any] = [*([state_of(model)] if states else []), *([own] if dense else [])]
            return (loss, tuple(also) if len(also) > 1 else also[0]) if also else loss

        return other_rounding(loss_fn, settings.twin) if settings.twin else loss_fn

    common: dict[str, Any] = {"strategy": Strategy(settings.strategy), "has_state": bool(jax.tree.leaves(state))}
    loss_fn, dense_loss_fn = loss_of(dense=False), loss_of(dense=True)
    return _Steps(
        waits=value_and_grad(loss_fn, mesh, reduces=False, **common),
        reduces=value_and_grad(loss_fn, mesh, **common),
        dense_waits=value_and_grad(dense_loss_fn, mesh, reduces=False, has_aux=True, **common),
        dense=value_and_grad(dense_loss_fn, mesh, local_grads=True, has_aux=True, **common),
    )


def _parts(settings: RunSettings, batches: list[Batch]) -> list[Any]:
    """Each microbatch of all ranks, one rank's part behind the other's."""
    parts = []
    for i in range(settings.accumulate):
        part = slice(i * settings.batch_size, (i + 1) * settings.batch_size)
        arrays = ([getattr(batch, name)[part] for batch in batches] for name in ("inputs", "targets"))
        parts.append(tuple(jnp.asarray(np.concatenate(each)) for each in arrays))
    return parts


def _train(settings: RunSettings, manifest: Manifest, writers: list[RecordingWriter], mesh: Mesh) -> None:
    sharded, graphdef, state = shard_initial(settings, mesh)
    if tuple(sharded.tree.units) != manifest.units:
        raise UsageError("the layouts of the model's definition are not those that jax_backend computed")
    steps = _steps(settings, graphdef, state, mesh)
    state = per_rank(state, mesh) if jax.tree.leaves(state) else None
    optimizer = optimizer_of(settings)
    opt_state = optimizer.init(sharded)  # type: ignore[arg-type]

    def update(sharded: ShardedParams, opt_state: Any, grads: ShardedParams) -> tuple[ShardedParams, Any]:
        if settings.clip is not None:
            grads, _ = clip_grad_norm(grads, settings.clip)
        updates, opt_state = optimizer.update(grads, opt_state, sharded)  # type: ignore[arg-type]
        return optax.apply_updates(sharded, updates), opt_state  # type: ignore[arg-type,return-value]

    # What an optimizer makes of its constants in float32, such as 1 - 0.999, rounding can change much.
    jitted_update = jax.jit(other_rounding(update, settings.twin) if settings.twin else update)
    events = None
    for step in range(settings.steps):
        batches = [settings.batch(step, rank) for rank in range(settings.world_size)]
        parts, dense = _parts(settings, batches), manifest.schedule.is_dense(step)
        if events is None:
            events = steps.events(sharded, parts, state, mesh)
        losses, outputs, result = steps(sharded, parts, state, dense=dense)
        state = result.state
        updated, opt_state = jitted_update(sharded, opt_state, result.grads)
        for rank, writer in enumerate(writers):
            writer.batch(step, batches[rank].digest, batches[rank].sample_ids)
            if step == 0:
                _record_pieces(writer.parameters, step, sharded, rank)
            writer.loss(step, float(losses[rank]))
            writer.collectives(step, _of_rank(events, settings.spec, rank))
            if dense:
                _record_outputs(writer, step, outputs, rank)
                _record_local_grads(writer, step, sharded, result.local_grads, rank)
            if writer.records(step):
                _record_pieces(writer.reduced_grads, step, result.grads, rank)
                _record_pieces(writer.updated, step, updated, rank)
            writer.end_step(step)
        sharded = updated


def _of_rank(events: list[Event], spec: MeshSpec, rank: int) -> list[Event]:
    """The events of rank 0 as another rank has them: it does the same in groups of its own."""
    groups = {tuple(of(0)): tuple(of(rank)) for of in (spec.replicate_group, spec.shard_group)}
    return [replace(event, group=groups[tuple(event.group)]) for event in events]


def _record_outputs(writer: RecordingWriter, step: int, outputs: list[Any], rank: int) -> None:
    for microbatch, by_unit in enumerate(outputs):
        for unit, ranks in by_unit.items():
            output = np.asarray(ranks[rank])
            # An image with its channels last, as flax has it: torch has them first.
            writer.output(step, microbatch, unit, np.moveaxis(output, -1, 1) if output.ndim == 4 else output)


def _record_local_grads(writer: RecordingWriter, step: int, sharded: ShardedParams, grads: Any, rank: int) -> None:
    for unit, rows in grads.lines.items():
        writer.local_grads(step, unit, sharded.tree.views(unit, np.asarray(rows[rank])))


def _record_pieces(write: Any, step: int, sharded: ShardedParams, rank: int) -> None:
    """Write a rank's pieces of parameters or of reduced gradients, unit by unit."""
    shards, place = shards_of(sharded, rank), mesh_spec(mesh_of(sharded)).coordinate(rank)[1]
    for unit, layout in sharded.tree.units:
        pieces = {
            p.name: (p.param_start, p.param_stop, shards[unit][p.shard_start : p.shard_stop])
            for p in layout.pieces(place)
        }
        write(step, unit, pieces)
