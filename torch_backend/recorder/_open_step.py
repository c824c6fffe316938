"""Steps until they are written: losses and batches, and which optimizers have stepped."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from crossframe.errors import UsageError
from crossframe.recording import RecordingWriter
from crossframe.recording.batches import batch_of
from torch_backend.compat._dtypes import to_numpy
from torch_backend.modules._nested_tensors import tensors_in
from torch_backend.recorder._context import Context
from torch_backend.recorder._module_hooks import mask_in
from torch_backend.recorder._pipeline import Pipeline, StageWriter, replay


@dataclass
class StepValues:
    """The values of an ended step's lines, possibly still on a device: one list of tensors per microbatch; where optimizers take
    turns, the number of forwards before each backward, and its loss."""

    loss: list[Tensor | float]
    microbatches: list[list[Tensor]]
    masks: Sequence[int | None] = ()
    digest: str | None = None
    sample_ids: Sequence[int] | None = None
    rates: Sequence[Tensor | float] = ()
    backwards: Sequence[tuple[int, Tensor | float]] = ()


@dataclass
class OpenStep:
    """A step that has begun.

    Attributes:
        losses: of each backward.
        microbatches, masks: the inputs of each forward, and the index of the mask in them.
        norm: the gradient norm before clipping.
        kept: ids of parameters whose gradients are kept.
        outdated: ids of parameters through which a backward went after that.
        loss_scale: of a GradScaler.
        divisors: what optimizers divide gradients by besides, by the id of the parameter.
        updated: how many forwards were before the last step of each parameter's optimizer, by the id of the parameter.
    """

    losses: list[Tensor | float] = field(default_factory=list)
    microbatches: list[list[Tensor]] = field(default_factory=list)
    masks: list[int | None] = field(default_factory=list)
    norm: Tensor | float | None = None
    kept: set[int] = field(default_factory=set)
    outdated: set[int] = field(default_factory=set)
    loss_scale: float = 1.0
    divisors: dict[int, float] = field(default_factory=dict)
    updated: dict[int, int] = field(default_factory=dict)
    _num_divided: int = 0
    _before_backward: list[int] = field(default_factory=list)
    _stepped: list[torch.optim.Optimizer] = field(default_factory=list)
    _rates: dict[int, list[Tensor | float]] = field(default_factory=dict)

    def backward(self, loss: Tensor, forwards: int, params: Iterable[int], *, is_copy: bool = False) -> None:
        """A backward begins after this number of forwards, through parameters with these ids.

        Args:
            is_copy: whether the loss is a copy of that on which backward was called since the last forward.
        """
        while is_copy and self._before_backward and self._before_backward[-1] == forwards:
            self._before_backward.pop()
            self.losses.pop()
        self.losses.append(loss.clone())
        self._before_backward.append(forwards)
        if self.kept:
            self.outdated.update(params)

    def discard(self, num_losses: int) -> None:
        """The last losses were not part of training."""
        for kept in (self.losses, self._before_backward):
            del kept[len(kept) - num_losses :]

    def steps(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], forwards: int) -> None:
        """An optimizer of the model is about to update some of its parameters after this number of forwards. One that divides
        gradients also divides the losses since the last optimizer stepped."""
        if (divisor := getattr(optimizer, "loss_divisor", 1.0)) != 1.0:
            self.losses[self._num_divided :] = [loss / divisor for loss in self.losses[self._num_divided :]]
            self.divisors.update((id(param), divisor) for param in params)
        self._num_divided = len(self.losses)
        self.updated.update((id(param), forwards) for param in params)
        if is_wrapper(optimizer):
            return
        self._stepped.append(optimizer)
        rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
        self._rates[id(optimizer)] = [rate.clone() if isinstance(rate, Tensor) else float(rate) for rate in rates]

    @property
    def takes_turns(self) -> bool:
        """Whether there are forwards between the steps of optimizers of different parameters."""
        return len(set(self.updated.values())) > 1

    @property
    def backwards(self) -> list[tuple[int, Tensor | float]]:
        """The number of forwards before each backward, and its loss."""
        return list(zip(self._before_backward, self.losses, strict=True))

    def values(
        self,
        loss: Any,
        batch: Any,
        sample_ids: Sequence[int] | None,
        pipeline: Pipeline | None,
        *,
        has_no_batch: bool,
    ) -> StepValues:
        """The loss and batch of the step, where the loop states them or as they were seen. In a pipeline the last stage has the
        loss, and the first one the batch.

        Args:
            has_no_batch: whether the step is computed from parameters alone.
        """
        has_loss = pipeline is None or pipeline.is_last
        losses = self._losses(loss, in_pipeline=pipeline is not None) if has_loss else []
        if pipeline is not None and not pipeline.is_first:
            return StepValues(losses, [])
        microbatches, masks = self.microbatches, self.masks
        if isinstance(batch, str):
            if sample_ids is None and not microbatches:
                raise UsageError("Recorder.step: with a digest as batch and no forward, pass sample_ids= too")
            return StepValues(losses, microbatches, (), batch, sample_ids)
        if batch is not None:
            microbatches = [list(tensors_in(batch))]
            masks = [mask_in(batch, microbatches[0])]
        if not any(microbatches) and not has_no_batch:
            where = "" if pipeline is None else "on the first stage "
            raise UsageError(f"Recorder.step: no forward with tensors was seen {where}in this step; pass batch=")
        return StepValues(losses, microbatches, masks, None, sample_ids)

    def _losses(self, loss: Any, *, in_pipeline: bool) -> list[Tensor | float]:
        if loss is not None:
            return [loss.detach().clone() if isinstance(loss, Tensor) else float(loss)]
        if in_pipeline:  # whose schedule divides the losses on which it calls backward
            raise UsageError("Recorder.step: pass loss= on the last stage of a pipeline: the loss of the whole step")
        if not self.losses:
            raise UsageError(
                "no backward from a single number was seen in this step; pass loss= to Recorder.step, or let the script call "
                "backward on a sum or a mean"
            )
        return self.losses

    def rates(self, *, of_stages: bool) -> list[Tensor | float]:
        """The learning rates of all groups. Optimizers of stages that have the same ones count once, as that of one device."""
        every = list(self._rates.values())
        if of_stages and all(rates == every[0] for rates in every):
            every = every[:1]
        return [rate for rates in every for rate in rates]

    def current(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """The optimizers whose state is of this step. That of an earlier one whose parameters others have updated is not."""
        states = {id(each.state) for each in self._stepped}  # those of accelerate have the state of another one
        return [
            each
            for each in optimizers
            if id(each.state) in states or not {id(param) for param in params_of(each)} <= self.updated.keys()
        ]

    def lacks_grads(self, params: Sequence[Tensor] | None) -> set[int] | None:
        """The ids of those among parameters (None: of all) whose gradients are outdated, or not kept yet: an optimizer may step
        in backward, before others have gradients. None if none are kept yet."""
        if not self.kept:
            return None
        if params is None:
            return self.outdated
        given = set(map(id, params))
        return given & self.outdated | (given - self.kept)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of all groups of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def stepped_params(optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The parameters that a call of `step` with these arguments updates: those among its arguments, as where hooks release
    gradients in backward (`optimizer.step(param=param)` of optimi), or else all. Another call of `step` follows such ones."""
    given = {id(each) for each in (*args, *kwargs.values()) if isinstance(each, Tensor)}
    every = params_of(optimizer)
    return [param for param in every if id(param) in given] or every


