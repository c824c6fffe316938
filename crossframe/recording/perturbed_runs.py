"""Perturbed runs: runs that differ from the original run only as rounding lets correct runs differ.

A perturbed run starts with parameters that are one unit in the last place away from those of the original run. A hash of its name
and index moves each element up or down, so that all ranks and replicas agree in every layout. The framework may also change the
order of sums (`torch_backend.other_rounding`). The spread of the perturbed runs measures how far rounding drives such runs apart:
see `crossframe.verdict.perturbed_runs.spread`.
"""

import os
from typing import Any

import numpy as np

from crossframe.errors import UsageError
from crossframe.recording.hashing import element_keys

NUMBER_VARIABLE = "CROSSFRAME_PERTURBED_RUN"
"""The environment variable with the number of the perturbed run, if the loop does not pass it."""

_INTEGERS = {2: np.int16, 4: np.int32, 8: np.int64}


def perturbed_values(name: str, values: np.ndarray, perturbed_run: int, start: int = 0) -> np.ndarray:
    """The initial values of a perturbed run: each one unit in the last place up or down; zeros, NaN and inf do not change.

    Args:
        name: canonical name of the parameter.
        values: elements `start:start + size` of the parameter, of any shape and floating dtype.
        perturbed_run: number of the perturbed run; 0 is the original run, which changes nothing.

    >>> one = np.ones(4, np.float32)
    >>> sorted({float(abs(x - 1)) for x in perturbed_values("w", one, 1)}) == [2.0**-24, 2.0**-23]
    True
    """
    if perturbed_run == 0:
        return values
    up = element_keys(name, start, start + values.size, f"twin {perturbed_run}") >> np.uint64(63) == 1
    flat = np.ascontiguousarray(values).reshape(-1)
    integers = flat.view(_INTEGERS[flat.dtype.itemsize])
    stays = (flat == 0) | ~np.isfinite(flat)
    # The bits of a float, read as an integer, order its magnitude: adding 1 gives the next value away from zero.
    changed = np.where(stays, integers, integers + np.where(up, 1, -1).astype(integers.dtype))
    return changed.view(flat.dtype).reshape(values.shape)


def perturbed_run_number(given: int | None) -> int:
    """The number of the perturbed run, from the argument or else from the environment; 0: not a perturbed run.

    Raises:
        UsageError: not an int of at least 0.
    """
    number: Any = os.environ.get(NUMBER_VARIABLE, "0") if given is None else given
    if isinstance(number, str) and number.isdecimal():
        number = int(number)
    if type(number) is not int or number < 0:
        where = NUMBER_VARIABLE if given is None else "perturbed_run"
        raise UsageError(f"{where}: expected 0, or the number of a perturbed run, got {number!r}")
    return number
