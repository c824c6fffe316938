"""Opens a page in a real browser."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=4000",
    "--dump-dom",
)


def opened(url: str, profile: Path) -> str:
    """The document after its scripts have run; fails if the page wrote anything to the console.

    Args:
        profile: a new folder for the data of the browser.
    """
    command = ["chromium", *_OPTIONS, f"--user-data-dir={profile}", url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "</html>" in result.stdout, result.stderr
    assert [line for line in result.stderr.splitlines() if ":CONSOLE" in line] == []
    return result.stdout
