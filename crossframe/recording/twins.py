"""Perturbed runs: runs that differ from one another only as rounding makes right runs differ.

A perturbed run begins one unit in the last place away from the run it is a perturbed run of, each element up or down by a hash
of its name and index, so that all ranks and replicas agree whatever the layout. What sums do in other orders is the framework's
to change (`torch_backend.other_rounding`). How far the perturbed runs of a run part is how far rounding drives runs like it
apart: `crossframe.verdict.envelope`.
"""

import os
from typing import Any

import numpy as np

from crossframe.errors import UsageError
from crossframe.recording.hashing import element_keys

TWIN = "CROSSFRAME_TWIN"
"""The environment variable that says which perturbed run a run is, where its loop does not."""

_INTEGERS = {2: np.int16, 4: np.int32, 8: np.int64}


def moved(name: str, values: np.ndarray, twin: int, start: int = 0) -> np.ndarray:
    """Values one unit in the last place up or down, as this perturbed run begins with them. Zeros and what is not finite stay.

    Args:
        name: canonical name of the parameter.
        values: elements `start:start + size` of it, of any shape and floating dtype.
        twin: its number; 0 is the run itself, and moves nothing.

    >>> one = np.ones(4, np.float32)
    >>> sorted({float(abs(x - 1)) for x in moved("w", one, 1)}) == [2.0**-24, 2.0**-23]
    True
    """
    if twin == 0:
        return values
    up = element_keys(name, start, start + values.size, f"twin {twin}") >> np.uint64(63) == 1
    flat = np.ascontiguousarray(values).reshape(-1)
    integers = flat.view(_INTEGERS[flat.dtype.itemsize])
    stays = (flat == 0) | ~np.isfinite(flat)
    # The bits of a float, read as an integer, count its magnitude: one more is the next one away from zero.
    changed = np.where(stays, integers, integers + np.where(up, 1, -1).astype(integers.dtype))
    return changed.view(flat.dtype).reshape(values.shape)


def twin_number(given: int | None) -> int:
    """Which perturbed run a run is, by argument or environment; 0: none.

    Raises:
        UsageError: no number of 0 or more.
    """
    said: Any = os.environ.get(TWIN, "0") if given is None else given
    if isinstance(said, str) and said.isdecimal():
        said = int(said)
    if type(said) is not int or said < 0:
        where = TWIN if given is None else "twin"
        raise UsageError(f"{where}: expected 0, or the number of a perturbed run, got {said!r}")
    return said
