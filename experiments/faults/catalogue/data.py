"""Faults in the data: other samples, another order, labels of others. Runs that were not fed the same cannot be compared."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from crossframe.replacing import replacing
from experiments.data import Batch, labelled
from experiments.faults.catalogue.fault import JAX, TORCH, Answer, Family, other_batches
from experiments.models import ModelDefinition

DATA = Family("data", JAX, TORCH)


def _fed(change: Callable[[Callable[[int, int, int], Batch], int, int, int], Batch]) -> Iterator[None]:
    """A rank is fed `change(right, seed, step, rank)` instead of `right(seed, step, rank)`."""
    right = ModelDefinition.batch

    def batch(self: ModelDefinition, seed: int, step: int, rank: int, *sizes: Any) -> Batch:
        return change(lambda *of: right(self, *of, *sizes), seed, step, rank)

    with replacing(ModelDefinition, "batch", batch):
        yield


@DATA.fault(
    "the order of samples comes from another seed, that of another epoch",
    other_batches(),
    source="huggingface/accelerate#4071",
)
def other_order() -> Iterator[None]:
    yield from _fed(lambda right, seed, step, rank: right(seed + 1, step, rank))


@DATA.fault(
    "all ranks are fed what the first is, as without a sampler that knows of ranks",
    other_batches(),
    source="openspeech-team/openspeech#149",
)
def same_on_all_ranks() -> Iterator[None]:
    yield from _fed(lambda right, seed, step, rank: right(seed, step, 0))


@DATA.fault(
    "from step 2 on the data are a step ahead, as behind a checkpoint that counted one batch too many",
    other_batches(),
    source="huggingface/accelerate#2016",
    within=(TORCH, JAX),
)
def a_step_ahead() -> Iterator[None]:
    yield from _fed(lambda right, seed, step, rank: right(seed, step + (step >= 2), rank))


@DATA.fault(
    "each sample has the labels of the next one",
    other_batches(),
    within=(TORCH, JAX),
    model="mlp",
)
def labels_of_the_next() -> Iterator[None]:
    def change(right: Callable[[int, int, int], Batch], seed: int, step: int, rank: int) -> Batch:
        batch = right(seed, step, rank)
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
    with replacing(mlp_torch.MLP, "forward", lambda self, images: right(self, images * (255 / 256))):
        yield
