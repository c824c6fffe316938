"""Collects the environment of this process: machine, packages, variables, source, command line and generators."""

import hashlib
import json
import os
import platform
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from crossframe.environment.command import arguments_of
from crossframe.environment.configuration import SUFFIXES, hidden, read_configuration
from crossframe.environment.facts import (
    COMMAND,
    CONFIGURATION,
    FRAMEWORK,
    HOST,
    LONGEST,
    MACHINE,
    MODULES,
    PACKAGES,
    RANDOM,
    SOURCE,
    VARIABLES,
    Environment,
    Fact,
)
from crossframe.errors import UsageError
from crossframe.recording.program import file_digest, processor, sources

FLAGS = "XLA_FLAGS"
_VARIABLES = re.compile(
    r"(XLA|JAX|TF|NVIDIA|CUDA|CUDNN|CUBLAS|CUBLASLT|NCCL|RCCL|HIP|HSA|ROCBLAS|MIOPEN|TORCH|TORCHINDUCTOR|PYTORCH|ATEN|TRITON"
    r"|OMP|KMP|MKL|OPENBLAS|GOTO|BLIS|VECLIB|NUMEXPR|DNNL|ONEDNN|GLOO|UCX|FI|NVTE|FLASH|XFORMERS|ACCELERATE|LIBTPU|TPU|PL"
    r"|DEEPSPEED|FSDP|NEURON)_.*|PYTHONHASHSEED|PYTHONOPTIMIZE|LD_PRELOAD|LD_LIBRARY_PATH|OMP_.*|MALLOC_.*"
)
# Variables that launchers set to another value in each launch or on each rank, and folders of compiled code, which is the same.
_OF_LAUNCH = re.compile(
    r"TORCHELASTIC_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING|CUDA_.*_PATH|TPU_(WORKER|PROCESS).*|PL_GLOBAL_.*|.*_CACHE(_DIR|_PATH)?"
)
# The folder of the metadata of an installed package: its name and its version.
_INSTALLED = re.compile(r"(.+?)-([^-]+)\.dist-info")
_GIT_SECONDS = 5.0
_MOST_FILES = 512
_OWN = ("crossframe", "torch_backend", "jax_backend")


def collect(
    framework: Mapping[str, Fact],
    random_states: Mapping[str, str] | None = None,
    modules: Mapping[str, str] | None = None,
) -> Environment:
    """The environment of this process.

    Args:
        framework: settings of the framework on which numbers depend, and its libraries, by name.
        random_states: digests of the states of the framework's random generators; those of Python and NumPy are added.
        modules: the model's modules by name: class and options.
    """
    command = sys.argv
    found: dict[str, Mapping[str, Fact]] = {
        MACHINE: _machine(),
        PACKAGES: _packages(),
        VARIABLES: variables_of(os.environ),
        FRAMEWORK: dict(framework),
        SOURCE: _source(Path(command[0] if command else ".").resolve().parent),
        COMMAND: arguments_of(command),
        CONFIGURATION: _configurations(command[1:]),
        RANDOM: _random_states() | dict(random_states or {}),
        MODULES: dict(modules or {}),
    }
    return Environment(
        {section: {name: _cut(fact) for name, fact in facts.items()} for section, facts in found.items()}
    )


def _cut(fact: Fact) -> Fact:
    return fact[:LONGEST] if isinstance(fact, str) else fact


def variables_of(environment: Mapping[str, str]) -> dict[str, Fact]:
    """The environment variables that affect numerics or communication, with each flag of XLA_FLAGS by itself.

    >>> variables_of({"HOME": "/root", "NCCL_ALGO": "Ring", "XLA_FLAGS": "--xla_a=1 --xla_b"})
    {'NCCL_ALGO': 'Ring', 'XLA_FLAGS --xla_a': '1', 'XLA_FLAGS --xla_b': True}
    """
    found: dict[str, Fact] = {}
    for name, text in sorted(environment.items()):
        if name == FLAGS:
            for flag in text.split():
                key, equals, value = flag.partition("=")
                found[f"{FLAGS} {key}"] = value if equals else True
        elif _VARIABLES.fullmatch(name) and not _OF_LAUNCH.fullmatch(name):
            found[name] = hidden(name, text)
    return found


