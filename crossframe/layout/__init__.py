"""Layouts: offsets, padding and pieces are computed in this folder and nowhere else."""

from crossframe.errors import LayoutError
from crossframe.layout.flat import FlatLayout
from crossframe.layout.per_param import PerParamLayout
from crossframe.layout.pieces import Column, Layout, Padding, Piece, views
from crossframe.params import ParamSpec

__all__ = ["Column", "FlatLayout", "Layout", "Padding", "PerParamLayout", "Piece", "layout_from_json", "views"]


def layout_from_json(fields: dict, params: tuple[ParamSpec, ...]) -> Layout:
    """The layout that `to_json` described, over these parameters.

    Raises:
        LayoutError: no mapping, an unknown kind, or a field that is missing.
    """
    if not isinstance(fields, dict):
        raise LayoutError(f"expected the fields of a layout as a mapping, got {fields!r}")
    try:
        match fields["kind"]:
            case "flat":
                return FlatLayout(params, fields["world_size"], fields["keep_original"], fields["compute_dtype"])
            case "per_param":
                return PerParamLayout(params, fields["world_size"])
    except KeyError as error:
        raise LayoutError(f"a layout needs the field {error}, got {list(fields)}") from None
    raise LayoutError(f"unknown layout kind {fields['kind']!r}: expected 'flat' or 'per_param'")
