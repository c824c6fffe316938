"""Reading a drawing: its rectangles, texts and paths, whatever they look like."""

# pyright: reportCallIssue=false

import re
from typing import NamedTuple
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"


class Box(NamedTuple):
    """A rectangle of a drawing and its tooltip."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    about: str


def parse(drawing: str) -> ElementTree.Element:
    """The drawing as XML, which it has to be."""
    root = ElementTree.fromstring(drawing)
    assert root.tag == f"{SVG}svg"
    return root


def boxes(drawing: str, kind: str) -> list[Box]:
    """Its rectangles whose class matches, those with a tooltip."""
    found = []
    for each in parse(drawing).iter(f"{SVG}rect"):
        tip = each.find(f"{SVG}title")
        if re.match(kind, each.get("class", "")) and tip is not None:
            x, y, width, height = (float(each.get(name, "nan")) for name in ("x", "y", "width", "height"))
            found.append(Box(x, y, width, height, each.get("class", ""), tip.text or ""))
    return found


def frames(drawing: str) -> list[Box]:
    """The outlines of bars."""
    return [
        Box(*(float(each.get(name, "nan")) for name in ("x", "y", "width", "height")), "frame", "")
        for each in parse(drawing).iter(f"{SVG}rect")
        if each.get("class") == "frame"
    ]


def texts(drawing: str) -> list[str]:
    """Its texts, tooltips not among them."""
    return [each.text or "" for each in parse(drawing).iter(f"{SVG}text")]
