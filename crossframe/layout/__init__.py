"""Layouts: where the elements of each parameter lie. Offsets, padding and pieces are computed in this folder and nowhere else."""

from typing import Any

from crossframe.errors import LayoutError
from crossframe.layout.by_rows import layouts_by_rows
from crossframe.layout.exchange import Exchange, Part, exchange
from crossframe.layout.flat import FlatLayout
from crossframe.layout.overlay import Transfer, overlay
from crossframe.layout.padding import Padding
from crossframe.layout.per_param import PerParamLayout
from crossframe.layout.pieces import Column, Layout, Piece, Run, views
from crossframe.layout.ragged import RaggedLayout
from crossframe.layout.sharding import LAYOUT_KINDS, LAYOUTS, Sharding, post_forward, post_forward_group, reduced_layout
from crossframe.params import ParamSpec
from crossframe.quoting import quote

__all__ = [
    "LAYOUTS",
    "LAYOUT_KINDS",
    "Column",
    "Exchange",
    "FlatLayout",
    "Layout",
    "Padding",
    "Part",
    "PerParamLayout",
    "Piece",
    "RaggedLayout",
    "Run",
    "Sharding",
    "Transfer",
    "exchange",
    "layout_from_json",
    "layouts_by_rows",
    "overlay",
    "post_forward",
    "post_forward_group",
    "reduced_layout",
    "views",
]


def layout_from_json(fields: dict, params: tuple[ParamSpec, ...]) -> Layout:
    """Build the layout that `to_json` described, over these parameters.

    Raises:
        LayoutError: `fields` is not a mapping, has an unknown kind or lacks a field; it states other offsets than this version
            computes; or the layout itself rejects the arguments.
    """
    if not isinstance(fields, dict):
        raise LayoutError(f"expected the fields of a layout as a mapping, got {quote(fields)}")

    def field(name: str) -> Any:
        if name not in fields:
            raise LayoutError(f"a layout needs the field {name!r}, got {quote(list(fields))}")
        return fields[name]

    def optional(name: str) -> Any:
        """A list that older recordings lack."""
        value = fields.get(name)
        return tuple(value) if isinstance(value, list) else value

    kind = field("kind")
    match kind if isinstance(kind, str) else None:
        case "flat":
            made: Layout = FlatLayout(
                params,
                field("world_size"),
                field("keep_original"),
                field("compute_dtype"),
                padded_for=fields.get("padded_for"),
            )
        case "per_param":
            made = PerParamLayout(params, field("world_size"), optional("dims"))
        case "ragged":
            made = RaggedLayout(params, field("world_size"), optional("blocks"), padded_for=fields.get("padded_for"))
        case _:
            raise LayoutError(f"unknown layout kind {quote(kind)}: expected one of {', '.join(LAYOUT_KINDS)}")
    # Files of formats without places were written by the layout rules of this version.
    stated, here = fields.get("places", {}), made.places()
    for name in here:
        if "places" in fields and not _same(stated.get(name) if isinstance(stated, dict) else None, here[name]):
            raise LayoutError(
                f"a {kind} layout states other places than the rules of this version give it ({name!r}, here "
                f"{quote(here[name])}): {quote(stated)}; read it with the version that wrote it"
            )
    return made


def _same(stated: Any, here: int | list[int]) -> bool:
    if isinstance(here, int):
        return type(stated) is int and stated == here
    return type(stated) is list and all(type(place) is int for place in stated) and stated == here
