"""What is known of a step until it is recorded: losses and batches, and which optimizers have stepped."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


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
        has_grads: whether gradients are kept.
        outdated: ids of parameters through which a backward went after that.
        loss_scale: of a GradScaler, which multiplies local gradients.
        updated: how many forwards were before the last step of each parameter's optimizer, by the id of the parameter.
    """

    losses: list[Tensor | float] = field(default_factory=list)
    microbatches: list[list[Tensor]] = field(default_factory=list)
    masks: list[int | None] = field(default_factory=list)
    norm: Tensor | float | None = None
    has_grads: bool = False
    outdated: set[int] = field(default_factory=set)
    loss_scale: float = 1.0
    updated: dict[int, int] = field(default_factory=dict)
    _before_backward: list[int] = field(default_factory=list)
    _stepped: list[torch.optim.Optimizer] = field(default_factory=list)
    _rates: dict[int, list[Tensor | float]] = field(default_factory=dict)

    def backward(self, loss: Tensor, forwards: int, params: Iterable[int]) -> None:
        """A backward begins after this number of forwards, through parameters with these ids."""
        self.losses.append(loss.clone())
        self._before_backward.append(forwards)
        if self.has_grads:
            self.outdated.update(params)

    def steps(self, optimizer: torch.optim.Optimizer, forwards: int) -> None:
        """An optimizer of the model is about to step after this number of forwards."""
        self._stepped.append(optimizer)
        self.updated.update((id(param), forwards) for param in params_of(optimizer))
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
        """The ids of those among parameters (None: of all) whose kept gradients are outdated; None if none are kept yet."""
        if not self.has_grads:
            return None
        return self.outdated.intersection(self.outdated if params is None else map(id, params))


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of all groups of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]
