"""The documentation site builds without warnings, loads nothing from elsewhere, and opens in a browser without errors."""

import json
import re
import subprocess
import sys
import threading
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

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


# Loads the pages one after the other, without their scripts, in a frame as wide as a phone. A page that does not fit can be
# scrolled sideways. The header is left out, since a script puts its title in place.
FRAME = """
<!doctype html><title>widths</title>
<iframe id="frame" width="390" height="800" style="border: 0" sandbox="allow-same-origin"></iframe>
<script>
const frame = document.getElementById("frame"), pages = PAGES, widths = {};
frame.onload = () => {
  const shown = frame.contentDocument;
  widths[pages.shift()] = [shown.documentElement.clientWidth, (shown.querySelector("main") || shown.body).scrollWidth];
  if (pages.length) frame.src = pages[0];
  else {
    const results = document.createElement("pre");
    results.id = "results";
    results.textContent = JSON.stringify(widths);
    document.body.replaceChildren(results);
  }
};
frame.src = pages[0];
</script>
"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each on stderr."""

    def log_message(self, *_) -> None:
        pass


@needs_chromium
@pytest.mark.exhaustive
def test_no_page_scrolls_sideways_on_a_phone(site, tmp_path):
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if path.name != "frame.html")
    (site / "frame.html").write_text(FRAME.replace("PAGES", json.dumps(pages)))
    # Frames of file: URLs may not be read.
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        document = opened(f"http://127.0.0.1:{server.server_port}/frame.html", tmp_path, silent=False)
        server.shutdown()
    found = re.search(r'<pre id="results">(.*?)</pre>', document, re.DOTALL)
    assert found, document[-2000:]
    widths = json.loads(unescape(found[1]))
    assert sorted(widths) == pages
    assert {page: each for page, each in widths.items() if each[0] != 390 or each[1] > each[0]} == {}
