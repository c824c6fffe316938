"""Detects the framework of a training script by its imports, without running it."""

import ast
from pathlib import Path

JAX = frozenset({"jax", "flax", "optax", "equinox", "haiku"})
# What trains with torch, or may.
TORCH = frozenset({"torch", "lightning", "pytorch_lightning", "accelerate", "transformers"})
OPTAX, LOADS_DATA, TORCH_OPTIM = "optax", frozenset({"torch", "transformers"}), "torch.optim"
MOST_FILES = 100


def is_of_jax(script: Path, folder: Path | None = None) -> bool:
    """Whether a script and the local modules that it imports import JAX and not torch; or optax and no optimizer of torch, which
    may then load data or models.

    Args:
        folder: where its local modules are. None: its own.
    """
    seen: set[Path] = set()
    found: set[str] = set()
    waiting = [script]
    while waiting and len(seen) < MOST_FILES:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for module in _imported(path):
            found |= {module.partition(".")[0]} | ({TORCH_OPTIM} if module.startswith(TORCH_OPTIM) else set())
            for where in {folder or script.parent, script.parent}:
                beside = where.joinpath(*module.split("."))
                waiting += [each for each in (beside.with_suffix(".py"), beside / "__init__.py") if each.is_file()]
    trains = found & (TORCH - LOADS_DATA | {TORCH_OPTIM}) if OPTAX in found else found & TORCH
    return bool(found & JAX) and not trains


def _imported(path: Path) -> set[str]:
    """The modules that a file imports; empty if it cannot be read, which running it will report."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == TORCH_OPTIM:
            found.add(TORCH_OPTIM)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found
