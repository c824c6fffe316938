"""Opens a page in a real browser."""

import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

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
    "--hide-scrollbars",
    "--virtual-time-budget=4000",
)


def opened(url: str, profile: Path, *, silent: bool = True) -> str:
    """The document after its scripts have run.

    Args:
        profile: a new folder for the data of the browser.
        silent: fail if the page wrote anything to the console.
    """
    result = _chromium(url, profile, "--dump-dom")
    assert "</html>" in result.stdout, result.stderr
    assert not silent or [line for line in result.stderr.splitlines() if ":CONSOLE" in line] == []
    return result.stdout


def screenshot(url: str, profile: Path, file: Path, width: int, height: int) -> None:
    """Draw the top of a page into a PNG file of at most 256 colours, which keeps it small.

    Args:
        profile: a new folder for the data of the browser.
        width: of the window, in pixels.
        height: of the window, in pixels.
    """
    result = _chromium(url, profile, f"--screenshot={file}", f"--window-size={width},{height}")
    assert file.is_file(), result.stderr
    with Image.open(file) as drawn:
        small = drawn.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small.save(file, optimize=True)


def _chromium(url: str, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["chromium", *_OPTIONS, *options, f"--user-data-dir={profile}", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
