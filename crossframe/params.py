"""Descriptions of parameters: names, shapes and dtypes, but no values."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from crossframe.dtypes import itemsize
from crossframe.errors import ParamError
from crossframe.quoting import quote

# Sizes, strides and bytes are signed 64-bit ints in numpy, torch and XLA.
OVERFLOW = 2**63


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of a model.

    Attributes:
        name: canonical (torch) name of its first occurrence in the module tree.
        shape: sizes of the unsharded parameter.
        dtype: dtype in which it is stored.
        aliases: its other names, if modules share it (R01).
        requires_grad: whether it is trained.

    Raises:
        ParamError: a name or alias is empty or occurs twice, a size is not a non-negative int, the dtype is unknown,
            requires_grad is not a bool, or the shape has 2**63 bytes or more.

    >>> ParamSpec("weight", (5, 3)).numel
    15
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    aliases: tuple[str, ...] = ()
    requires_grad: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ParamError(f"a parameter needs a name: expected a non-empty string, got {quote(self.name)}")
        if not isinstance(self.shape, tuple) or not all(type(size) is int and size >= 0 for size in self.shape):
            raise ParamError(
                f"parameter {self.name!r}: expected a tuple of sizes >= 0 as shape, got {quote(self.shape)}"
            )
        # Strides of an empty tensor overflow too: a size of 0 counts as 1.
        numel = math.prod(self.shape) or math.prod(max(1, size) for size in self.shape)
        if numel * itemsize(self.dtype) >= OVERFLOW:
            raise ParamError(
                f"parameter {self.name!r}: a shape that overflows: expected fewer than 2**63 bytes of {self.dtype}, got "
                f"shape {quote(self.shape)}"
            )
        if not isinstance(self.aliases, tuple) or not all(isinstance(alias, str) and alias for alias in self.aliases):
            raise ParamError(
                f"parameter {self.name!r}: expected a tuple of names as aliases, got {quote(self.aliases)}"
            )
        if not isinstance(self.requires_grad, bool):
            raise ParamError(
                f"parameter {self.name!r}: expected a bool as requires_grad, got {quote(self.requires_grad)}"
            )
        names = (self.name, *self.aliases)
        if len(set(names)) != len(names):
            raise ParamError(f"parameter {self.name!r}: the same name twice among its aliases {self.aliases!r}")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def check_params(params: tuple[ParamSpec, ...]) -> None:
    """Raise ParamError unless this is a tuple of parameters without a common name or alias."""
    if not isinstance(params, tuple) or not all(isinstance(param, ParamSpec) for param in params):
        raise ParamError(f"expected a tuple of ParamSpec, got {quote(params)}")
    check_unique_names(params)


def check_unique_names(params: Iterable[ParamSpec]) -> None:
    """Raise ParamError if two of these parameters share a name or an alias."""
    owner: dict[str, str] = {}
    for param in params:
        for name in (param.name, *param.aliases):
            if name in owner:
                raise ParamError(f"the name {name!r} belongs to two parameters, {owner[name]!r} and {param.name!r}")
            owner[name] = param.name
