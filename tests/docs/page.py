"""Runs the blocks of pages of the documentation in order, each in an empty folder:
`python -m tests.docs.page [--update] [--screenshots] PAGE ...`.

| block | what happens |
|---|---|
| a title: ```python title="train.py" | the file is written, and not run |
| ```python | runs in the page's namespace; as doctests if it begins with ">>> " |
| ```console | its lines that begin with "$ " run in bash |
| ```text after one of these two | must be what it prints, apart from measured differences; "..." stands for any text |
| a language of NOT_RUN | nothing |

A block that cannot run here has the word notest after its language, and above it `<!-- notest: REASON -->`. A command that fails
must be followed by its output. What is written to the folder `pictures` must be equal to the files in `pictures` beside the page.

<!-- screenshot: page.html 900x700 pictures/page.png --> after a block states how a picture is made of a page that the block
wrote: the size of the window, and the file relative to the page of the documentation. --screenshots makes these pictures, in
chromium; they are not compared, since fonts differ between machines.

The exit status is 1 if an output or a picture differs; --update then replaces it. It is 2 if the page is invalid or code fails.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from doctest import ELLIPSIS, DocTestParser, DocTestRunner, OutputChecker
from pathlib import Path
from typing import Any

from crossframe.errors import UsageError
from experiments.teach.run import PICTURES, Block, Lesson, blocks_of, printed_by, with_outputs
from tests.browser import screenshot

ROOT = Path(__file__).parents[2]
RUN = ("python", "console")
NOT_RUN = ("text", "bash", "toml", "json", "yaml")
NOTEST = "notest"
_REASON = re.compile(rf"<!-- {NOTEST}: .{{10,}} -->")
# A measured difference, of which another processor may have other digits, and the spaces that align it; the number of
# quantities without one.
_MEASURED = re.compile(r" *\b\d+(?:\.\d+)?e[-+]\d+\b|(?<=at most )\S+(?= of the bound)|\d+(?= equal; at most)")
_SCREENSHOT = re.compile(r"^<!-- screenshot: (\S+) (\d+)x(\d+) (\S+) -->$", re.MULTILINE)
_TITLE = re.compile(r'title="([^"/][^"]*)"')
# A user's shell has none of these; the tests' process may.
_NOT_PASSED = ("XLA_", "JAX_", "PYTHON", "CROSSFRAME_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "FORCE_COLOR")


def blocks_to_run(path: Path) -> Iterator[Block]:
    """The blocks of a page that are run or written.

    Raises:
        UsageError: a block of another language, with other words after its language, or `notest` without a reason.
    """
    text = path.read_text(encoding="utf-8")
    lines = ["", *text.splitlines()]
    for block in blocks_of(text):
        where = f"{path.name}, line {block.start}"
        if block.language not in RUN + NOT_RUN:
            raise UsageError(f"{where}: expected a block of {', '.join(RUN + NOT_RUN)}, got {block.language!r}")
        if block.words and block.words != (NOTEST,) and title_of(block) is None:
            raise UsageError(
                f'{where}: expected title="FILE" or {NOTEST} after {block.language}, got {" ".join(block.words)!r}'
            )
        if block.words == (NOTEST,) and not _REASON.fullmatch(lines[block.start - 1]):
            raise UsageError(
                f"{where}: expected <!-- {NOTEST}: REASON --> in the line above, got {lines[block.start - 1]!r}"
            )
        if title_of(block) or (block.language in RUN and not block.words):
            yield block


def title_of(block: Block) -> str | None:
    """The file that a block is, or None."""
    found = _TITLE.fullmatch(" ".join(block.words))
    return found[1] if found else None


@dataclass(frozen=True)
class Screenshot:
    """A picture of a page that a block writes.

    Attributes:
        line: where the page of the documentation states it.
        source: the page, and the fragment of its URL if it has one.
        width: of the window, in pixels.
        height: of the window, in pixels.
        target: the picture.
    """

    line: int
    source: str
    width: int
    height: int
    target: Path

    def take(self) -> None:
        file, _, fragment = self.source.partition("#")
        with tempfile.TemporaryDirectory() as profile:
            url = f"{Path(file).resolve().as_uri()}#{fragment}"
            screenshot(url, Path(profile), self.target, self.width, self.height)


def screenshots_of(path: Path) -> list[Screenshot]:
    """The screenshots that a page states, in order."""
    text = path.read_text(encoding="utf-8")
    return [
        Screenshot(text.count("\n", 0, m.start()), m[1], int(m[2]), int(m[3]), (path.parent / m[4]).resolve())
        for m in _SCREENSHOT.finditer(text)
    ]


def run(path: Path, *, exact: bool = False, screenshots: bool = False) -> Lesson:
    """Run a page.

    Args:
        exact: also compare measured differences, which another processor may give other digits.
        screenshots: also make the pictures that the page states, in their places.

    Raises:
        UsageError: an invalid block, code that raises, or a command that fails and is not followed by its output.
    """
    found = path.read_text(encoding="utf-8")
    lines = found.splitlines(keepends=True)
    namespace: dict[str, Any] = {"__name__": path.stem}
    printed: dict[Block, str] = {}
    pending = screenshots_of(path) if screenshots else []
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        drawings = Path(PICTURES)
        drawings.mkdir()
        for block in blocks_to_run(path):
            while pending and pending[0].line < block.start:
                pending.pop(0).take()
            if (title := title_of(block)) is not None:
                Path(title).parent.mkdir(parents=True, exist_ok=True)
                Path(title).write_text(block.code, encoding="utf-8")
                continue
            raw = _console(path, block) if block.language == "console" else _python(path, block, namespace)
            got = "".join(f"{line.rstrip()}\n" for line in raw.replace(os.getcwd(), "/home/you").splitlines())
            start, stop = block.output or (0, 0)
            expected = "".join(lines[start + 1 : stop - 1])
            texts = (expected, got) if exact else (_MEASURED.sub("#", expected), _MEASURED.sub("#", got))
            printed[block] = expected if OutputChecker().check_output(*texts, ELLIPSIS) else got
        for each in pending:
            each.take()
        pictures = {file.name: file.read_text(encoding="utf-8") for file in sorted(drawings.iterdir())}
    return Lesson(path, found, with_outputs(found, printed), pictures, ())


def _python(path: Path, block: Block, namespace: dict[str, Any]) -> str:
    """What the code of a block prints."""
    if not block.code.startswith(">>> "):
        return printed_by(path, block, namespace)
    test = DocTestParser().get_doctest(block.code, namespace, path.name, str(path), block.start)
    report: list[str] = []
    if DocTestRunner(optionflags=ELLIPSIS).run(test, out=report.append, clear_globs=False).failed:
        raise UsageError("".join(report))
    namespace |= test.globs
    return ""


def _console(path: Path, block: Block) -> str:
    """What the commands of a block print."""
    script = re.sub(r"^\$ ", "", "".join(_commands(block.code)), flags=re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED)}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
    }
    command = ["bash", *([] if block.output else ["-e"]), "-c", script]
    result = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode and not block.output:
        raise UsageError(
            f"{path.name}, line {block.start + 1}: a command ended with {result.returncode}, and its output is not "
            f"shown:\n{result.stdout}"
        )
    return result.stdout


def _commands(code: str) -> Iterator[str]:
    """The lines that begin with "$ ", and those that continue them: after a backslash, or inside quotes."""
    continued, command = False, ""
    for line in code.splitlines(keepends=True):
        if line.startswith("$ ") or continued:
            yield line
            command = command + line if continued else line
            continued = line.endswith("\\\n") or command.count('"') % 2 == 1


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    options = {"exact": "--update" in sys.argv, "screenshots": "--screenshots" in sys.argv}
    try:
        pages = [run(Path(argument).resolve(), **options) for argument in arguments]
    except UsageError as error:
        sys.exit(f"{error}")
    if "--update" in sys.argv:
        for page in pages:
            page.write()
    else:
        differences = [line for page in pages for line in page.differences()]
        print("\n".join(differences))
        sys.exit(bool(differences))
