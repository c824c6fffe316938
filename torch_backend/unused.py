"""Which parameters no rank's backward reached, so that they have no gradient rather than zeros (R29).

A rank that lacks the gradient of a parameter sends zeros for it, and cannot tell from the sum whether another rank had one. So,
before it issues the reduction, it says in the store what it lacks. When its reduction is over, all ranks have issued theirs, and
have said so if they lack something: what every rank lacks has no gradient. Ranks that lack nothing do nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from torch_backend.collectives import UnitMesh
from torch_backend.rounds import group_key, num_rounds, spans_ranks


class Unused:
    """The parameters of one bucket that a backward did not reach."""

    def __init__(self, mesh: UnitMesh) -> None:
        self._mesh = mesh
        self._asks = any(some.size > 1 and spans_ranks(some.group) for some in (mesh.shards, mesh.replicas))
        # How many reductions there were, and of the last one what this rank lacks.
        self._key, self._turn = "", 0
        self._lacking: frozenset[int] = frozenset()

    def name(self, name: str) -> None:
        """Learn a name of the bucket that it has on all ranks, which have just agreed to use it."""
        shards, replicas = self._mesh.shards, self._mesh.replicas
        groups = [some for some in (shards, replicas) if some.size > 1]
        where = "/".join(f"{group_key(some.group)}/{num_rounds(some.group)}" for some in groups[:1])
        if len(groups) == 2:
            # Each rank knows its own two groups; that of all their ranks has no name, but a first rank.
            first = shards.ranks[0] + replicas.ranks[0] - dist.get_rank()
            where = f"crossframe/mesh/{first}/{shards.size}/{replicas.size}/{num_rounds(shards.group)}"
        self._key, self._turn = f"{where}/unused/{name}", 0

    def lack(self, params: Sequence[bool]) -> None:
        """A reduction is about to be issued; this rank lacks the gradients of these parameters."""
        self._turn += 1
        self._lacking = frozenset(i for i, lacks in enumerate(params) if lacks)
        if self._lacking and self._asks:
            _store().append(f"{self._key}/{self._turn}", "".join("01"[lacks] for lacks in params))
            # Whoever issues this reduction has read what was said of the last but one.
            _store().delete_key(f"{self._key}/{self._turn - 2}")

    def everywhere(self, num_params: int, join_host: Callable[[], None]) -> frozenset[int]:
        """Of the reduction that is over: the parameters that no rank had a gradient of.

        Args:
            join_host: lets the host wait until it is over.
        """
        if not self._lacking or not self._asks:
            return self._lacking
        join_host()
        said = _store().get(f"{self._key}/{self._turn}").decode()
        if len(said) < num_params * self._mesh.spec.world_size:  # some rank lacks nothing
            return frozenset()
        return frozenset(i for i in self._lacking if set(said[i::num_params]) == {"1"})


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
