"""Record a run in JAX: one process, one device a rank, `value_and_grad` over sharded parameters."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from crossframe.errors import UsageError
from crossframe.operators import Request
from crossframe.recording import Batch as RecordedBatch
from crossframe.recording import Manifest, create_recording
from crossframe.strategy import Strategy
from crossframe.trace import Event
from experiments.data import Batch
from experiments.faults.catalogue import fault_in_effect
from experiments.models import load_flax
from experiments.parity.settings import MOMENTUM, RunSettings, choose_device
from experiments.train.resume import resume_jax
from jax_backend import (
    Result,
    ShardedParams,
    clip_grad_norm,
    make_mesh,
    per_rank,
    shard,
    sharded_optimizer,
    trace_of,
    value_and_grad,
)
from jax_backend.nnx import state_of, watch, with_params
from jax_backend.other_rounding import other_rounding
from jax_backend.recorder._begin import program
from jax_backend.recorder._interior import with_inner
from jax_backend.recorder._modules import module_paths
from jax_backend.recorder._operators import OperatorTrace
from jax_backend.recorder._shards import OfShards
from jax_backend.recorder._writers import Seen, Writers


def record_jax(settings: RunSettings, output: Path, *, twins: int = 0, overwrite: bool = False) -> None:
    """Train and record. JAX must not have been used before in this process, since its devices are made here.

    Args:
        twins: how many perturbed runs of the run are recorded behind it, inside its folder.

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
    manifest = settings.manifest("jax", ("jax", "flax", "optax", "numpy"), program(devices[0]))
    create_recording(output, manifest, overwrite=overwrite)
    # If the run fails, no writer is finished: a recording without its end is not taken for a whole one.
    with fault_in_effect(settings.fault), jax.default_device(devices[0]):
        _train(settings, manifest, output, mesh)


def shard_initial(settings: RunSettings, mesh: Mesh) -> tuple[ShardedParams, Any, Any]:
    """The model's initial values, sharded; its nnx graph and the state that is no parameter."""
    graphdef, params, state = load_flax.split_model(settings.definition, settings.dtype)
    return _sharded(settings, params, mesh), graphdef, state


def _sharded(settings: RunSettings, params: Any, mesh: Mesh) -> ShardedParams:
    definition = settings.definition
    params = load_flax.nnx_params(definition, params, settings.initial_params)
    return shard(params, mesh, units=definition.units, param_map=definition.param_map, mp_policy=settings.policy)


def optimizer_of(settings: RunSettings) -> optax.GradientTransformation:
    """The optimizer of a run, on shards."""
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer == "sgd":
        return sharded_optimizer(optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate, momentum=MOMENTUM)))
    return sharded_optimizer(optax.adamw(rate, weight_decay=decay))


# Up to so many steps, computing and dropping what dense steps give costs less than compiling another program.
SHORT = 12


class _Programs:
    """What runs of these settings compute, whatever their seeds and lengths, and whichever perturbed runs they are.

    Attributes:
        graphdef, state: of the model; the state is one rank's.
        waits, reduces: steps of value_and_grad of a microbatch that reduces nothing, and of one that reduces what all have left.
        dense_waits, dense: the same, and they give what is a rank's own.
        optimizer: on shards.
        update: (parameters, state of the optimizer, gradients, perturbed run) to (parameters, state, norm of the gradients or
            None).
    """

    def __init__(self, settings: RunSettings, mesh: Mesh) -> None:
        self._twin = settings.twin > 0
        definition = settings.definition
        self.graphdef, self.params, self.state = load_flax.split_model(definition, settings.dtype)
        paths = module_paths(definition.param_map, definition.units)
        has_state = bool(jax.tree.leaves(self.state))

        def loss_fn(params: Any, *rest: Any) -> Any:
            *states, (inputs, targets) = rest
            model: Any = with_params(self.graphdef, params, *states)
            watch(model, paths)
            losses = optax.softmax_cross_entropy_with_integer_labels(model(inputs), targets)
            loss = losses.mean() / settings.accumulate
            return (loss, state_of(model)) if states else loss

        def made(loss_fn: Any, has_aux: bool, **options: Any) -> Callable[..., Result]:
            loss_fn = _as_twin(loss_fn, has_state, has_aux) if self._twin else loss_fn
            strategy, keeps_state = Strategy(settings.strategy), has_state or self._twin
            return value_and_grad(loss_fn, mesh, strategy=strategy, has_state=keeps_state, has_aux=has_aux, **options)

        dense_loss_fn = with_inner(loss_fn, has_state=has_state)
        self.waits = made(loss_fn, False, reduces=False)
        self.reduces = made(loss_fn, False)
        self.dense_waits = made(dense_loss_fn, True, reduces=False)
        self.dense = made(dense_loss_fn, True, local_grads=True)
        self.optimizer = optimizer_of(settings)

        def update(sharded: ShardedParams, opt_state: Any, grads: ShardedParams) -> tuple[ShardedParams, Any, Any]:
            grads, norm = (grads, None) if settings.clip is None else clip_grad_norm(grads, settings.clip)
            updates, opt_state = self.optimizer.update(grads, opt_state, sharded)  # type: ignore[arg-type]
            return optax.apply_updates(sharded, updates), opt_state, norm  # type: ignore[arg-type,return-value]

        def update_of(twin: Any, *args: Any) -> Any:
            # What an optimizer makes of its constants in float32, such as 1 - 0.999, rounding can change much.
            return (other_rounding(update, twin) if self._twin else update)(*args)

        self.update = jax.jit(update_of)

    def state_of(self, twin: int, mesh: Mesh) -> Any:
        """What a step takes as state at the beginning of a run."""
        state = per_rank(self.state, mesh) if jax.tree.leaves(self.state) else None
        return {"own": state, "twin": per_rank(np.uint32(twin), mesh)} if self._twin else state

    def step(
        self, sharded: ShardedParams, parts: list[Any], state: Any, *, dense: bool
    ) -> tuple[np.ndarray, list, Result]:
        """The ranks' mean losses, what is inside of each microbatch, and the result of the last."""
        losses, waiting, inner = 0.0, None, []
        waits, reduces = (self.dense_waits, self.dense) if dense else (self.waits, self.reduces)
        for part in parts[:-1]:
            result = waits(sharded, part, state)
            inner += [result.aux[1]] if dense else []
            losses, state = losses + np.asarray(result.losses), result.state
            waiting = result.grads if waiting is None else waiting + result.grads
        result = reduces(sharded, parts[-1], state, accumulated=waiting)
        inner += [result.aux[1]] if dense else []
        return losses + np.asarray(result.losses), inner, result

    def events(self, sharded: ShardedParams, parts: list[Any], state: Any, mesh: Mesh, *, dense: bool) -> list[Event]:
        """The collectives of a step."""
        waits, reduces = (self.dense_waits, self.dense) if dense else (self.waits, self.reduces)
        found: list[Event] = []
        # All microbatches but the last run one program.
        waiting = trace_of(waits, sharded, parts[0], state, mesh=mesh) if len(parts) > 1 else []
        for i in range(len(parts) - 1):
            found += [replace(event, microbatch=i) for event in waiting]
        events = trace_of(reduces, sharded, parts[-1], state, mesh=mesh)
        return found + [replace(event, microbatch=len(parts) - 1) for event in events]


