"""Going on from a checkpoint in the middle of a run, as after a restart: a right run shows no trace of it.

A checkpoint is saved at the step at which the run goes on and at the one before, as loops do that keep the last few. Then all
that it holds is forgotten, and the newest is loaded. Buffers stay: they are in no checkpoint.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from crossframe.checkpoint import remove
from experiments.parity.settings import RunSettings


def newest(folder: Path) -> Path:
    """The checkpoint of the latest step."""
    return sorted(folder.iterdir())[-1]


def _saved(settings: RunSettings, step: int, output: Path) -> tuple[Path, Path] | None:
    """The folder of checkpoints and where that of this step goes; None where none is due."""
    resume_at = settings.resume_at
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


def resume_torch(settings: RunSettings, step: int, output: Path, model: Any, optimizer: Any) -> None:
    """Ahead of a step: save if it is due, and go on from there if that is. All ranks call it.

    Args:
        output: where the run is recorded; checkpoints lie beside it until they have been loaded.
    """
    import torch
    import torch.distributed as dist

    from torch_backend import save_checkpoint

    due = _saved(settings, step, output)
    if due is None:
        return
    folder, path = due
    save_checkpoint(path, model, optimizer)
    if step == settings.resume_at:
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
    settings: RunSettings, step: int, output: Path, sharded: Any, opt_state: Any, optimizer: Any
) -> tuple[Any, Any]:
    """The same in JAX: the parameters and the optimizer's state to go on with."""
    import jax
    from jax import numpy as jnp

    from jax_backend import save_checkpoint

    due = _saved(settings, step, output)
    if due is None:
        return sharded, opt_state
    folder, path = due
    save_checkpoint(path, sharded, opt_state)
    if step == settings.resume_at:
        empty = jax.tree.map(jnp.zeros_like, sharded)
        sharded, opt_state = load_jax(newest(folder), empty, optimizer.init(empty))
        _remove(folder, step)
    return sharded, opt_state


def load_jax(path: Path, sharded: Any, opt_state: Any) -> tuple[Any, Any]:
    """Parameters and state like these, loaded."""
    from jax_backend import load_checkpoint

    return load_checkpoint(path, sharded, opt_state)
