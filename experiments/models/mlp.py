"""MLP: layers of one width over the pixels of a digit."""

from collections.abc import Iterator
from dataclasses import dataclass

from crossframe.param_map import linear
from experiments.models.definition import MakeFlax, MakeTorch, ModelDefinition, Row, define, rows


@dataclass(frozen=True)
class MLPConfig:
    """Sizes of an MLP. An odd width is a multiple of no number of ranks."""

    num_pixels: int = 64
    width: int = 23
    num_layers: int = 2
    num_classes: int = 10


def _table(config: MLPConfig) -> Iterator[Row]:
    width, classes = config.width, config.num_classes
    yield from rows(linear("inp", "inp"), (width, config.num_pixels), (width,))
    for i in range(config.num_layers):
        yield from rows(linear(f"layers.{i}.linear", f"layers.{i}.linear"), (width, width), (width,))
    yield from rows(linear("head", "head"), (classes, width), (classes,))


def describe(name: str, config: MLPConfig, make_torch: MakeTorch, make_flax: MakeFlax) -> ModelDefinition:
    """An MLP of these sizes, which both functions build."""
    units = tuple(f"layers.{i}" for i in range(config.num_layers))
    return define(name, config, _table(config), units, make_torch, make_flax)
