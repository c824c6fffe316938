"""What the processes of a run tell each other outside of steps: small values, and that one of them failed."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from crossframe.errors import AgreementError

T = TypeVar("T")

# What a process says goes round in frames of this size, so that one program serves for all.
FRAME_BYTES = 4096


def everyones(value: Any) -> list[Any]:
    """What every process says, in their order. All processes call it.

    Args:
        value: what JSON has.
    """
    if jax.process_count() == 1:
        return [value]
    said = json.dumps(value).encode()
    longest = int(_gathered(np.array([len(said)], np.int32)).max())
    frames = max(1, -(-longest // FRAME_BYTES))
    sent = np.frombuffer(said.ljust(frames * FRAME_BYTES), np.uint8).reshape(frames, FRAME_BYTES)
    parts = [_gathered(frame) for frame in sent]
    return [json.loads(b"".join(part[i].tobytes() for part in parts)) for i in range(jax.process_count())]


def together(title: str, act: Callable[[], T]) -> T:
    """Do something in every process, and go on once all have done it.

    Args:
        title: what it is, as a noun.

    Raises:
        AgreementError: it failed in other processes, which they are told to be; where it failed, its own error.
    """
    failure: Exception | None = None
    done: Any = None
    try:
        done = act()
    except Exception as error:
        failure = error
    words = "" if failure is None else f"{type(failure).__name__}: {' '.join(str(failure).split())}"
    said = everyones(words)
    if failure is not None:
        raise failure
    if failed := [f"process {i} failed in the {title}: {words}" for i, words in enumerate(said) if words]:
        raise AgreementError("; ".join(failed))
    return done


class AllProcesses:
    """The processes of a run, which save a checkpoint together (`crossframe.checkpoint.save`)."""

    @property
    def is_first(self) -> bool:
        """Whether this is process 0."""
        return jax.process_index() == 0

    def together(self, title: str, act: Callable[[], T]) -> T:
        """See the function `together`."""
        return together(title, act)

    def from_first(self, value: str) -> str:
        """Process 0's value."""
        return everyones(value)[0]


def _gathered(array: np.ndarray) -> np.ndarray:
    """(num_processes, *shape)"""
    return np.asarray(multihost_utils.process_allgather(array)).reshape(jax.process_count(), *array.shape)
