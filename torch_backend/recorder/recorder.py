"""`Recorder`: records any training loop."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from crossframe.errors import RecordingError, UsageError
from crossframe.operators import Request
from crossframe.recording import Manifest, RecordingWriter, Schedule
from crossframe.recording.batches import digest_of, row_ids
from crossframe.recording.lines import perturbed_run_folder
from crossframe.recording.perturbed_runs import perturbed_run_number
from torch_backend.compat._dtypes import to_numpy
from torch_backend.modules._inputs import tensors_in
from torch_backend.other_rounding import OtherRounding
from torch_backend.recorder.around import Listener, overheard
from torch_backend.recorder.begin import created, manifest_of, move
from torch_backend.recorder.keep import Keeper
from torch_backend.recorder.model import ModelView, view_of
from torch_backend.recorder.operators import OperatorTrace
from torch_backend.recorder.watch import Sink, Watch, quietly

# Steps of an accelerator whose losses and batches wait on it, so that the loop need not wait for them.
_MOST_WAITING = 32


@dataclass
class _Said:
    """What the lines of a step say, as long as it may lie on a device. One list of tensors a microbatch."""

    loss: list[Tensor | float]
    microbatches: list[list[Tensor]]
    digest: str | None = None
    sample_ids: Sequence[int] | None = None
    rates: Sequence[Tensor | float] = ()


class Recorder(Sink, Listener):
    """Records a loop; the loop stays as it is, and says only where a step ends.

        with Recorder("runs/mine", model=model, optimizer=optimizer) as recorder:
            for batch in data:
                loss = loss_of(model(batch))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                recorder.step(loss=loss)

    The model may be a FullyShardedDataParallel or made by fully_shard, ours or torch's, DistributedDataParallel, or a plain
    module on one device or with gradients averaged by hand. All its ranks record, into one directory that all can write to.

    Of recorded steps are kept: reduced gradients as they are before the first clipping or else before the optimizer steps, the
    norm that clipping found, the parameters and the optimizer's state after the step, and our engine's collectives. Of dense ones
    besides: parameters in full as forward reads them, inputs and outputs of modules, and the gradients of each rank's own batch.
    Of every step: the loss, and what the batch was. Inside of a compiled module nothing is seen.

    Args:
        directory: where to record to.
        model: what is trained, as the loop calls it.
        optimizer: whose state is recorded; None: every one that steps with parameters of the model.
        units: of a model that nothing shards, what counts as a unit: names or classes of modules, or an auto_wrap_policy. None:
            the members of its longest list of modules.
        every, dense: tensors are recorded at every so many steps, and all of the first steps.
        windows: (start, stop) of further steps of which all is recorded; `open_window` opens one while the loop runs.
        detail: "full", "sketch" (`crossframe.recording.sketch`: two kilobytes a tensor), or "auto": sketches of a model of more
            than a million parameters.
        steps: how many the loop will take, if that is known; the last one is then recorded too.
        twin: number of the perturbed run (`crossframe.recording.perturbed_runs`), or 0 for the original run. A perturbed run
            starts one unit in the last place away and rounds differently. Its recording is a folder inside the original run's
            recording. None: the environment variable CROSSFRAME_TWIN, else 0.
        overwrite: replace a recording that is there.
        name: of the model. None: that of its class.
        seed, settings: for the manifest: where initial values and batches come from, and whatever else is worth knowing.
        manifest: of a recording that has been created, into which this rank writes; then all from `units` on comes from it.

    Raises:
        UsageError, UnsupportedError: arguments of other kinds; a model that cannot be recorded.
        RecordingError: a directory that cannot be recorded to.
        AgreementError: another rank failed, or has another model. This and the last come when the first step begins.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        units: Any = None,
        every: int = 100,
        dense: int = 2,
        windows: Iterable[tuple[int, int]] = (),
        detail: str = "auto",
        steps: int | None = None,
        twin: int | None = None,
        overwrite: bool = False,
        name: str | None = None,
        seed: int | None = None,
        settings: Mapping[str, Any] | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"Recorder: expected a module as model, got {type(model).__name__}")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"Recorder: expected an optimizer of torch, got {type(optimizer).__name__}")
        if detail not in ("auto", "full", "sketch"):
            raise UsageError(f"Recorder: detail: expected 'auto', 'full' or 'sketch', got {detail!r}")
        self._model, self._units, self._overwrite, self._manifest = model, units, overwrite, manifest
        self._twin = perturbed_run_number(twin)
        self._path = (
            Path(directory, perturbed_run_folder(self._twin)) if self._twin and manifest is None else Path(directory)
        )
        self._options: dict[str, Any] = {
            "schedule": Schedule(dense, every, tuple(windows)),
            "detail": detail,
            "steps": steps,
            "name": name,
            "seed": seed,
            "twin": self._twin,
            "settings": settings or {},
        }
        self._request, self._trace = Request.from_environment(), None
        if self._request is not None:
            # The run is made again for the operators of one step: what it records besides is of no interest.
            self._path = Path(self._request.directory, "recording") if manifest is None else self._path
            self._overwrite = True
            self._options |= {"schedule": Schedule(0, 10**9), "detail": "sketch"}
        self._given = optimizer
        self._optimizers: list[torch.optim.Optimizer] = [] if optimizer is None else [optimizer]
        self._stack = ExitStack()
        self._keeper: Keeper | None = None
        self._view: ModelView | None = None
        self._step = 0
        self._waiting: list[_Said] = []
        self._forget()

    def _forget(self) -> None:
        """A step begins: nothing of it is known."""
        self._losses: list[Tensor | float] = []
        self._microbatches: list[list[Tensor]] = []
        self._norm: Tensor | float | None = None
        self._has_grads = False
        # By what a GradScaler multiplied the loss, and with it every rank's own gradients.
        self._loss_scale = 1.0
        # Of each optimizer that stepped, the learning rates of its groups.
        self._rates: dict[int, list[Tensor | float]] = {}

    def __enter__(self) -> Self:
        self._watch = Watch(self._model, self)
        self._stack.callback(self._watch.close)
        self._stack.enter_context(overheard(self, self._model))
        if self._request is not None:
            self._trace = self._stack.enter_context(OperatorTrace(self._model, self._request))
        if self._twin:
            self._view = view_of(self._model, self._units)
            with quietly():
                move(self._view, self._twin)
            self._stack.enter_context(OtherRounding(self._twin))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if self._keeper is None:
            if kind is None:
                raise RecordingError(
                    "Recorder: no step was recorded: the model never ran in here with gradients enabled"
                )
            return
        if kind is None:
            self._write_waiting()
        self._keeper.writer.__exit__(kind, error, trace)

    # What the loop says

    def step(
        self,
        *,
        loss: Tensor | float | None = None,
        batch: Any = None,
        sample_ids: Sequence[int] | None = None,
        grad_norm: Tensor | float | None = None,
    ) -> None:
        """A step is over: the optimizer has stepped. Gradients may be gone by now.

        Args:
            loss: this rank's, of the whole step. None: the sum of what backward was called on.
            batch: what this rank was fed: its sha256 in hex, or its tensors. None: the tensors that forward was given.
            sample_ids: a number of each sample of it. None: a hash of its values (`crossframe.recording.batches`), for which all
                of them are read at every step: of batches of many megabytes say a digest and numbers of your own.
            grad_norm: of the loop's own computing, before it clipped. None: that of clip_grad_norm_, if it was called.

        Raises:
            UsageError: no forward, or no backward, and nothing given in their place.
        """
        with quietly():
            keeper, said = self._begun(), self._said(loss, batch, sample_ids)
            said.rates = [rate for rates in self._rates.values() for rate in rates]
            records = keeper.writer.records(self._step)
            if records:
                self._keep_grads()
                norm = self._norm if grad_norm is None else grad_norm
                keeper.after_step(self._step, self._optimizers, norm, self._watch, self._loss_scale)
            self._waiting.append(said)
            if records or len(self._waiting) >= _MOST_WAITING or not self._on_accelerator:
                self._write_waiting()
            self._step += 1
            traced = self._request is not None and self._step > self._request.step
            if traced and self._trace is not None and self._trace.active:
                self._trace.write()
            self._begin_step()
        if traced:
            raise SystemExit(0)

    def open_window(self, num_steps: int) -> None:
        """Make so many steps dense, beginning with the one that has not begun. All ranks call it at the same step.

        Raises:
            UsageError: no number of steps; a step is under way.
        """
        if type(num_steps) is not int or num_steps < 1:
            raise UsageError(f"Recorder.open_window: expected a number of steps, got {num_steps!r}")
        with quietly():
            keeper = self._begun()
            if self._microbatches:
                raise UsageError("Recorder.open_window: call it between steps, right behind Recorder.step")
            self._write_waiting()
            keeper.writer.open_window(self._step + num_steps)
            self._begin_step()

    # What is overheard

    def begins(self) -> None:
        with quietly():
            self._begun()

    def batch(self, tensors: list[Tensor]) -> None:
        self._microbatches.append([tensor.clone() for tensor in tensors])  # the loop may fill them anew

    def activation(self, microbatch: int, module: str, use: str, value: Tensor, operator: str) -> None:
        self._begun().activation(self._step, microbatch, module, use, value, operator)

    def unsharded(self, unit: str, name: str, value: Tensor) -> None:
        self._begun().unsharded(self._step, unit, name, value)

    def backward(self, loss: Tensor) -> None:
        with quietly():
            self._watch.backward_begins()
            self._losses.append(loss.clone())
            if self._trace is not None:
                self._trace.result(loss)

    def scaled(self, scaler: Any) -> None:
        if self._watch.is_dense:  # else nobody asks, and an accelerator need not be waited for
            self._loss_scale = float(scaler.get_scale())

    def clips(self, params: Sequence[Tensor] | None) -> None:
        if self._keeper is not None and (params is None or self._keeper.has_any(params)):
            with quietly():
                self._keep_grads()

    def norm(self, params: Sequence[Tensor] | None, norm: Tensor) -> None:
        if self._keeper is not None and (params is None or self._keeper.has_any(params)):
            self._norm = norm.detach().clone()

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        with quietly():
            keeper = self._begun()
            if keeper.has_any(param for group in optimizer.param_groups for param in group["params"]):
                if self._given is None and optimizer not in self._optimizers:
                    self._optimizers.append(optimizer)
                rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
                self._rates[id(optimizer)] = [r.clone() if isinstance(r, Tensor) else float(r) for r in rates]
                self._keep_grads()

    # What is done

    def _begun(self) -> Keeper:
        """The recording, which begins when this is first asked for."""
        if self._keeper is None:
            self._view = view = self._view or view_of(self._model, self._units)
            manifest = self._manifest
            if manifest is None:
                manifest = manifest_of(view, self._model, self._optimizers, **self._options)
                manifest = created(self._path, manifest, view, overwrite=self._overwrite)
            elif manifest.units != view.units or manifest.mesh != view.mesh:
                raise UsageError("the layouts that the manifest has are not those of the model")
            writer = RecordingWriter(self._path, manifest, view.rank)
            self._keeper = Keeper(view, writer)
            self._keeper.initial()
            self._begin_step()
        return self._keeper

    def _begin_step(self) -> None:
        assert self._keeper is not None and self._view is not None
        writer = self._keeper.writer
        records = writer.records(self._step)
        if records:
            self._write_waiting()
        self._forget()
        if self._trace is not None and self._request is not None:
            asked = (self._step, self._view.rank) == (self._request.step, self._request.rank)
            self._trace.begin_step(active=asked)
        self._watch.begin_step(self._view, collects=records, is_dense=writer.is_dense(self._step))

    def _keep_grads(self) -> None:
        """Record the reduced gradients, if they are wanted and have not been recorded yet.

        Ahead of all forwards there are none: whoever loads an optimizer's state may let it step, so that there is some to fill.
        """
        assert self._keeper is not None
        if self._microbatches and not self._has_grads and self._keeper.writer.records(self._step):
            self._has_grads = self._keeper.reduced_grads(self._step)

    @property
    def _on_accelerator(self) -> bool:
        return self._view is not None and any(not held.param.is_cpu for held in self._view.held)

    def _said(self, loss: Any, batch: Any, sample_ids: Sequence[int] | None) -> _Said:
        losses = self._losses if loss is None else [loss.detach().clone() if isinstance(loss, Tensor) else float(loss)]
        if not losses:
            raise UsageError("Recorder.step: no backward from a loss was seen in this step; pass loss=")
        if isinstance(batch, str):
            if sample_ids is None and not self._microbatches:
                raise UsageError("Recorder.step: with a digest as batch and no forward, pass sample_ids= too")
            return _Said(losses, self._microbatches, batch, sample_ids)
        microbatches = self._microbatches if batch is None else [list(tensors_in(batch))]
        if not any(microbatches):
            raise UsageError("Recorder.step: no forward with tensors was seen in this step; pass batch=")
        return _Said(losses, microbatches, None, sample_ids)

    def _write_waiting(self) -> None:
        """Write the steps that have been left on the accelerator, and end them."""
        first = self._step + 1 - len(self._waiting)
        assert self._keeper is not None
        for step, said in enumerate(self._waiting, first):
            writer = self._keeper.writer
            arrays = [[to_numpy(tensor) for tensor in tensors] for tensors in said.microbatches]
            digest = said.digest or digest_of([array for some in arrays for array in some])
            ids = said.sample_ids
            writer.batch(step, digest, [i for some in arrays for i in row_ids(some)] if ids is None else ids)
            writer.loss(step, sum(float(loss) for loss in said.loss))
            writer.end_step(step, [float(rate) for rate in said.rates])
        self._waiting = []
