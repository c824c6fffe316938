"""Finds parameters that no rank used in backward, so that their gradient is None instead of zeros (R29).

A rank without a gradient for a parameter contributes zeros, and the sum does not show whether another rank had one. So before a
rank issues the reduction, it writes its missing gradients to the store. When the reduction has finished, all ranks have issued
theirs and have written their keys, so parameters that are missing on all ranks have no gradient. Ranks without missing gradients
write nothing.

Each rank has its own key, because appending to a shared key is not atomic in every store (a FileStore can lose concurrent
appends). A rank issues its reduction only after its key is stored, because a TCPStore could otherwise process it after another
rank's query.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from torch_backend.ranks._collectives import UnitMesh
from torch_backend.ranks._consensus import group_key, num_rounds, spans_ranks

_NOTHING: frozenset[int] = frozenset()


class Unused:
    """The unused parameters of one bucket in backward."""

    def __init__(self, mesh: UnitMesh) -> None:
        self._mesh = mesh
        self._asks = any(some.size > 1 and spans_ranks(some.group) for some in (mesh.shards, mesh.replicas))
        # The number of reductions; unfinished reductions with this rank's missing gradients; and this rank's store keys of the
        # last finished gradient.
        self._key, self._turn = "", 0
        self._waiting: list[tuple[int, frozenset[int]]] = []
        self._read: list[str] = []

    def name(self, name: str) -> None:
        """Set a name of the bucket that is equal on all ranks."""
        if not self._asks:
            return
        shards, replicas = self._mesh.shards, self._mesh.replicas
        groups = [some for some in (shards, replicas) if some.size > 1]
        where = "/".join(f"{group_key(some.group)}/{num_rounds(some.group)}" for some in groups[:1])
        if len(groups) == 2:
            # Each rank knows its own two groups; their union has no name, but has a first rank.
            first = shards.ranks[0] + replicas.ranks[0] - dist.get_rank()
            where = f"crossframe/mesh/{first}/{shards.size}/{replicas.size}/{num_rounds(shards.group)}"
        self._key, self._turn = f"{where}/unused/{name}", 0

    def lack(self, params: Sequence[bool]) -> None:
        """Store the parameters without a gradient on this rank, before a reduction is issued."""
        self._turn += 1
        lacking = frozenset([i for i, lacks in enumerate(params) if lacks]) if params else _NOTHING
        self._waiting.append((self._turn, lacking))
        if lacking and self._asks:
            key = self._keys(self._turn)[self._place]
            _store().set(key, "".join("01"[lacks] for lacks in params))
            # A TCPStore does not acknowledge writes; the answer to a later request shows that the key is stored.
            _store().check([key])

    def forget(self) -> None:
        """Discard pending reductions and partial sums."""
        self._waiting.clear()

    def everywhere(self, join_host: Callable[[], None]) -> frozenset[int]:
        """The parameters without a gradient on any rank in the finished reduction and the partial sums that it includes (R28).

        Args:
            join_host: blocks the host until the last reduction has finished, so that all ranks have issued all of them.
        """
        waiting, self._waiting = self._waiting, []
        if not any(lacking for _, lacking in waiting):
            return _NOTHING
        unused = frozenset.intersection(*(lacking for _, lacking in waiting))
        if not self._asks:
            return unused
        if unused:
            join_host()
        turns = [self._keys(turn) for turn, lacking in waiting if lacking]
        for keys in turns:
            if unused:
                # A rank without missing gradients has no key.
                masks = _store().multi_get(keys) if _store().check(keys) else []
                unused = frozenset(i for i in unused if masks and all(each[i : i + 1] == b"1" for each in masks))
        for key in self._read:  # all ranks that issued this reduction have read the keys of the last gradient
            _store().delete_key(key)
        self._read = [keys[self._place] for keys in turns]
        return unused

    def _keys(self, turn: int) -> list[str]:
        """The store keys of all ranks of the mesh."""
        return [f"{self._key}/{turn}/{place}" for place in range(self._mesh.spec.world_size)]

    @property
    def _place(self) -> int:
        shards, replicas = self._mesh.shards, self._mesh.replicas
        return replicas.rank * shards.size + shards.rank


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
