"""Padding of shards: the kinds of it, and what it is filled with (R05)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Padding:
    """A run of a rank's shard that belongs to no parameter.

    `kind` is "alignment" (between parameters, R02), "divisibility" (the tail of a flat parameter, R03), "shard" (the end of a
    rank's buffer or chunk, R03, R04, R07) or "block" (between blocks, R09). `fill` is the value stored in it (R05).
    """

    kind: str
    start: int
    stop: int

    @property
    def fill(self) -> int:
        """42 inside torch's flat parameter; 0 at the end of a shard (R05) and in padding that torch does not have."""
        return 42 if self.kind in ("alignment", "divisibility") else 0
