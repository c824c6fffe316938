"""How pages and docstrings of this project become pages of the site."""

import re
from functools import partial
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from crossframe.explorer import dtype_choices, explorer_data, explorer_page
from crossframe.shapes import model_shapes

# What follows the language of a block is for the tests that run it; only a title is shown.
_FENCE = re.compile(r"^( *)(`{3,})(\w+)[ \t]+(?!title=)[^\n`]*$", re.MULTILINE)
_DOCTEST = re.compile(r"(?:^ *>>> .*\n(?: *\S.*\n)*)+", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for each page."""
    return _FENCE.sub(r"\1\2\3", markdown)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> None:
    """Called by MkDocs once: adds the example of the layout explorer."""
    data = explorer_data(dtype_choices(partial(model_shapes, "gpt-tiny"), "float32"), 8)
    page = explorer_page(data, model="gpt-tiny", start={})
    files.append(File.generated(config, "reference/gpt-tiny.html", content=page))


class Doctests(griffe.Extension):
    """Shows the doctests of docstrings as code."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called by griffe for each object that has been read."""
        if obj.is_alias or obj.docstring is None:
            return
        obj.docstring.value = _DOCTEST.sub(lambda found: f"```pycon\n{found[0]}```\n", obj.docstring.value + "\n")
