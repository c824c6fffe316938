"""Checks through the store that all ranks of a group agree, before they issue a collective.

Uses the store of the process group with a timeout instead of a collective, because ranks that disagree would hang in a
collective.

[Note: rounds] Each check of a group is a round: the n-th round of a rank in the group matches the n-th round of every other rank.
A rank publishes the hash of its description and waits for the verdict of the group's first rank, which is a single key for any
number of ranks. Descriptions are only exchanged if hashes differ. Titles are compared first, so ranks at different points (one
builds another unit while another runs its root) fail at once. Ranks in rounds of different groups would wait for each other. So
after one second of waiting, a rank publishes its round and reads those of the others; if another rank waits for it in a round
that it cannot reach, it raises.

A successful round leaves one key in the store, which the next round of the group deletes. A rank whose round failed always
publishes its position, so that ranks that wait for it in other rounds raise too.
"""

import hashlib
import json
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch.distributed as dist

from crossframe.errors import AgreementError

Description = Sequence[tuple[str, Mapping[str, str]]]
"""A description that must be equal on all ranks: (subject, settings by name), in order."""

# Rounds that this process has entered, by group name, for each store: a store keeps the entries of groups that are gone.
_entered: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()

# The rounds of this process that failed, likewise.
_failed: weakref.WeakKeyDictionary[Any, list[dict[str, Any]]] = weakref.WeakKeyDictionary()

_PATIENCE_SECONDS = 1.0
# Between two looks into the store: at first, for each rank of the group, since all of them look; that at most; and later.
_PAUSE_PER_RANK_SECONDS, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.00005, 0.0005, 0.25
# The maximum number of different descriptions in a message, and of listed ranks.
_MAX_SIDES, _MAX_NAMED = 8, 8


def agree(
    groups: Sequence[dist.ProcessGroup],
    title: str,
    description: Description | Callable[[], Description],
    *,
    brief: str | None = None,
    advice: str = "build the same module with the same settings on every rank",
) -> None:
    """Raise AgreementError on every rank, naming the first difference, unless all ranks of the groups have equal descriptions.

    Waits up to the group's timeout for missing ranks. Costs one or two round trips to the store.

    Args:
        groups: the groups to check in order: the group of the whole mesh, or the shard group and then the replicate group. A
            failure in one group is passed to the next, so that all ranks of the mesh raise. Groups of one rank are skipped.
        title: the next operation as a noun, such as "first use of the root".
        description: the description; with `brief`, a function that creates it, called only if ranks differ.
        brief: a cheaper fingerprint of the description; equal iff the descriptions are equal.
        advice: what to do if ranks differ.
    """
    failure = ""
    for group in groups:
        if spans_ranks(group):
            failure = _Round(group, title).meet(description, brief, failure, advice)
    if failure:
        raise AgreementError(f"rank {dist.get_rank()}: {failure}")


def withdraw(groups: Sequence[dist.ProcessGroup], title: str, error: BaseException) -> None:
    """Make the other ranks raise in the round with this title because this rank failed before it.

    Call it before raising an error that may occur on this rank only and prevents `agree`.
    """
    for group in groups:
        if spans_ranks(group):
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            _Round(group, title).withdraw(f"rank {dist.get_rank()} failed before the {title}: {reason}")


def spans_ranks(group: dist.ProcessGroup) -> bool:
    """Whether the group has other ranks to check; False for the fake backend and for objects that only have a rank and a size."""
    return isinstance(group, dist.ProcessGroup) and group.size() > 1 and dist.get_backend(group) != "fake"


class _Failed(Exception):
    """A round that cannot succeed; the message is the reason."""


