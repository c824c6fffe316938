"""GPT: a causal transformer over bytes, with learned positions and pre-normalised blocks.

`gpt` has about a million parameters; `gpt-tiny` has uneven sizes and takes no time; `gpt-tied` is as small, and its head is its
embedding of tokens."""

from dataclasses import dataclass

import numpy as np

from crossframe.names import MapEntry, ParamMap
from experiments.models.definition import MakeFlax, MakeTorch, ModelDefinition


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
        tied: whether the weight of the head is that of the embedding of tokens: one parameter, with two uses.
    """

    vocabulary: int = 256
    context: int = 64
    width: int = 128
    num_heads: int = 4
    num_blocks: int = 5
    norm_epsilon: float = 1e-5
    tied: bool = False


def _shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    width = config.width
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding.weight": (config.vocabulary, width),
        "position_embedding.weight": (config.context, width),
    }
    for i in range(config.num_blocks):
        block = f"blocks.{i}"
        shapes |= {f"{block}.attention_norm.weight": (width,), f"{block}.attention_norm.bias": (width,)}
        for part in ("query", "key", "value", "out"):
            shapes |= {
                f"{block}.attention.{part}.weight": (width, width),
                f"{block}.attention.{part}.bias": (width,),
            }
        shapes |= {f"{block}.mlp_norm.weight": (width,), f"{block}.mlp_norm.bias": (width,)}
        shapes |= {f"{block}.mlp.up.weight": (4 * width, width), f"{block}.mlp.up.bias": (4 * width,)}
        shapes |= {f"{block}.mlp.down.weight": (width, 4 * width), f"{block}.mlp.down.bias": (width,)}
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
    return shapes if config.tied else shapes | {"head.weight": (config.vocabulary, width)}


def _entry(name: str) -> MapEntry:
    module, _, attribute = name.rpartition(".")
    if attribute == "bias":
        return MapEntry(name, name)
    if module.endswith("norm"):
        return MapEntry(name, f"{module}.scale")
    if module.endswith("embedding"):
        return MapEntry(name, f"{module}.embedding")
    # torch's linear weight is (out, in), flax's kernel (in, out).
    return MapEntry(name, f"{module}.kernel", (1, 0))


def _initial(name: str, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    if name.endswith(".bias"):
        return np.zeros(shape)
    if name.endswith("norm.weight"):
        return np.ones(shape)
    return generator.normal(0.0, 0.02, shape)


def describe(name: str, config: GPTConfig, make_torch: MakeTorch, make_flax: MakeFlax) -> ModelDefinition:
    """A GPT of these sizes, which both functions build."""
    shapes = _shapes(config)
    return ModelDefinition(
        name=name,
        config=config,
        shapes=shapes,
        param_map=ParamMap(tuple(_entry(parameter) for parameter in shapes)),
        units=tuple(f"blocks.{i}" for i in range(config.num_blocks)),
        initial=_initial,
        make_torch=make_torch,
        make_flax=make_flax,
        context=config.context,
        terms=config.context,
    )
