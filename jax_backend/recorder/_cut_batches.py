"""The microbatches that a step cuts out of its batch itself, inside of a jitted function.

[Note: samples of a microbatch] Of such a step only the whole batch is known, but not in which order the step takes its samples,
and which rank gets which of them. The arguments of the loss function show it: each of their rows is a row of the batch.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jax_backend.recorder._script_turns import Gradient, Model
from jax_backend.recorder._taps import Value

Rows = np.ndarray
"""The samples of a microbatch, as their indices in the batch; those of rank 0 come first."""


class CutBatches:
    """Cuts batches as the steps of a script do: where the interior is not recorded, as in the last step in which it is."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Model, int], Sequence[Rows | None]] = {}

    def cut(self, model: Model, gradients: Sequence[Gradient]) -> list[Gradient]:
        """The gradients of a turn of a model, with the arrays of their microbatches if the step cuts these out of one batch, and
        not if all are of the whole batch, as those of two losses are."""
        parts = [part for each in gradients for part in each.microbatches]
        if len(parts) < 2 or len({tuple(map(id, part)) for part in parts}) > 1 or not parts[0]:
            return [*gradients]
        if any(len(each.tap.scans) > 1 for each in gradients):
            return [*gradients]
        if not all(getattr(leaf, "is_fully_addressable", True) for leaf in parts[0]):
            return [*gradients]
        batch = [np.asarray(leaf) for leaf in parts[0]]
        found, num_whole = [], 0
        for i, each in enumerate(gradients):
            if given := each.tap.values["given"]:
                self._rows[model, i] = [_rows(_of_microbatch(given, k), batch) for k in range(each.num_microbatches)]
            of_parts = [
                rows for rows in self._rows.get((model, i), ()) if rows is not None and rows.max() < len(batch[0])
            ]
            if len(of_parts) != each.num_microbatches:
                return [*gradients]
            num_whole += sum(len(rows) == len(batch[0]) for rows in of_parts)
            found.append(
                replace(each, parts=[[_taken(leaf, rows, len(batch[0])) for leaf in batch] for rows in of_parts])
            )
        return [*gradients] if num_whole == len(parts) else found


def _of_microbatch(given: Sequence[Value], k: int) -> list[np.ndarray]:
    """The arguments of a loss function in iteration k of the scan around it, if there is one, with the samples of all ranks."""
    found = []
    for value in given:
        if value.array is not None and getattr(value.array, "is_fully_addressable", True):
            array = np.asarray(value.array)
            if value.scans:
                array = array[:, k] if value.by_rank else array[k]
            if not value.by_rank:
                found.append(array)
            elif array.ndim > 1:
                found.append(array.reshape(-1, *array.shape[2:]))
    return found


def _rows(given: Sequence[np.ndarray], batch: Sequence[np.ndarray]) -> Rows | None:
    """The rows of a batch that are given; None if they are not known, such as rows of which the batch has several."""
    size, rest, pairs = len(batch[0]), [*given], []
    for whole in batch:
        alike = (i for i, part in enumerate(rest) if (part.dtype, part.shape[1:]) == (whole.dtype, whole.shape[1:]))
        if len(whole) == size and (i := next(alike, None)) is not None:
            pairs.append((whole, rest.pop(i)))
    if not pairs or len({len(part) for _, part in pairs}) > 1:
        return None
    at: dict[tuple[bytes, ...], list[int]] = defaultdict(list)
    for i in range(size):
        at[tuple(whole[i].tobytes() for whole, _ in pairs)].append(i)
    found = [at.get(tuple(part[i].tobytes() for _, part in pairs), []) for i in range(len(pairs[0][1]))]
    return np.array([rows[0] for rows in found]) if found and {len(rows) for rows in found} == {1} else None


def _taken(leaf: np.ndarray, rows: Rows, size: int) -> np.ndarray:
    return leaf[rows] if len(leaf) == size else leaf
