"""`python -m experiments.teach`: check the lessons, or write their outputs and pictures anew."""

import argparse
import sys
from pathlib import Path

from crossframe.errors import CrossframeError, UsageError
from experiments.teach.run import FOLDER, LESSONS, run


def main() -> int:
    """The exit status: 0 if all lessons stand as their code gives them, 1 if one does not, 2 if one cannot be run."""
    parser = argparse.ArgumentParser("python -m experiments.teach", description="Run the lessons and compare them.")
    parser.add_argument(
        "lessons", nargs="*", type=Path, help="files, or names of this folder's; without any, all of these"
    )
    parser.add_argument("--update", action="store_true", help="write outputs and pictures as they are")
    asked = parser.parse_args()
    status = 0
    for path in asked.lessons or [FOLDER / name for name in LESSONS]:
        try:
            lesson = run(_found(path))
        except CrossframeError as error:
            print(error, file=sys.stderr)
            return 2
        differences = lesson.differences()
        if asked.update:
            lesson.write()
        elif differences:
            print("\n".join(differences))
            status = 1
        said = "updated" if asked.update and differences else "differs" if differences else "stands"
        without = f", without {', '.join(lesson.passed_over)}" if lesson.passed_over else ""
        print(f"{path.name}: {said}{without}")
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


if __name__ == "__main__":
    sys.exit(main())
