"""Each lesson opens as a notebook whose cells print what the lesson shows."""

import shutil
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

from experiments.teach.run import FOLDER, LESSONS, blocks_of
from tests.docs.page import ROOT

# They start a kernel each, and tests/across/commands/test_teach.py runs their code without one.
pytestmark = pytest.mark.exhaustive


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_runs_as_a_notebook(name, tmp_path, monkeypatch):
    # A lesson draws into the folder beside it.
    lessons = shutil.copytree(FOLDER, tmp_path / "lessons")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = jupytext.read(lessons / name)
    nbformat.validate(notebook)
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(lessons)}}
    ).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    blocks = [block for block in blocks_of((FOLDER / name).read_text()) if block.language == "python"]
    assert [printed(cell) for cell in cells] == [shown(block, FOLDER / name) for block in blocks]


def printed(cell: nbformat.NotebookNode) -> str:
    """What a cell printed; fails if it also displayed a value or wrote to stderr."""
    assert all(output.output_type == "stream" and output.name == "stdout" for output in cell.outputs), cell
    return "".join(output.text for output in cell.outputs)


def shown(block, lesson: Path) -> str:
    """The output of a block as the lesson has it."""
    if block.output is None:
        return ""
    start, stop = block.output
    return "".join(lesson.read_text().splitlines(keepends=True)[start + 1 : stop - 1])
