"""`python -m experiments teach`: check the lessons, or write their outputs and pictures anew."""

import sys
from collections.abc import Sequence
from pathlib import Path

from crossframe.errors import UsageError
from experiments.teach.run import FOLDER, LESSONS, run


def run_lessons(lessons: Sequence[Path], *, update: bool) -> int:
    """Run lessons; returns the exit status: 0 if all are as their code gives them, otherwise 1.

    Args:
        lessons: files, or names of lessons in this folder; empty: all of these.
        update: write outputs and pictures into the lessons.

    Raises:
        UsageError: a lesson that does not exist or cannot be run.
    """
    status = 0
    for path in lessons or [FOLDER / name for name in LESSONS]:
        lesson = run(_found(path))
        differences = lesson.differences()
        if update:
            lesson.write()
        elif differences:
            print("\n".join(differences))
            status = 1
        result = "updated" if update and differences else "differs" if differences else "unchanged"
        without = f", without {', '.join(lesson.passed_over)}" if lesson.passed_over else ""
        print(f"{path.name}: {result}{without}")
    if status:
        print("--update writes what is run into the lessons; look at the difference first", file=sys.stderr)
    return status


def _found(path: Path) -> Path:
    """The file itself, or the lesson of that name."""
    if path.is_file():
        return path
    if str(path) in LESSONS:
        return FOLDER / path
    raise UsageError(f"no lesson {str(path)!r}: expected a file, or one of {', '.join(LESSONS)}")
