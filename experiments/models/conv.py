"""A convolutional net with batch norm over images of digits.

Batch norm subtracts what the bias of the convolution before it added: that bias has a gradient of zero, and is here to show how
such parameters are reported (`crossframe.verdict.measure.zero_gradient`). Statistics are each rank's own, of its batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from crossframe.param_map import conv, linear, norm
from experiments.models.definition import MakeFlax, MakeTorch, ModelDefinition, Row, define, rows


@dataclass(frozen=True)
class ConvConfig:
    """Sizes of a convolutional net."""

    image: int = 8
    num_channels: int = 6
    num_blocks: int = 2
    num_classes: int = 10
    norm_epsilon: float = 1e-5


def _table(config: ConvConfig) -> Iterator[Row]:
    channels, classes = config.num_channels, config.num_classes
    yield from rows(conv("stem", "stem"), (channels, 1, 3, 3), (channels,))
    for i in range(config.num_blocks):
        block = f"blocks.{i}"
        yield from rows(conv(f"{block}.conv", f"{block}.conv"), (channels, channels, 3, 3), (channels,))
        yield from rows(norm(f"{block}.norm", f"{block}.norm"), (channels,), (channels,))
    yield from rows(linear("head", "head"), (classes, channels), (classes,))


def describe(name: str, config: ConvConfig, make_torch: MakeTorch, make_flax: MakeFlax) -> ModelDefinition:
    """A convolutional net of these sizes, which both functions build."""
    units = tuple(f"blocks.{i}" for i in range(config.num_blocks))
    return define(
        name,
        config,
        _table(config),
        units,
        make_torch,
        make_flax,
        terms=config.image**2,
        per_rank_statistics=tuple(f"{unit}.norm" for unit in units),
    )
