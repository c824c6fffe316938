"""Judged quantities."""

from dataclasses import replace

import numpy as np

from crossframe.layout import PerParamLayout
from crossframe.verdict.measure.quantities import Quantity
from tests.core.helpers import synthetic


def quantity(a, b, *, scale=1.0, bound: float | None = 0.5, phase="update", unit="", parameter="bias", **other):
    """What two sides hold of a parameter; `other` replaces fields."""
    made = Quantity(0, phase, "optimizer", unit, parameter, None, 0, np.asarray(a), np.asarray(b), scale, bound)
    return replace(made, **other)


def scaled(phase, name, factor, step=0):
    def change(at, when, rank, what, array):
        return (array * factor).astype(array.dtype) if (at, when, what) == (phase, step, name) else array

    return change


def other_specs(unit, **fields):
    """The manifest of per-parameter shards in which the parameters of one unit have other fields."""
    units = tuple(
        (name, PerParamLayout(tuple(replace(p, **fields) if name == unit else p for p in layout.params), 2))
        for name, layout in synthetic.manifest(kind="per_param").units
    )
    return synthetic.manifest(units=units)
