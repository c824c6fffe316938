"""The role of each entry of an optimizer's state (R37). It follows from shapes, so that ranks agree without sending values.

*Elementwise* state, such as `exp_avg`, has one value for each element and is sharded like the parameter. *Scalar* state, such as
`step`, is one value for the whole parameter: it is the same on every rank that holds an element, and every rank needs it.
Anything else, such as factored moments, cannot be sharded and is rejected by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import numpy as np

from crossframe.errors import StateDictError
from crossframe.quoting import quote


class Role(Enum):
    """The role of a value of an optimizer's state: one for each element, or one for the whole parameter."""

    ELEMENTWISE = "elementwise"
    SCALAR = "scalar"


@dataclass(frozen=True)
class Seen:
    """The description of a value that a rank can send instead of the value: its shape, None for a plain Python value, and its
    dtype or type."""

    shape: tuple[int, ...] | None
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a plain value."""
        return prod(self.shape or ())


Description = tuple[Seen, Any]
"""The description of a value that a rank sends to others, and if the value is a scalar the value itself."""


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

    A value that has dims, and on each rank as many elements as the rank holds, is elementwise. Any other value of one element,
    or a plain value, is a scalar. If each rank holds one element, a value of shape (1,) is elementwise.

    Args:
        by_rank: the entry on each rank; None if it is absent.
        held: the number of elements of `owner` that each rank holds.

    Raises:
        StateDictError: a rank holds elements and lacks the entry, ranks differ in dtype, or the entry has neither role.
    """
    present = {rank: what for rank, what in enumerate(by_rank) if what is not None}
    where = f"state {entry!r} of {owner!r}"
    if lacking := [rank for rank, numel in enumerate(held) if numel and rank not in present]:
        raise StateDictError(
            f"{where}: ranks {quote(lacking)} hold elements and have no such state, ranks {quote(sorted(present))} have it; "
            "every rank that holds a part of a parameter must have stepped it as often"
        )
    if all(what.shape and what.numel == held[rank] for rank, what in present.items()):
        role = Role.ELEMENTWISE
    elif all(what.numel == 1 for what in present.values()):
        role = Role.SCALAR
    else:
        rank, what = next((r, w) for r, w in present.items() if not w.shape or w.numel != held[r])
        raise StateDictError(
            f"{where}: rank {rank} holds {held[rank]} elements and has a value of shape {quote(what.shape)}: expected one "
            "value an element, or one in all; save what is factored or shared between elements on its own"
        )
    if role is Role.ELEMENTWISE and len({what.dtype for what in present.values()}) > 1:
        raise StateDictError(
            f"{where}: expected one dtype, got {quote({r: w.dtype for r, w in present.items()})} (by rank)"
        )
    return role


def agreed(owner: str, entry: str, values: Mapping[int, Any], held: Sequence[int]) -> Any:
    """The value of a scalar, which all ranks that hold an element share. Ranks without elements may have another.

    Raises:
        StateDictError: values, dtypes or shapes differ.
    """
    voters = {rank: value for rank, value in values.items() if held[rank]} or values
    first = next(iter(voters))
    for rank, value in voters.items():
        if not same_value(value, voters[first]):
            raise StateDictError(
                f"state {entry!r} of {owner!r} is one value for the whole parameter: rank {first} has "
                f"{quote(voters[first])}, rank {rank} has {quote(value)}; the ranks did not take the same steps"
            )
    return voters[first]


def merged(
    owner: str, by_rank: Sequence[Mapping[str, Description]], held: Sequence[int]
) -> dict[str, tuple[Role, Seen, Any]]:
    """The entries of the state of `owner` from what all ranks tell of it: role, description, and the value of a scalar.

    Args:
        by_rank: what each rank tells, by entry.
        held: the number of elements of `owner` that each rank holds.

    Raises:
        StateDictError: see `classify` and `agreed`.

    >>> step = seen(np.array(3.0)), np.array(3.0)
    >>> found = merged("w", [{"step": step, "m": (Seen((2,), "float32"), None)}, {}], [2, 0])
    >>> {entry: (role.value, what.dtype) for entry, (role, what, _) in found.items()}
    {'step': ('scalar', 'float64'), 'm': ('elementwise', 'float32')}
    """
    found = {}
    for entry in dict.fromkeys(entry for entries in by_rank for entry in entries):
        entries = {rank: each[entry] for rank, each in enumerate(by_rank) if entry in each}
        role = classify(
            owner, entry, [entries[rank][0] if rank in entries else None for rank in range(len(by_rank))], held
        )
        values = {rank: value for rank, (_, value) in entries.items()}
        value = agreed(owner, entry, values, held) if role is Role.SCALAR else None
        found[entry] = role, next(iter(entries.values()))[0], value
    return found


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are equal and have the same type, shape and dtype; a NaN equals itself."""
    if seen(a) != seen(b):
        return False
    if seen(a).shape is not None:
        return a.tobytes() == b.tobytes()
    return bool(a == b or (a != a and b != b))
