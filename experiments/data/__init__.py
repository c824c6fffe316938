"""Real text, as bytes, and the batches that every framework and every rank is fed from it."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from crossframe.errors import UsageError
from crossframe.mesh import check_rank


@cache
def shakespeare() -> np.ndarray:
    """Plays by William Shakespeare (public domain), as uint8, of shape (length,)."""
    return np.frombuffer(files("experiments.data").joinpath("shakespeare.txt").read_bytes(), np.uint8)


@dataclass(frozen=True)
class Batch:
    """What one rank is fed at one step.

    Attributes:
        tokens, targets: int32, of shape (batch_size, context); targets are the tokens one place further on.
        sample_ids: where in the text each sample starts.
        digest: sha256 of tokens and targets, in hex.
    """

    tokens: np.ndarray
    targets: np.ndarray
    sample_ids: tuple[int, ...]
    digest: str


def text_batch(seed: int, step: int, rank: int, world_size: int, batch_size: int, context: int) -> Batch:
    """The windows of text for one rank at one step: a function of its arguments alone, whoever asks.

    The samples of all ranks are drawn together and dealt in rank order, so that runs of the same global batch size see the
    same samples at any world size.

    Raises:
        MeshError: a rank outside the world.
        UsageError: a context longer than the text.
    """
    check_rank(rank, world_size)
    text = shakespeare()
    if context >= len(text):
        raise UsageError(f"expected a context shorter than the text of {len(text)} bytes, got {context}")
    generator = np.random.default_rng((seed, step))
    starts = generator.integers(0, len(text) - context, world_size * batch_size)
    mine = starts[rank * batch_size : (rank + 1) * batch_size]
    windows = np.stack([text[start : start + context + 1] for start in mine]).astype(np.int32)
    tokens, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
    digest = hashlib.sha256(tokens.tobytes() + targets.tobytes()).hexdigest()
    return Batch(tokens, targets, tuple(int(start) for start in mine), digest)
