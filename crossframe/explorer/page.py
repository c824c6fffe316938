"""The page of the layout explorer."""

import json
from html import escape
from pathlib import Path
from typing import Any

from crossframe.draw.svg import MARKING, style
from crossframe.errors import UsageError

FOLDER = Path(__file__).parent
# Maximum size of a page: above it, browsers take seconds to load it.
MOST_BYTES = 4 * 2**20


def explorer_page(data: dict[str, Any], *, model: str, start: dict[str, Any]) -> str:
    """One HTML page without external references.

    Args:
        data: from `explorer_data`.
        model: the model as the command names it, for the commands that the page shows.
        start: what the page selects first, by the names of its URL fragment: "world", "layout", "strategy", "dtype",
            "element". A fragment takes precedence.

    Raises:
        UsageError: the page would be too large.
    """
    parts = {
        "title": escape(f"Layout explorer: {data['model']}"),
        "css": (FOLDER / "explorer.css").read_text(encoding="utf-8"),
        "drawing": style() + MARKING,
        "data": _in_script(data | {"command": model, "start": start}),
        "script": (FOLDER / "explorer.js").read_text(encoding="utf-8"),
    }
    page = (FOLDER / "explorer.html").read_text(encoding="utf-8")
    before, *rest = page.split("{{")
    for part in rest:
        name, _, after = part.partition("}}")
        before += parts[name] + after
    if (num_bytes := len(before.encode())) > MOST_BYTES:
        raise UsageError(
            f"html: the page would have {num_bytes / 2**20:.1f} MiB, expected at most {MOST_BYTES // 2**20}: pass a smaller "
            "--world-size, or draw one combination with --svg"
        )
    return before


def _in_script(data: dict[str, Any]) -> str:
    """JSON for a script element: "<" is escaped, so that no name can end it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
