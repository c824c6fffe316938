"""The layers of a unit: a plain unit's arrays hold one, a stacked unit's have a leading dim of layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from crossframe.checkpoint import state_layout
from crossframe.layout import Layout


@dataclass(frozen=True)
class OneLayer:
    """The layers of a plain unit.

    Attributes:
        lead: the leading dims of its arrays.
    """

    lead: ClassVar[tuple[int, ...]] = ()

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of one layer's arrays, mapped over all layers of JAX arrays."""
        return function

    def split(self, array: Any) -> Sequence[Any]:
        """The layers of an array."""
        return [array]

    def join(self, layers: Sequence[Any]) -> Any:
        """The inverse of `split`."""
        (array,) = layers
        return array

    def renames(self, unit: str) -> list[Callable[[str], str]]:
        """For each layer, from the name of a unit or of a parameter in it to its name in torch, which lists the layers."""
        return [str]

    def units(self, unit: str, layout: Layout) -> tuple[tuple[str, Layout], ...]:
        """(unit, layout) of each layer, by torch's names."""
        return ((unit, layout),)


ONE_LAYER = OneLayer()


@dataclass(frozen=True)
class Layers:
    """The layers of a stacked unit; see `OneLayer`."""

    num_layers: int

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading dims of the unit's arrays."""
        return (self.num_layers,)

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.vmap(function)

    def split(self, array: Any) -> Sequence[Any]:
        return list(array)

    def join(self, layers: Sequence[Any]) -> Any:
        return (jnp if isinstance(layers[0], jax.Array) else np).stack(layers)

    def renames(self, unit: str) -> list[Callable[[str], str]]:
        def rename_in(layer: int) -> Callable[[str], str]:
            return lambda name: f"{unit}.{layer}{name.removeprefix(unit)}"

        return [rename_in(layer) for layer in range(self.num_layers)]

    def units(self, unit: str, layout: Layout) -> tuple[tuple[str, Layout], ...]:
        return tuple((rename(unit), state_layout(layout, "", layout.dtype, rename)) for rename in self.renames(unit))
