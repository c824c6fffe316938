"""Finds parameters that no rank's backward reached, so that their gradient is None instead of zeros (R29).

A rank that lacks the gradient of a parameter sends zeros for it, and cannot tell from the sum whether another rank had one. So,
before it issues the reduction, it says in the store what it lacks. When its reduction is over, all ranks have issued theirs, and
have said so if they lack something: what every rank lacks has no gradient. Ranks that lack nothing do nothing.

Each rank has a key of its own: appending to one that they share is not atomic in every store (a FileStore loses what two append
at the same time). And it issues its reduction only once its key is there: a TCPStore may otherwise hear of it later than of
another rank's question.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from torch_backend.ranks._collectives import UnitMesh
from torch_backend.ranks._consensus import group_key, num_rounds, spans_ranks


class Unused:
    """The parameters of one bucket that a backward did not reach."""

    def __init__(self, mesh: UnitMesh) -> None:
        self._mesh = mesh
        self._asks = any(some.size > 1 and spans_ranks(some.group) for some in (mesh.shards, mesh.replicas))
        # How many reductions there were; those that no gradient has come of yet, and what this rank lacks in each; and this
        # rank's keys in the store of those of which the last one came.
        self._key, self._turn = "", 0
        self._waiting: list[tuple[int, frozenset[int]]] = []
        self._read: list[str] = []

    def name(self, name: str) -> None:
        """Learn a name of the bucket that it has on all ranks, which have just agreed to use it."""
        if not self._asks:
            return
        shards, replicas = self._mesh.shards, self._mesh.replicas
        groups = [some for some in (shards, replicas) if some.size > 1]
        where = "/".join(f"{group_key(some.group)}/{num_rounds(some.group)}" for some in groups[:1])
        if len(groups) == 2:
            # Each rank knows its own two groups; that of all their ranks has no name, but a first rank.
            first = shards.ranks[0] + replicas.ranks[0] - dist.get_rank()
            where = f"crossframe/mesh/{first}/{shards.size}/{replicas.size}/{num_rounds(shards.group)}"
        self._key, self._turn = f"{where}/unused/{name}", 0

    def lack(self, params: Sequence[bool]) -> None:
        """A reduction is about to be issued; this rank lacks the gradients of these parameters, if any."""
        self._turn += 1
        lacking = frozenset(i for i, lacks in enumerate(params) if lacks)
        self._waiting.append((self._turn, lacking))
        if lacking and self._asks:
            key = self._keys(self._turn)[self._place]
            _store().set(key, "".join("01"[lacks] for lacks in params))
            # A TCPStore is told and does not answer: only once it has answered something else is the key there for all.
            _store().check([key])

    def forget(self) -> None:
        """The reductions under way, and those that only came to a partial sum, are void."""
        self._waiting.clear()

    def everywhere(self, join_host: Callable[[], None]) -> frozenset[int]:
        """Of the gradient that has come, by one reduction, or by several of which the earlier ones left partial sums (R28): the
        parameters that no rank had a gradient of in any of them.

        Args:
            join_host: lets the host wait until the last one is over, and so all ranks have issued all of them.
        """
        waiting, self._waiting = self._waiting, []
        if not any(lacking for _, lacking in waiting):
            return frozenset()
        unused = frozenset.intersection(*(lacking for _, lacking in waiting))
        if not self._asks:
            return unused
        if unused:
            join_host()
        turns = [self._keys(turn) for turn, lacking in waiting if lacking]
        for keys in turns:
            if unused:
                # A rank that lacks nothing has no key.
                said = _store().multi_get(keys) if _store().check(keys) else []
                unused = frozenset(i for i in unused if said and all(each[i : i + 1] == b"1" for each in said))
        for key in self._read:  # whoever issued this reduction has read what was said of the last gradient
            _store().delete_key(key)
        self._read = [keys[self._place] for keys in turns]
        return unused

    def _keys(self, turn: int) -> list[str]:
        """Of each rank of the mesh the key under which it says what it lacks."""
        return [f"{self._key}/{turn}/{place}" for place in range(self._mesh.spec.world_size)]

    @property
    def _place(self) -> int:
        shards, replicas = self._mesh.shards, self._mesh.replicas
        return replicas.rank * shards.size + shards.rank


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
