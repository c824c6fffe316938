"""Environments of pinned packages, which pip makes once in a cache, and the commands that run in them."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from crossframe.errors import UsageError

CODE = Path(__file__).parents[1]
ENVIRONMENT = {"PYTHONPATH": str(CODE), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
OURS_ALONE = CODE / "experiments" / "fsdp_scripts" / "ours_alone.py"
"""`OURS_ALONE SCRIPT ARGUMENTS` runs a script with torch_backend instead of torch's FSDP, which then may not be used."""
TIMEOUT = 3000
"""Seconds that a command may take."""
_INSTALLED = ".installed"
_PLACES = re.compile(r"(?<![\w.-])/[^\s\"]*/(?=site-packages/|bin/python|[\w.-]+-[0-9a-f]{12}/)")


def make_virtual_environment(name: str, requirements: Path, cache: Path, console: Console) -> str:
    """The interpreter of a virtual environment that has the required packages alone."""

    def make(folder: Path) -> None:
        checked([sys.executable, "-m", "venv", str(folder)])
        _install(str(folder / "bin" / "python"), requirements)

    return str(_made(name, requirements, cache, make, console) / "bin" / "python")


def install_packages(name: str, requirements: Path, cache: Path, console: Console) -> Path:
    """A folder that has the required packages, for PYTHONPATH, next to those of this interpreter."""

    def make(folder: Path) -> None:
        _install(sys.executable, requirements, "--target", str(folder))

    return _made(name, requirements, cache, make, console)


def _made(name: str, requirements: Path, cache: Path, make: Callable[[Path], None], console: Console) -> Path:
    folder = (cache / f"{name}-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]}").absolute()
    if not (folder / _INSTALLED).is_file():
        console.print(f"making {folder}", markup=False)
        shutil.rmtree(folder, ignore_errors=True)
        make(folder)
        (folder / _INSTALLED).touch()
    return folder


def _install(python: str, requirements: Path, *options: str) -> None:
    # Versions of all packages are stated: with dependencies pip would add those that nobody needs.
    checked([python, "-m", "pip", "install", "--quiet", "--no-deps", *options, "-r", str(requirements)])


def run(
    command: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path | None = None, most: int = 2000
) -> tuple[int, str]:
    """(exit status, the end of the output).

    Args:
        environment: variables next to those of this process and of ENVIRONMENT.
        folder: in which it runs; None: that of this process.
        most: characters of the output.
    """
    done = subprocess.run(
        command,
        env=os.environ | ENVIRONMENT | dict(environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
        cwd=folder,
    )
    return done.returncode, done.stdout[-most:]


def checked(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Run a command.

    Raises:
        UsageError: its exit status is not 0.
    """
    status, text = run(command, environment)
    if status:
        raise UsageError(f"{' '.join(command)}: exit status {status}\n{text}")


def without_places(text: str) -> str:
    """An output whose paths begin at the repository, the packages or the folder of a cache, wherever these are."""
    return _PLACES.sub("", text.replace(f"{Path.cwd()}/", ""))