class _Round:
    """One round; see [Note: rounds]."""

    def __init__(self, group: dist.ProcessGroup, title: str) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._rank = group.rank()
        self._title = title
        self._group = group
        self._entered = _entered.setdefault(self._store, {})
        self._number = self._entered.get(group.group_name, 0)
        self._entered[group.group_name] = self._number + 1
        self._told_where = False
        self._own, self._verdict = self._key("hash", self._rank), self._key("verdict")

    @cached_property
    def _hashes(self) -> list[str]:
        return [self._key("hash", rank) for rank in range(len(self._ranks))]

    def _key(self, *parts: Any, number: int | None = None) -> str:
        number = self._number if number is None else number
        return "/".join(map(str, (group_key(self._group), number, *parts)))

    def meet(
        self, description: Description | Callable[[], Description], brief: str | None, failure: str, advice: str
    ) -> str:
        """The reason why the ranks do not agree, or "". This rank's `failure` fails the round on all ranks."""
        try:
            try:
                verdict = self._meet(description, brief, failure, advice)
            except _Failed as error:
                verdict = f"failed:{error}"
                self._store.set(self._verdict, verdict)
            failed = _failed.setdefault(self._store, [])
            if verdict.startswith("failed:"):
                failed.append(self._where)
                self._publish(failed)
            elif self._told_where:
                self._publish(failed)
        except dist.DistError as error:
            return (
                f"the store of the process group does not answer ({error}); the process that keeps it, rank 0 or the "
                "launcher, has probably ended: look at its output"
            )
        return verdict.removeprefix("failed:") if verdict.startswith("failed:") else ""

    def _meet(
        self, description: Description | Callable[[], Description], brief: str | None, failure: str, advice: str
    ) -> str:
        text = self._text(description) if brief is None else f"{self._title}: {brief}"
        # Python's own; OpenSSL's hashes would load a megabyte of code.
        digest = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
        self._store.set(self._own, f"failed:{failure}" if failure else digest)
        verdict = self._judge() if self._rank == 0 else self._read(self._verdict)
        if verdict.startswith("differ:"):
            difference = self._compare(json.loads(verdict.removeprefix("differ:")), self._text(description))
            verdict = f"failed:{difference}; {advice}"
        self._store.delete_key(self._own)
        return verdict

    def _text(self, description: Description | Callable[[], Description]) -> str:
        described = description() if callable(description) else description
        return json.dumps([[self._title, {}], *([subject, dict(settings)] for subject, settings in described)])

    def withdraw(self, failure: str) -> None:
        """Fail the round without waiting."""
        with suppress(dist.DistError):  # report the first failure
            self._store.set(self._own, f"failed:{failure}")
            if self._rank == 0:
                self._store.set(self._verdict, f"failed:{failure}")

    def _judge(self) -> str:
        """Publish the verdict: "agreed", "failed:" and the reason, or "differ:" and the groups of ranks with equal
        descriptions."""
        self._await(self._hashes, unless=self._verdict)
        if self._store.check([self._verdict]):  # another rank has given up, perhaps on this one
            return self._read(self._verdict)
        digests = [digest.decode() for digest in self._store.multi_get(self._hashes)]
        failed = next((digest for digest in digests if digest.startswith("failed:")), None)
        sides: dict[str, list[int]] = {}
        for rank, digest in enumerate(digests):
            sides.setdefault(digest, []).append(rank)
        verdict = failed or ("agreed" if len(sides) == 1 else f"differ:{json.dumps(list(sides.values()))}")
        self._store.set(self._verdict, verdict)
        if self._number:
            # All ranks have arrived, so all have read the verdict of the last round.
            self._store.delete_key(self._key("verdict", number=self._number - 1))
        return verdict

    def _compare(self, sides: list[list[int]], text: str) -> str:
        """Exchange one description for each set of equal ranks, and return the first difference."""
        sides = sides[:_MAX_SIDES]
        keys = [self._key("text", side[0]) for side in sides]
        if any(side[0] == self._rank for side in sides):
            self._store.set(self._key("text", self._rank), text)
        texts = [json.loads(self._read(key)) for key in keys]
        named = [[self._ranks[rank] for rank in side] for side in sides]
        return first_difference(named, texts)

    def _read(self, key: str) -> str:
        self._await([key])
        return self._store.get(key).decode()

    def _await(self, keys: list[str], *, unless: str | None = None) -> None:
        """Wait until all keys exist, or the verdict of a rank that gave up. Raises _Failed on timeout or if they can never
        exist."""
        start, seconds = time.monotonic(), timeout_seconds(self._group)
        first = min(_PAUSE_PER_RANK_SECONDS * len(self._ranks), _FIRST_PAUSE_SECONDS)
        while not self._store.check(keys):
            waited = time.monotonic() - start
            if waited > _PATIENCE_SECONDS:
                if unless and self._store.check([unless]):
                    return
                self._publish([*_failed.get(self._store, ()), self._where])
                self._told_where = True
                self._look_for_deadlock()
            if waited > seconds:
                raise _Failed(self._who_is_absent(seconds))
            # In proportion, so that what has taken long takes little longer by it.
            time.sleep(min(max(waited / 2, first), _LONGEST_PAUSE_SECONDS))

    def position(self) -> dict[str, Any]:
        """This rank's position while it waits; see [Note: ranks that come apart]."""
        return {
            "what": f"an agreement ({self._title})",
            "group": self._group.group_name,
            "ranks": self._ranks,
            "round": self._number,
        }

    @property
    def _where(self) -> dict[str, Any]:
        return {
            "group": self._group.group_name,
            "ranks": self._ranks,
            "number": self._number,
            "title": self._title,
        }

    def _publish(self, rounds: Sequence[dict[str, Any]]) -> None:
        self._store.set(_where_key(dist.get_rank()), json.dumps(rounds))

    def _look_for_deadlock(self) -> None:
        """Raise _Failed if a rank that this one waits for waits for this one in another round."""
        for rank in self._absent(self._hashes if self._rank == 0 else self._hashes[:1]):
            other = self._ranks[rank]
            if not self._store.check([_where_key(other)]):
                continue
            for where in json.loads(self._store.get(_where_key(other))):
                # A round that this rank has entered is over, and what is there about it is old.
                is_over = self._entered.get(where["group"], 0) > where["number"]
                elsewhere = where["group"] != self._group.group_name
                if elsewhere and dist.get_rank() in where["ranks"] and not is_over:
                    raise _Failed(self._elsewhere(other, where))

    def _elsewhere(self, other: int, where: dict[str, Any]) -> str:
        same = list(self._ranks) == where["ranks"]
        return (
            f"the ranks do not agree on the mesh: rank {dist.get_rank()} shares its units with ranks {listed(self._ranks)} "
            f"({self._title}), rank {other} with ranks {listed(where['ranks'])}{' in another process group' if same else ''} "
            f"({where['title']}); give every rank the same mesh or process groups"
        )

    def _absent(self, keys: list[str]) -> list[int]:
        """The ranks whose keys are missing, by bisection, because the store only tells whether all of several keys exist."""
        if self._store.check(keys):
            return []
        if len(keys) == 1:
            return [self._hashes.index(keys[0])]
        half = len(keys) // 2
        return self._absent(keys[:half]) + self._absent(keys[half:])

    def _who_is_absent(self, seconds: float) -> str:
        absent = [self._ranks[rank] for rank in self._absent(self._hashes)]
        if not absent:
            first = self._ranks[0]
            return f"rank {first} gave no verdict on the {self._title} within {seconds:g} s; look at its output"
        return (
            f"rank {listed(absent)} did not come to the {self._title} within {seconds:g} s, the timeout of the process "
            f"group, as rank {dist.get_rank()} did; it failed earlier, is late, or was not given this unit: look at its output"
        )


