"""Resumes a run from a checkpoint in its middle, as after a restart. A correct run shows no trace of it.

A checkpoint is saved at the step at which the run goes on and at the one before, as loops do that keep the last few. Then all
that it holds is forgotten, and the newest is loaded. Buffers stay: they are in no checkpoint.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from crossframe.checkpoint import remove


def newest(folder: Path) -> Path:
    """The checkpoint of the latest step."""
    return sorted(folder.iterdir())[-1]


def _saved(resume_at: int | None, step: int, output: Path) -> tuple[Path, Path] | None:
    """The folder of checkpoints and where that of this step goes; None where none is due."""
    if resume_at is None or step not in (resume_at - 1, resume_at):
        return None
    folder = output.with_name(f"{output.name}-checkpoints")
    return folder, folder / f"step{step:05d}"


def _remove(folder: Path, resume_at: int) -> None:
    """Remove both checkpoints, and their folder where nothing else is in it."""
    for step in (resume_at - 1, resume_at):
        remove(folder / f"step{step:05d}")
    with suppress(OSError):
        folder.rmdir()


def resume_torch(resume_at: int | None, step: int, output: Path, model: Any, optimizer: Any) -> None:
    """Before a step, save a checkpoint and resume from it where that is due. All ranks call this.

    Args:
        resume_at: the step before which the run goes on from a checkpoint; None: it runs through.
        output: where the run is recorded; checkpoints lie beside it until they have been loaded.
    """
    import torch
    import torch.distributed as dist

    from torch_backend import save_checkpoint

    due = _saved(resume_at, step, output)
    if due is None:
        return
    folder, path = due
    save_checkpoint(path, model, optimizer)
    if step == resume_at:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        optimizer.state.clear()
        load_torch(newest(folder), model, optimizer)
        if dist.get_rank() == 0:
            _remove(folder, step)


def load_torch(path: Path, model: Any, optimizer: Any) -> None:
    """Load into a model and its optimizer."""
    from torch_backend import load_checkpoint

    load_checkpoint(path, model, optimizer)


def resume_jax(
    resume_at: int | None, step: int, output: Path, sharded: Any, opt_state: Any, optimizer: Any
) -> tuple[Any, Any]:
    """Like `resume_torch`, in JAX; returns the parameters and the optimizer state to continue with."""
    import jax
    from jax import numpy as jnp

    from jax_backend import save_checkpoint

    due = _saved(resume_at, step, output)
    if due is None:
        return sharded, opt_state
    folder, path = due
    save_checkpoint(path, sharded, opt_state)
    if step == resume_at:
        empty = jax.tree.map(jnp.zeros_like, sharded)
        sharded, opt_state = load_jax(newest(folder), empty, optimizer.init(empty))
        _remove(folder, step)
    return sharded, opt_state


def load_jax(path: Path, sharded: Any, opt_state: Any) -> tuple[Any, Any]:
    """Parameters and state like these, loaded."""
    from jax_backend import load_checkpoint

    return load_checkpoint(path, sharded, opt_state)
