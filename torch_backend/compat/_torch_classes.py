"""Conversion of torch's own policy objects, which scripts with mixed imports pass to this package.

torch's FSDP is not imported here. A class is identified as pickle identifies it, by the module and the name that it was defined
under, so that nothing depends on what was imported where, and subclasses are found through their bases.
"""

from dataclasses import fields
from enum import Enum
from typing import Any


def derives_from_torch(cls: type, name: str) -> bool:
    """Whether `cls` is torch's class of this name, or a subclass of it.

    >>> import torch
    >>> derives_from_torch(torch.optim.AdamW, "Optimizer"), derives_from_torch(int, "Optimizer")
    (True, False)
    """
    return any(base.__name__ == name and base.__module__.partition(".")[0] == "torch" for base in cls.__mro__)


def as_ours(value: Any, kind: type) -> Any:
    """Convert an instance of torch's class of the same name as `kind`, or of a subclass of it, to a `kind`.

    Args:
        value: anything; what is not such an instance is returned unchanged, for the caller to check.
        kind: an enum or a dataclass of this package, named as torch's. Attributes of torch's that it lacks are dropped.
    """
    if isinstance(value, kind) or not derives_from_torch(type(value), kind.__name__):
        return value
    if issubclass(kind, Enum):
        return kind[value.name]
    return kind(**{each.name: getattr(value, each.name) for each in fields(kind) if hasattr(value, each.name)})
