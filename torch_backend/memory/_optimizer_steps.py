"""A rank-consistent count of optimizer steps, used to detect stale unsharded parameters.

Detecting writes to this rank's shard would not be rank-consistent, as a rank may have no elements. Only optimizers with
parameters of the unit are counted, because a rank may have other optimizers.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from crossframe.errors import UsageError
from crossframe.step import StepCount
from torch_backend.compat._torch_classes import derives_from_torch

_ATTRIBUTE = "_crossframe_steps"
_PARTITIONING = "ZeroRedundancyOptimizer"


def count_steps(params: Iterable[nn.Parameter], steps: StepCount) -> None:
    """From now on, count in `steps` each step of an optimizer with any of `params`."""
    for param in params:
        setattr(param, _ATTRIBUTE, steps)


def count_like(param: nn.Parameter, other: nn.Parameter) -> None:
    """Count the steps of `param`, which replaces `other`, in the same counters."""
    if hasattr(other, _ATTRIBUTE):
        setattr(param, _ATTRIBUTE, getattr(other, _ATTRIBUTE))


def _count(optimizer: Any, *_: object) -> None:
    params = (param for group in optimizer.param_groups for param in group["params"])
    for steps in {id(steps): steps for param in params if (steps := getattr(param, _ATTRIBUTE, None))}.values():
        steps.add()


def _refuse_partitions(optimizer: Any, *_: object) -> None:
    if not derives_from_torch(type(optimizer), _PARTITIONING):
        return
    if any(hasattr(param, _ATTRIBUTE) for group in optimizer.param_groups for param in group["params"]):
        raise UsageError(
            f"{_PARTITIONING} broadcasts whole parameters between ranks, but each rank holds only its shards. Optimizer "
            "state is sharded like the parameters: use the inner optimizer directly"
        )


register_optimizer_step_pre_hook(_refuse_partitions)
register_optimizer_step_post_hook(_count)
