"""Train a GPT on text, sharded over all devices by jax_backend: the counterpart of `experiments.train_torch`.

    python -m experiments.train_jax --output runs/gpt-jax

One process takes all GPUs that it sees; `--cpu-devices 2` makes it two ranks on a CPU. On several machines, or with a process for
each GPU, start one command a process: `--coordinator auto` under SLURM, else `--coordinator HOST:PORT --num-processes N
--process-id I`. The same command goes on from the newest whole checkpoint: on any number of devices and processes, with any
strategy and layout, also where `experiments.train_torch` wrote it. A step follows from the seed and its number alone: the ranks
share out one batch. So a run is the same however often it was interrupted: bit for bit on as many ranks, to rounding on others.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import optax
import typer
from jax.sharding import Mesh, NamedSharding

from crossframe.checkpoint import AsyncSaver
from crossframe.errors import CrossframeError, UsageError
from crossframe.mesh import MeshSpec
from crossframe.precision import PrecisionPolicy
from crossframe.strategy import Strategy
from experiments.data import text_batch
from experiments.models.load_flax import nnx_params
from experiments.train import loop
from experiments.train.settings import TrainSettings
from jax_backend import (
    ShardedParams,
    apply_updates,
    clip_grad_norm,
    load_checkpoint,
    make_mesh,
    save_checkpoint,
    shard,
    sharded_optimizer,
    value_and_grad,
)
from jax_backend.mesh._device_mesh import rank_partition
from jax_backend.nnx import split, with_params
from jax_backend.ranks._processes import gather_values

DEFAULTS = TrainSettings(Path("runs/gpt-jax"), layout="flat")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def train(settings: TrainSettings, devices: list[Any] | None = None) -> bool:
    """Train to the end, or until SIGTERM asks to stop. All processes call it.

    Args:
        devices: the ranks; None: all devices of all processes.

    Returns:
        Whether the last step that was taken is in a checkpoint.

    Raises:
        CrossframeError: settings, a folder or a checkpoint that cannot be used.
    """
    if settings.dropout:
        raise UsageError(f"dropout: expected 0, got {settings.dropout}; experiments.train_torch alone has it")
    mesh = make_mesh(_spec(settings, len(devices or jax.devices())), devices)
    settings.num_microbatches(mesh.size)  # before anything is made
    return loop.run(settings, JaxProcesses(), lambda: JaxTrainer(settings, mesh))


class JaxProcesses:
    """The processes of jax.distributed, or this one; see `experiments.train.together.Ranks`."""

    noun = "process"

    def __init__(self) -> None:
        self.rank, self.size = jax.process_index(), jax.process_count()

    def gather(self, value: Any) -> list[Any]:
        """What each process passes."""
        return gather_values(value)


class JaxTrainer:
    """The model and AdamW; see `experiments.train.loop.Trainer`."""

    def __init__(self, settings: TrainSettings, mesh: Mesh) -> None:
        self.settings, self.mesh = settings, mesh
        self.params, loss_fn = build(settings, mesh)
        optimizer: Any = sharded_optimizer(
            optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(settings.weight_decay)), mesh
        )
        self.opt_state = optimizer.init(self.params)
        self._waits, self._reduces = (
            value_and_grad(loss_fn, mesh, strategy=Strategy(settings.strategy), reduces=reduces)
            for reduces in (False, True)
        )

        @partial(jax.jit, donate_argnums=(0, 1))
        def update(params: ShardedParams, opt_state: Any, grads: ShardedParams, rate: Any, asked: jax.Array) -> Any:
            grads, norm = clip_grad_norm(grads, settings.clip)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            updates = jax.tree.map(lambda update: (-rate * update).astype(update.dtype), updates)
            return apply_updates(params, updates), opt_state, norm, asked.any()

        self._update = update

    def save(self, path: Path, about: dict[str, Any], saver: AsyncSaver | None = None) -> None:
        """Write a checkpoint."""
        save_checkpoint(path, self.params, self.opt_state, about=about, saver=saver)

    def load(self, path: Path) -> None:
        """Take over the state of one."""
        self.params, self.opt_state = load_checkpoint(path, self.params, self.opt_state)

    def step(self, step: int, asked: Callable[[], bool]) -> tuple[float, float, bool]:
        """Take a step."""
        waiting, loss = None, 0.0
        *earlier, last = _microbatches(self.settings, self.mesh, step)
        for batch in earlier:
            result = self._waits(self.params, batch)
            waiting, loss = result.grads if waiting is None else waiting + result.grads, loss + result.loss
        result = self._reduces(self.params, last, accumulated=waiting)
        rate = self.settings.learning_rate_at(step)
        everywhere = _spread(np.full(len(_own_ranks(self.mesh)), asked()), self.mesh)
        self.params, self.opt_state, norm, stopping = self._update(
            self.params, self.opt_state, result.grads, rate, everywhere
        )
        return float(loss + result.loss), float(norm), bool(stopping)


def build(settings: TrainSettings, mesh: Mesh) -> tuple[ShardedParams, Callable[..., jax.Array]]:
    """The model with its initial values, sharded, and the mean loss of one rank's batch."""
    definition, computed, stored = settings.definition, settings.precision, settings.stored_dtype
    # An embedding of flax computes in the dtype that it was made with.
    graphdef, params, state = split(definition.make_flax(computed))
    policy = PrecisionPolicy("bfloat16", reduce_dtype="float32") if computed == "bfloat16" else None
    sharded = shard(
        nnx_params(definition, params, definition.initial_params(settings.seed, stored)),
        mesh,
        units=definition.units,
        param_map=definition.param_map,
        layout=settings.layout or "flat",
        mp_policy=policy,
    )
    num_microbatches = settings.num_microbatches(mesh.size)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        tokens, targets = batch
        logits = with_params(graphdef, params, state)(tokens).astype(stored)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean() / num_microbatches

    return sharded, loss_fn


