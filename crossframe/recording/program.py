"""Describes the program that ran and digests its environment, so that a comparison recognizes a repetition of the same program.

A deterministic program that runs twice computes the same bits. The description states everything that may change bits without a
change of the computation: the device, the processor, the number of threads, flags of the framework, and whether the step is
compiled. Digests of the source and of the environment distinguish a repeated run from a run of changed code.
"""

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from crossframe.dtypes import TF32

PROGRAM = "program"
"""The name of the setting in a manifest that has the description."""
SOURCE, ENVIRONMENT = "source", "environment"
"""Digests in hex. They may differ between programs that compute the same bits."""
DEVICE, DETERMINISTIC, COMPILED, PROCESSES = "device", "deterministic", "compiled", "processes"
GRADIENTS = "gradients of a step"
"""How many of them a step adds, where a recorder knows: the sum of several is rounded otherwise than one of the whole batch."""
MODEL_RANKS = "ranks of a replica"
"""The number of processes that compute one of the recording's ranks together, if these are several: they add partial sums."""
MATMUL, TF32_IN_CONVOLUTIONS = "matmul", "tf32"
"""The precision of float32 matrix products, in the framework's words; whether convolutions on GPUs round to TF32."""
MODE = "mode"
"""How a sharded step in JAX has its collectives: "shard_map", in the program, or "jit", where XLA places them."""
OPTIMIZER_KERNEL = "optimizer_kernel"
"""How the optimizer computes its step, such as "fused". It affects the bits of optimizer states and updates only."""

_MOST_FILES, _LARGEST = 4096, 1 << 22
_INSTALLED = f"{os.sep}site-packages{os.sep}"
# Variables that launchers, shells and schedulers set to other values in each run.
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
    """The description of the program that runs in this process.

    Args:
        device: type of the device, and its name if it has one.
        deterministic: whether every operator returns the same bits for the same input bits.
        compiled: whether the step is compiled as a whole, so that a change in one place may change rounding in another.
        more: anything else that affects bits, such as the number of threads.
    """
    return {
        DEVICE: device,
        "processor": processor(),
        "python": platform.python_version(),
        DETERMINISTIC: deterministic,
        COMPILED: compiled,
        **more,
    }


def with_digests(program: Mapping[str, Any]) -> dict[str, Any]:
    """The setting `PROGRAM`: the description of a program, and digests of its source and of its environment."""
    return {SOURCE: source_digest(), ENVIRONMENT: environment_digest(os.environ), **program}


_EXACT = ("highest", "float32", "f32_f32_f32", "f64_f64_f64")
_BFLOAT16 = ("bf16_bf16_f32", "bf16_bf16_bf16")
"""Algorithms of JAX's dots, besides those of three and more products, which are more precise than TF32."""
_LARGEST_KERNEL = 64


def products_in(dtype: str, program: Mapping[str, Any], shapes: Iterable[Sequence[int]]) -> str:
    """The format to which factors of matrix products and convolutions are rounded: `dtype`, or a coarser one.

    GPUs round float32 factors to TF32: torch in convolutions by default and in matrix products if asked to, JAX by default in
    both. TPUs round them to bfloat16. Sources: torch.backends.cudnn.allow_tf32, torch.set_float32_matmul_precision,
    jax.default_matmul_precision.

    Args:
        dtype: in which the run computes.
        program: the setting `PROGRAM`.
        shapes: of the parameters. Of a convolution's weight the last dims, of more than two, are those of its kernel.

    >>> products_in("float32", {"device": "cuda H100", "matmul": "high"}, [(8, 8)])
    'tf32'
    >>> products_in("float32", {"device": "cuda H100", "matmul": "highest", "tf32": True}, [(8, 8)])
    'float32'
    >>> products_in("float32", {"device": "gpu H100", "matmul": "None"}, [(8, 8)])
    'tf32'
    >>> products_in("float32", {"device": "gpu H100", "matmul": "BF16_BF16_F32"}, [(8, 8)])
    'bfloat16'
    """
    kind = str(program.get(DEVICE)).partition(" ")[0]  # "None" if it is not stated
    if dtype != "float32" or kind not in ("cuda", "gpu", "rocm", "tpu"):
        return dtype
    precision = str(program.get(MATMUL, "highest")).lower()
    exact = precision in _EXACT
    if exact and program.get(TF32_IN_CONVOLUTIONS) is True:
        exact = not any(len(shape) > 2 and shape[-1] <= _LARGEST_KERNEL for shape in shapes)
    if exact:
        return dtype
    return "bfloat16" if kind == "tpu" or precision in _BFLOAT16 else TF32


def source_digest() -> str:
    """A digest of the script and of all modules imported so far that are neither installed nor in the standard library."""
    found = hashlib.sha256()
    for path in sources()[:_MOST_FILES]:
        found.update(os.path.basename(path).encode(errors="surrogateescape") + b"\0")
        with suppress(OSError):
            found.update(bytes.fromhex(file_digest(path)))
    return found.hexdigest()[:16]


def file_digest(path: str) -> str:
    """SHA-256 in hex of a file's first 4 MiB.

    Raises:
        OSError: the file cannot be read.
    """
    status = os.stat(path)
    return _file_digest(path, status.st_ino, status.st_size, status.st_mtime_ns)


# A recording states the digests of some hundred sources three times, and a process may write several recordings.
@lru_cache(maxsize=4 * _MOST_FILES)
def _file_digest(path: str, *status: int) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read(_LARGEST)).hexdigest()


def environment_digest(environment: Mapping[str, str]) -> str:
    """A digest of the environment variables, without those that differ between launches.

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


def sources() -> list[str]:
    """Paths of the script and of all modules imported so far that are neither installed nor in the standard library, sorted."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    files.add(sys.argv[0] if sys.argv else None)
    known = (file if os.path.isabs(file) else os.path.abspath(file) for file in files if isinstance(file, str))
    # By folders, as paths are sorted.
    return sorted({path for path in map(_source, known) if path}, key=lambda path: path.split(os.sep))


# A process has thousands of modules, nearly all of them installed, and to resolve a path takes some ten system calls.
@cache
def _source(file: str) -> str:
    """Its path, without links, if a module is neither installed nor in the standard library; "" otherwise."""
    if not file.endswith(".py") or _INSTALLED in file or file.startswith(f"{_stdlib()}{os.sep}"):
        return ""
    if not os.path.isfile(file):
        return ""
    folder, name = os.path.split(file)
    path = Path(file).resolve() if os.path.islink(file) else _resolved_folder(folder) / name
    return "" if "site-packages" in path.parts or _stdlib() in path.parents else str(path)


@cache
def _resolved_folder(folder: str) -> Path:
    return Path(folder).resolve()


@cache
def _stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"]).resolve()


def processor() -> str:
    """The model of the processor, by which libraries choose kernels."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(names, platform.machine())
    except OSError:
        return platform.processor() or platform.machine()
