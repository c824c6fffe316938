"""Every history of a small world: what may happen to a unit, in every order, up to a length, beside the simplest model.

Histories that lead to the same world are followed once, and counted all.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from crossframe.lifecycle import Move, UnitState
from experiments.spec.histories.agree import Disagreement
from experiments.spec.histories.pair import OPERATIONS, Pair


@dataclass
class Explored:
    """What was gone through.

    Attributes:
        num_histories: lists of operations of the full length; all of them were followed.
        num_worlds: different worlds that they lead through.
        tried: how often each operation was done in these worlds.
        refused: how often it was refused there.
        pairs: every (state, move) that a unit took.
    """

    num_histories: int = 0
    num_worlds: int = 0
    tried: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    pairs: set[tuple[UnitState, Move]] = field(default_factory=set)

    @property
    def num_tried(self) -> int:
        """Operations done, lawful or not."""
        return self.tried.total()

    @property
    def num_refused(self) -> int:
        """Operations that were refused."""
        return self.refused.total()

    def add(self, other: "Explored") -> None:
        """Take in what was found in another world."""
        self.num_histories += other.num_histories
        self.num_worlds += other.num_worlds
        self.tried += other.tried
        self.refused += other.refused
        self.pairs |= other.pairs

    def describe(self) -> str:
        """The counts in words."""
        return (
            f"{self.num_histories:,} histories through {self.num_worlds:,} worlds; {self.num_tried:,} operations tried, "
            f"{self.num_refused:,} refused; {len(self.pairs)} pairs of state and move"
        )


def explore(pair: Pair, length: int, operations: Sequence[str] = OPERATIONS) -> Explored:
    """All histories of `length` operations from where the pair stands.

    Raises:
        Disagreement: with the history that led to it, which `replay` follows again.
    """
    found = Explored()
    level: dict[bytes, int] = {pair.save(): 1}
    followed: dict[bytes, list[bytes]] = {}
    path: dict[bytes, tuple[str, ...]] = dict.fromkeys(level, ())
    for _ in range(length):
        following: dict[bytes, int] = {}
        for world, num_histories in level.items():
            if world not in followed:
                followed[world] = list(_follow(pair, world, operations, path, found))
            for after in followed[world]:
                following[after] = following.get(after, 0) + num_histories
        level = following
    found.num_histories, found.num_worlds, found.pairs = sum(level.values()), len(path), set(pair.pairs)
    return found


def _follow(
    pair: Pair, world: bytes, operations: Sequence[str], path: dict[bytes, tuple[str, ...]], found: Explored
) -> Iterator[bytes]:
    """The worlds that each operation leads to from one."""
    pair.load(world)
    before = pair.save()
    for operation in operations:
        found.tried[operation] += 1
        try:
            lawful = pair.take(operation, before=before)
        except Exception as error:
            raise Disagreement(f"after {[*path[world], operation]}: {type(error).__name__}: {error}") from error
        if not lawful:
            found.refused[operation] += 1
            yield world
            continue
        after = pair.save()
        path.setdefault(after, (*path[world], operation))
        yield after
        pair.load(world)
        before = pair.save()


def replay(pair: Pair, history: Sequence[str]) -> None:
    """Follow one history."""
    for operation in history:
        pair.take(operation)
