"""Keras' own optimizers, on its torch backend."""

import gc
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from crossframe.keras_models import (
    OPTIMIZERS,
    accumulated,
    decay_of,
    indices_of,
    is_keras,
    num_averaged,
    options_of,
    rate_of,
    rule_of,
    state_of,
)
from crossframe.replacing import replacing
from torch_backend.recorder._followed_optimizers import Follower, follower_of, known_follower_of
from torch_backend.recorder._models_together import made_modules, outermost
from torch_backend.recorder._module_tree import tensor_of


class _Follower(Follower):
    """An optimizer of Keras.

    Args:
        trained: the variables that the optimizer updates.
        scaler: the LossScaleOptimizer around the optimizer; None: there is none.
    """

    def __init__(self, followed: Any, trained: Sequence[Any], scaler: Any) -> None:
        self.trained, self._scaler = trained, scaler
        super().__init__(followed)

    def assume(self, trained: Sequence[Any]) -> None:
        """From now on the optimizer is to update these variables."""
        self.trained = trained
        self.param_groups = self._groups()

    @property
    def loss_divisor(self) -> float:  # type: ignore[override]
        scaler, scale = self._scaler, self._followed.loss_scale_factor or 1.0
        if scaler is not None:
            scale = float(scaler.dynamic_scale if scaler.built else scaler.initial_scale)
        return scale * num_averaged(self._followed)

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._followed
        rate = rate_of(float(optimizer.learning_rate))
        by_decay: dict[float, list[Tensor]] = {}
        for variable in self.trained:
            by_decay.setdefault(decay_of(optimizer, variable), []).append(tensor_of(variable))
        options = options_of(optimizer) | {"lr": rate}
        return [{"params": params, **options, "weight_decay": decay} for decay, params in by_decay.items()]

    def _states(self) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
        optimizer, names = self._followed, indices_of(self._followed)
        variables, count = optimizer.variables, float(optimizer.iterations)
        for variable in self.trained:
            entries = state_of(optimizer, variable, names=names)
            yield tensor_of(variable), {"step": count} | {name: variables[i].value for name, i in entries.items()}


class KerasOptimizers:
    """Follows the optimizers of Keras until a stack ends, from when the script has imported it.

    Attributes:
        are_known: whether those with variables are the ones that train. `fit` gives variables to the optimizer of `compile`, too,
            which a model with further optimizers never uses.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._follows, self.are_known = stack, False, True
        self._made: list[weakref.ref[Any]] = []

    def find(self, modules: Sequence[nn.Module]) -> None:
        """Find the optimizers that the script has made.

        Keras gives an optimizer its variables at its first step. The only one that has none yet trains those of these modules,
        which are being called, that no other one trains. Several train as many models: which one trains which is assumed until
        they step.
        """
        if not self._follows and not self._begin():
            return
        known = {optimizer: getattr(optimizer, "_trainable_variables", []) for optimizer in self._held()}
        taken = {id(variable) for trained in known.values() for variable in trained}
        without = [optimizer for optimizer, trained in known.items() if not trained]
        models = [each for each in modules if is_keras(each)]
        if len(without) > 1 and models:
            models = outermost([each for each in made_modules() if is_keras(each) and _free(each, taken)])
        if len(without) == 1 or len(without) == len(models):
            known |= {optimizer: _free(model, taken) for optimizer, model in zip(without, models, strict=False)}
        has_stepped = (int(optimizer._iterations) > 0 for optimizer, trained in known.items() if trained)
        self.are_known = all(known.values()) or all(has_stepped)
        for optimizer, trained in known.items():
            if trained:
                self._follower(optimizer, trained)

    def _begin(self) -> bool:
        library = sys.modules.get(OPTIMIZERS)
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

            if (int(optimizer._iterations) + 1) % num_averaged(optimizer):
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
        found: _Follower = follower_of(optimizer, rule_of(optimizer), _Follower, trained, scaler)
        ids, assumed = {id(variable) for variable in trained}, found.trained
        if ids != {id(variable) for variable in assumed}:
            found.assume(trained)
            for other in filter(None, map(known_follower_of, self._held())):
                if other is not found and not ids.isdisjoint(map(id, other.trained)):
                    other.assume(assumed)
        return found


def _free(model: Any, taken: AbstractSet[int]) -> list[Any]:
    """The trainable variables of a model that no optimizer has."""
    return [variable for variable in model.trainable_variables if id(variable) not in taken]


@contextmanager
def _gradients(optimizer: Any, grads: Sequence[Any], trained: Sequence[Any]) -> Iterator[None]:
    """A context in which parameters have the gradients of this step: without the scale of the loss, and averaged over the
    microbatches of which the optimizer has kept the sum."""
    params, number, names = [tensor_of(each) for each in trained], num_averaged(optimizer), indices_of(optimizer)
    kept = [param.grad for param in params]
    scale = optimizer.loss_scale_factor or 1.0
    for variable, param, grad in zip(trained, params, grads, strict=True):
        if grad is not None and scale != 1.0:
            grad = grad / scale
        if grad is not None and number > 1:
            grad = (grad + optimizer.variables[accumulated(variable, names=names)].value) / number
        param.grad = grad
    try:
        yield
    finally:
        for param, grad in zip(params, kept, strict=True):
            param.grad = grad
