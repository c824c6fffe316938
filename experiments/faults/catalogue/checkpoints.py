"""Faults in checkpoints: of runs that go on from one at step 3."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from crossframe.replacing import replacing
from experiments.faults.catalogue.core import GATHERED
from experiments.faults.catalogue.fault import JAX, TELLABLE, TORCH, Answer, Family
from experiments.faults.catalogue.optimizers import STATE

CHECKPOINTS = Family("checkpoint", TORCH)
AT = 3


def _loads(framework: str, load: Callable[[Callable[..., Any], Path, Any, Any], Any]) -> Iterator[None]:
    """Replaces the function that loads by `load(right, path, params, state)`."""
    from experiments.train import resume

    name = f"load_{framework}"
    right = getattr(resume, name)
    with replacing(resume, name, lambda *args: load(right, *args)):
        yield


@CHECKPOINTS.fault(
    "the parameters are loaded, and the optimizer's state is not",
    Answer(*STATE, step=AT, signature=None),
    source="KempnerInstitute/KempnerForge#115",
    resume_at=AT,
)
def moments_lost() -> Iterator[None]:
    from torch_backend import load_checkpoint

    yield from _loads(TORCH, lambda right, path, model, optimizer: load_checkpoint(path, model))


@CHECKPOINTS.fault(
    "the checkpoint that is loaded is that of the step before",
    Answer(*GATHERED, step=AT, signature="stale_copy"),
    within=(TORCH, JAX),
    resume_at=AT,
)
def older_checkpoint() -> Iterator[None]:
    from experiments.train import resume

    with replacing(resume, "newest", lambda folder: sorted(folder.iterdir())[0]):
        yield


@CHECKPOINTS.fault(
    "the two moments of Adam change places", Answer(*STATE, step=AT, signature=None), within=(JAX,), resume_at=AT
)
def moments_exchanged() -> Iterator[None]:
    def load(right: Callable[..., Any], path: Path, sharded: Any, opt_state: Any) -> Any:
        params, (adam, *others) = right(path, sharded, opt_state)
        return params, (adam._replace(mu=adam.nu, nu=adam.mu), *others)

    yield from _loads(JAX, load)


@CHECKPOINTS.fault(
    "the optimizer's state of two parameters of one shape changes places, as where the order of layers differs",
    Answer(*STATE, step=AT, unit="blocks.1", signature="mixed_parameters"),
    source="Lightning-AI/pytorch-lightning#17025",
    resume_at=AT,
)
def state_of_another() -> Iterator[None]:
    from torch_backend.state import _checkpoint_state as checkpoint_state

    right_layout = checkpoint_state.state_layout
    query, key = (f"blocks.1.attention.{part}.weight" for part in ("query", "key"))
    other = {query: key, key: query}

    def layout(given: Any, entry: str, dtype: str) -> Any:
        return right_layout(given, entry, dtype, lambda name: other.get(name, name))

    def load(right: Callable[..., Any], *args: Any) -> None:
        with replacing(checkpoint_state, "state_layout", layout):
            right(*args)

    yield from _loads(TORCH, load)


@CHECKPOINTS.fault(
    "the count of the optimizer's steps is one too many: loading made one",
    Answer(*STATE, step=AT, signature=None),
    source="NVIDIA-NeMo/Megatron-Bridge#5680",
    resume_at=AT,
)
def count_advanced() -> Iterator[None]:
    def load(right: Callable[..., Any], path: Path, model: Any, optimizer: Any) -> None:
        right(path, model, optimizer)
        for state in optimizer.state.values():
            state["step"] += 1

    yield from _loads(TORCH, load)


@CHECKPOINTS.fault(
    "the parameters were saved in bfloat16",
    Answer(*GATHERED, step=AT, signature=None),
    within=(JAX,),
    dtypes=TELLABLE,
    resume_at=AT,
)
def saved_in_bfloat16() -> Iterator[None]:
    def load(right: Callable[..., Any], path: Path, sharded: Any, opt_state: Any) -> Any:
        import jax
        from jax import numpy as jnp

        params, state = right(path, sharded, opt_state)
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(leaf.dtype), params), state

    yield from _loads(JAX, load)


def _lines(wanted: str, place_of: Callable[[int, int], int]) -> Iterator[None]:
    """A section of a checkpoint is read for another rank: `place_of(place, size)`."""
    from crossframe.checkpoint import Saved

    right = Saved.lines

    def lines(self: Any, section: str, target: Any, place: int) -> Any:
        return right(self, section, target, place_of(place, target.mesh.shard) if section == wanted else place)

    with replacing(Saved, "lines", lines):
        yield


@CHECKPOINTS.fault("the ranks load each other's shards", Answer(*GATHERED, step=AT, signature=None), resume_at=AT)
def shards_of_others() -> Iterator[None]:
    yield from _lines("model", lambda place, size: size - 1 - place)


@CHECKPOINTS.fault(
    "all ranks load the first rank's optimizer state, the only one that was saved",
    Answer(*STATE, step=AT, rank=1, signature=None),
    source="huggingface/transformers#23034",
    resume_at=AT,
)
def state_of_the_first() -> Iterator[None]:
    yield from _lines("state", lambda place, size: 0)
