"""Record a run in JAX: one process, one device a rank, `value_and_grad` over sharded parameters."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from crossframe.recording import Batch as RecordedBatch
from crossframe.recording import Manifest, create_recording
from crossframe.strategy import Strategy
from experiments.data import Batch
from experiments.faults.catalogue import fault_in_effect
from experiments.models import load_flax
from experiments.parity.settings import MOMENTUM, RunSettings, choose_device
from experiments.train.resume import resume_jax
from jax_backend import (
    LossOutput,
    Recorder,
    ShardedParams,
    apply_updates,
    clip_grad_norm,
    make_mesh,
    per_rank,
    shard,
    sharded_optimizer,
)
from jax_backend.nnx import state_of, watch, with_params
from jax_backend.other_rounding import other_rounding
from jax_backend.recorder import module_paths, program


def record_jax(settings: RunSettings, output: Path, *, perturbed_runs: int = 0, overwrite: bool = False) -> None:
    """Train and record. JAX must not have been used before in this process, since its devices are made here.

    Args:
        perturbed_runs: number of perturbed runs that are recorded after it, inside its folder.

    Raises:
        UsageError: fewer devices than ranks.
        RecordingError: an output that cannot be written to.
    """
    jax.config.update("jax_enable_x64", settings.dtype == "float64")
    # Accelerators may otherwise round the operands of a float32 product to less.
    jax.config.update("jax_default_matmul_precision", "highest")
    devices = _devices(settings)
    for run, path in settings.runs(output, perturbed_runs):
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


def shard_model(settings: RunSettings, params: Any, mesh: Mesh) -> ShardedParams:
    """The initial values of a run, sharded; `params` gives their tree and shapes."""
    definition = settings.definition
    params = load_flax.nnx_params(definition, params, settings.initial_params)
    units, param_map = definition.units, definition.param_map
    # The layout of FSDP1, which the other side of a parity run uses.
    return shard(params, mesh, units=units, param_map=param_map, layout="flat", mp_policy=settings.policy)


def optimizer_of(settings: RunSettings) -> Any:
    """The optimizer of a run, on shards. A fault may replace the functions of optax by its own, which are elementwise too."""
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer == "sgd":
        made = optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate, momentum=MOMENTUM))
    else:
        made = optax.adamw(rate, weight_decay=decay)
    return sharded_optimizer(made, elementwise=bool(settings.fault))


# Compiling a second program takes longer than the interiors of so many steps.
SHORT = 12


class _Model:
    """A model, its loss and its optimizer, the same for all seeds and lengths of a run and for its perturbed runs.

    Attributes:
        params, state: shapes of its parameters, and the rest of one rank's state.
        loss_fn: the mean loss of a microbatch, divided by their number.
        update: from (seed of another rounding or None, parameters, optimizer state, gradients) to (parameters, optimizer state,
            norm of the gradients or None).
    """

    def __init__(self, settings: RunSettings) -> None:
        definition = settings.definition
        graphdef, self.params, self.state = load_flax.split_model(definition, settings.dtype)
        paths = module_paths(definition.param_map, definition.units)
        self.has_state = bool(jax.tree.leaves(self.state))
        self.optimizer: Any = optimizer_of(settings)

        def loss_fn(params: Any, batch: Any, state: Any = None) -> Any:
            inputs, targets = batch
            model: Any = with_params(graphdef, params, state)
            watch(model, paths)
            losses = optax.softmax_cross_entropy_with_integer_labels(model(inputs), targets)
            loss = losses.mean() / settings.accumulate
            return loss if state is None else LossOutput(loss, state=state_of(model))

        def update(sharded: ShardedParams, opt_state: Any, grads: ShardedParams) -> tuple[ShardedParams, Any, Any]:
            grads, norm = (grads, None) if settings.clip is None else clip_grad_norm(grads, settings.clip)
            updates, opt_state = self.optimizer.update(grads, opt_state, sharded)
            return apply_updates(sharded, updates), opt_state, norm

        def update_of(seed: Any, *args: Any) -> Any:
            # Constants that an optimizer computes in float32, such as 1 - 0.999, have large rounding errors.
            return (update if seed is None else other_rounding(update, seed))(*args)

        self.loss_fn, self.update = loss_fn, jax.jit(update_of)


@functools.lru_cache(maxsize=1)
def _model(settings: RunSettings) -> _Model:
    """The model of settings, kept while runs of one kind follow each other, which then share its programs."""
    return _Model(settings)


def _microbatches(settings: RunSettings, batches: list[Batch]) -> list[Any]:
    """The microbatches, each with the samples of all ranks in rank order."""
    parts = []
    for i in range(settings.accumulate):
        part = slice(i * settings.batch_size, (i + 1) * settings.batch_size)
        arrays = ([getattr(batch, name)[part] for batch in batches] for name in ("inputs", "targets"))
        parts.append(tuple(jnp.asarray(np.concatenate(each)) for each in arrays))
    return parts


def _train(settings: RunSettings, manifest: Manifest, output: Path, mesh: Mesh) -> None:
    model = _model(replace(settings, seed=0, steps=1, dense=0, windows=(), resume_at=None, perturbed_run=0))
    sharded = shard_model(replace(settings, perturbed_run=0), model.params, mesh)
    with Recorder(output, sharded, manifest=manifest, perturbed_run=settings.perturbed_run) as recorder:
        sharded, state = recorder.params, per_rank(model.state, mesh) if model.has_state else None
        waits, reduces = (
            recorder.value_and_grad(
                model.loss_fn,
                one_program=settings.steps <= SHORT,
                strategy=Strategy(settings.strategy),
                reduces=reduces,
            )
            for reduces in (False, True)
        )
        opt_state, seed = (
            model.optimizer.init(sharded),
            np.uint32(settings.perturbed_run) if settings.perturbed_run else None,
        )
        for step in range(settings.steps):
            sharded, opt_state = resume_jax(settings.resume_at, step, output, sharded, opt_state, model.optimizer)
            batches = [settings.batch(step, rank) for rank in range(settings.world_size)]
            losses, waiting = 0.0, None
            *earlier, last = _microbatches(settings, batches)
            for microbatch in earlier:
                result = waits(sharded, microbatch, state)
                losses, state = losses + np.asarray(result.losses), result.state
                waiting = result.grads if waiting is None else waiting + result.grads
            result = reduces(sharded, last, state, accumulated=waiting)
            losses, state = losses + np.asarray(result.losses), result.state
            sharded, opt_state, norm = model.update(seed, sharded, opt_state, result.grads)
            recorder.step(
                loss=losses,
                params=sharded,
                grads=result.grads,
                opt_state=opt_state,
                batch=[RecordedBatch(batch.digest, batch.sample_ids) for batch in batches],
                grad_norm=norm,
            )
