"""Communication between processes outside steps: small values, and failures."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from crossframe.errors import AgreementError

T = TypeVar("T")

# Values are exchanged in frames of this size, so that one program serves for all.
FRAME_BYTES = 4096


def gather_values(value: Any) -> list[Any]:
    """The values of all processes, in their order. All processes call it.

    Args:
        value: a JSON value.
    """
    if jax.process_count() == 1:
        return [value]
    payload = json.dumps(value).encode()
    longest = int(_gathered(np.array([len(payload)], np.int32)).max())
    frames = max(1, -(-longest // FRAME_BYTES))
    sent = np.frombuffer(payload.ljust(frames * FRAME_BYTES), np.uint8).reshape(frames, FRAME_BYTES)
    parts = [_gathered(frame) for frame in sent]
    return [json.loads(b"".join(part[i].tobytes() for part in parts)) for i in range(jax.process_count())]


def together(title: str, act: Callable[[], T]) -> T:
    """Call a function in every process, and return when all have.

    Args:
        title: a noun for it, for messages.

    Raises:
        AgreementError: it failed in other processes, which are named; where it failed, its own error is raised.
    """
    failure: Exception | None = None
    done: Any = None
    try:
        done = act()
    except Exception as error:
        failure = error
    words = "" if failure is None else f"{type(failure).__name__}: {' '.join(str(failure).split())}"
    failures = gather_values(words)
    if failure is not None:
        raise failure
    if failed := [f"process {i} failed in the {title}: {words}" for i, words in enumerate(failures) if words]:
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
        return gather_values(value)[0]


def _gathered(array: np.ndarray) -> np.ndarray:
    """(num_processes, *shape)"""
    return np.asarray(multihost_utils.process_allgather(array)).reshape(jax.process_count(), *array.shape)
