"""Virtual environments that hold the wheel and exactly the distributions that it declares, linked from this environment."""

import os
import subprocess
import sys
import venv
from collections.abc import Collection, Mapping
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this repository."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


class Environment:
    """A virtual environment without pip.

    Args:
        folder: its directory, which must not exist.
        wheel: what is installed.
        extras: extras of the wheel whose dependencies are installed as well.
    """

    def __init__(self, folder: Path, wheel: Path, extras: Collection[str]) -> None:
        self.folder = folder
        venv.create(folder, symlinks=True, with_pip=False)
        self.python = folder / "bin" / "python"
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(self.python),
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            "--no-compile",
        ]
        subprocess.run([*pip, "--disable-pip-version-check", str(wheel)], check=True, capture_output=True)
        (self._packages,) = folder.glob("lib/python3*/site-packages")
        (metadata,) = self._packages.glob("crossframe-*.dist-info")
        self._linked = {"crossframe"}
        self._link(Distribution.at(metadata), extras)

    def _link(self, requiring: Distribution, extras: Collection[str]) -> None:
        """Link what a distribution requires, and what that requires."""
        for line in requiring.requires or ():
            required = Requirement(line)
            wanted = (
                any(required.marker.evaluate({"extra": extra}) for extra in ("", *extras)) if required.marker else True
            )
            if not wanted or required.name in self._linked:
                continue
            self._linked.add(required.name)
            found = distribution(required.name)
            for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
                if not (self._packages / top).exists():
                    os.symlink(Path(str(found.locate_file(top))), self._packages / top)
            self._link(found, required.extras)

    def run(
        self, *command: object, folder: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in a folder; "python" and "crossframe" are found there."""
        program, *arguments = map(str, command)
        words = [str(self.folder / "bin" / program), *arguments]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return subprocess.run(
            words,
            cwd=folder,
            env=clean | dict(environment or {}),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
