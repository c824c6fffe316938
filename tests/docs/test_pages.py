"""What the README and the documentation show is what a reader gets who types it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from crossframe.errors import UsageError
from experiments.teach.run import LESSONS
from tests.browser import needs_chromium
from tests.docs.page import ROOT, blocks_to_run, run, screenshots_of

# Lessons have tests of their own.
PAGES = [Path("README.md")]
PAGES += sorted(path.relative_to(ROOT) for path in ROOT.glob("docs/**/*.md") if path.name not in LESSONS)
GUIDES = Path("docs/guides")
TICKS = "```"


@pytest.mark.parametrize(
    "page",
    # The README and the guides start torch again and again. tests/installed goes from recording to verdict as well.
    [
        pytest.param(page, id=str(page), marks=[pytest.mark.exhaustive] * (page.parent in (GUIDES, Path())))
        for page in PAGES
    ],
)
def test_a_page_shows_what_its_code_prints(page):
    if not list(blocks_to_run(ROOT / page)):
        return
    command = [sys.executable, "-m", "tests.docs.page", str(page)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_blocks_of_a_page_are_valid(page):
    list(blocks_to_run(ROOT / page))


def test_pictures_of_guides_are_shown():
    shown = {
        name for page in (ROOT / GUIDES).glob("*.md") for name in re.findall(r"]\(pictures/([^)]+)\)", page.read_text())
    }
    assert shown == {path.name for path in (ROOT / GUIDES / "pictures").glob("*")}


def test_every_screenshot_can_be_made_again_and_is_small():
    stored = set((ROOT / "docs").rglob("*.png"))
    assert {each.target for page in PAGES for each in screenshots_of(ROOT / page)} == stored
    assert {path: size for path in stored if (size := path.stat().st_size) > 150_000} == {}


def page_of(folder: Path, *parts: str) -> Path:
    """A page of these parts; a part "python:..." is a block of that language."""
    path = folder / "page.md"
    blocks = [
        re.sub(r"^([a-z]+(?: [^\n:]+)?):(.*)$", rf"{TICKS}\1\n\2\n{TICKS}", part, flags=re.DOTALL) for part in parts
    ]
    path.write_text("\n\n".join(blocks) + "\n")
    return path


def test_blocks_share_a_folder_and_a_namespace(tmp_path):
    page = page_of(
        tmp_path,
        'python title="a/b.py":print("from a file")',
        "python:x = 2",
        "console:$ python a/b.py\n$ ls \\\n    a\nno command",
        "text:from a ...\nb.py",
        "python:print(x + 1)",
        "text:3",
    )
    assert run(page).differences() == []


def test_an_output_that_differs_is_found_and_replaced(tmp_path):
    page = page_of(tmp_path, "console:$ echo one two; false", "text:one three", "python:print(1)")
    differences = run(page).differences()
    assert "-one three" in differences and "+one two" in differences and "+1" in differences
    run(page).write()
    assert run(page).differences() == []


@needs_chromium
def test_a_screenshot_shows_the_page_as_it_is_there(tmp_path):
    page = page_of(
        tmp_path,
        "python:from pathlib import Path\n_ = Path('a.html').write_text('<body bgcolor=red>')",
        "<!-- screenshot: a.html 200x100 a.png -->",
        "python:_ = Path('a.html').write_text('<body bgcolor=blue>')",
    )
    assert run(page).differences() == [] and not (tmp_path / "a.png").exists()
    run(page, screenshots=True)
    with Image.open(tmp_path / "a.png") as drawn:
        assert drawn.size == (200, 100) and drawn.convert("RGB").getpixel((9, 9)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("console:$ false\n$ true",), "line 2: a command ended with 1"),
        (("fortran:end",), "got 'fortran'"),
        (("python torch:1",), "got 'torch'"),
        (("python:1 / 0",), "ZeroDivisionError"),
        (("<!-- notest: -->\n```python notest\n1\n```",), "line 2: expected <!-- notest: REASON -->"),
        (("python:>>> 1 + 1\n3",), "Expected:\n    3\nGot:\n    2"),
    ],
)
def test_invalid_blocks_and_failures_raise(tmp_path, parts, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        run(page_of(tmp_path, *parts))


def test_a_block_marked_notest_is_not_run(tmp_path):
    assert (
        run(page_of(tmp_path, "<!-- notest: needs two machines -->\n```console notest\n$ false\n```")).differences()
        == []
    )
