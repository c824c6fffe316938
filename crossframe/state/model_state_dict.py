"""The state dict of a sharded model (R36): the layout of each kind, and whether a state dict fits a model.

A tied parameter has an entry under each of its names, as in the unwrapped model. Buffers are replicated: every rank that has
entries has them in full.
"""

from collections.abc import Collection, Mapping, Sequence
from enum import Enum

from crossframe.errors import StateDictError, UnsupportedError
from crossframe.layout import FlatLayout, Layout, PerParamLayout
from crossframe.quoting import quote


class StateKind(Enum):
    """The kinds of state dicts of a model.

    - FULL: every parameter in full.
    - SHARDED: the same keys and shapes; each rank holds whole rows of each parameter.
    - LOCAL: as in torch, one key for each unit, the rank's shard of its flat parameter.
    """

    FULL = "full"
    SHARDED = "sharded"
    LOCAL = "local"


def target_of(layout: Layout, kind: StateKind, unit: str = "") -> Layout:
    """The layout in which a state dict of this kind holds a bucket. Saving copies to it, and loading copies from it.

    FULL: one line without padding, over one rank; every rank that has entries has a copy of it. SHARDED: chunks of dim 0, or the
    layout itself if it is per parameter; its chunks may be of other dims. LOCAL: the layout itself.

    Args:
        unit: name of the unit, for errors.

    Raises:
        StateDictError: `kind` is not a StateKind.
        UnsupportedError: LOCAL with a layout that has no flat parameter.

    >>> from crossframe.params import ParamSpec
    >>> layout = FlatLayout((ParamSpec("w", (3, 2)),), world_size=2, keep_original=False)
    >>> for kind in StateKind:
    ...     target = target_of(layout, kind)
    ...     pieces = [target.pieces(rank) for rank in range(target.world_size)]
    ...     print(kind.value, [(piece.param_start, piece.param_stop) for (piece,) in pieces])
    full [(0, 6)]
    sharded [(0, 4), (4, 6)]
    local [(0, 3), (3, 6)]
    """
    match kind:
        case StateKind.FULL:
            return FlatLayout(layout.params, world_size=1, keep_original=False)
        case StateKind.SHARDED:
            return layout if isinstance(layout, PerParamLayout) else PerParamLayout(layout.params, layout.world_size)
        case StateKind.LOCAL if isinstance(layout, FlatLayout):
            return layout
        case StateKind.LOCAL:
            raise UnsupportedError(
                f"unit {unit!r} has the {layout.kind} layout and no flat parameter: a LOCAL state dict is of flat parameters; "
                "ask for SHARDED"
            )
        case _:
            raise StateDictError(f"expected a StateKind, got {quote(kind)}")


def unfit(
    expected: Mapping[str, Sequence[int]],
    found: Mapping[str, Sequence[int] | str],
    *,
    strict: bool = True,
    optional: Collection[str] = (),
) -> list[str]:
    """What of a state dict does not fit a model, in words. Dtypes may differ: values are converted when they are copied.

    Args:
        expected: the shapes that the model has, by key without wrapper prefixes.
        found: the shapes in the state dict; for a value that is no tensor, the name of its type.
        strict: whether missing and unexpected keys do not fit.
        optional: keys that may be missing.

    >>> unfit({"w": (2, 3), "b": (2,), "s": ()}, {"w": (3, 2), "b": "float", "s": (1,), "c": (1,)})
    ["unexpected 'c'", "'w' has shape (3, 2), expected (2, 3)", "'b' is a float and no tensor"]
    """
    if found == expected:
        return []
    wrong = []
    if strict:
        missing = [key for key in expected if key not in found and key not in optional]
        unexpected = [key for key in found if key not in expected]
        for title, keys in (("missing", missing), ("unexpected", unexpected)):
            if keys:
                wrong.append(f"{title} {', '.join(map(repr, keys))}")
    for key, shape in expected.items():
        came = found.get(key, shape)
        if isinstance(came, str):
            wrong.append(f"{key!r} is a {came} and no tensor")
        elif came != shape and tuple(came) != tuple(shape) and not (not shape and tuple(came) == (1,)):
            wrong.append(f"{key!r} has shape {tuple(came)}, expected {tuple(shape)}")  # torch takes (1,) for ()
    return wrong
