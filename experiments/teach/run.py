"""Running a lesson: its code block by block, in one namespace, and the lesson as it should read.

A block opened by ```python is run. What it prints stands in the block ```text that follows. Words after "python" name extras
that it needs ("```python torch"); a block whose extras are not installed is skipped, and its output is not checked.
Code runs in an empty folder with a folder `pictures` in it; what is written there is compared with `pictures` beside the lesson.
"""

import importlib.util
import io
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from crossframe.errors import UsageError

LESSONS = (
    "flat_parameters.md",
    "unshard_and_writeback.md",
    "a_training_step.md",
    "hybrid_sharding.md",
    "two_frameworks.md",
    "moving_a_model.md",
)
FOLDER = Path(__file__).parents[2] / "docs" / "lessons"
PICTURES = "pictures"
OUTPUT = "text"
WITH_OUTPUT = ("python", "console")
"""Languages whose blocks may be followed by a block of output."""


@dataclass(frozen=True)
class Block:
    """A block of code, and where it and its output stand in the lesson.

    Attributes:
        language: the first word after the fence.
        words: the other words after the fence; in lessons, modules without which the block is skipped.
        code: its lines.
        start: the first line of the code, counted from 0.
        stop: the line after the end of the block.
        output: lines `start, stop` of the block of output that follows, fences included; None if there is none.
    """

    language: str
    words: tuple[str, ...]
    code: str
    start: int
    stop: int
    output: tuple[int, int] | None


@dataclass(frozen=True)
class Lesson:
    """A lesson that was run.

    Attributes:
        path: its file.
        found: its text as it stands there.
        text: its text with the outputs that the code gave.
        pictures: what the code drew, by file name.
        passed_over: what is not installed and was needed.
    """

    path: Path
    found: str
    text: str
    pictures: dict[str, str]
    passed_over: tuple[str, ...]

    def differences(self) -> list[str]:
        """What stands in the lesson or beside it and is not what its code gives, line by line; nothing if all is well."""
        where = self.path.name
        lines = list(
            unified_diff(self.found.splitlines(), self.text.splitlines(), where, f"{where} as run", lineterm="")
        )
        for name, drawn in self.pictures.items():
            stored = self.path.parent / PICTURES / name
            if not stored.is_file():
                lines.append(f"{where}: {PICTURES}/{name} is drawn and not stored")
            elif stored.read_bytes() != drawn.encode():
                lines.append(f"{where}: {PICTURES}/{name} is not what is drawn")
        return lines

    def write(self) -> None:
        """Store the lesson and its pictures as they were run."""
        self.path.write_text(self.text, encoding="utf-8")
        for name, drawn in self.pictures.items():
            folder = self.path.parent / PICTURES
            folder.mkdir(exist_ok=True)
            (folder / name).write_bytes(drawn.encode())


def blocks_of(text: str) -> Iterator[Block]:
    """The fenced blocks of a page that are not the output of another one, in order."""
    tokens = MarkdownIt("commonmark").parse(text)
    output = None
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type != "fence" or token is output:
            continue
        language, *words = token.info.split() or [""]
        is_output = following is not None and following.type == "fence" and following.info == OUTPUT
        output = following if is_output and language in WITH_OUTPUT else None
        start, stop = _lines(token)
        yield Block(language, tuple(words), token.content, start + 1, stop, _lines(output) if output else None)


def _lines(token: Any) -> tuple[int, int]:
    start, stop = token.map
    return start, stop


def run(path: Path) -> Lesson:
    """Run a lesson.

    Raises:
        UsageError: no such file, or code that raises; the message has the lesson and the line.
    """
    if not path.is_file():
        raise UsageError(f"expected the file of a lesson, got {str(path)!r}")
    found = path.read_text(encoding="utf-8")
    blocks = [block for block in blocks_of(found) if block.language == "python"]
    missing = {name for block in blocks for name in block.words if importlib.util.find_spec(name) is None}
    chosen = [block for block in blocks if not missing & set(block.words)]
    namespace: dict[str, Any] = {"__name__": path.stem}
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        drawings = Path(folder, PICTURES)
        drawings.mkdir()
        printed = {block: printed_by(path, block, namespace) for block in chosen}
        pictures = {file.name: file.read_text(encoding="utf-8") for file in sorted(drawings.iterdir())}
    return Lesson(path, found, with_outputs(found, printed), pictures, tuple(sorted(missing)))


def printed_by(path: Path, block: Block, namespace: dict[str, Any]) -> str:
    """What a block prints. Its lines are those of its page, for tracebacks.

    Raises:
        UsageError: the code raises; the message has the page and the line.
    """
    stdout = io.StringIO()
    try:
        with redirect_stdout(stdout):
            exec(compile("\n" * block.start + block.code, str(path), "exec"), namespace)
    except Exception as error:
        line, trace = block.start + 1, error.__traceback__
        while trace is not None:
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == str(path) else line
            trace = trace.tb_next
        raise UsageError(f"{path.name}, line {line}: {type(error).__name__}: {error}") from error
    return stdout.getvalue()


def with_outputs(text: str, printed: dict[Block, str]) -> str:
    """A page with these outputs instead of its own."""
    lines = text.splitlines(keepends=True)
    for block, output in reversed(printed.items()):
        end = "" if not output or output.endswith("\n") else "\n"
        fenced = ["```text\n", output + end, "```\n"] if output else []
        if block.output:
            start, stop = block.output
            lines[start:stop] = fenced
        elif fenced:
            lines[block.stop : block.stop] = ["\n", *fenced]
    return "".join(lines)
