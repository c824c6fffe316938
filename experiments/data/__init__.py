"""Real text, as bytes, real images, and the batches that every framework and every rank is fed from them."""

import gzip
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


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Handwritten digits: images, float64 from 0 to 1, of shape (1797, 8, 8), and what they show, int32, of shape (1797,)."""
    text = gzip.decompress(files("experiments.data").joinpath("digits.csv.gz").read_bytes())
    table = np.loadtxt(text.decode().splitlines(), delimiter=",", dtype=np.int32)
    return table[:, :-1].reshape(-1, 8, 8) / 16.0, table[:, -1].copy()


@dataclass(frozen=True)
class Batch:
    """What one rank is fed at one step.

    Attributes:
        inputs: of text int32 tokens, of shape (batch_size, context); of digits floating images, of shape (batch_size, 8, 8).
        targets: int32: the tokens one place further on, or of shape (batch_size,) the digits.
        sample_ids: where in the text each sample starts, or which image it is.
        digest: sha256 of inputs and targets, in hex.
    """

    inputs: np.ndarray
    targets: np.ndarray
    sample_ids: tuple[int, ...]
    digest: str

    @property
    def tokens(self) -> np.ndarray:
        """The inputs of a batch of text."""
        return self.inputs


def text_batch(seed: int, step: int, rank: int, world_size: int, batch_size: int, context: int) -> Batch:
    """The windows of text for one rank at one step: a function of its arguments alone, whoever asks.

    The samples of all ranks are drawn together and dealt in rank order, so that runs of the same global batch size see the
    same samples at any world size.

    Raises:
        MeshError: a rank outside the world.
        UsageError: a context longer than the text.
    """
    text = shakespeare()
    if context >= len(text):
        raise UsageError(f"expected a context shorter than the text of {len(text)} bytes, got {context}")
    mine = _dealt(len(text) - context, seed, step, rank, world_size, batch_size)
    windows = np.stack([text[start : start + context + 1] for start in mine]).astype(np.int32)
    return labelled(windows[:, :-1].copy(), windows[:, 1:].copy(), mine)


def digits_batch(seed: int, step: int, rank: int, world_size: int, batch_size: int, dtype: str) -> Batch:
    """The images for one rank at one step, in a floating dtype; drawn and dealt as `text_batch` does.

    Raises:
        MeshError: a rank outside the world.
    """
    images, shown = digits()
    mine = _dealt(len(images), seed, step, rank, world_size, batch_size)
    return labelled(images[mine].astype(dtype), shown[mine], mine)


def _dealt(num_samples: int, seed: int, step: int, rank: int, world_size: int, batch_size: int) -> np.ndarray:
    check_rank(rank, world_size)
    drawn = np.random.default_rng((seed, step)).integers(0, num_samples, world_size * batch_size)
    return drawn[rank * batch_size : (rank + 1) * batch_size]


def labelled(inputs: np.ndarray, targets: np.ndarray, ids: np.ndarray) -> Batch:
    """A batch of these samples, with its digest."""
    digest = hashlib.sha256(inputs.tobytes() + targets.tobytes()).hexdigest()
    return Batch(inputs, targets, tuple(int(each) for each in ids), digest)
