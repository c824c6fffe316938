"""ShardedGradScaler: loss scaling for float16 with sharded gradients.

A gradient scaler multiplies the loss, divides the gradients, and skips the optimizer step if a gradient is infinite or NaN. With
sharded gradients each rank only sees its own elements, so the ranks must agree, or some would skip the step and others not. Each
check of an optimizer's gradients all-reduces one number.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from crossframe.errors import UsageError
from crossframe.quoting import quote
from torch_backend.ranks._collectives import Communicator

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for sharded models, in which all ranks skip a step or none does.

    Gradients may be float16, on the CPU while the loss is on a GPU, sparse, DTensors, empty, or missing on some ranks.

    Args:
        device: the device type of the process group's communication, "cuda" or "cpu".
        init_scale: the initial scale.
        backoff_factor: the factor of the scale after a skipped step.
        growth_factor: the factor of the scale after `growth_interval` consecutive steps without a skip, while it stays finite.
        growth_interval: a number of steps.
        enabled: if False, `scale` returns its argument and `step` calls the optimizer.
        process_group: all ranks with parts of the gradients. None: the default group.

    Raises:
        UsageError: a factor out of range, an invalid process group, or no process group when one is needed.

    >>> ShardedGradScaler("cpu", init_scale=8.0).scale(torch.ones((), dtype=torch.float16))
    tensor(8., dtype=torch.float16)
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if isinstance(process_group, tuple) or not (process_group is None or hasattr(process_group, "size")):
            raise UsageError(
                "ShardedGradScaler: expected as process_group one group of all ranks that hold parts of the gradients, "
                f"got {quote(process_group)}"
            )
        if enabled:
            _check_number("init_scale", init_scale, Real, 0, math.inf)
            _check_number("backoff_factor", backoff_factor, Real, 0, 1)
            _check_number("growth_factor", growth_factor, Real, 1, math.inf)
            _check_number("growth_interval", growth_interval, Integral, 0, math.inf)
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Multiply outputs (a tensor or nested iterables of tensors) by the scale, keeping their dtypes.

        A float16 loss stays float16, as with FSDP's mixed precision, and can overflow.

        Raises:
            UsageError: other types.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if not isinstance(outputs, Iterable) or isinstance(outputs, str | bytes | Mapping):
            raise UsageError(
                f"ShardedGradScaler.scale: expected a tensor or an iterable of tensors, got {quote(outputs)}"
            )
        scaled = map(self.scale, outputs)
        if hasattr(outputs, "_fields"):  # a named tuple
            return type(outputs)(*scaled)
        return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiply the optimizer's gradients by `inv_scale`. Returns 1 if any rank found an infinite or NaN element, else 0.

        torch.amp.GradScaler calls this before each step, also for optimizers that unscale themselves (`fused=True`).
        """
        grads: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        with torch.no_grad():
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                if param.grad is not None:
                    values = _values(param)
                    grads[values.device, values.dtype].append(values)
            for (device, _), tensors in grads.items():
                found = found_inf.to(device, copy=True)
                torch._amp_foreach_non_finite_check_and_unscale_(  # type: ignore[attr-defined]
                    tensors, found, inv_scale.to(device)
                )
                found_inf = found.to(found_inf.device)
        agreed = self._agree(found_inf)
        return {agreed.device: agreed}

    def _agree(self, found_inf: Tensor) -> Tensor:
        """All-reduce the flag: 1 if it is 1 on any rank, never more, because fused optimizers only skip at exactly 1. Every rank
        calls it once per check."""
        group = dist.group.WORLD if self.process_group is None else self.process_group
        if group is None:
            raise UsageError(
                "ShardedGradScaler: there is no process group, over which the ranks agree to skip a step: call "
                "torch.distributed.init_process_group first, or use torch.amp.GradScaler in a process by itself"
            )
        home = found_inf.device
        agreed = found_inf.to(self._device) if home.type == "cpu" else found_inf
        Communicator(group).sum_all(agreed)
        return agreed.clamp(max=1).to(home)


def _values(param: Tensor) -> Tensor:
    """The memory that holds a parameter's gradient on this rank."""
    grad = param.grad
    assert grad is not None
    if isinstance(grad, DTensor):
        return grad.to_local()
    if not grad.is_sparse:
        return grad
    if grad.dtype is torch.float16 and not grad.is_coalesced():
        # Duplicate rows are added in float32, because a partial sum may overflow even if the final sum does not.
        grad = param.grad = grad.float().coalesce().half()
    return grad._values()


def _check_number(name: str, value: Any, kind: type, above: float, below: float) -> None:
    if not isinstance(value, kind) or not above < float(value) < below:  # type: ignore[arg-type]
        noun = "whole number" if kind is Integral else "number"
        bounds = f"above {above}" + ("" if below == math.inf else f" and below {below}")
        raise UsageError(f"ShardedGradScaler: expected a {noun} {bounds} as {name}, got {quote(value)}")
