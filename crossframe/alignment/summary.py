"""Summaries: what a recording in sketches knows of a parameter, for an alignment without its elements."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.recording.hashing import element_hashes
from crossframe.recording.sample import Sample, sample_of
from crossframe.recording.sketch import Sketch, sketches_of


@dataclass(frozen=True)
class Summary:
    """A parameter, or its gradient, without its elements.

    Attributes:
        sample: None of a gradient.
    """

    shape: tuple[int, ...]
    sketch: Sketch
    sample: Sample | None = None

    @classmethod
    def of(cls, array: "np.ndarray | Summary") -> "Summary":
        """The summary of an array, or a summary itself.

        >>> Summary.of(np.ones((2, 3))).value, Summary.of(np.arange(3.0)).value
        (1.0, None)
        """
        return array if isinstance(array, Summary) else cls(array.shape, sketches_of([array])[0], sample_of(array))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return self.sketch.numel

    @property
    def dtype(self) -> np.dtype:
        return numpy_dtype(self.sketch.dtype)

    @property
    def signature(self) -> int:
        """The sum of the hashes of all elements."""
        assert self.sample is not None
        return self.sample.signature

    @cached_property
    def value(self) -> float | None:
        """The value of all elements; None if they are not equal, or there are none."""
        assert self.sample is not None
        one = np.array([self.sample.least], np.float64).astype(self.dtype)
        is_one = self.size and self.size * int(element_hashes(one)[0]) % 2**64 == self.signature
        return float(one[0]) if is_one else None

    def distance(self, other: "Summary | np.ndarray") -> float:
        """An estimate of norm(self - other) / norm(self), of elements in the same order; NaN if the first one is zero."""
        norm = self.sketch.norm
        theirs = other.sketch if isinstance(other, Summary) else sketches_of([other])[0]
        return self.sketch.distance(theirs) / norm if norm > 0 else np.nan


def varies(array: np.ndarray | Summary) -> bool:
    """Whether not all elements are equal."""
    if isinstance(array, Summary):
        return array.size > 0 and array.value is None
    return array.size > 0 and bool((array != array.flat[0]).any())
