"""Keras on its JAX backend: the optimizers' steps have taps, and layers report, under the names that they have with torch."""

import functools
import gc
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from crossframe.keras_models import (
    OPTIMIZERS,
    accumulated,
    decay_of,
    indices_of,
    layers_in,
    num_averaged,
    options_of,
    rate_of,
    rule_of,
    state_of,
    variables_in,
)
from crossframe.recording.known_settings import GROUPS
from crossframe.replacing import replacing, setting
from jax_backend.recorder._model_state import name_list
from jax_backend.recorder._module_calls import calling_model, module_reported
from jax_backend.recorder._optimizer_settings import noted
from jax_backend.recorder._optimizer_updates import Accumulation, accumulation, applied, updated
from jax_backend.recorder._taps import innermost

_layers: ContextVar[dict[int, str] | None] = ContextVar("layers", default=None)
"""The names of the layers of the model that is called, by their ids."""


class _Rate(NamedTuple):
    """As in the state of `optax.inject_hyperparams`."""

    hyperparams: dict[str, Any]


def follow_keras(stack: ExitStack) -> bool:
    """Follow Keras until the stack ends, once the script has imported it with its JAX backend; returns whether it has."""
    library = sys.modules.get(OPTIMIZERS)
    if library is None or library.backend.backend() != "jax":
        return False
    kind, layer = library.BaseOptimizer, _layer()
    stack.enter_context(replacing(kind, "build", _build(kind.build)))
    for each in gc.get_objects():
        if issubclass(type(each), kind) and each.built:
            _initialised(each)
    stack.enter_context(replacing(kind, "stateless_apply", _stateless_apply(kind.stateless_apply)))
    stack.enter_context(replacing(layer, "stateless_call", _stateless_call(layer.stateless_call)))
    stack.enter_context(replacing(layer, "__call__", _call(layer.__call__)))
    return True


# Layers


def _layer() -> Any:
    return sys.modules["keras.src.layers.layer"].Layer


