"""SVG elements for the drawings: shapes, colours for light and dark pages, hatches, text that fits, and a legend."""

from collections.abc import Iterator, Sequence
from html import escape

# Width of a character relative to the font size, in a monospace font and on average in a sans-serif font.
MONOSPACE, SANS = 0.602, 0.55
FONT = 12
# Fills that are distinguishable with most kinds of colour blindness, after Paul Tol and Okabe and Ito; ink is readable on each.
_LIGHT = ("#8ab8e6", "#f2b26b", "#8fd0a8", "#e3a7cf", "#d9d26e", "#a6a3e0", "#7fd3d3", "#f0a095", "#c2c9a0", "#c9b29b",
          "#b9c3cf", "#e8d5a9", "#b7d4ea")  # fmt: skip
_DARK = ("#2f669e", "#96591a", "#277248", "#8a3f72", "#716913", "#55519c", "#1d6f6f", "#9c443a", "#5f6a36", "#745a41",
         "#56616d", "#6e6340", "#3d5a75")  # fmt: skip
# Number of fills that parameters cycle through; the other fills have fixed meanings.
NUM_FILLS = 10
_PAGE = {
    "paper": ("#ffffff", "#14171b"),
    "ink": ("#1b1f24", "#e6e9ed"),
    "soft": ("#5b6570", "#9aa4af"),
    "line": ("#dfe3e8", "#2e353d"),
    "panel": ("#f5f7f9", "#1c2127"),
    "alarm": ("#c3261f", "#ff8379"),
}
# The angle of the hatching of each kind of padding.
_HATCHES = {"alignment": 45, "divisibility": 135, "shard": 90, "block": 0, "waiting": 45}


# The style of drawings with marked elements.
MARKING = (
    "<style>.crossframe rect.outline{fill:none;stroke:var(--alarm);stroke-width:2.5}"
    ".crossframe rect.pale{fill-opacity:.3}</style>"
)


def style() -> str:
    """The style sheet and the hatches of a drawing."""

    def variables(at: int) -> str:
        fills = (f"--fill{i}:{pair[at]}" for i, pair in enumerate(zip(_LIGHT, _DARK, strict=True)))
        return ";".join([*(f"--{name}:{pair[at]}" for name, pair in _PAGE.items()), *fills])

    hatches = "".join(
        f'<pattern id="crossframe-{kind}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate({angle})"><path class="hatch {kind}" d="M0 3H6"/></pattern>'
        for kind, angle in _HATCHES.items()
    )
    fills = "".join(f".crossframe .fill{i}{{fill:var(--fill{i})}}" for i in range(len(_LIGHT)))
    return (
        f"<style>.crossframe{{{variables(0)};max-width:100%;height:auto;background:var(--paper);"
        f"font:{FONT}px system-ui,sans-serif}}"
        f"@media(prefers-color-scheme:dark){{.crossframe{{{variables(1)}}}}}"
        ".crossframe text{fill:var(--ink)}.crossframe .soft{fill:var(--soft)}"
        ".crossframe .name{font-family:ui-monospace,monospace}.crossframe .bold{font-weight:600}"
        ".crossframe .middle{text-anchor:middle}.crossframe .end{text-anchor:end}"
        ".crossframe .frame{fill:none;stroke:var(--soft)}.crossframe .grid{stroke:var(--line);fill:none}"
        ".crossframe .cells{stroke:var(--paper);stroke-opacity:.55;fill:none}.crossframe .panel{fill:var(--panel)}"
        ".crossframe .hatch{stroke:var(--soft);stroke-opacity:.65}.crossframe .hatch.waiting{stroke:var(--alarm)}"
        ".crossframe rect[class^=fill]{stroke:var(--paper);stroke-width:.8}"
        ".crossframe rect[class^=hatch]{stroke:var(--soft);stroke-width:.8}"
        ".crossframe rect.second{fill-opacity:.5}.crossframe rect.third{fill-opacity:.25}"
        ".crossframe rect.thin,.crossframe rect.hatch-waiting{stroke:none}"
        ".crossframe .plate{fill:var(--paper);opacity:.92}.crossframe .alarm{fill:var(--alarm)}"
        f"{fills}</style><defs>{hatches}</defs>"
    )


