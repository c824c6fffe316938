"""What a manifest states of the program that ran, so that a comparison can tell whether two recordings are of the same one.

A deterministic program that runs twice computes the same bits. What may change bits without a change of the computation is
stated here: the device, the processor, the number of threads, flags of the framework, whether the step was compiled. Digests of
the source and of the environment tell a repetition of a run from a run of changed code.
"""

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PROGRAM = "program"
"""The setting of a manifest that holds this."""
SOURCE, ENVIRONMENT = "source", "environment"
"""Digests, in hex. They may differ between two runs of programs that compute the same bits."""
DEVICE, DETERMINISTIC, COMPILED = "device", "deterministic", "compiled"

_MOST_FILES, _LARGEST = 4096, 1 << 22
# What launchers, shells and schedulers set anew for each run.
_VOLATILE = (
    "TORCHELASTIC",
    "TORCH_NCCL",
    "GROUP_",
    "ROLE_",
    "LOCAL_",
    "SLURM_",
    "SSH_",
    "XDG_",
    "TERM",
    "LC_",
    "CROSSFRAME_",
)
_VOLATILE_NAMES = frozenset(
    (
        *("_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "LS_COLORS", "TMPDIR", "HOSTNAME", "PYTEST_CURRENT_TEST"),
        *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    )
)


def program_of(*, device: str, deterministic: bool, compiled: bool, **more: str | int | bool) -> dict[str, Any]:
    """What to state under `PROGRAM`, from inside the process that runs.

    Args:
        device: its type, and its name where it has one.
        deterministic: whether an operator that is given the same bits gives the same bits.
        compiled: whether the step is compiled as a whole, so that a change in one place may move rounding in another.
        more: whatever else decides upon bits, such as the number of threads.
    """
    return {
        DEVICE: device,
        "processor": _processor(),
        "python": platform.python_version(),
        DETERMINISTIC: deterministic,
        COMPILED: compiled,
        **more,
        SOURCE: source_digest(),
        ENVIRONMENT: environment_digest(os.environ),
    }


def source_digest() -> str:
    """A digest of the script, and of all modules imported so far that are neither installed nor of the standard library."""
    found = hashlib.sha256()
    for path in sorted(_sources())[:_MOST_FILES]:
        found.update(path.name.encode(errors="surrogateescape") + b"\0")
        try:
            with open(path, "rb") as file:
                found.update(hashlib.sha256(file.read(_LARGEST)).digest())
        except OSError:
            continue
    return found.hexdigest()[:16]


def environment_digest(environment: Mapping[str, str]) -> str:
    """A digest of the environment variables, without those that every start sets anew.

    >>> environment_digest({"A": "1", "MASTER_PORT": "1"}) == environment_digest({"A": "1", "MASTER_PORT": "2"})
    True
    >>> environment_digest({"A": "1"}) == environment_digest({"A": "2"})
    False
    """
    kept = sorted(
        f"{name}={value}"
        for name, value in environment.items()
        if name not in _VOLATILE_NAMES and not name.startswith(_VOLATILE)
    )
    return hashlib.sha256("\0".join(kept).encode(errors="surrogateescape")).hexdigest()[:16]


def _sources() -> set[Path]:
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    files.add(sys.argv[0] if sys.argv else None)
    stdlib = Path(sysconfig.get_paths()["stdlib"]).resolve()
    return {path for path in _resolved(files) if "site-packages" not in path.parts and stdlib not in path.parents}


def _resolved(files: set[Any]) -> Iterator[Path]:
    for file in files:
        if isinstance(file, str) and file.endswith(".py") and os.path.isfile(file):
            yield Path(file).resolve()


def _processor() -> str:
    """The model of the processor: libraries choose kernels by it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(names, platform.machine())
    except OSError:
        return platform.processor() or platform.machine()