def _stateless_call(own: Callable) -> Callable:
    @functools.wraps(own)
    def call(model: Any, trainable: Any, others: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_watched():
            names = {id(variable): name for name, variable in variables_in(model, trained=False)}
            seeds = (f"seed_{i}" for i in itertools.count())
            name_list(others, [names.get(id(each)) or next(seeds) for each in model.non_trainable_variables])
        run = functools.partial(own, model, trainable, others)
        values = {id(variable): leaf for variable, leaf in zip(model.trainable_variables, trainable, strict=False)}
        return (
            _outermost(model, run, args, kwargs, values)
            if _is_watched() and _layers.get() is None
            else run(*args, **kwargs)
        )

    return call


def _call(own: Callable) -> Callable:
    @functools.wraps(own)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        run, names = own.__get__(layer), _layers.get()
        if not _is_watched():
            return run(*args, **kwargs)
        if names is None:
            return _outermost(layer, run, args, kwargs)
        name = names.get(id(layer))
        return run(*args, **kwargs) if name is None else module_reported(name, run, args, kwargs, layer)

    return call


def _is_watched() -> bool:
    return (collector := innermost()) is not None and collector.in_loss


def _outermost(
    model: Any, run: Callable, args: Any, kwargs: Any, values: Mapping[int, Any] = MappingProxyType({})
) -> Any:
    """Call a model. One that is not trained, such as a teacher, does not report.

    Args:
        values: those of its variables that it is called with, by their ids.
    """
    named = variables_in(model, trained=True)
    params = {name: values[id(variable)] for name, variable in named if id(variable) in values}
    names = {id(layer): name for name, layer in layers_in(model).items()} if model.trainable else {}
    with setting(_layers, names), calling_model(params):
        return module_reported("", run, args, kwargs, model) if model.trainable else run(*args, **kwargs)


# Optimizers


def _build(own: Callable) -> Callable:
    @functools.wraps(own)
    def build(optimizer: Any, variables: Any) -> None:
        own(optimizer, variables)
        _initialised(optimizer)

    return build


def _initialised(optimizer: Any) -> None:
    """The state of an optimizer is made, by which it is known how many models the script trains."""
    if not hasattr(optimizer, "inner_optimizer"):
        # `fit` takes the values out of variables while it trains.
        values = [
            variable if variable._value is None else variable._value for variable in optimizer._trainable_variables
        ]
        noted.initialised(dict(zip(_known_names(optimizer), values, strict=True)))


def _stateless_apply(own: Callable) -> Callable:
    @functools.wraps(own)
    def apply(optimizer: Any, state: Any, grads: Any, params: Any) -> Any:
        if hasattr(optimizer, "inner_optimizer") or not optimizer.built:
            return own(optimizer, state, grads, params)
        names, results = _known_names(optimizer), []
        if not len(grads) == len(params) == len(names):  # which Keras refuses
            return own(optimizer, state, grads, params)
        given, named = (OrderedDict(zip(names, each, strict=True)) for each in (grads, params))

        def update(grads: Any, _: Any, params: Any) -> Any:
            results[:] = own(optimizer, state, [*grads.values()], [*params.values()])
            after = zip(params.items(), results[0], strict=True)
            if (number := num_averaged(optimizer)) > 1:
                count = results[1][indices_of(optimizer)["iteration"]] % number
                accumulation.set(Accumulation(count, lambda: _averaged(optimizer, state, grads)))
            updates = OrderedDict((name, new - old) for (name, old), new in after)
            return updates, _state(optimizer, names, state, results[1])

        updates, _ = updated(update, given, (), named)
        if results:
            applied(lambda *_: OrderedDict(zip(names, results[0], strict=True)), named, updates)
        return tuple(results)

    return apply


def _known_names(optimizer: Any) -> list[str]:
    if id(optimizer) not in noted.keras_names:
        noted.keras_names[id(optimizer)] = _names_of(optimizer)
    return noted.keras_names[id(optimizer)]


def _names_of(optimizer: Any) -> list[str]:
    """The names of an optimizer's variables in the model that it trains: the smallest one that has them all, with the layers that
    enclose it if these have no others."""
    wanted = {id(variable) for variable in optimizer._trainable_variables}
    found: tuple[Any, dict[int, str]] | None = None
    layer = _layer()
    for each in gc.get_objects():
        if issubclass(type(each), layer) and wanted <= {id(variable) for variable in each.trainable_variables}:
            names = {id(variable): name for name, variable in variables_in(each, trained=True)}
            size = len(names), -len(layers_in(each))
            if wanted <= names.keys() and (found is None or size < found[0]):
                found = size, names
    if found is None:
        return [variable.path.replace("/", ".") for variable in optimizer._trainable_variables]
    return [found[1][id(variable)] for variable in optimizer._trainable_variables]


def _state(optimizer: Any, names: Sequence[str], before: Any, after: Any) -> dict[str, Any]:
    """The state of an optimizer by entry and parameter, that of Adam as optax has it, and the learning rate of its step.

    Args:
        before, after: the values of the optimizer's variables.
    """
    at, backend = indices_of(optimizer), sys.modules[OPTIMIZERS].backend
    with backend.StatelessScope(state_mapping=list(zip(optimizer.variables, before, strict=True))):
        rate = jnp.asarray(backend.convert_to_tensor(optimizer.learning_rate))
    entries: dict[str, OrderedDict[str, Any]] = {}
    for name, variable in zip(names, optimizer._trainable_variables, strict=True):
        for entry, i in state_of(optimizer, variable, names=at).items():
            entries.setdefault(entry, OrderedDict())[name] = after[i]
    found: dict[str, Any] = {"rate": _Rate({"learning_rate": rate})}
    if {"exp_avg", "exp_avg_sq"} <= entries.keys():
        count = after[at["iteration"]] // num_averaged(optimizer)
        found["adam"] = optax.ScaleByAdamState(count, entries.pop("exp_avg"), entries.pop("exp_avg_sq"))
    if id(optimizer) not in noted.of_keras:
        noted.of_keras[id(optimizer)] = _settings(optimizer, names)
    return found | entries


def _settings(optimizer: Any, names: Sequence[str]) -> dict[str, Any]:
    """The settings of an optimizer. `fit` takes the learning rate out of the optimizer, so that only its state has it."""
    found = {"optimizer": rule_of(optimizer), **options_of(optimizer)}
    decays = {name: decay_of(optimizer, each) for name, each in zip(names, optimizer._trainable_variables, strict=True)}
    if most := max(decays.values(), default=0.0):
        found["weight_decay"] = most
        if exempt := [name for name, decay in decays.items() if not decay]:
            found[GROUPS] = [{"params": exempt, "weight_decay": 0.0}]
    rate = getattr(optimizer._learning_rate, "_value", None)
    return found if rate is None else found | {"lr": rate_of(rate)}


def _averaged(optimizer: Any, state: Any, grads: Any) -> Any:
    """The gradients of a step, if these are those of its last microbatch."""
    names, number = indices_of(optimizer), num_averaged(optimizer)
    variables = zip(optimizer._trainable_variables, grads.items(), strict=True)
    return OrderedDict(
        (name, (grad + state[accumulated(each, names=names)]) / number) for each, (name, grad) in variables
    )
