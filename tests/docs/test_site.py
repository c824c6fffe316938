"""The documentation site builds without warnings, loads nothing from elsewhere, and opens in a browser without errors."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.docs.page import ROOT

PAGES = ("index.html", "reference/verdict.html", "api/crossframe.html", "lessons/flat_parameters.html")
BROWSER = [
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
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_pages_load_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert pages
    for page in pages:
        loaded = re.findall(r'<(?:script|img|link|iframe)[^>]*?(?:src|href)="?(https?:[^" >]+)', page.read_text())
        assert loaded == [], page


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("page", PAGES)
def test_pages_open_in_a_browser_without_errors(site, page, tmp_path):
    command = ["chromium", *BROWSER, f"--user-data-dir={tmp_path}", f"file://{site}/{page}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "</html>" in result.stdout
    assert [line for line in result.stderr.splitlines() if ":CONSOLE" in line] == []
