"""Pairs of environments, and of checkpoints, with the expected first answer. They were written before the ranking existed.

The first answers that the ranking gave, before any correction, are in `docs/guides/before_training.md`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Sections = Mapping[str, Mapping[str, Any]]
CERTAINLY, POSSIBLY, HARDLY = "certainly", "possibly", "hardly"


@dataclass(frozen=True)
class Case:
    """Two environments, by section and name, and the section, name and effect of the difference that ranks first."""

    name: str
    a: Sections
    b: Sections
    section: str
    first: str
    effect: str


GPU = {"device": "cuda NVIDIA H100"}
CPU = {"device": "cpu"}

CASES = (
    Case(
        "tf32 on a GPU, not another NumPy",
        {"framework": GPU | {"torch.backends.cuda.matmul.allow_tf32": False}, "packages": {"numpy": "2.1.0"}},
        {"framework": GPU | {"torch.backends.cuda.matmul.allow_tf32": True}, "packages": {"numpy": "2.2.0"}},
        "framework",
        "torch.backends.cuda.matmul.allow_tf32",
        CERTAINLY,
    ),
    Case(
        "torch's version, not TF32 on a CPU",
        {"framework": CPU | {"torch.backends.cuda.matmul.allow_tf32": False}, "packages": {"torch": "2.11.0"}},
        {"framework": CPU | {"torch.backends.cuda.matmul.allow_tf32": True}, "packages": {"torch": "2.13.0"}},
        "packages",
        "torch",
        POSSIBLY,
    ),
    Case(
        "jaxlib, not a linter",
        {"packages": {"jaxlib": "0.10.0", "ruff": "0.5"}, "variables": {"CUDA_VISIBLE_DEVICES": "0"}},
        {"packages": {"jaxlib": "0.10.2", "ruff": "0.9"}, "variables": {"CUDA_VISIBLE_DEVICES": "1"}},
        "packages",
        "jaxlib",
        POSSIBLY,
    ),
    Case(
        "a learning rate, not the folder of the output",
        {"command": {"--lr": "1e-3", "--output-dir": "a"}},
        {"command": {"--lr": "3e-4", "--output-dir": "b"}},
        "command",
        "--lr",
        CERTAINLY,
    ),
    Case(
        "a key of a configuration, not the name of the run",
        {"configuration": {"run.yaml: optimizer.weight_decay": 0.1, "run.yaml: wandb.name": "x"}},
        {"configuration": {"run.yaml: optimizer.weight_decay": 0.01, "run.yaml: wandb.name": "y"}},
        "configuration",
        "run.yaml: optimizer.weight_decay",
        CERTAINLY,
    ),
    Case(
        "an epsilon in a norm, not the commit",
        {"modules": {"1": "LayerNorm((32,), eps=1e-05)"}, "source": {"commit": "aaa"}},
        {"modules": {"1": "LayerNorm((32,), eps=1e-06)"}, "source": {"commit": "bbb"}},
        "modules",
        "1",
        CERTAINLY,
    ),
    Case(
        "the algorithm of all-reduces, not the log of NCCL",
        {"variables": {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO"}},
        {"variables": {"NCCL_ALGO": "Tree", "NCCL_DEBUG": "WARN"}},
        "variables",
        "NCCL_ALGO",
        POSSIBLY,
    ),
    Case(
        "threads, not the host",
        {"variables": {"OMP_NUM_THREADS": "8"}, "machine": {"host": "n1"}},
        {"variables": {"OMP_NUM_THREADS": "16"}, "machine": {"host": "n2"}},
        "variables",
        "OMP_NUM_THREADS",
        POSSIBLY,
    ),
    Case(
        "a changed script, not Python's patch version",
        {"source": {"changed train.py": "1111"}, "machine": {"python": "3.11.8"}},
        {"source": {"changed train.py": "2222"}, "machine": {"python": "3.11.9"}},
        "source",
        "changed train.py",
        POSSIBLY,
    ),
    Case(
        "only the host and the log",
        {"variables": {"NCCL_DEBUG": "INFO"}, "machine": {"host": "n1"}},
        {"machine": {"host": "n2"}},
        "variables",
        "NCCL_DEBUG",
        HARDLY,
    ),
    Case(
        "64-bit numbers in JAX, not a compiler flag",
        {"framework": CPU | {"jax_enable_x64": False}, "variables": {"XLA_FLAGS --xla_cpu_multi_thread_eigen": "true"}},
        {"framework": CPU | {"jax_enable_x64": True}, "variables": {"XLA_FLAGS --xla_cpu_multi_thread_eigen": "false"}},
        "framework",
        "jax_enable_x64",
        CERTAINLY,
    ),
    Case(
        "excess precision, not dumps of XLA",
        {"variables": {"XLA_FLAGS --xla_allow_excess_precision": "true"}},
        {"variables": {"XLA_FLAGS --xla_allow_excess_precision": "false", "XLA_FLAGS --xla_dump_to": "/tmp/x"}},
        "variables",
        "XLA_FLAGS --xla_allow_excess_precision",
        POSSIBLY,
    ),
    Case(
        "the seed of a command, not its world size",
        {"command": {"--seed": "0", "--num-workers": "2"}, "run": {"mesh": "replicate 1, shard 2"}},
        {"command": {"--seed": "1", "--num-workers": "8"}, "run": {"mesh": "replicate 1, shard 4"}},
        "command",
        "--seed",
        CERTAINLY,
    ),
    Case(
        "cuDNN, not pip",
        {"packages": {"nvidia-cudnn-cu12": "9.1.0.70", "pip": "24.0"}, "machine": {"python": "3.11.8"}},
        {"packages": {"nvidia-cudnn-cu12": "9.10.2.21", "pip": "25.0"}, "machine": {"python": "3.12.1"}},
        "packages",
        "nvidia-cudnn-cu12",
        POSSIBLY,
    ),
    Case(
        "states of generators, not the allocator",
        {"random": {"torch": "aa"}, "variables": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
        {"random": {"torch": "bb"}, "variables": {}},
        "random",
        "torch",
        POSSIBLY,
    ),
    Case(
        "the dtype of a parameter, not torch's version",
        {"parameters": {"w": "float32[4, 4]"}, "packages": {"torch": "2.11.0"}},
        {"parameters": {"w": "bfloat16[4, 4]"}, "packages": {"torch": "2.13.0"}},
        "parameters",
        "w",
        CERTAINLY,
    ),
    Case(
        "precision of matrix products in JAX on a GPU",
        {"framework": GPU | {"jax_default_matmul_precision": "highest"}, "packages": {"optax": "0.2.4"}},
        {"framework": GPU | {"jax_default_matmul_precision": None}, "packages": {"optax": "0.2.5"}},
        "framework",
        "jax_default_matmul_precision",
        CERTAINLY,
    ),
    Case(
        "a fused optimizer, not the driver",
        {"framework": GPU | {"optimizer_kernel": "fused"}, "machine": {"driver": "550"}},
        {"framework": GPU | {"optimizer_kernel": "foreach"}, "machine": {"driver": "560"}},
        "framework",
        "optimizer_kernel",
        POSSIBLY,
    ),
)


@dataclass(frozen=True)
class CheckpointCase:
    """Two checkpoints as (tensors, values by name), the verdict, and the expected kind of their first difference."""

    name: str
    make: Callable[[np.random.Generator], tuple[dict[str, Any], dict[str, Any]]]
    verdict: str
    kind: str


def _model(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "model": {
            "a.weight": rng.standard_normal((24, 16)).astype(np.float32),
            "a.bias": rng.standard_normal(24).astype(np.float32),
            "b.weight": rng.standard_normal((16, 16)).astype(np.float32),
        }
    }


def _adam(rng: np.random.Generator, step: int) -> dict[str, Any]:
    found = _model(rng)
    moments = {
        f"{entry}:{name}": (value if entry == "exp_avg" else value * value).astype(np.float32)
        for entry in ("exp_avg", "exp_avg_sq")
        for name, value in ((n, 1e-2 * rng.standard_normal(v.shape)) for n, v in found["model"].items())
    }
    return found | {"state": moments, "values": {"step": np.int32(step)}}


def _with(changed: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Callable[..., Any]:
    def make(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
        first = _model(rng)
        return first, {"model": changed(dict(first["model"]))}

    return make


def _one_update(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of both is that after step 10, and the parameters of the first are those before its update."""
    first = _adam(rng, 10)
    after = {}
    for name, value in first["model"].items():
        m, v = (first["state"][f"{entry}:{name}"].astype(np.float64) for entry in ("exp_avg", "exp_avg_sq"))
        update = (m / (1 - 0.9**10)) / (np.sqrt(v / (1 - 0.999**10)) + 1e-8)
        after[name] = (value - 1e-3 * update).astype(np.float32)
    return first, {**first, "model": after}