def digest(content: bytes) -> str:
    """A short digest, for facts whose equality alone matters."""
    return hashlib.sha256(content).hexdigest()[:16]


def _machine() -> dict[str, Fact]:
    found: dict[str, Fact] = {
        HOST: socket.gethostname(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "processor": processor(),
    }
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(errors="replace")
        if version := re.search(r"Kernel Module.*?(\d+(\.\d+)+)", text):
            found["driver"] = version[1]
    return found


def _packages() -> dict[str, Fact]:
    """The versions of the packages that can be imported, from the names of their metadata folders: their content is long."""
    found: dict[str, Fact] = {}
    for folder in dict.fromkeys(sys.path):
        with suppress(OSError):
            for entry in os.listdir(folder or "."):
                if match := _INSTALLED.fullmatch(entry):
                    found.setdefault(re.sub("[-_.]+", "-", match[1]).lower(), match[2])
    return dict(sorted(found.items()))


def _source(folder: Path) -> dict[str, Fact]:
    """The commit of the script's folder, tracked files that differ from it, and the sources that were imported."""
    found: dict[str, Fact] = {}
    top = _git(folder, "rev-parse", "--show-toplevel") if _may_have_repository(folder) else None
    root = Path(top.strip()) if top else None
    if root is not None and (commit := _git(root, "rev-parse", "HEAD")):
        found["commit"] = commit.strip()
    imported = _named(sources(), root or folder)
    found |= {f"file {name}": _file_digest(path) for name, path in imported.items()}
    if root is not None:
        changed, known = _git(root, "diff", "--name-only", "-z", "HEAD") or "", set(imported.values())
        for name in [each for each in changed.split("\0") if each][:_MOST_FILES]:
            if (path := str(root / name)) not in known:
                found[f"changed {name}"] = _file_digest(path)
    return found


def _named(paths: Iterable[str], root: Path) -> dict[str, str]:
    """Sources by their path from a folder, or by their name if they are elsewhere. Those of this project, in a checkout, are left
    out: its version is that of the package."""
    project, within = Path(__file__).resolve().parents[2], os.path.join(root, "")
    own = tuple(os.path.join(project, package, "") for package in _OWN)
    # Those of the script's repository first: there may be more files than are stated, and a file elsewhere of the same name.
    others = sorted((path for path in paths if not path.startswith(own)), key=lambda path: not path.startswith(within))
    found: dict[str, str] = {}
    for path in others[:_MOST_FILES]:
        found.setdefault(path.removeprefix(within) if path.startswith(within) else os.path.basename(path), path)
    return found


def _file_digest(path: str) -> str:
    try:
        return file_digest(path)[:16]
    except OSError:
        return "not readable"


def _may_have_repository(folder: Path) -> bool:
    """Whether git would look into a repository from a folder: without one, no process is started to learn that."""
    return "GIT_DIR" in os.environ or any((each / ".git").exists() for each in (folder, *folder.parents))


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of a git command; None if it fails, takes too long, or git is not installed."""
    try:
        ended = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=_GIT_SECONDS,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.decode(errors="replace") if ended.returncode == 0 else None


def _configurations(arguments: Sequence[str]) -> dict[str, Fact]:
    """The values of all configuration files that are named in the command line."""
    found: dict[str, Fact] = {}
    for word in arguments:
        path = Path(word.rpartition("=")[2] or word)
        try:
            if path.suffix.lower() in SUFFIXES and path.is_file():
                found |= {f"{path.name}: {key}": value for key, value in read_configuration(path).items()}
        except OSError:
            continue
        except UsageError:
            found[f"{path.name}: sha256"] = _file_digest(str(path))
    return found


def _random_states() -> dict[str, str]:
    found = {"python": digest(repr(random.getstate()).encode())}
    if "numpy" in sys.modules:
        import numpy as np

        state = np.random.get_state(legacy=False)
        found["numpy"] = digest(json.dumps(state, default=lambda array: array.tolist()).encode())
    return found
