"""What one value of an optimizer's state belongs to (R37), told from shapes alone: ranks need not send values to agree.

*Elementwise* state (`exp_avg`) has one value an element: it is sharded like the parameter. *Scalar* state (`step`) is one value
for the whole parameter: every rank that holds an element has the same, and every rank needs it. Anything else (factored
moments) says nothing of a shard, and is refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import numpy as np

from crossframe.errors import StateDictError
from crossframe.shown import shown


class Role(Enum):
    """What a value of an optimizer's state belongs to: each element, or the whole parameter."""

    ELEMENTWISE = "elementwise"
    SCALAR = "scalar"


@dataclass(frozen=True)
class Seen:
    """What one rank can tell of a value without sending it: its shape, None for a plain Python value, and its dtype or type."""

    shape: tuple[int, ...] | None
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a plain value."""
        return prod(self.shape or ())


def seen(value: Any) -> Seen:
    """The shape and dtype of an array, or the type of a plain value.

    >>> seen(np.zeros((2, 3))), seen(3)
    (Seen(shape=(2, 3), dtype='float64'), Seen(shape=None, dtype='int'))
    """
    if isinstance(value, np.ndarray | np.generic):
        return Seen(tuple(value.shape), str(value.dtype))
    return Seen(None, type(value).__name__)


def classify(owner: str, entry: str, by_rank: Sequence[Seen | None], held: Sequence[int]) -> Role:
    """The role of one entry of the state of `owner`, a parameter or a flat unit.

    What has dims and as many elements as each rank holds is elementwise; what else has one element, a plain value among
    them, is a scalar. (One element held by each, and shape (1,): elementwise.)

    Args:
        by_rank: what each rank has; None where the entry is absent.
        held: how many elements of `owner` each rank holds.

    Raises:
        StateDictError: a rank that holds elements and lacks the entry, ranks that differ in dtype, or neither role.
    """
    present = {rank: what for rank, what in enumerate(by_rank) if what is not None}
    where = f"state {entry!r} of {owner!r}"
    if lacking := [rank for rank, numel in enumerate(held) if numel and rank not in present]:
        raise StateDictError(
            f"{where}: ranks {shown(lacking)} hold elements and have no such state, ranks {shown(sorted(present))} have it; "
            "every rank that holds a part of a parameter must have stepped it as often"
        )
    if all(what.shape and what.numel == held[rank] for rank, what in present.items()):
        role = Role.ELEMENTWISE
    elif all(what.numel == 1 for what in present.values()):
        role = Role.SCALAR
    else:
        rank, what = next((r, w) for r, w in present.items() if not w.shape or w.numel != held[r])
        raise StateDictError(
            f"{where}: rank {rank} holds {held[rank]} elements and has a value of shape {shown(what.shape)}: expected one "
            "value an element, or one in all; save what is factored or shared between elements on its own"
        )
    if role is Role.ELEMENTWISE and len({what.dtype for what in present.values()}) > 1:
        raise StateDictError(
            f"{where}: expected one dtype, got {shown({r: w.dtype for r, w in present.items()})} (by rank)"
        )
    return role


def agreed(owner: str, entry: str, values: Mapping[int, Any], held: Sequence[int]) -> Any:
    """The one value of a scalar on all ranks that hold an element; those that hold none may have stayed behind.

    Raises:
        StateDictError: two values, dtypes or shapes.
    """
    voters = {rank: value for rank, value in values.items() if held[rank]} or values
    first = next(iter(voters))
    for rank, value in voters.items():
        if not same_value(value, voters[first]):
            raise StateDictError(
                f"state {entry!r} of {owner!r} is one value for the whole parameter: rank {first} has "
                f"{shown(voters[first])}, rank {rank} has {shown(value)}; the ranks did not take the same steps"
            )
    return voters[first]


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are of one type, shape and dtype and equal; a NaN is equal to itself."""
    if seen(a) != seen(b):
        return False
    if seen(a).shape is not None:
        return a.tobytes() == b.tobytes()
    return bool(a == b or (a != a and b != b))
