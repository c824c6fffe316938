"""Keras' own optimizers, on its torch backend."""

import gc
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn

from crossframe.recording.known_settings import EPS_HAT
from crossframe.replacing import replacing
from torch_backend.recorder._followed_optimizers import Follower, follower_of
from torch_backend.recorder._module_tree import is_keras, tensor_of

_MODULE = "keras.src.optimizers.base_optimizer"
_OF_MOMENTS = {"momentum": "exp_avg", "velocity": "exp_avg_sq", "velocity_hat": "max_exp_avg_sq"}
_ACCUMULATED = "gradient_accumulator"
_NOT_READ_BY_UPDATES = (_ACCUMULATED, "average")
_COUPLED_IN_TORCH = ("Adam", "RMSprop", "SGD")
"""Optimizers of torch that add the decay to the gradient. Those of Keras decay the parameter."""


class _Follower(Follower):
    """
    Args:
        trained: the variables that the optimizer updates.
        scaler: the LossScaleOptimizer around the optimizer; None: there is none.
    """

    def __init__(self, followed: Any, trained: Sequence[Any], scaler: Any) -> None:
        self.trained, self._scaler = trained, scaler
        super().__init__(followed)

    @property
    def loss_divisor(self) -> float:  # type: ignore[override]
        scaler, scale = self._scaler, self._followed.loss_scale_factor or 1.0
        if scaler is not None:
            scale = float(scaler.dynamic_scale if scaler.built else scaler.initial_scale)
        return scale * _num_averaged(self._followed)

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._followed
        options: dict[str, Any] = {
            name: float(value)
            for name in ("epsilon", "momentum")
            if isinstance(value := getattr(optimizer, name, None), int | float)
        }
        if "epsilon" in options:
            options[EPS_HAT if _name(optimizer) in ("Adam", "AdamW") else "eps"] = options.pop("epsilon")
        if hasattr(optimizer, "beta_2"):
            options["betas"] = float(optimizer.beta_1), float(optimizer.beta_2)
        options["lr"] = float(
            str(np.float32(float(optimizer.learning_rate)))
        )  # 0.01, not the float32 that is nearest to it
        by_decay: dict[float, list[Tensor]] = {}
        for variable in self.trained:
            decay = optimizer.weight_decay if optimizer._use_weight_decay(variable) else None
            by_decay.setdefault(decay or 0.0, []).append(tensor_of(variable))
        return [{"params": params, **options, "weight_decay": decay} for decay, params in by_decay.items()]

    def _states(self) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
        optimizer = self._followed
        names: Mapping[str, str] = _OF_MOMENTS if hasattr(optimizer, "beta_2") else {}
        count = float(optimizer.iterations)
        entries: dict[str, Tensor] = {each.name: each.value for each in optimizer.variables}
        for variable in self.trained:
            prefix = _in_names(variable)
            state: dict[str, Any] = {"step": count}
            for name, value in entries.items():
                own = name.removeprefix(prefix)
                if name.startswith(prefix) and own not in _NOT_READ_BY_UPDATES:
                    state[names.get(own, own)] = value
            yield tensor_of(variable), state


class KerasOptimizers:
    """Follows the optimizers of Keras until a stack ends, from when the script has imported it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._follows = stack, False
        self._made: list[weakref.ref[Any]] = []

    def find(self, modules: Sequence[nn.Module]) -> None:
        """Find the optimizers that the script has made. One that has no variables yet trains those of these modules, which are
        being called."""
        if not self._follows and not self._begin():
            return
        called = [variable for each in modules if is_keras(each) for variable in each.trainable_variables]  # type: ignore[union-attr]
        for optimizer in self._held():
            if trained := getattr(optimizer, "_trainable_variables", None) or called:
                self._follower(optimizer, trained)

    def _begin(self) -> bool:
        library = sys.modules.get(_MODULE)
        if library is None or library.backend.backend() != "torch":
            return False
        kind, self._follows = library.BaseOptimizer, True
        own_init, own_apply = kind.__init__, kind.apply

        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            own_init(optimizer, *args, **kwargs)
            self._made.append(weakref.ref(optimizer))

        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
            def step() -> None:
                own_apply(optimizer, grads, trainable_variables)

            if (int(optimizer._iterations) + 1) % _num_averaged(optimizer):
                step()  # which only adds to the gradients
                return
            trained = list(trainable_variables or optimizer._trainable_variables)
            with _gradients(optimizer, list(grads), trained):
                self._follower(optimizer, trained).follow(step)

        self._stack.enter_context(replacing(kind, "__init__", init))
        self._stack.enter_context(replacing(kind, "apply", apply))
        self._made += [weakref.ref(each) for each in gc.get_objects() if issubclass(type(each), kind)]
        return True

    def _held(self) -> list[Any]:
        """The optimizers that the script has made and not freed, but for those around others."""
        held = [optimizer for ref in self._made if (optimizer := ref()) is not None]
        return [each for each in held if not hasattr(each, "inner_optimizer")]

    def _follower(self, optimizer: Any, trained: Sequence[Any]) -> Follower:
        made = (ref() for ref in self._made)
        scaler = next((each for each in made if getattr(each, "inner_optimizer", None) is optimizer), None)
        found: _Follower = follower_of(optimizer, _name(optimizer), _Follower, trained, scaler)
        found.trained = trained
        return found


@contextmanager
def _gradients(optimizer: Any, grads: Sequence[Any], trained: Sequence[Any]) -> Iterator[None]:
    """A context in which parameters have the gradients of this step: without the scale of the loss, and averaged over the
    microbatches of which the optimizer has kept the sum."""
    params, number = [tensor_of(variable) for variable in trained], _num_averaged(optimizer)
    kept = [param.grad for param in params]
    sums = {each.name: each.value for each in optimizer.variables if each.name.endswith(_ACCUMULATED)}
    scale = optimizer.loss_scale_factor or 1.0
    for variable, param, grad in zip(trained, params, grads, strict=True):
        if grad is not None and scale != 1.0:
            grad = grad / scale
        if grad is not None and number > 1:
            grad = (grad + sums[_in_names(variable) + _ACCUMULATED]) / number
        param.grad = grad
    try:
        yield
    finally:
        for param, grad in zip(params, kept, strict=True):
            param.grad = grad


def _name(optimizer: Any) -> str:
    """torch's name of an optimizer with the same rule, or the name of its class with a prefix or suffix."""
    kinds = (kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("keras.src.optimizers"))
    name = next(kinds, type(optimizer)).__name__
    if optimizer.weight_decay and name in _COUPLED_IN_TORCH:
        name += "W"
    # Its momentum is of updates, which have the learning rate in them, and not of gradients.
    return f"Keras{name}" if name.startswith("SGD") and optimizer.momentum else name


def _num_averaged(optimizer: Any) -> int:
    return optimizer.gradient_accumulation_steps or 1


def _in_names(variable: Any) -> str:
    """How a variable's path is in the names of its entries in the optimizer's state."""
    return f"{variable.path.replace('/', '_')}_"
