"""A mixture of experts over the pixels of a digit: a router weighs experts by softmax, and the best two have a say.

Which two is a comparison: where two weights are nearly equal, rounding decides, and the results part by far more than rounding.
In float64 that is not met by chance; in bfloat16 it is: there such models are judged by the spread of perturbed runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from crossframe.param_map import linear
from experiments.models.definition import MakeFlax, MakeTorch, ModelDefinition, Row, define, rows


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


def describe(name: str, config: MoEConfig, make_torch: MakeTorch, make_flax: MakeFlax) -> ModelDefinition:
    """A mixture of experts of these sizes, which both functions build."""
    units = tuple(f"blocks.{i}" for i in range(config.num_blocks))
    return define(name, config, _table(config), units, make_torch, make_flax)
