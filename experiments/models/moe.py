"""A mixture of experts over the pixels of a digit: a router weighs experts by softmax, and the best two have a say.

Which two is a comparison: where two weights are nearly equal, rounding decides, and the results part by far more than rounding.
In float64 that is not met by chance; in bfloat16 it is, which is why such models are judged there by an envelope.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from crossframe.names import linear
from experiments.models.definition import ModelDefinition, Row, define, rows


@dataclass(frozen=True)
class MoEConfig:
    """Sizes of a mixture of experts."""

    num_pixels: int = 64
    width: int = 14
    expert_width: int = 9
    num_experts: int = 4
    num_chosen: int = 2
    num_blocks: int = 2
    num_classes: int = 10


def _table(config: MoEConfig) -> Iterator[Row]:
    width, inner, classes = config.width, config.expert_width, config.num_classes
    yield from rows(linear("inp", "inp"), (width, config.num_pixels), (width,))
    for i in range(config.num_blocks):
        router = f"blocks.{i}.router"
        yield from rows(linear(router, router, bias=False), (config.num_experts, width))
        for j in range(config.num_experts):
            expert = f"blocks.{i}.experts.{j}"
            yield from rows(linear(f"{expert}.up", f"{expert}.up"), (inner, width), (inner,))
            yield from rows(linear(f"{expert}.down", f"{expert}.down"), (width, inner), (width,))
    yield from rows(linear("head", "head"), (classes, width), (classes,))


def _make_torch(config: MoEConfig):
    from experiments.models.moe_torch import Block
    from experiments.models.moe_torch import MoE as TorchMoE

    return TorchMoE(config), {Block}


def _make_flax(config: MoEConfig):
    from experiments.models.moe_flax import MoE as FlaxMoE

    return FlaxMoE(config)


def define_moe(name: str, config: MoEConfig) -> ModelDefinition:
    """A mixture of experts of these sizes, in both frameworks."""
    units = tuple(f"blocks.{i}" for i in range(config.num_blocks))
    return define(name, config, _table(config), units, lambda: _make_torch(config), lambda _: _make_flax(config))


MOE = define_moe("moe", MoEConfig())
