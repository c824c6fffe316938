"""The pytest plugin costs nothing where it is not used."""

import subprocess
import sys

HEAVY = ("numpy", "torch", "jax", "rich", "typer", "jinja2", "matplotlib")


def test_the_plugin_imports_nothing_until_it_is_used():
    code = f"import sys, crossframe.pytest_plugin; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
