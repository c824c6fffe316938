"""`Recorder`: records any training loop in JAX."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import PyTree

from crossframe.errors import RecordingError, UsageError
from crossframe.operators import Request
from crossframe.param_map import ParamMap
from crossframe.recording import Batch, Manifest
from crossframe.recording.known_settings import LOSSES, MEAN, PER_RANK
from crossframe.recording.run_options import RunOptions
from crossframe.trace import Event
from jax_backend.activations import Activations, listening
from jax_backend.engine._value_and_grad import SHARD_MAP, Result
from jax_backend.other_rounding import other_rounding
from jax_backend.programs._trace import trace_of
from jax_backend.ranks._processes import gather_values
from jax_backend.recorder._array_interior import ArrayInterior, by_rank, first_floating, may_be_batch, mean_square
from jax_backend.recorder._combined_grads import combined
from jax_backend.recorder._device_ranks import Grid, are_rows_of
from jax_backend.recorder._manifest import About, begun, check_directory, kept, manifest_of
from jax_backend.recorder._model_state import ByRank, state_by_rank, statistics_of_ranks
from jax_backend.recorder._modules import check_channels_last, describe_modules, is_module, module_paths
from jax_backend.recorder._observed_loss import Interior, programs_of
from jax_backend.recorder._operator_trace import OperatorTrace
from jax_backend.recorder._params_as_arrays import ArrayPieces
from jax_backend.recorder._params_as_shards import ShardPieces, recorded_collectives
from jax_backend.recorder._taps import Value
from jax_backend.recorder._writers import StepData, Writers
from jax_backend.shards._local_grads import LocalGrads
from jax_backend.shards._sharded_params import ShardedParams

if TYPE_CHECKING:  # judging imports more than recording does, and most runs are not watched
    from crossframe.monitoring import Monitor

# Steps whose losses stay on the device, so that the loop does not wait for them.
_MOST_PENDING = 2
MORE = ("grads", "grad_norm", "learning_rate", "model_state")
"""The keys of the dict that a wrapped step may return."""


class Recorder:
    """Records a training loop.

        with Recorder("runs/mine", params) as recorder:
            step = recorder.wrap(step)      # step(params, opt_state, batch) -> (params, opt_state, loss)
            for batch in data:
                params, opt_state, loss = step(params, opt_state, batch)

    or, if the loop has more to record,

        with Recorder("runs/mine", params) as recorder:
            params = recorder.params
            for batch in data:
                loss, grads = loss_and_grads(params, batch)
                updates, opt_state = optimizer.update(grads, opt_state, params)
                params = optax.apply_updates(params, updates)
                recorder.step(params=params, grads=grads, loss=loss, opt_state=opt_state, batch=batch)

    or, if it only calls a model,

        with Recorder("runs/mine", params, forward_only=True) as recorder:
            model = recorder.forward(model)     # model(params, *inputs) -> output
            for batch in data:
                logits = model(params, batch)

    The parameters are ShardedParams, or any pytree of floating arrays, on one device or sharded over a mesh by NamedSharding, as
    in FSDP by hand. Each device is a rank. Its piece of a parameter is the part on it, if that is a run of rows in canonical
    order; else the rows that the core's layout assigns to it. All processes record, into one directory that they share.

    At every step the loss and the identity of the batch are recorded; at recorded steps also gradients, parameters and optimizer
    state, if they are passed. The interior of a step (full parameters as each rank's forward sees them, inputs and outputs of
    modules, each rank's own gradients, collectives) is not visible under jit: it is recorded by `recorder.value_and_grad` alone,
    at dense steps. The manifest's settings say what was recorded.

    Args:
        directory: the directory of the recording.
        params: the initial parameters.
        model: the model, a module of flax or equinox. Class and options of its modules are recorded for `crossframe check`; of
            linen, without those of modules that are made while it is called. None: `params`, if they are a module of equinox.
        mesh: the mesh whose devices are the ranks; None: that of the parameters, or one device. A copy of the model is sharded
            over the axes that shard any parameter; the other axes are replicas. ShardedParams have their own, and the devices of
            a rank along model axes are recorded as one.
        param_map: canonical (torch) names and axis orders; None: the paths of the pytree. ShardedParams have their own.
        units: names of the modules that are units; None: the members of the longest list of modules. ShardedParams have their
            own.
        every, dense: record tensors at every `every`-th step, and everything at the first `dense` steps.
        windows: (start, stop) of further dense steps; `open_window` opens one while the loop runs.
        detail: "full", "sketch" (`crossframe.recording.sketch`: two kilobytes for each tensor), or "auto": sketches for a model
            of more than a million parameters.
        steps: the number of steps, if known; the last one is then recorded too.
        model_state: state of the model that is no parameter before the first step, as `step` gets it after each step.
        samples: maps a batch to the arrays that identify its samples; None: all of it. A recording in torch has the inputs of the
            model: return those to compare with one.
        channels_last: canonical names of modules, or (name, "input" or "output"), whose activations have channels in the last dim
            where torch has them in dim 1; all others are in torch's order. None: convolutions of the map have them last, and for
            other images `compare` infers the order from the shapes of both recordings. Required only if shapes and values fit
            both orders, such as 8 channels of 8 x 8.
        perturbed_run: number of the perturbed run (`crossframe.recording.perturbed_runs`), or 0 for the original run. In a
            perturbed run `recorder.params` differ by one unit in the last place, wrapped functions round differently, and the
            recording is a folder inside the original run's recording. None: the environment variable
            CROSSFRAME_PERTURBED_RUN, else 0.
        forward_only: record calls of a model (`forward`), and no training.
        overwrite: replace an existing recording.
        monitor: judges the run while it is recorded (`crossframe.monitoring.Monitor`). All processes pass an equal one.
        manifest: manifest of an existing recording, into which this process writes. It replaces all arguments about the run.
        name, dtype, strategy, learning_rate, seed, terms, settings: for the manifest. `dtype` is the compute dtype; None: that of
            most parameters. `settings` is JSON, such as {"optimizer": "AdamW", "weight_decay": 0.1}.

    Raises:
        UsageError: invalid arguments; parameters that cannot be recorded.
        RecordingError: a directory that cannot be recorded to.
        AgreementError: another process failed.
    """

    def __init__(
        self,
        directory: str | Path,
        params: PyTree,
        *,
        model: object = None,
        mesh: Mesh | None = None,
        param_map: ParamMap | None = None,
        units: Iterable[str] | None = None,
        every: int = 100,
        dense: int = 2,
        windows: Iterable[tuple[int, int]] = (),
        detail: str = "auto",
        steps: int | None = None,
        model_state: PyTree = None,
        samples: Callable[[PyTree], PyTree[ArrayLike]] | None = None,
        channels_last: Iterable[str | tuple[str, str]] | None = None,
        perturbed_run: int | None = None,
        forward_only: bool = False,
        overwrite: bool = False,
        monitor: "Monitor | None" = None,
        manifest: Manifest | None = None,
        name: str = "model",
        dtype: str | None = None,
        strategy: str | None = None,
        learning_rate: float | None = None,
        seed: int | None = None,
        terms: int | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        if isinstance(params, ShardedParams):
            if given := [
                what
                for what, value in (("mesh", mesh), ("param_map", param_map), ("units", units))
                if value is not None
            ]:
                raise UsageError(f"{' and '.join(given)}: expected None with ShardedParams, which have their own")
            self._source: ArrayPieces | ShardPieces = ShardPieces(params)
        else:
            self._source = ArrayPieces(params, mesh, param_map, units)
        if forward_only and isinstance(params, ShardedParams):
            raise UsageError("forward_only: expected a pytree of arrays, got ShardedParams; unshard them first")
        self._request = Request.from_environment()
        self._options = RunOptions(
            directory,
            every=every,
            dense=dense,
            windows=windows,
            detail=detail,
            steps=steps,
            seed=seed,
            perturbed_run=perturbed_run,
            forward_only=forward_only,
            overwrite=overwrite,
            settings=settings,
            manifest=manifest,
            trace_directory=None if self._request is None else self._request.directory,
        )
        self._path, self.perturbed_run = self._options.path, self._options.perturbed_run
        self._forward_only, self._samples, self._manifest = forward_only, samples, manifest
        self._channels_last = check_channels_last(channels_last)
        if manifest is not None and manifest.units != tuple(self._source.units):
            raise UsageError(
                "manifest: expected the units and layouts of the parameters, got others; make it from them"
            )
        self._trace = None if self._request is None else OperatorTrace(self._request)
        self._monitor = None if self._request is not None or self.perturbed_run else monitor
        self._about = About(name, dtype, strategy, learning_rate, terms)
        self._dense_until = 0
        self.params = self._source.moved(params, self.perturbed_run) if self.perturbed_run else params
        self._initial: Any = kept(self._source, self.params, self._options)
        self._writers: Writers | None = None
        if model is not None and not is_module(model):
            raise UsageError(
                f"model: expected a module of flax or equinox, or None, got {type(model).__name__}; for a model of functions "
                "leave it out"
            )
        described = params if model is None and is_module(params) else model
        # Class and options of the model's modules, by canonical name.
        self.modules: dict[str, str] = {}
        self.constants: dict[str, str] = {}
        if described is not None:
            units = [unit for unit, _ in self._source.units]
            self.modules = describe_modules(described, self._source.param_map, filter(None, units))
        self._initial_state = self._state_by_rank(model_state)
        self._mode: str | None = None
        # Modules that normalise over the samples of their own rank.
        self.per_rank_statistics: list[str] = []
        self._step, self._closed = 0, False
        self._pending: list[tuple[int, StepData]] = []
        self._begin_step()

    def _begin_step(self) -> None:
        self._interiors: list[Interior] = []
        self._reduced: list[tuple[LocalGrads, ShardedParams | None]] = []
        self._events: list[Event] = []
        self._num_microbatches = 0
        self._calls: list[PyTree] = []
        self._turns: Mapping[str, int] = {}
        self._backwards: Sequence[tuple[int, Any]] = ()
        self._model_state: ByRank = {}

    def __enter__(self) -> Self:
        if self._manifest is None:
            check_directory(self._path, self._options.overwrite)
        if self._trace is not None:
            self._trace.begin_step(self._step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        if self._trace is not None:
            self._trace.end()
        if self._writers is None:
            if kind is None:
                raise RecordingError(
                    f"{self._path}: no step was recorded; call recorder.step, or a step that was wrapped"
                )
            return
        try:
            if kind is None:
                self._write_pending(0)
        finally:
            self._writers.__exit__(kind, error, trace)
        if self._monitor is not None:  # of the other processes, as far as they have come
            self._monitor.judge()

    @property
    def grid(self) -> Grid:
        """The ranks."""
        return self._source.grid

    def began_with(self, params: PyTree) -> None:
        """Replace the initial parameters, if the loop has perturbed them itself. To be called before the first step."""
        self.params = params
        self._initial = kept(self._source, params, self._options)

    def add_interior(self, interior: Any) -> None:
        """Add the interior of a microbatch of this step, whose values the source of the recording reads."""
        self._interiors.append(interior)

    def add_local_grads(self, grads: LocalGrads) -> None:
        """Add each rank's own gradients of this step."""
        self._reduced.append((grads, None))

    def add_collectives(self, events: Iterable[Event]) -> None:
        """Add collectives of rank 0 in this step."""
        self._events += events

    def add_state(self, initial: ByRank, after: ByRank) -> None:
        """Add state of the model that is no parameter: that before the first step, and that after the step."""
        self._initial_state, self._model_state = initial or self._initial_state, after

    @property
    def param_names(self) -> tuple[str, ...]:
        """Canonical names of the parameters."""
        return tuple(self._source.param_map.by_name)

    @functools.cached_property
    def module_names(self) -> Mapping[str, str]:
        """Canonical names of modules, by path."""
        units = [unit for unit, _ in self._source.units]
        return {path: name for name, path in module_paths(self._source.param_map, filter(None, units)).items()}

    def _state_by_rank(self, state: PyTree) -> ByRank:
        names = self.param_names
        by_rank = isinstance(self._source, ShardPieces)
        return state_by_rank(state, self._source.grid, names, by_rank=by_rank)

    def add_turns(self, forwards: Mapping[str, int], losses: Sequence[tuple[int, ArrayLike]]) -> None:
        """Say how models take turns in this step.

        Args:
            forwards: the number of microbatches before the update of each parameter.
            losses: of each turn the number of microbatches before its update, and its loss.
        """
        self._turns, self._backwards = forwards, losses

    def records(self) -> bool:
        """Whether the tensors of the current step are recorded."""
        return self._writers is None or self._writers.records(self._step)

    def is_dense(self, step: int | None = None) -> bool:
        """Whether the interior of a step is recorded; None: of the current one."""
        step = self._step if step is None else step
        return step < self._dense_until or self._options.schedule.is_dense(step)

    def open_window(self, num_steps: int) -> None:
        """Record everything at the next steps."""
        if type(num_steps) is not int or num_steps < 1:
            raise UsageError(f"open_window: expected a number of steps of at least 1, got {num_steps!r}")
        self._dense_until = max(self._dense_until, self._step + num_steps)
        if self._writers is not None:
            self._write_pending(0)
            self._open_window()

    def _open_window(self) -> None:
        assert self._writers is not None
        if self._dense_until > self._step:
            for writer in self._writers.by_rank.values():
                writer.open_window(self._dense_until)

    def step(
        self,
        *,
        loss: ArrayLike,
        params: PyTree,
        grads: PyTree = None,
        opt_state: PyTree = None,
        batch: PyTree = None,
        grad_norm: ArrayLike | None = None,
        learning_rate: ArrayLike | None = None,
        model_state: PyTree = None,
    ) -> None:
        """Record the end of an optimizer step.

        Args:
            loss: the mean over all ranks, a scalar; or each rank's loss, of shape (ranks,), as Result.losses.
            params: the parameters after the step.
            grads: the reduced gradients before clipping, a pytree like the parameters.
            opt_state: the state of optax after the step. That of Adam and momentum is recorded under torch's names.
            batch: the batch of the step: a pytree of arrays, of which each rank has the part on its device, or else its part of
                the leading dim; or a `crossframe.recording.Batch` for each rank of this process, in order.
            grad_norm: the norm of the gradients before clipping, if the loop computed it.
            learning_rate: the learning rate of this step, a scalar. None: that of `optax.inject_hyperparams` in `opt_state`, if
                any.
            model_state: state of the model that is no parameter after the step, such as flax's `batch_stats`: a pytree of arrays,
                of which floating ones are recorded. With ShardedParams, each has a leading dim of ranks.
        """
        if self._forward_only:
            raise UsageError(
                "Recorder.step: with forward_only each call of the model is a step; wrap the model by recorder.forward, and "
                "leave the call of step out"
            )
        if model_state is not None and self.records():
            self._check(model_state=model_state)
            self._model_state = self._state_by_rank(model_state)
        self._end_step(loss, params, grads, opt_state, batch, grad_norm, learning_rate)

    def end_call(self, loss: ArrayLike, batch: PyTree) -> None:
        """Record the end of a call of a model, of which `add_interior` has the rest.

        Args:
            loss: the root mean square of its output.
            batch: as of `step`.
        """
        self._end_step(loss, None, None, None, batch, None, None)

    def _end_step(
        self, loss: Any, params: Any, grads: Any, opt_state: Any, batch: Any, grad_norm: Any, learning_rate: Any
    ) -> None:
        if self._closed:
            raise RecordingError(f"{self._path}: the recording is closed; call step inside the with block")
        self._check(loss=loss, params=params, grads=grads, opt_state=opt_state)
        if np.shape(loss) != (self._source.grid.spec.world_size,):
            loss = jnp.reshape(jnp.asarray(loss), ()) if np.shape(loss) else loss  # one element, such as of shape (1,)
        if self._trace is not None and self._trace.active:
            self._trace.finish(loss)
        if self._writers is None:
            given = {"batch": batch, "gradients": grads, "gradient norm": grad_norm, "optimizer state": opt_state,
                    "inside of steps": self._interiors or None}  # fmt: skip
            self._start([what for what, value in given.items() if value is not None], by_rank=np.shape(loss) != ())
        assert self._writers is not None
        rates = rates_in(opt_state) if learning_rate is None else (learning_rate,)
        records = self._writers.records(self._step)
        judges = self._monitor is not None and self._monitor.is_due(self._step, recorded=records)
        data = StepData(self._batches(batch), loss, self._backwards, self._turns, grad_norm, rates, self._events)
        if records:
            self._write_pending(0)
            data.initial, self._initial = self._initial, None
            data.grads, data.state, data.updated = grads, opt_state, params
            data.initial_state, data.model_state = self._initial_state, self._model_state
            self._initial_state = {}
            if self._writers.is_dense(self._step):
                data.interiors, data.local_grads = self._interiors, combined(self._reduced, grads)
            self._writers.write(self._step, data)
        else:
            self._pending.append((self._step, data))
            self._write_pending(0 if judges else _MOST_PENDING)
        self._step += 1
        if self._step == 1:
            self.params = None  # free them
        self._begin_step()
        if self._trace is not None:
            self._trace.begin_step(self._step)
        if judges:
            self._judge()

    def _judge(self) -> None:
        """Let the monitor judge the run. All processes do what follows: they record windows and keep checkpoints together."""
        monitor = self._monitor
        assert monitor is not None
        if any(gather_values(monitor.judge())):
            if monitor.window:
                self.open_window(monitor.window)
            monitor.save_checkpoint(self._step)

    def wrap(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The same step, recorded at each call.

        Args:
            step: a function `(params, opt_state, batch) -> (params, opt_state, loss)`, jitted or not. `params` are a pytree like
                the Recorder's, `opt_state` is optax's, and `loss` is the mean over ranks or each rank's own. To record gradients,
                it returns a fourth value, a dict with "grads" (reduced, before clipping), "grad_norm" and what else `step` gets.
                The interior is not recorded (see `value_and_grad`).

        Returns:
            A function with the arguments and results of `step`. In a perturbed run it begins with `recorder.params` instead of
            its first argument, has other rounding, is jitted, and keeps the devices of parameters.
        """
        run = step
        if self.perturbed_run:  # one program for all perturbed runs, which JAX's persistent cache can keep
            run = functools.partial(
                jax.jit(lambda perturbed_run, *args: other_rounding(step, perturbed_run)(*args)),
                np.uint32(self.perturbed_run),
            )

        @functools.wraps(step)
        def recorded(params: Any, opt_state: Any, batch: Any) -> Any:
            shardings: Any = None
            if self.perturbed_run:
                params = self.params if self._step == 0 else params
                shardings = jax.tree.map(lambda leaf: leaf.sharding if isinstance(leaf, jax.Array) else None, params)
            found = run(params, opt_state, batch)
            if not isinstance(found, tuple) or len(found) not in (3, 4):
                got = f"a tuple of {len(found)}" if isinstance(found, tuple) else type(found).__name__
                raise UsageError(
                    f"wrap: expected a step that returns (params, opt_state, loss), or those and a dict, got {got}"
                )
            more = found[3] if len(found) == 4 else {}
            if not isinstance(more, Mapping) or set(more) - set(MORE):
                raise UsageError(
                    f"wrap: expected as the fourth result of the step a dict with keys among {MORE}, got {more!r}"
                )
            if self.perturbed_run:
                placed = jax.tree.map(
                    lambda leaf, at: leaf if at is None else jax.device_put(leaf, at), found[0], shardings
                )
                found = (placed, *found[1:])
            self.step(params=found[0], opt_state=found[1], loss=found[2], batch=batch, **more)
            return found

        return recorded

    def forward(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """The same model, of which each call is a step of a recording with `forward_only`. The loss of a step is the root mean
        square of the first floating array of the output, as in torch.

        Args:
            model: a function `(params, *inputs) -> output`, jitted or not, whose `params` are a pytree like the Recorder's. At
                dense steps it is also run under jit, to observe the modules inside (`jax_backend.activations`).

        Returns:
            A function with the arguments and results of `model`, to be called outside of jit. In a perturbed run it computes
            with `recorder.params` instead of its first argument, has other rounding, and is jitted.
        """
        if not self._forward_only:
            raise UsageError("forward: expected a Recorder of forward alone; make it with forward_only=True")
        own = inspect.unwrap(model)  # a jitted function that JAX has traced already would report nothing
        run, initial = model, self.params
        if self.perturbed_run:
            run = jax.jit(lambda *args: other_rounding(own, self.perturbed_run)(*args))

        @jax.jit
        def inside(params: Any, *inputs: Any) -> Activations:
            with listening() as reported:
                own(params, *inputs)
            return Activations(tuple(reported.values()), tuple(reported))

        @functools.wraps(model)
        def recorded(params: Any, *inputs: Any) -> Any:
            if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((params, inputs))):
                raise UsageError("recorder.forward: expected arrays, got tracers; call the model outside jit and grad")
            if self.perturbed_run:
                params = initial
            output = run(params, *inputs)
            if (result := first_floating(output)) is None:
                raise UsageError("forward: expected a model that returns a floating array, got none")
            batch = [leaf for leaf in jax.tree.leaves(inputs) if may_be_batch(leaf)]
            if self.is_dense() or (self._trace is not None and self._trace.active):
                found = inside(params, *inputs)
                values = tuple(by_rank(Value(value), batch, self.grid) for value in found.values)
                self.add_interior(ArrayInterior(params, replace(found, values=values)))
            self.end_call(jnp.sqrt(mean_square(result)), batch)
            return output

        return recorded

    def value_and_grad(self, loss_fn: Callable, *, one_program: bool = False, **options: Any) -> Callable[..., Result]:
        """`jax_backend.value_and_grad`, which at dense steps also records the interior: full parameters as each rank's forward
        sees them, activations of modules (`jax_backend.activations`), and each rank's own gradients. Several calls before `step`
        are microbatches of one step: if each of them reduces its gradients, the ranks' own are recorded only where `step` gets
        the sum or the mean of the calls' gradients. Requires ShardedParams.

        [Note: a recorded step has the bits of one that is not] What a program also returns may change the rounding of the rest:
        XLA may make one fused multiply-add of a product and a sum, unless the product is a result too. So the step always returns
        the results of the program that records nothing. At dense steps another one runs as well, which takes as long again; the
        interior that it returns is the step's up to rounding.

        Args:
            one_program: run the program that returns the interior at all steps, for a run that is too short to compile two. Its
                bits may differ from those of a run that is not recorded.
            options: of `value_and_grad`. In a perturbed run the loss has other rounding.

        Returns:
            Its step, to be called outside of jit, since it depends on whether the step is dense.
        """
        if not isinstance(self._source, ShardPieces):
            raise UsageError(
                "value_and_grad: expected a Recorder of ShardedParams, got one of a pytree of arrays; make them with "
                "jax_backend.shard, or record what the loop has by recorder.step"
            )
        self._mode = str(options.get("mode", SHARD_MAP))
        tree = self._source.tree
        plain, dense = programs_of(loss_fn, self._source.grid.mesh, options)
        program = dense if one_program else plain
        seed = {"seed": np.uint32(self.perturbed_run)} if self.perturbed_run else {}
        events: list[Event] = []

        def step(*args: Any, **kwargs: Any) -> Result:
            if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs))):
                raise UsageError(
                    "recorder.value_and_grad: expected arrays, got tracers; call its step outside jit and grad"
                )
            kwargs |= seed
            self._calls.append(args[1] if len(args) > 1 else kwargs.get("batch"))
            if self._trace is not None and self._trace.active:
                inside = dense(*args, **kwargs)
                self._trace.microbatch(inside.losses, inside.aux[1].activations.values)
                return inside._replace(aux=inside.aux[0])
            if not events and self._mode == SHARD_MAP:  # otherwise XLA places them
                found = trace_of(program, *args, mesh=self._source.grid.mesh, **kwargs)
                events.extend(recorded_collectives(tree, found))
            self._events += [replace(event, microbatch=self._num_microbatches) for event in events]
            self._num_microbatches += 1
            result = program(*args, **kwargs)
            if self._writers is None:
                self.per_rank_statistics = statistics_of_ranks(result.state)
            if self.is_dense():
                inside = result if one_program else dense(*args, **kwargs)
                self._interiors.append(inside.aux[1])
                if inside.local_grads is not None:
                    self._reduced.append((inside.local_grads, result.grads))
            return result._replace(aux=result.aux[0]) if one_program else result

        return step

    def _check(self, **given: Any) -> None:
        if traced := [
            what for what, value in given.items() if any(isinstance(x, Tracer) for x in jax.tree.leaves(value))
        ]:
            raise UsageError(f"step: expected arrays, got tracers in {traced}; call recorder.step outside jit and grad")
        size = self._source.grid.spec.world_size
        if "loss" in given and (shape := np.shape(given["loss"])) != (size,) and math.prod(shape) != 1:
            raise UsageError(f"loss: expected a scalar, or one for each of {size} ranks, got shape {shape}")

    def _start(self, recorded: list[str], *, by_rank: bool) -> None:
        manifest = self._manifest
        if manifest is None:
            says = {"recorded": sorted(recorded), LOSSES: "by rank" if by_rank else MEAN}
            if self.per_rank_statistics:
                says[PER_RANK] = self.per_rank_statistics
            manifest = begun(self._options, manifest_of(self._source, self._about, self._options, says, self._mode))
        self._writers = Writers(self._path, manifest, self._source, self._channels_last)
        self._writers.state_environment(self.modules, self.constants)
        self._open_window()
        if self._monitor is not None and jax.process_index() == 0:
            self._monitor.begin(self._path)

    def _batches(self, batch: Any) -> dict[int, Batch]:
        grid = self._source.grid
        if isinstance(batch, Sequence) and batch and all(isinstance(each, Batch) for each in batch):
            if len(batch) != len(grid.here):
                raise UsageError(
                    f"batch: expected one for each of {len(grid.here)} ranks of this process, got {len(batch)}"
                )
            return dict(zip(grid.here, batch, strict=True))
        parts = self._calls if are_rows_of(self._calls, batch) else [batch]
        return grid.batches([jax.tree.leaves(each if self._samples is None else self._samples(each)) for each in parts])

    def _write_pending(self, most: int) -> None:
        """Write the oldest pending steps, until at most `most` are left."""
        assert self._writers is not None
        while len(self._pending) > most:
            self._writers.write(*self._pending.pop(0))


def rates_in(opt_state: Any) -> tuple[Any, ...]:
    """The learning rates of `optax.inject_hyperparams` in a state."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(getattr(node, "hyperparams", None), Mapping))
    kept = (node.hyperparams.get("learning_rate") for node in nodes if hasattr(node, "hyperparams"))
    return tuple(rate for rate in kept if rate is not None and np.shape(rate) == ())
