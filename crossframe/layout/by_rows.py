"""Layouts of parameters that are stored in full and assigned to ranks by rows."""

from collections.abc import Iterable

from crossframe.layout.flat import FlatLayout
from crossframe.layout.per_param import PerParamLayout
from crossframe.params import ParamSpec


def layouts_by_rows(params: Iterable[ParamSpec], world_size: int) -> list[PerParamLayout | FlatLayout]:
    """One layout for each dtype of these parameters, by rows; parameters without dims, which have no rows, in a flat one.

    >>> specs = ParamSpec("w", (4, 2)), ParamSpec("scale", ())
    >>> [layout.kind for layout in layouts_by_rows(specs, 2)]
    ['per_param', 'flat']
    """
    buckets: dict[tuple[str, bool], list[ParamSpec]] = {}
    for spec in params:
        buckets.setdefault((spec.dtype, bool(spec.shape)), []).append(spec)
    return [
        PerParamLayout(tuple(members), world_size) if has_dims else FlatLayout(tuple(members), world_size, True)
        for (_, has_dims), members in buckets.items()
    ]