def _later(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    first = _adam(rng, 10)
    second = {section: dict(tensors) for section, tensors in first.items()}
    second["values"]["step"] = np.int32(11)
    for name, value in second["model"].items():
        second["model"][name] = (value - 1e-3 * np.sign(first["state"][f"exp_avg:{name}"])).astype(np.float32)
    return first, second


def _nudged(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return tensors | {"a.weight": np.nextafter(tensors["a.weight"], np.float32(np.inf))}


def _truncated(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    import ml_dtypes

    return {
        name: (value.view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)
        for name, value in tensors.items()
    }


def _cast(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    import ml_dtypes

    return {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}


def _half_zero(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    value = tensors["a.weight"].copy()
    value[12:] = 0
    return tensors | {"a.weight": value}


CHECKPOINTS = (
    CheckpointCase("the same", _with(lambda x: x), "equal", ""),
    CheckpointCase("last bits", _with(_nudged), "rounding", "rounding"),
    CheckpointCase("a cast", _with(_cast), "rounding", "cast"),
    CheckpointCase("a cast that truncates", _with(_truncated), "bug", "truncated"),
    CheckpointCase("a transposed matrix", _with(lambda x: x | {"b.weight": x["b.weight"].T}), "bug", "transposed"),
    CheckpointCase(
        "a transposed shape", _with(lambda x: x | {"a.weight": x["a.weight"].T.copy()}), "incomparable", "transposed"
    ),
    CheckpointCase(
        "a missing tensor", _with(lambda x: {k: v for k, v in x.items() if k != "a.bias"}), "incomparable", "missing"
    ),
    CheckpointCase("a later step", _later, "incomparable", "step"),
    CheckpointCase("parameters before their update", _one_update, "bug", "update"),
    CheckpointCase("a shard that was not loaded", _with(_half_zero), "bug", "zeros"),
    CheckpointCase(
        "other initial values",
        lambda rng: (_model(rng), _model(rng)),
        "incomparable",
        "unrelated",
    ),
    CheckpointCase(
        "training that went apart",
        _with(lambda x: {k: (v + 0.02 * np.roll(v, 1)).astype(np.float32) for k, v in x.items()}),
        "inconclusive",
        "beyond",
    ),
)
