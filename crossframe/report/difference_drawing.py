"""Draws the differing elements on the layout of their unit."""

import re
from dataclasses import dataclass

from markupsafe import Markup

from crossframe.draw import Mark, layout_svg
from crossframe.layout import Sharding
from crossframe.recording.event_format import WHOLE_ON_RANK
from crossframe.verdict import Divergence

# As wide as the page on a desktop and on a phone: a drawing is not scaled, so that it can be read.
WIDTHS = {"wide": 1000, "narrow": 356}


@dataclass(frozen=True)
class Place:
    """Two drawings of a range of elements.

    Attributes:
        wide, narrow: the same at two widths; the style sheet shows one of them.
        whole: whether the elements are of a rank that holds the parameter in full, and so lie in other ranks' shards too.
    """

    wide: Markup
    narrow: Markup
    whole: bool


def place_of(where: Divergence | None, sharding: Sharding) -> Place | None:
    """The range of elements on the layout of its unit; None if it is not a range of a parameter."""
    if where is None or where.parameter is None or where.start is None or where.stop is None:
        return None
    found = sharding.find(where.parameter)
    if found is None:
        return None
    whole = where.phase in WHOLE_ON_RANK
    unit, layout = sharding.units[found[0]]
    mark = Mark(layout.params[found[1]].name, where.start, where.stop, None if whole else where.rank)
    bucket = Sharding(((unit, layout),), sharding.mesh)
    drawn = {name: _own(layout_svg(bucket, mark=mark, width=width), name) for name, width in WIDTHS.items()}
    return Place(drawn["wide"], drawn["narrow"], whole)


def _own(drawing: str, name: str) -> Markup:
    """A drawing with unique ids, since a page has two. Quotes in names are escaped, so only attributes match."""
    return Markup(re.sub(r'(<pattern id="|fill="url\(#)crossframe-', rf"\g<1>{name}-", drawing))
