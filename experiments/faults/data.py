"""Faults in the data: other samples, another order, labels of others. Runs that were not fed the same cannot be compared."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from experiments.faults.fault import JAX, TORCH, Answer, Family, other_batches, patched

DATA = Family("data", JAX, TORCH)


def _fed(change: Callable[[Callable[..., Any], Any, int, int], Any]) -> Iterator[None]:
    """`change(right, settings, step, rank)` in the place of what a rank is fed; `right` is what it should be."""
    from experiments.parity.settings import RunSettings

    right = RunSettings.batch
    with patched(RunSettings, "batch", lambda self, step, rank: change(right, self, step, rank)):
        yield


@DATA.fault(
    "the order of samples comes from another seed, that of another epoch",
    other_batches(),
    source="huggingface/accelerate#4071",
)
def other_order() -> Iterator[None]:
    yield from _fed(lambda right, settings, step, rank: right(replace(settings, seed=settings.seed + 1), step, rank))


@DATA.fault(
    "all ranks are fed what the first is, as without a sampler that knows of ranks",
    other_batches(),
    source="openspeech-team/openspeech#149",
)
def same_on_all_ranks() -> Iterator[None]:
    yield from _fed(lambda right, settings, step, rank: right(settings, step, 0))


@DATA.fault(
    "from step 2 on the data are a step ahead, as behind a checkpoint that counted one batch too many",
    other_batches(),
    source="huggingface/accelerate#2016",
    within=(TORCH, JAX),
)
def a_step_ahead() -> Iterator[None]:
    yield from _fed(lambda right, settings, step, rank: right(settings, step + (step >= 2), rank))


@DATA.fault(
    "each sample has the labels of the one behind it",
    other_batches(),
    within=(TORCH, JAX),
    model="mlp",
)
def labels_of_the_next() -> Iterator[None]:
    import numpy as np

    from experiments.data import labelled

    def change(right: Callable[..., Any], settings: Any, step: int, rank: int) -> Any:
        batch = right(settings, step, rank)
        return labelled(batch.inputs, np.roll(batch.targets, -1, axis=0), np.array(batch.sample_ids))

    yield from _fed(change)


@DATA.fault(
    "behind the loader, where no digest sees it, images are scaled to 255 steps, not 256",
    Answer("forward", "input", unit="", parameter="inp", signature="constant_factor"),
    within=(TORCH,),
    model="mlp",
)
def scaled_by_255() -> Iterator[None]:
    from experiments.models import mlp_torch

    right = mlp_torch.MLP.forward
    with patched(mlp_torch.MLP, "forward", lambda self, images: right(self, images * (255 / 256))):
        yield
