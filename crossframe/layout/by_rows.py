"""Layouts of parameters that are stored in full and assigned to ranks by rows."""

from collections.abc import Iterable

from crossframe.layout.per_param import PerParamLayout
from crossframe.params import ParamSpec


def layouts_by_rows(params: Iterable[ParamSpec], world_size: int) -> list[PerParamLayout]:
    """One layout for each dtype of these parameters, by rows.

    >>> specs = ParamSpec("w", (4, 2)), ParamSpec("scale", ()), ParamSpec("half", (3,), "bfloat16")
    >>> [[spec.name for spec in layout.params] for layout in layouts_by_rows(specs, 2)]
    [['w', 'scale'], ['half']]
    """
    buckets: dict[str, list[ParamSpec]] = {}
    for spec in params:
        buckets.setdefault(spec.dtype, []).append(spec)
    return [PerParamLayout(tuple(members), world_size) for members in buckets.values()]