def _spec(settings: TrainSettings, num_devices: int) -> MeshSpec:
    """The mesh of a run: hybrid strategies keep a copy of the model in each process, unless they are told otherwise."""
    strategy = Strategy(settings.strategy)
    shard = (settings.shard or jax.local_device_count()) if strategy.is_hybrid else None
    return strategy.mesh(num_devices, shard)


def _microbatches(settings: TrainSettings, mesh: Mesh, step: int) -> list[Any]:
    """The microbatches of a step, each an array over all ranks of which this process has made its ranks' parts."""
    samples, num = settings.rank_batch_size(mesh.size), settings.num_microbatches(mesh.size)
    context = settings.definition.context or 0
    batches = [text_batch(settings.seed, step, rank, mesh.size, samples, context) for rank in _own_ranks(mesh)]

    def array(name: str, i: int) -> jax.Array:
        return _spread(np.concatenate([np.split(getattr(batch, name), num)[i] for batch in batches]), mesh)

    return [(array("inputs", i), array("targets", i)) for i in range(num)]


def _own_ranks(mesh: Mesh) -> list[int]:
    """The ranks whose devices this process has."""
    return [rank for rank, device in enumerate(mesh.devices.flat) if device.process_index == jax.process_index()]


def _spread(own: np.ndarray, mesh: Mesh) -> jax.Array:
    """An array over all ranks, of whose leading dim this is the part of the ranks of this process."""
    return jax.make_array_from_process_local_data(NamedSharding(mesh, rank_partition(mesh)), own)


def _start(cpu_devices: int | None, coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Make the devices, before JAX is first used."""
    if cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    if coordinator is None:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if coordinator == "auto":
        jax.distributed.initialize()
    elif num_processes is None or process_id is None:
        raise UsageError("--coordinator: HOST:PORT needs --num-processes and --process-id")
    else:
        jax.distributed.initialize(coordinator, num_processes, process_id)


@app.command()
def main(
    output: Annotated[Path, typer.Option(help="Folder of checkpoints and metrics, which all processes see.")],
    model: Annotated[str, typer.Option(help="gpt, gpt-tiny or llama-tiny.")] = DEFAULTS.model,
    layout: Annotated[str | None, typer.Option(help="flat, per_param or ragged.")] = DEFAULTS.layout,
    strategy: Annotated[
        str, typer.Option(help="full_shard, shard_grad_op, no_shard, hybrid_shard or hybrid_shard_zero2.")
    ] = DEFAULTS.strategy,
    shard: Annotated[
        int | None, typer.Option(help="Hybrid: ranks that hold one copy of the model. Default: those of a process")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of the whole run.")] = DEFAULTS.steps,
    batch_size: Annotated[int, typer.Option(help="Samples of a step, on all ranks together.")] = DEFAULTS.batch_size,
    micro_batch_size: Annotated[
        int | None, typer.Option(help="Samples of a rank in one forward; fewer than its part accumulate. Default: all")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="The highest, of AdamW.")] = DEFAULTS.learning_rate,
    warmup_steps: Annotated[int, typer.Option(help="Steps in which it rises.")] = DEFAULTS.warmup_steps,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.")] = DEFAULTS.weight_decay,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = DEFAULTS.clip,
    precision: Annotated[
        str, typer.Option(help="float32, float64, or bfloat16 to compute in over stored float32.")
    ] = DEFAULTS.precision,
    seed: Annotated[int, typer.Option(help="Where values and batches come from.")] = DEFAULTS.seed,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = DEFAULTS.checkpoint_every,
    async_save: Annotated[
        bool, typer.Option("--async-save", help="Continue training while a checkpoint is written.")
    ] = DEFAULTS.async_save,
    keep: Annotated[int, typer.Option(help="How many of the newest checkpoints stay.")] = DEFAULTS.keep,
    resume: Annotated[str, typer.Option(help="auto, none, or the folder of a checkpoint.")] = DEFAULTS.resume,
    cpu_devices: Annotated[int | None, typer.Option(help="Ranks of this process, on a CPU. Default: its GPUs")] = None,
    coordinator: Annotated[
        str | None, typer.Option(help="HOST:PORT of the first process, or auto under SLURM. Default: one process")
    ] = None,
    num_processes: Annotated[int | None, typer.Option(help="With HOST:PORT: how many processes.")] = None,
    process_id: Annotated[int | None, typer.Option(help="With HOST:PORT: which of them this is.")] = None,
) -> None:
    """Train a GPT on text, sharded; started again, go on from the newest whole checkpoint.

    Exit status: 0 trained or stopped, and saved; 1 not saved at the end; 2 wrong use, or no checkpoint that can be used.
    """
    given = dict(locals())
    where = [given.pop(name) for name in ("cpu_devices", "coordinator", "num_processes", "process_id")]
    try:
        settings = TrainSettings(**given)
        if settings.definition.context is None:
            raise UsageError(f"--model: expected a model of text, got {settings.model}")
        jax.config.update("jax_enable_x64", settings.precision == "float64")
        _start(*where)
        saved = train(settings)
    except CrossframeError as error:
        if jax.process_index() == 0:
            print(f"train_jax: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    raise typer.Exit(not saved)


if __name__ == "__main__":
    app()
