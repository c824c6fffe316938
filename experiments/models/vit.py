"""ViT: a transformer over the patches of an image of a digit.

Its attention is each framework's own: torch keeps query, key and value in one parameter, flax has three with heads apart. It
has no biases: that of the key would be a part of a parameter, with a gradient of zero in exact arithmetic, that others have not.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from crossframe.param_map import MapEntry, attention, conv, linear, norm
from experiments.models.definition import MakeFlax, MakeTorch, ModelDefinition, Row, define, rows


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of a ViT."""

    image: int = 8
    patch: int = 2
    width: int = 15
    num_heads: int = 3
    num_blocks: int = 2
    num_classes: int = 10
    norm_epsilon: float = 1e-5

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image // self.patch) ** 2


def _table(config: ViTConfig) -> Iterator[Row]:
    width, head_width = config.width, config.width // config.num_heads
    yield MapEntry("positions", "positions"), (config.num_patches, width)
    yield from rows(conv("patches", "patches"), (width, 1, config.patch, config.patch), (width,))
    for i in range(config.num_blocks):
        block = f"blocks.{i}"
        yield from rows(norm(f"{block}.attention_norm", f"{block}.attention_norm"), (width,), (width,))
        maps = attention(f"{block}.attention", f"{block}.attention", head_width, bias=False)
        yield from rows(maps, (3 * width, width), (width, width))
        yield from rows(norm(f"{block}.mlp_norm", f"{block}.mlp_norm"), (width,), (width,))
        yield from rows(linear(f"{block}.up", f"{block}.up"), (2 * width, width), (2 * width,))
        yield from rows(linear(f"{block}.down", f"{block}.down"), (width, 2 * width), (width,))
    yield from rows(linear("head", "head"), (config.num_classes, width), (config.num_classes,))


def describe(name: str, config: ViTConfig, make_torch: MakeTorch, make_flax: MakeFlax) -> ModelDefinition:
    """A ViT of these sizes, which both functions build."""
    units = tuple(f"blocks.{i}" for i in range(config.num_blocks))
    return define(name, config, _table(config), units, make_torch, make_flax, terms=config.num_patches)