def fill_of(i: int) -> str:
    """The class of the i-th parameter: one of the colours, and paler versions of them if there are more parameters.

    >>> fill_of(3), fill_of(13), fill_of(33)
    ('fill3', 'fill3 second', 'fill3 third')
    """
    return f"fill{i % NUM_FILLS}{('', ' second', ' third')[min(2, i // NUM_FILLS)]}"


def document(width: float, height: float, about: str, body: Sequence[str]) -> str:
    """A complete drawing of this size in pixels; `about` is its description."""
    about, width_text, height_text = escape(about), number(width), number(height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="crossframe" width="{width_text}" height="{height_text}" '
        f'viewBox="0 0 {width_text} {height_text}" role="img" aria-label="{about}"><title>{about}</title>{style()}'
        f'<rect width="{width_text}" height="{height_text}" style="fill:var(--paper)"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def number(value: float) -> str:
    """A coordinate to a ten-thousandth of a pixel.

    >>> number(3.0), number(1 / 3), number(-0.00001)
    ('3', '0.3333', '0')
    """
    text = f"{value:.4f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def rect(x: float, y: float, width: float, height: float, kind: str, about: str = "") -> str:
    """A rectangle of class `kind` with a tooltip; a class "hatch-..." is filled with that hatch."""
    hatch = kind.removeprefix("hatch-")
    fill = f' fill="url(#crossframe-{hatch})"' if hatch != kind else ""
    box = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    tip = f"<title>{escape(about)}</title>" if about else ""
    return f'<rect {box} class="{kind}"{fill}>{tip}</rect>' if tip else f'<rect {box} class="{kind}"{fill}/>'


def text(x: float, y: float, content: str, kind: str = "") -> str:
    """A line of text with its baseline at y."""
    return f'<text x="{number(x)}" y="{number(y)}" class="{kind}">{escape(content)}</text>'


def path(d: str, kind: str, about: str = "") -> str:
    """A path with a tooltip."""
    tip = f"<title>{escape(about)}</title>" if about else ""
    return f'<path d="{d}" class="{kind}">{tip}</path>' if tip else f'<path d="{d}" class="{kind}"/>'


def fits(content: str, width: float, char: float = MONOSPACE) -> bool:
    """Whether a text fits in this many pixels, with a small margin."""
    return len(content) * char * FONT + 6 <= width


def cut(content: str, width: float, char: float = MONOSPACE) -> str:
    """The text, or as much of its end as fits, since names differ at their ends.

    >>> cut("blocks.0.weight", 86), cut("w", 80)
    ('…s.0.weight', 'w')
    """
    if fits(content, width, char):
        return content
    most = max(1, int((width - 6) / (char * FONT)) - 1)
    return f"…{content[-most:]}"


def legend(x: float, y: float, width: float, entries: Sequence[tuple[str, str]]) -> tuple[float, Iterator[str]]:
    """A legend of swatches with texts, from y downwards.

    Args:
        entries: (class of the swatch, text).

    Returns:
        Its height, and its SVG elements.
    """
    placed, at, line = [], x, 0
    for kind, words in entries:
        words = cut(words, width - 18)
        needs = 18 + len(words) * MONOSPACE * FONT + 18
        if at > x and at + needs - 18 > x + width:
            at, line = x, line + 1
        placed.append((kind, words, at, y + 18 * line))
        at += needs
    elements = (
        each
        for kind, words, left, top in placed
        for each in (rect(left, top, 12, 12, kind), text(left + 18, top + 10.5, words, "name soft"))
    )
    return 18 * (line + 1), elements