def first_difference(sides: Sequence[Sequence[int]], texts: Sequence[Sequence[Any]]) -> str:
    """The first difference between descriptions, as a sentence.

    Args:
        sides: sets of ranks with equal descriptions.
        texts: their descriptions.

    >>> single, double = [["parameter 'w'", {"dtype": "float32"}]], [["parameter 'w'", {"dtype": "float64"}]]
    >>> first_difference([[0, 1], [2]], [single, double])
    "the dtype of parameter 'w' differs: rank 0, 1: float32; rank 2: float64"
    """
    nothing = ["nothing more", {}]
    for position in range(max(map(len, texts))):
        lines = [text[position] if position < len(text) else nothing for text in texts]
        subjects = [subject for subject, _ in lines]
        if len(set(subjects)) > 1:
            what = "what the ranks are about to do" if position == 0 else "what the ranks shard"
            return f"{what} differs: {_opposed(sides, subjects)}"
        names = dict.fromkeys(name for _, settings in lines for name in settings)
        for name in names:
            values = [settings.get(name, "not set") for _, settings in lines]
            if len(set(values)) > 1:
                return f"the {name} of {subjects[0]} differs: {_opposed(sides, values)}"
    raise AssertionError("equal texts have different hashes")


def _opposed(sides: Sequence[Sequence[int]], values: Sequence[str]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for side, value in zip(sides, values, strict=True):
        ranks_of.setdefault(value, []).extend(side)
    return "; ".join(f"rank {listed(sorted(ranks))}: {value}" for value, ranks in ranks_of.items())


def listed(ranks: Sequence[int]) -> str:
    """A list of ranks, abbreviated if long."""
    named = ", ".join(map(str, ranks[:_MAX_NAMED]))
    return named if len(ranks) <= _MAX_NAMED else f"{named} and {len(ranks) - _MAX_NAMED} more"


def num_rounds(group: dist.ProcessGroup) -> int:
    """The number of rounds that this rank entered with the group, which is equal on all ranks directly after a round."""
    return num_rounds_in(group.group_name)


def num_rounds_in(group_name: str) -> int:
    """`num_rounds` by the group's name."""
    return _entered.get(dist.distributed_c10d._get_default_store(), {}).get(group_name, 0)


def group_key(group: dist.ProcessGroup) -> str:
    """The store prefix of a group, whose name is unique and equal on all of its ranks."""
    return f"crossframe/{group.group_name}"


def _where_key(rank: int) -> str:
    return f"crossframe/where/{rank}"


def timeout_seconds(group: dist.ProcessGroup) -> float:
    """The timeout of the group's collectives."""
    return group._get_backend(group._device_types[0]).options._timeout.total_seconds()
