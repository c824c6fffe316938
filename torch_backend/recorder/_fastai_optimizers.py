"""fastai's optimizers, by the functions that make their steps."""

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from crossframe.replacing import replacing
from torch_backend.recorder._followed_optimizers import Follower, follower_of

_OF_MOMENTS = {"grad_avg": "exp_avg", "sqr_avg": "exp_avg_sq"}
# By the function that makes the step: torch's class, and torch's names of the state.
_RULES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "sgd_step": ("SGD", {}),
    "momentum_step": ("SGD", {"grad_avg": "momentum_buffer"}),
    "rms_prop_step": ("RMSprop", {"grad_avg": "momentum_buffer", "sqr_avg": "square_avg"}),
    "adam_step": ("Adam", _OF_MOMENTS),
    "radam_step": ("RAdam", _OF_MOMENTS),
}


class _Follower(Follower):
    """An optimizer of fastai."""

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._followed
        return [
            {"params": list(params), **_options(optimizer, hypers)}
            for params, hypers in zip(optimizer.param_lists, optimizer.hypers, strict=True)
        ]

    def _states(self) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
        names = _rule(self._followed)[1]
        for param, state in self._followed.state.items():
            yield param, {names.get(name, name): value for name, value in state.items() if name in (*names, "step")}


def follow_fastai(stack: ExitStack) -> bool:
    """Follow the optimizers of fastai until the stack ends, once the script has imported it; returns whether it has."""
    if (library := sys.modules.get("fastai.optimizer")) is None:
        return False
    kind, own = library.Optimizer, library.Optimizer.step

    def step(optimizer: Any, *closure: Any) -> None:
        _follower(optimizer).follow(lambda: own(optimizer, *closure))

    stack.enter_context(replacing(kind, "step", step))
    for each in gc.get_objects():
        if issubclass(type(each), kind):
            _follower(each)
    return True


def _follower(optimizer: Any) -> Follower:
    is_decoupled = any(getattr(each, "__name__", "") == "weight_decay" for each in optimizer.cbs)
    name = _rule(optimizer)[0]
    return follower_of(optimizer, f"{name}W" if is_decoupled and name == "Adam" else name, _Follower)


def _rule(optimizer: Any) -> tuple[str, Mapping[str, str]]:
    """torch's class, and torch's names of the state. An unknown rule has the name of the function that makes the step."""
    last = getattr(optimizer.cbs[-1], "__name__", type(optimizer).__name__)
    return _RULES.get(last, (last, {}))


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
