"""The pytest plugin costs nothing where it is not used."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from crossframe.pytest_plugin import pytest_terminal_summary

HEAVY = ("numpy", "torch", "jax", "rich", "typer", "jinja2", "matplotlib")


def test_the_plugin_imports_nothing_until_it_is_used():
    code = f"import sys, crossframe.pytest_plugin; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def report(when, *properties):
    return SimpleNamespace(when=when, user_properties=properties)


@pytest.mark.parametrize("written", [(), ("wrote a.golden", "wrote b.golden")])
def test_the_summary_lists_the_goldens_that_were_written_once(written):
    """Each report of a test has its properties, and others' reports have none."""
    properties = [("crossframe golden", text) for text in written]
    reports = [report(when, ("seed", "3"), *properties[:1]) for when in ("setup", "call", "teardown")]
    stats = {"": reports[:1], "passed": [*reports[1:], report("teardown", *properties[1:])], "deselected": [object()]}
    said = []
    reporter = SimpleNamespace(stats=stats, section=lambda title: said.append(f"== {title}"), write_line=said.append)
    pytest_terminal_summary(reporter)
    assert said == (["== goldens", *written] if written else [])
