"""The documentation site builds without warnings, loads nothing from elsewhere, and opens in a browser without errors."""

import re
import subprocess
import sys

import pytest

from tests.browser import needs_chromium, opened
from tests.docs.page import ROOT

PAGES = (
    "index.html",
    "reference/verdict.html",
    "api/crossframe.html",
    "lessons/flat_parameters.html",
    "reference/gpt-tiny.html",
)


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


@needs_chromium
@pytest.mark.parametrize("page", [PAGES[0], *(pytest.param(page, marks=pytest.mark.exhaustive) for page in PAGES[1:])])
def test_pages_open_in_a_browser_without_errors(site, page, tmp_path):
    opened(f"file://{site}/{page}", tmp_path)