def is_wrapper(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all parameters of an optimizer are of other ones that it has, whose steps its step calls, such as a container of
    several, or sharpness-aware minimization around another optimizer."""
    inner = [set(map(id, params_of(each))) for each in inner_optimizers(optimizer)]
    return bool(inner) and set(map(id, params_of(optimizer))) <= set().union(*inner)


def is_inner_optimizer(optimizer: torch.optim.Optimizer, outer: torch.optim.Optimizer) -> bool:
    """Whether another optimizer has this one for some of its parameters, as ZeroRedundancyOptimizer has for those of a rank."""
    return not is_wrapper(outer) and any(each is optimizer for each in inner_optimizers(outer))


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Other optimizers among the attributes of one."""
    held: list[Any] = []
    for name, value in vars(optimizer).items():
        if name not in ("state", "param_groups"):
            held += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return [each for each in held if isinstance(each, torch.optim.Optimizer)]


class PendingSteps:
    """Steps that have ended and are not written, so that the loop does not wait for values on an accelerator."""

    def __init__(self, pipeline: Pipeline | None, context: Context | None) -> None:
        self._pipeline, self._context = pipeline, context
        self._steps: list[StepValues] = []
        self._num_written = 0

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, values: StepValues) -> None:
        """Add the step that follows the last one."""
        self._steps.append(values)

    def write(self, writers: Sequence[RecordingWriter], *, speaks: bool) -> None:
        """Write all steps.

        Args:
            writers: of the stages on this rank, or that of the model.
            speaks: whether this rank sends its stages to the first one (`ModelView.speaks`).
        """
        pipeline, context = self._pipeline, self._context
        for step, values in enumerate(self._steps, self._num_written):
            loss = sum(float(loss) for loss in values.loss)
            if context is not None:
                loss = context.mean(loss)
            if pipeline is not None and speaks:
                stages = zip(pipeline.stages, writers, strict=True)
                calls = {stage: each.taken() for stage, each in stages if isinstance(each, StageWriter)}
                loss, later = pipeline.gather(loss, calls)
                if pipeline.is_first:
                    replay(writers[0], step, later)
            begins_model = pipeline is None or pipeline.is_first
            for each in writers[1:] if begins_model else writers:
                each.end_step(step)
            if begins_model:
                self._write(writers[0], step, values, loss)
        self._num_written += len(self._steps)
        self._steps = []

    def _write(self, writer: RecordingWriter, step: int, values: StepValues, loss: float) -> None:
        arrays = [[to_numpy(tensor) for tensor in tensors] for tensors in values.microbatches]
        if self._context is not None and not values.digest:
            arrays = self._context.whole_batch(arrays)
        batch = batch_of(arrays, values.masks, digest=values.digest, sample_ids=values.sample_ids)
        writer.batch(step, batch.digest, batch.sample_ids, batch.inputs)
        backwards = [(forwards, float(each)) for forwards, each in values.backwards]
        writer.loss(step, loss, backwards, num_losses=max(1, len(values.loss)))
        writer.end_step(step, [float(rate) for rate in values.rates])
