"""Draws the operators near the first one that differs, of both runs side by side, with their source lines."""

from collections.abc import Iterator
from pathlib import PurePath

from crossframe.draw.svg import FONT, MARKING, MONOSPACE, cut, document, fits, path, rect, text
from crossframe.operators.match import Finding, Neighbour
from crossframe.operators.trace import Operator

_BOX, _COLUMN_GAP, _MARGIN = (460, 64), 70, 20
_ROW = _BOX[1] + 26
_TOP = 44
_STYLE = "<style>.crossframe .dashed{stroke-dasharray:4 4}</style>"
_LEGEND = (
    "grey frame: its outputs are values of the other run, too",
    "red frame: an output has no partner in the other run; hatched: the first such operator",
)


def operators_svg(found: Finding, names: tuple[str, str]) -> str:
    """Two columns of operators in the order in which they ran.

    A line joins an operator to one that reads its output; a dashed line joins operators of both runs with equal outputs.

    Args:
        found: with the neighbours of the first operators that differ.
        names: of the two recordings.
    """
    rows = max(len(near) for near in found.neighbours)
    legend_top = _TOP + rows * _ROW + 4
    width = 2 * _MARGIN + 2 * _BOX[0] + _COLUMN_GAP
    body = [MARKING, _STYLE, *_partners(found)]
    for column, (name, first, near) in enumerate(zip(names, (found.a, found.b), found.neighbours, strict=True)):
        x = _left(column)
        body.append(text(x, 26, cut(name, _BOX[0]), "bold"))
        if not near:
            body.append(text(x, _TOP + FONT, "every operator's output has a partner", "soft"))
        body += _reads(near, x)
        for row, each in enumerate(near):
            body += _box(each, each.operator is first, x, _TOP + row * _ROW)
    body += [text(_MARGIN, legend_top + 18 * (1 + i), words, "soft") for i, words in enumerate(_LEGEND)]
    about = f"operators of {names[0]} and {names[1]} near the first that differ"
    return document(width, legend_top + 18 * len(_LEGEND) + 16, about, body)


def _left(column: int) -> float:
    return _MARGIN + column * (_BOX[0] + _COLUMN_GAP)


def _box(each: Neighbour, is_first: bool, x: float, y: float) -> Iterator[str]:
    op = each.operator
    shapes = ", ".join(f"{output.dtype}{list(output.shape)}" for output in op.outputs[:2])
    line = f"{PurePath(op.line.file).name}:{op.line.number}: {op.line.code}" if op.line else "no line of the script"
    yield rect(x, y, *_BOX, "panel")
    if is_first:
        yield rect(x, y, *_BOX, "hatch-waiting")
        yield rect(x + 6, y + 6, _BOX[0] - 12, _BOX[1] - 12, "plate")
    yield rect(x, y, *_BOX, "frame" if each.matched else "outline", _title(op))
    call = f"{op.name}({op.arguments})" if op.arguments else op.name
    for row, (words, kind) in enumerate(
        (
            (_start(call), "name bold"),
            (_start(f"{shapes}, {op.phase} of {op.module or '(root)'}"), "soft"),
            (_start(line), "name"),
        )
    ):
        yield text(x + 12, y + 20 + 18 * row, words, kind)


def _title(op: Operator) -> str:
    return op.line.describe() if op.line else op.name


def _start(content: str) -> str:
    """The text, or as much of its beginning as fits into a box."""
    width = _BOX[0] - 24
    if fits(content, width):
        return content
    return f"{content[: int((width - 6) / (MONOSPACE * FONT)) - 1]}…"


def _reads(near: tuple[Neighbour, ...], x: float) -> Iterator[str]:
    """Lines to each operator from those above it whose outputs it reads; of equal outputs, from the last one."""
    last: dict[str, int] = {}
    for j, each in enumerate(near):
        for i in sorted({last[value.bits] for value in each.operator.inputs if value.bits in last}):
            # Lines that pass other boxes keep left of them, further the more they pass.
            start, stop, out = _TOP + i * _ROW + _BOX[1], _TOP + j * _ROW, 5 * (j - i)
            d = f"M{x + 30} {start}V{stop}" if j == i + 1 else f"M{x} {start - 20}h{-out}V{stop + 20}h{out}"
            yield path(d, "frame")
        last |= {output.bits: j for output in each.operator.outputs}


def _partners(found: Finding) -> Iterator[str]:
    """Dashed lines between operators of both runs with equal outputs, one for each, if possible of one shape."""
    free = list(range(len(found.neighbours[1])))
    for i, ours in enumerate(found.neighbours[0]):
        equal = [j for j in free if _distance(ours.operator, found.neighbours[1][j].operator) is not None]
        if equal:
            j = min(equal, key=lambda j: _distance(ours.operator, found.neighbours[1][j].operator) or 0)
            free.remove(j)
            top, other = (_TOP + row * _ROW + _BOX[1] / 2 for row in (i, j))
            yield path(f"M{_left(0) + _BOX[0]} {top}L{_left(1)} {other}", "frame dashed")


def _distance(a: Operator, b: Operator) -> int | None:
    """0 if an output of both has the same elements and shape, 1 if it has another shape; None if no outputs are equal."""
    equal = [x.shape == y.shape for x in a.outputs for y in b.outputs if x.multiset == y.multiset]
    return int(not any(equal)) if equal else None
