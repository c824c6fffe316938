"""fastai's optimizers, which are none of `torch.optim`, as optimizers of torch that have the same parameters and state."""

import gc
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from crossframe.replacing import replacing

_FOLLOWER = "_crossframe_follower"
_OF_MOMENTS = {"grad_avg": "exp_avg", "sqr_avg": "exp_avg_sq"}
# By the function that makes the step: torch's class, and torch's names of the state.
_RULES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "sgd_step": ("SGD", {}),
    "momentum_step": ("SGD", {"grad_avg": "momentum_buffer"}),
    "rms_prop_step": ("RMSprop", {"grad_avg": "momentum_buffer", "sqr_avg": "square_avg"}),
    "adam_step": ("Adam", _OF_MOMENTS),
    "radam_step": ("RAdam", _OF_MOMENTS),
}


class _Follower(Optimizer):
    """An optimizer of torch whose step is that of an optimizer of fastai.

    Args:
        followed: the optimizer of fastai.
        step: its class's step.
    """

    def __init__(self, followed: Any, step: Callable[[Any], None]) -> None:
        self._followed, self._step = followed, step
        groups = [{"params": list(params), **_options(followed, hypers)} for params, hypers in _groups(followed)]
        super().__init__(groups, {})

    def read_options(self) -> None:
        """Take the options of the next step, which schedules and callbacks may have changed."""
        for group, (_, hypers) in zip(self.param_groups, _groups(self._followed), strict=True):
            group |= _options(self._followed, hypers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._step(self._followed) if closure is None else self._step(self._followed, closure)  # type: ignore[call-arg]
        names = _rule(self._followed)[1]
        for param, state in self._followed.state.items():
            values = {names.get(name, name): value for name, value in state.items() if name in (*names, "step")}
            self.state[param] = {
                name: value if isinstance(value, Tensor) else torch.tensor(float(value))
                for name, value in values.items()
            }


def follow_fastai(stack: ExitStack) -> bool:
    """Follow the optimizers of fastai until the stack ends, once the script has imported it; returns whether it has."""
    if (library := sys.modules.get("fastai.optimizer")) is None:
        return False
    kind, own = library.Optimizer, library.Optimizer.step

    def step(optimizer: Any, closure: Any = None) -> None:
        follower = _follower(optimizer, own)
        follower.read_options()  # before the hooks of torch's step
        follower.step(closure)

    stack.enter_context(replacing(kind, "step", step))
    for each in gc.get_objects():
        if issubclass(type(each), kind):
            _follower(each, own)
    return True


def _follower(optimizer: Any, step: Callable[[Any], None]) -> _Follower:
    if (found := vars(optimizer).get(_FOLLOWER)) is None:
        is_decoupled = any(getattr(each, "__name__", "") == "weight_decay" for each in optimizer.cbs)
        name = _rule(optimizer)[0]
        found = type(f"{name}W" if is_decoupled and name == "Adam" else name, (_Follower,), {})(optimizer, step)
        setattr(optimizer, _FOLLOWER, found)
    return found


def _rule(optimizer: Any) -> tuple[str, Mapping[str, str]]:
    """torch's class, and torch's names of the state. An unknown rule has the name of the function that makes the step."""
    last = getattr(optimizer.cbs[-1], "__name__", type(optimizer).__name__)
    return _RULES.get(last, (last, {}))


def _groups(optimizer: Any) -> list[tuple[Any, Mapping[str, Any]]]:
    return list(zip(optimizer.param_lists, optimizer.hypers, strict=True))


def _options(optimizer: Any, hypers: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group under torch's names."""
    found: dict[str, Any] = {  # schedules set tensors
        name: value.item() if isinstance(value, Tensor) else value
        for name, value in hypers.items()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and not value.ndim)
    }
    if "wd" in found:
        found["weight_decay"] = found.pop("wd")
    if _rule(optimizer)[1] is _OF_MOMENTS and {"mom", "sqr_mom"} <= found.keys():
        found["betas"] = found.pop("mom"), found.pop("sqr_mom")
    elif "mom" in found:
        found["momentum"] = found.pop("mom")
    if "sqr_mom" in found:
        found["alpha"] = found.pop("sqr_mom")
    return found
