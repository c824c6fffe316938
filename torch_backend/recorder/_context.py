"""Context parallelism: ranks that have parts of the same sequences are recorded as one rank with the whole sequences.

[Note: context ranks] The parts are put together along dim 1, in the order of positions: batches and activations as they are,
losses as their mean. Gradients are those that the optimizers get. Each rank's own gradient is that of its part, so local
gradients are not recorded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from crossframe.errors import UsageError
from torch_backend.ranks._collectives import Communicator, axis_name

RANK, HEAD_TAIL = "rank", "head_tail"
ORDERS = (RANK, HEAD_TAIL)
_DIM = 1


class Context:
    """The ranks that have parts of the same sequences.

    Attributes:
        group: the process group. ranks: their numbers.
        axis: the name of the mesh axis along which they lie.
    """

    def __init__(self, group: dist.ProcessGroup, order: str) -> None:
        """The ranks of a process group.

        Args:
            order: of the parts. RANK: each rank has one, in the order of ranks. HEAD_TAIL: of 2n parts, rank i of n has part i
                and part 2n - 1 - i, which balances the work under a causal mask.
        """
        if order not in ORDERS:
            raise UsageError(f"Recorder: context_order: expected one of {ORDERS}, got {order!r}")
        self.group, self._ranks, self._order = group, Communicator(group), order
        self.ranks, self.axis = self._ranks.ranks, axis_name(group, "cp")

    def mean(self, loss: float) -> float:
        """The mean of the losses of all parts."""
        return sum(self._ranks.gather_objects(loss)) / self._ranks.size

    def whole_batch(self, arrays: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """The arrays of whole sequences, by microbatch. Arrays with one dim are those of the first rank."""
        every = self._ranks.gather_objects(list(map(list, arrays)))
        return [
            [self._joined([each[i][j] for each in every]) for j in range(len(microbatch))]
            for i, microbatch in enumerate(every[0])
        ]

    def _joined(self, parts: list[np.ndarray]) -> np.ndarray:
        if parts[0].ndim <= _DIM:
            return parts[0]
        return np.concatenate(self._in_order(parts, lambda part: np.array_split(part, 2, _DIM)), _DIM)

    def _in_order(self, parts: list[Any], halves: Callable[[Any], Sequence[Any]]) -> list[Any]:
        """The parts in the order of positions, those of HEAD_TAIL as halves."""
        if self._order == RANK:
            return parts
        cut = [halves(part) for part in parts]
        return [head for head, _ in cut] + [tail for _, tail in reversed(cut)]

    def whole(self, value: Tensor) -> Tensor | None:
        """An activation of whole sequences; None if its parts are not alike, or have no dim of positions."""
        value = value.contiguous()
        shapes = self._ranks.gather_objects(tuple(value.shape))
        if value.ndim <= _DIM or any(shape != shapes[0] for shape in shapes):
            return None
        parts = list(self._ranks.gather_all(value))
        return torch.cat(self._in_order(parts, lambda part: part.chunk(2, _DIM)), _DIM)
