"""`Recorder`: records any training loop."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from crossframe.errors import RecordingError, UnsupportedError, UsageError
from crossframe.operators import Request
from crossframe.recording import Manifest, RecordingWriter, SilentWriter
from crossframe.recording.run_options import RunOptions
from torch_backend.modules._nested_tensors import tensors_in
from torch_backend.other_rounding import OtherRounding
from torch_backend.ranks._collectives import Communicator, default_process_group
from torch_backend.recorder._context import RANK, Context
from torch_backend.recorder._contexts import quietly
from torch_backend.recorder._environment import environment_of
from torch_backend.recorder._manifest import created, manifest_of, move
from torch_backend.recorder._model_ranks import full
from torch_backend.recorder._model_view import Arrangement, ModelView, view_of, warn_of_left_out
from torch_backend.recorder._module_tree import without_fabric
from torch_backend.recorder._open_step import OpenStep, PendingSteps, is_inner_optimizer, is_wrapper, params_of
from torch_backend.recorder._operator_trace import OperatorTrace
from torch_backend.recorder._patched_functions import Listener, overheard
from torch_backend.recorder._pipeline import Copies, FirstWriter, Pipeline, StageWriter
from torch_backend.recorder._recorded_part import RecordedPart
from torch_backend.recorder._tensor_writing import Keeper
from torch_backend.recorder._updates_by_hand import StepsByHand, assigned_grads

if TYPE_CHECKING:  # judging imports more than recording does, and most runs are not watched
    from crossframe.monitoring import Monitor

# The number of steps whose losses and batches stay on the accelerator, so that the loop does not wait for them.
_MOST_PENDING = 32


class Recorder(Listener):
    """Records a training loop. The loop only calls `step` after each step.

        with Recorder("runs/mine", model=model, optimizer=optimizer) as recorder:
            for batch in data:
                loss = loss_of(model(batch))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                recorder.step(loss=loss)

    The model can be a FullyShardedDataParallel or use fully_shard (of this package or PyTorch), a DistributedDataParallel, or a
    plain module on one device or with manually averaged gradients. All ranks record into one shared directory.

    Every step records the loss and the batch's digest and sample ids. Recorded steps also contain reduced gradients (before the
    first clipping, or before the optimizer step), the gradient norm of clipping, parameters, optimizer state and buffers after
    the step, and the collectives of our engine. Dense steps also contain unsharded parameters, inputs and outputs of modules,
    and local gradients. The inside of compiled modules is not recorded.

    Args:
        directory: the directory of the recording.
        model: the trained model, as the loop calls it. In a pipeline with several stages on each rank, the list of them.
        optimizer: the optimizer whose state is recorded, or several. None: all optimizers that step with parameters of the model.
        units: the units of an unsharded model: names or classes of modules, or an auto_wrap_policy. None: the members of its
            longest list of modules.
        every, dense: record tensors every `every` steps, and the first `dense` steps densely.
        windows: (start, stop) of further dense steps; `open_window` adds one while the loop runs.
        detail: "full", "sketch" (`crossframe.recording.sketch`: 2 KB per tensor), or "auto": sketches for models with more than a
            million parameters.
        steps: the number of steps of the loop, if known; the last one is then also recorded.
        perturbed_run: number of the perturbed run (`crossframe.recording.perturbed_runs`), or 0 for the original run. A
            perturbed run starts one unit in the last place away and rounds differently. Its recording is a folder inside the
            original run's recording. None: the environment variable CROSSFRAME_PERTURBED_RUN, else 0.
        forward_only: record each call of the model as a step, with gradients or without; `step` is not called. The loss of a
            call is the root mean square of the first floating tensor that the model returns.
        in_parts: the loop calls parts of the model, as `model.encode(x)` does, or `model.forward(x)` instead of `model(x)`: all
            calls of its parts until backward are one forward. A model without a forward of its own is always called so.
        beside: modules beside the model, such as a teacher or a loss with state, by name. Their parameters and buffers are
            recorded as buffers.
        overwrite: replace an existing recording.
        monitor: judges the run while it is recorded (`crossframe.monitoring.Monitor`). All ranks pass an equal one.
        name: name of the model. None: that of its class.
        seed, settings: for the manifest: the seed of initial values and batches, and further settings.
        pipeline: the process group of a pipeline of which `model` is this rank's stage or stages
            (`torch.distributed.pipelining`), with the names of the whole model. Pass the optimizer too, and to `step` on the rank
            with the last stage the loss of the whole step.
        stages: the numbers of the stages of `model`. None: the ranks take turns, as rank 0 of 2 with the stages 0 and 2.
        tensor_parallel: the process group of the ranks that divide parameters without DTensors: those with Megatron-LM's
            attributes `tensor_model_parallel`, `partition_dim` and `partition_stride`, and those in `partition`. None: that of
            Megatron-LM, if it is initialised; else these parameters are not recorded, with a warning.
        partition: the divided dim of parameters by name or pattern of names, as {"*.up.weight": 0}.
        context: the process group of ranks that have parts of the same sequences, along dim 1 of batches and activations.
        context_order: "rank" if the parts are in the order of ranks; "head_tail" if of 2n parts rank i of n has part i and part
            2n - 1 - i, as for causal attention.
        manifest: the manifest of an existing recording into which this rank writes; replaces the arguments from `units` on.

    Raises:
        UsageError, UnsupportedError: invalid arguments, or a model that cannot be recorded.
        RecordingError: a directory that cannot be written. Raised at the first step.
        AgreementError: another rank failed or has another model. Raised at the first step.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        units: Any = None,
        every: int = 100,
        dense: int = 2,
        windows: Iterable[tuple[int, int]] = (),
        detail: str = "auto",
        steps: int | None = None,
        perturbed_run: int | None = None,
        forward_only: bool = False,
        in_parts: bool = False,
        beside: Mapping[str, nn.Module] | None = None,
        overwrite: bool = False,
        monitor: "Monitor | None" = None,
        name: str | None = None,
        seed: int | None = None,
        settings: Mapping[str, Any] | None = None,
        pipeline: dist.ProcessGroup | None = None,
        stages: Sequence[int] | None = None,
        tensor_parallel: dist.ProcessGroup | None = None,
        partition: Mapping[str, int] | None = None,
        context: dist.ProcessGroup | None = None,
        context_order: str = RANK,
        manifest: Manifest | None = None,
    ) -> None:
        models = [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, Sequence) else []
        if not models or not all(isinstance(each, nn.Module) for each in models):
            raise UsageError(f"Recorder: expected a module as model, or a list of stages, got {type(model).__name__}")
        optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        if not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
            raise UsageError(f"Recorder: expected an optimizer of torch, got {type(optimizer).__name__}")
        groups = {"pipeline": pipeline, "context": context, "tensor_parallel": tensor_parallel}
        for title, group in groups.items():
            if group is not None and not isinstance(group, dist.ProcessGroup):
                raise UsageError(
                    f"Recorder: {title}: expected a process group, got {type(group).__name__}; for instance "
                    "mesh['pp'].get_group()"
                )
        if pipeline is None and (len(models) > 1 or stages is not None):
            raise UsageError(
                "Recorder: several modules as model, and stages, are those of a pipeline; pass pipeline= too"
            )
        self._pipeline = None if pipeline is None else Pipeline(pipeline, len(models), stages)
        self._context = None if context is None else Context(context, context_order)
        self._stated = Arrangement(units, self._pipeline, self._context, tensor_parallel, dict(partition or {}))
        self._models = [without_fabric(each) for each in models]
        self._manifest, self._name = manifest, name
        request = Request.from_environment()
        self._trace = None if request is None else OperatorTrace(self._models[0], request)
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
            trace_directory=None if request is None else request.directory,
        )
        self._perturbed_run = self._options.perturbed_run
        self._forward_only, self._in_parts, self._beside = forward_only, in_parts, dict(beside or {})
        if wrong := [name for name, each in self._beside.items() if not isinstance(each, nn.Module)]:
            raise UsageError(
                f"Recorder: beside: expected modules by name, got {wrong[0]!r}: {self._beside[wrong[0]]!r:.80}"
            )
        if monitor is not None and forward_only and dist.is_initialized() and dist.get_world_size() > 1:
            raise UnsupportedError(
                "Recorder: monitor with forward_only on several ranks, which may call the model at other times; use crossframe "
                "watch instead"
            )
        self._monitor = None if request is not None or self._perturbed_run else monitor
        self._are_given = bool(optimizers)
        self._optimizers: list[torch.optim.Optimizer] = optimizers
        self._stack = ExitStack()
        self._parts: list[RecordedPart] = []
        self.current_step = 0
        self._pending = PendingSteps(self._pipeline, self._context)
        self._open = OpenStep()
        self._reads_buffers_late, self._is_unwritten = False, False
        self._steps_by_hand: StepsByHand | None = None

    def follow_updates_by_hand(self, updated: Callable[[], None]) -> None:
        """There is no optimizer: call `updated`, which calls `step`, once the script has changed parameters after a gradient
        ([Note: updates by hand] in `_updates_by_hand.py`)."""
        self._steps_by_hand = StepsByHand(updated)

    def begin_in_step(self) -> None:
        """An optimizer calls the model in its step, as L-BFGS does, whose closure clears gradients that it has used."""
        for part in self._parts:
            part.watch.doubts_inputs = False

    def read_buffers_late(self) -> None:
        """Record the buffers of a step when the next step begins, as for a script that changes them after the optimizer's step
        and does not call `step`, and those of the last step not at all. Where ranks write a step together, or a monitor judges
        it when it ends, they are recorded at its end."""
        self._reads_buffers_late = self._pipeline is None and self._context is None and self._monitor is None

    def __enter__(self) -> Self:
        for stage, model in zip(self._pipeline.stages if self._pipeline else (0,), self._models, strict=True):
            options = {"every_call": self._forward_only, "in_parts": self._in_parts}
            self._parts.append(part := RecordedPart(self, model, stage, **options))
            self._stack.callback(part.watch.close)
        if not self._forward_only:
            self._stack.enter_context(overheard(self, self._models[0]))
        if self._trace is not None:
            self._stack.enter_context(self._trace)
        if self._perturbed_run:
            with quietly():
                for part in self._parts:  # which are looked at again once their inputs are known
                    move(view_of(part.model, self._stated, part.stage), self._perturbed_run)
            self._stack.enter_context(OtherRounding(self._perturbed_run))
        if self._pipeline is not None:  # in forward, the stages wait for one another
            self.begins([])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if not self._has_begun:
            if kind is None:
                enabled = "" if self._forward_only else " with gradients enabled"
                raise RecordingError(f"Recorder: no step was recorded: the model never ran in here{enabled}")
            return
        self._is_unwritten = False  # what has changed since the last step may belong to what follows the training
        if kind is None:
            self._write_pending()
            for keeper in self._keepers:  # a forward after the last step, or an update of some parameters alone
                keeper.writer.leave_step()
        elif self._reads_buffers_late:
            with suppress(Exception):  # of the script, which is raised
                self._write_pending()
        for keeper in self._keepers:
            keeper.writer.__exit__(kind, error, trace)
        if self._monitor is not None:  # of the other ranks, as far as they have come
            self._monitor.judge()

    # Called by the loop

    def step(
        self,
        *,
        loss: Tensor | float | None = None,
        batch: Any = None,
        sample_ids: Sequence[int] | None = None,
        grad_norm: Tensor | float | None = None,
    ) -> None:
        """Record a step. Call it after the optimizer step; gradients may already be cleared.

        Args:
            loss: this rank's loss of the whole step. None: the sum of the tensors on which backward was called.
            batch: this rank's batch: its sha256 in hex, or its tensors. None: the tensor inputs of forward.
            sample_ids: an id of each sample. None: a hash of its values (`crossframe.recording.batches`), which reads all values
                at every step; for batches of many megabytes, pass a digest and ids.
            grad_norm: the gradient norm before clipping, if the loop computes it. None: that of clip_grad_norm_, if called.

        Raises:
            UsageError: no forward or backward ran, and the corresponding argument is missing; a Recorder of forward only.
        """
        if self._forward_only:
            raise UsageError(
                "Recorder.step: with forward_only each call of the model is a step; leave the call of step out"
            )
        self._end_step(loss, batch, sample_ids, grad_norm)

    def _end_step(self, loss: Any, batch: Any = None, sample_ids: Any = None, grad_norm: Any = None) -> None:
        with quietly():
            self.write_late()
            for part in self._parts:
                part.watch.release()
            writer, step = self._begun(), self._open
            values = step.values(
                loss, batch, sample_ids, self._pipeline, has_no_batch=self._parts[0].watch.has_no_batch
            )
            values.rates = step.rates(of_stages=len(self._parts) > 1)
            takes_turns = step.takes_turns and self._pipeline is None and self._context is None
            if takes_turns:
                values.backwards = step.backwards
            records = writer.records(self.current_step)
            if records and not self._reads_buffers_late:
                for keeper in self._keepers:
                    keeper.buffers(self.current_step)
            if records and self._forward_only:
                writer.collectives(self.current_step, self._parts[0].watch.events())
            elif records:
                self._keep_grads([])
                if takes_turns:
                    self._keepers[0].turns(step.updated)
                for keeper in self._keepers:
                    keeper.reduced_grads(self.current_step)
                norm = step.norm if grad_norm is None else grad_norm
                optimizers = step.current(self._optimizers)
                for part, keeper in zip(self._parts, self._keepers, strict=True):
                    keeper.local_grads(self.current_step, part.watch, step.loss_scale, step.divisors)
                    keeper.writer.collectives(self.current_step, part.watch.events())
                    keeper.after_step(self.current_step, optimizers, norm)
            self._pending.add(values)
            self._is_unwritten = records and self._reads_buffers_late
            judges = self._monitor is not None and self._monitor.is_due(self.current_step, recorded=records)
            is_due = records or judges or len(self._pending) >= _MOST_PENDING or not self._on_accelerator
            if is_due and not self._is_unwritten:
                self._write_pending()
            self.current_step += 1
            if self._trace is not None and self.current_step > self._trace.request.step:
                if self._trace.active:
                    self._trace.write()
                raise SystemExit(0)
            self._begin_step()
        if judges:
            self._judge()

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the state of a further optimizer of the model from this step on, as of L-BFGS after Adam."""
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)

    def open_window(self, num_steps: int) -> None:
        """Record the next `num_steps` steps densely. All ranks must call it at the same step.

        Raises:
            UsageError: an invalid number of steps, or a call during a step.
        """
        if type(num_steps) is not int or num_steps < 1:
            raise UsageError(f"Recorder.open_window: expected a number of steps, got {num_steps!r}")
        with quietly():
            self._begun()
            if self._open.microbatches:
                raise UsageError("Recorder.open_window: call it between steps, right after Recorder.step")
            self.write_late()
            self._write_pending()
            for keeper in self._keepers:
                keeper.writer.open_window(self.current_step + num_steps)
            self._begin_step()

    def _judge(self) -> None:
        """Let the monitor judge the run. All ranks do what follows, since they record windows and keep checkpoints together."""
        monitor = self._monitor
        assert monitor is not None
        raised = monitor.judge()
        if dist.is_initialized() and dist.get_world_size() > 1:
            with quietly():
                device = next((held.param.device for view in self._views for held in view.held), None)
                flag = torch.tensor([float(raised)], device=device)
                Communicator(default_process_group()).sum_all(flag)
                raised = bool(flag.item())
        if raised:
            if monitor.window:
                self.open_window(monitor.window)
            monitor.save_checkpoint(self.current_step)

    def begin_with_backward(self) -> None:
        """Begin with the backward that follows, since hooks saw no call of a module: steps have no batch."""
        for part in self._parts:
            part.watch.expects_forward = False
        self.begins([])

    def look_for_update(self) -> None:
        """End the step if the script has changed parameters by itself."""
        if self._steps_by_hand is not None:
            self._steps_by_hand.look()

    def write_late(self) -> None:
        """Write the step that has ended, with the buffers as they are now, if that was put off."""
        if self._is_unwritten:
            self._is_unwritten = False
            with quietly():
                for keeper in self._keepers:
                    keeper.buffers(self.current_step - 1)
                self._write_pending()

    # Called by hooks. Where the script compiles its whole step, these are not compiled.

    def begins(self, inputs: list[Tensor]) -> None:
        """A forward begins, with these inputs if it is the first one."""
        with quietly():
            self._begun(inputs)

    def forwards(self, part: RecordedPart, tensors: list[Tensor], mask: int | None) -> None:
        """A part is given a microbatch, and the index of the mask in it."""
        if part is self._parts[0]:
            self._open.microbatches.append([tensor.clone() for tensor in tensors])  # the loop may reuse the tensors
            self._open.masks.append(mask)

    def ends(self, output: Any) -> None:
        """A forward has ended."""
        if not self._forward_only:
            return
        found = next((each for each in tensors_in(output) if each.is_floating_point()), None)
        if found is None:
            raise UsageError("Recorder: forward_only: expected a model that returns a floating tensor, got none")
        with quietly():
            size = full(found.detach()).to(torch.float64).square().mean().sqrt()
        self._end_step(size)

    @_disable_dynamo
    def backward(self, loss: Tensor, stands_for: Tensor | None, *, keeps_graph: bool) -> None:
        self.look_for_update()
        with quietly():
            self.write_late()
            is_copy = stands_for is not None and not self._has_any([stands_for])
            for part in self._parts if not is_copy else ():
                self._open.discard(part.watch.backward_begins(keeps_graph=keeps_graph))
            params = [i for keeper in self._keepers for i in keeper.params]
            self._open.backward(loss, self._parts[0].watch.microbatches, params, is_copy=is_copy)
            if self._trace is not None:
                self._trace.result(loss)

    @_disable_dynamo
    def backward_ended(self, losses: Sequence[Tensor]) -> None:
        for part in self._parts:
            with quietly():
                self._open.discard(part.watch.backward_ended())
        if self._steps_by_hand is not None and self._has_begun:
            with quietly():
                self._keep_grads(None)
                self._steps_by_hand.gradients_taken(losses, self._views)

    @_disable_dynamo
    def grad_ended(self, inputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        if self._has_any(inputs):
            with assigned_grads(inputs, grads) if self._steps_by_hand is not None else nullcontext():
                self.backward_ended(())

    @_disable_dynamo
    def grad(self, loss: Tensor, inputs: Sequence[Tensor]) -> None:
        if self._has_any(inputs):
            self.backward(loss, None, keeps_graph=False)

    @_disable_dynamo
    def graph_freed(self, inputs: Sequence[Tensor]) -> None:
        for part in self._parts if not self._has_any(inputs) else ():
            part.watch.input_grads_returned()

    @_disable_dynamo
    def scaled(self, scaler: Any) -> None:
        if self._parts[0].watch.is_dense:  # otherwise unused, and it would wait for the accelerator
            self._open.loss_scale = float(scaler.get_scale())

    @_disable_dynamo
    def clips(self, params: Sequence[Tensor] | None) -> None:
        if self._has_begun and self._has_any(params):
            with quietly():
                self._keep_grads(params)

    @_disable_dynamo
    def norm(self, params: Sequence[Tensor] | None, norm: Tensor) -> None:
        if self._has_begun and self._has_any(params):
            self._open.norm = norm.detach().clone()

    @_disable_dynamo
    def steps(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
        with quietly():
            self._begun()
            if self._has_any(params_of(optimizer)):
                is_further = not self._are_given or any(
                    is_inner_optimizer(optimizer, each) for each in self._optimizers
                )
                for part in self._parts:
                    part.watch.release()
                self._open.steps(optimizer, params, self._parts[0].watch.microbatches)
                if is_wrapper(optimizer):
                    return  # the optimizer in it gets the gradients, possibly after another backward
                if is_further:
                    self.follow(optimizer)
                for part in self._parts:
                    part.watch.updates(params)
                # Set by a GradScaler whose scale the optimizer's own kernel takes out.
                self._keep_grads(params, getattr(optimizer, "grad_scale", None))

    # Writing

    @property
    def _has_begun(self) -> bool:
        return bool(self._parts) and self._parts[0].keeper is not None

    @property
    def _keepers(self) -> list[Keeper]:
        return [part.keeper for part in self._parts if part.keeper is not None]

    @property
    def _views(self) -> list[ModelView]:
        return [part.view for part in self._parts if part.view is not None]

    def _has_any(self, params: Sequence[Tensor] | None) -> bool:
        """Whether any of these parameters belong to the model; None stands for all of the model."""
        return params is None or any(id(param) in keeper.params for keeper in self._keepers for param in params)

    def _begun(self, inputs: Sequence[Tensor] = ()) -> RecordingWriter:
        """The writer of the first part. The recording starts on first use, with these inputs of the model, if they are known."""
        if not self._has_begun:
            self._begin(inputs)
        return self._keepers[0].writer

    def _begin(self, inputs: Sequence[Tensor]) -> None:
        for part in self._parts:
            part.view = view_of(part.model, self._stated, part.stage, inputs)
        copies = Copies()
        if self._pipeline is not None:
            copies = self._copies(self._pipeline)
            for part, view, names in zip(self._parts, self._views, copies.names, strict=True):
                part.view = view.renamed(names)
        first, manifest = self._views[0], self._manifest
        described = first
        if self._pipeline is not None:
            described = replace(
                first,
                units=self._pipeline.units([view.units for view in self._views], copies),
                held=tuple(held for view in self._views for held in view.held),
                left_out=self._pipeline.left_out([view.left_out for view in self._views]),
            )
        if manifest is None:
            manifest = manifest_of(described, self._models[0], self._optimizers, self._options, self._name)
            if self._pipeline is not None:
                manifest = replace(manifest, learning_rate=self._pipeline.of_first_stage(manifest.learning_rate))
            manifest = created(self._options, manifest, first)
        elif manifest.units != described.units or manifest.mesh != first.mesh:
            raise UsageError("the layouts that the manifest has are not those of the model")
        warn_of_left_out(self._views)
        for part, view in zip(self._parts, self._views, strict=True):
            if self._pipeline is not None and view.writes:
                writer = FirstWriter(self._options.path, manifest, view.rank, copies)
            else:
                kind = RecordingWriter if view.writes else StageWriter if view.speaks else SilentWriter
                writer = kind(self._options.path, manifest, view.rank)
            # The keeper comes first: it closes the writer if the next line fails.
            part.keeper = Keeper(part.model, view, writer, self._beside if part is self._parts[0] else {})
            writer.environment(environment_of(part.model, self._optimizers).to_bytes())
        for keeper in self._keepers:
            keeper.initial()
        if self._monitor is not None and first.creates:
            self._monitor.begin(self._options.path)
        self._begin_step()

    def _copies(self, pipeline: Pipeline) -> Copies:
        """The parameters of later stages that are those of earlier ones. Gives the stages names of their own first if they share
        others."""
        copies = pipeline.copies([view.bits() for view in self._views])
        own = [view.places.keys() - names for view, names in zip(self._views, copies.names, strict=True)]
        if not pipeline.share_names(own):
            return copies
        for part, view in zip(self._parts, self._views, strict=True):
            part.view = view.inside(f"stages.{part.stage}")
        return pipeline.copies([view.bits() for view in self._views])

    def _begin_step(self) -> None:
        writer = self._keepers[0].writer
        records = writer.records(self.current_step)
        if records and not self._is_unwritten:
            self._write_pending()
        self._open = OpenStep()
        if self._trace is not None:
            view, request = self._views[0], self._trace.request
            asked = view.writes and (self.current_step, view.rank) == (request.step, request.rank)
            self._trace.begin_step(active=asked)
        for part, view in zip(self._parts, self._views, strict=True):
            part.watch.begin_step(view, collects=records, is_dense=writer.is_dense(self.current_step))

    def _keep_grads(self, params: Sequence[Tensor] | None, scale: Tensor | None = None) -> None:
        """Keep the reduced gradients, if they are recorded: those of all parameters, and where they are kept, those of parameters
        with another gradient since, as of a discriminator that is updated after its generator.

        Before the first forward there are none: loading an optimizer state can call `step` to allocate it.

        Args:
            params: the parameters that are about to be clipped or updated; None: all of the model.
            scale: the divisor of the gradients; None for 1.
        """
        step = self._open
        if not (step.microbatches or step.losses) or not self._keepers[0].writer.records(self.current_step):
            return
        only = step.lacks_grads(params)
        if only is not None and not only:
            return
        # Read only if it is used, because the loop then waits for the accelerator.
        divisor = 1.0 if scale is None else float(scale)
        step.kept.update(*(each.keep_grads(self.current_step, divisor, only) for each in self._keepers))
        step.outdated.difference_update(only or ())

    @property
    def _on_accelerator(self) -> bool:
        return any(not held.param.is_cpu for view in self._views for held in view.held)

    def _write_pending(self) -> None:
        """Write the steps that have ended."""
        self._pending.write([keeper.writer for keeper in self._keepers], speaks=self._views[0].speaks)
