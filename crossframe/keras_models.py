"""Layers, variables and optimizers of Keras, on any of its backends: their names and options. Keras is not imported.

A layer has the name of the attribute that holds it, or else the name that Keras gives it: those of functional and sequential
models, and those in lists.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from crossframe.recording.known_settings import EPS_HAT

OPTIMIZERS = "keras.src.optimizers.base_optimizer"
"""The module of the base class of optimizers."""
ACCUMULATED = "gradient_accumulator"
"""The entry of an optimizer's state that is the sum of the gradients of a step's microbatches so far."""
_MADE_BY_KERAS = ("_torch_params", "_functional")
"""A second registration of the variables of a layer and its inner layers, and the graph of a sequential model."""
_OF_MOMENTS = {"momentum": "exp_avg", "velocity": "exp_avg_sq", "velocity_hat": "max_exp_avg_sq"}
_NOT_READ_BY_UPDATES = (ACCUMULATED, "average")
_COUPLED_IN_TORCH = ("Adam", "RMSprop", "SGD")
"""Optimizers of torch that add the decay to the gradient. Those of Keras decay the parameter."""


def is_keras(value: Any) -> bool:
    """Whether this is a layer or model of Keras."""
    return any(base.__name__ == "Layer" and base.__module__.startswith("keras.") for base in type(value).__mro__)


def children_of(layer: Any) -> dict[str, Any]:
    """The layers right inside of a layer, and modules of torch that it wraps, by name."""
    modules = {name: each for name, each in vars(layer).get("_modules", {}).items() if name not in _MADE_BY_KERAS}
    attributes = {id(value): name for name, value in (vars(layer) | modules).items() if name not in _MADE_BY_KERAS}
    inside = {id(each): each for each in (*layer._layers, *modules.values())}
    return {attributes.get(i) or each.name: each for i, each in inside.items()}


def variables_of(layer: Any, *, trained: bool) -> dict[str, Any]:
    """The variables of a layer without those of layers inside of it, by name: those that may be trained, or all others."""
    found: dict[str, Any] = {}
    for variable in layer._trainable_variables if trained else layer._non_trainable_variables:
        name = variable.name
        while name in found:
            name += "_"
        found[name] = variable
    return found


def layers_in(model: Any) -> dict[str, Any]:
    """A model, "", and all layers inside of it by name, outer ones first, each once."""
    found: dict[int, tuple[str, Any]] = {}

    def visit(name: str, layer: Any) -> None:
        if id(layer) not in found and is_keras(layer):
            found[id(layer)] = name, layer
            for own, child in children_of(layer).items():
                visit(f"{name}.{own}" if name else own, child)

    visit("", model)
    return dict(found.values())


def variables_in(model: Any, *, trained: bool) -> Iterator[tuple[str, Any]]:
    """The variables of a model by name: those that may be trained, or all others but the states of seed generators."""
    for name, layer in layers_in(model).items():
        for own, variable in variables_of(layer, trained=trained).items():
            yield (f"{name}.{own}" if name else own), variable


def rule_of(optimizer: Any) -> str:
    """torch's name of an optimizer with the same rule, or the name of its class with a prefix or suffix.

    A class of the script has its own name, since its rule may be another one.
    """
    if not type(optimizer).__module__.startswith("keras."):
        return type(optimizer).__name__
    # Before it there may be a class of the backend, of any name.
    kinds = (kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("keras.src.optimizers"))
    name = next(kinds).__name__
    if optimizer.weight_decay and name in _COUPLED_IN_TORCH:
        name += "W"
    # Its momentum is of updates, which have the learning rate in them, and not of gradients.
    return f"Keras{name}" if name.startswith("SGD") and optimizer.momentum else name


def options_of(optimizer: Any) -> dict[str, Any]:
    """The options of an optimizer under torch's names, but for the learning rate and the decay."""
    found: dict[str, Any] = {
        name: float(value)
        for name in ("epsilon", "momentum")
        if isinstance(value := getattr(optimizer, name, None), int | float)
    }
    if "epsilon" in found:
        found[EPS_HAT if rule_of(optimizer) in ("Adam", "AdamW") else "eps"] = found.pop("epsilon")
    if hasattr(optimizer, "beta_2"):
        found["betas"] = [float(optimizer.beta_1), float(optimizer.beta_2)]
    return found


def rate_of(value: Any) -> float:
    """A learning rate as the script wrote it, 0.01, of the float32 nearest to it."""
    return float(str(np.float32(value)))


def decay_of(optimizer: Any, variable: Any) -> float:
    """The weight decay of a variable."""
    return float(optimizer.weight_decay or 0.0) if optimizer._use_weight_decay(variable) else 0.0


def state_of(optimizer: Any, variable: Any, *, names: dict[str, int]) -> dict[str, int]:
    """The entries of an optimizer's state that the update of a variable reads, under torch's names where they mean the same.

    Args:
        names: the index of each of the optimizer's variables by its name, which begins with the path of the variable.

    Returns:
        The index of each.
    """
    found = {name: i for name, i in _entries(variable, names) if name not in _NOT_READ_BY_UPDATES}
    return {_OF_MOMENTS.get(name, name): i for name, i in found.items()} if hasattr(optimizer, "beta_2") else found


def accumulated(variable: Any, *, names: dict[str, int]) -> int:
    """The index of the sum of the gradients of a variable so far; `names` as for `state_of`."""
    return dict(_entries(variable, names))[ACCUMULATED]


def indices_of(optimizer: Any) -> dict[str, int]:
    """The index of each of an optimizer's variables by its name."""
    return {variable.name: i for i, variable in enumerate(optimizer.variables)}


def num_averaged(optimizer: Any) -> int:
    """Over how many microbatches an optimizer averages gradients itself."""
    return optimizer.gradient_accumulation_steps or 1


def _entries(variable: Any, names: dict[str, int]) -> Iterator[tuple[str, int]]:
    prefix = f"{variable.path.replace('/', '_')}_"
    return ((name.removeprefix(prefix), i) for name, i in names.items() if name.startswith(prefix))
