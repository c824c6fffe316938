"""GPT: a causal transformer over bytes, with learned positions and pre-normalised blocks.

`gpt` has about a million parameters; `gpt-tiny` has uneven sizes and takes no time; `gpt-tied` is as small, and its head is its
embedding of tokens."""

import numpy as np

from crossframe.param_map import MapEntry, ParamMap
from crossframe.shapes.published import GPTConfig
from experiments.models.definition import MakeFlax, MakeTorch, ModelDefinition


def _entry(name: str) -> MapEntry:
    module, _, attribute = name.rpartition(".")
    if attribute == "bias":
        return MapEntry(name, name)
    if module.endswith("norm"):
        return MapEntry(name, f"{module}.scale")
    if module.endswith("embedding"):
        return MapEntry(name, f"{module}.embedding")
    # torch's linear weight is (out, in), flax's kernel (in, out).
    return MapEntry(name, f"{module}.kernel", "i o -> o i")


def _initial(name: str, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    if name.endswith(".bias"):
        return np.zeros(shape)
    if name.endswith("norm.weight"):
        return np.ones(shape)
    return generator.normal(0.0, 0.02, shape)


def describe(name: str, config: GPTConfig, make_torch: MakeTorch, make_flax: MakeFlax) -> ModelDefinition:
    """A GPT of these sizes, which both functions build."""
    shapes = config.shapes
    return ModelDefinition(
        name=name,
        config=config,
        shapes=shapes,
        param_map=ParamMap(tuple(_entry(parameter) for parameter in shapes)),
        units=config.units,
        initial=_initial,
        make_torch=make_torch,
        make_flax=make_flax,
        context=config.context,
        terms=config.context,
    )