def _as_twin(loss_fn: Callable, has_state: bool, has_aux: bool) -> Callable:
    """The same with another rounding, which perturbed run's it is told in its state: so all perturbed runs run one program."""

    def run(params: Any, state: Any, batch: Any) -> Any:
        args = (params, state["own"], batch) if has_state else (params, batch)
        found: Any = other_rounding(loss_fn, state["twin"])(*args)
        also: Any = None
        if has_state or has_aux:
            found, also = found
        own, aux = also if has_state and has_aux else (also, None) if has_state else (None, also)
        after = {"own": own, "twin": state["twin"]}
        return found, (after, aux) if has_aux else after

    return run


@functools.lru_cache(maxsize=2)
def _programs(settings: RunSettings, mesh: Mesh) -> _Programs:
    """The programs of settings, kept while runs of one kind follow each other: a run's own and its perturbed runs'."""
    return _Programs(settings, mesh)


def _parts(settings: RunSettings, batches: list[Batch]) -> list[Any]:
    """Each microbatch of all ranks, one rank's part behind the other's."""
    parts = []
    for i in range(settings.accumulate):
        part = slice(i * settings.batch_size, (i + 1) * settings.batch_size)
        arrays = ([getattr(batch, name)[part] for batch in batches] for name in ("inputs", "targets"))
        parts.append(tuple(jnp.asarray(np.concatenate(each)) for each in arrays))
    return parts


def _train(settings: RunSettings, manifest: Manifest, output: Path, mesh: Mesh) -> None:
    kind = replace(settings, seed=0, steps=1, dense=0, resume_at=None, twin=min(settings.twin, 1))
    programs = _programs(kind, mesh)
    sharded = _sharded(settings, programs.params, mesh)
    if tuple(sharded.tree.units) != manifest.units:
        raise UsageError("the layouts of the model's definition are not those that jax_backend computed")
    state, opt_state = programs.state_of(settings.twin, mesh), programs.optimizer.init(sharded)  # type: ignore[arg-type]
    events: list[Event] | None = None
    request = Request.from_environment()
    trace = OperatorTrace(request) if request is not None else None
    with Writers(output, manifest, OfShards(sharded)) as writers:
        for step in range(settings.steps):
            sharded, opt_state = resume_jax(settings.resume_at, step, output, sharded, opt_state, programs.optimizer)
            batches = [settings.batch(step, rank) for rank in range(settings.world_size)]
            parts = _parts(settings, batches)
            if trace is not None:
                trace.begin_step(step)
            traced = trace is not None and trace.active
            dense = settings.steps <= SHORT or writers.is_dense(step) or traced
            if events is None:
                events = programs.events(sharded, parts, state, mesh, dense=dense)
            losses, inner, result = programs.step(sharded, parts, state, dense=dense)
            updated, opt_state, norm = programs.update(settings.twin, sharded, opt_state, result.grads)
            if trace is not None and trace.active:
                trace.microbatch(losses, [value for each in inner for value in each.activations.values])
                trace.finish(result.loss)
            seen = Seen(
                {rank: RecordedBatch(batch.digest, batch.sample_ids) for rank, batch in enumerate(batches)},
                {rank: float(loss) for rank, loss in enumerate(losses)},
                writers.source.pieces(sharded) if step == 0 else None,
                grads=result.grads,
                grad_norm=None if norm is None else float(norm),
                state=opt_state,
                updated=updated,
                inner=inner if writers.is_dense(step) else (),
                local_grads=result.local_grads,
                events=events,
            )
            writers.write(step, seen)
            sharded, state = updated, result.state
