"""Checks through the store that all ranks of a group agree, before they issue a collective.

Through the store of the process group and with a timeout, not by a collective: ranks that disagree would hang in one.

[Note: rounds] Each question to a group is a round: the n-th that a rank asks of the group meets the n-th of every other rank.
A rank describes what it was given, publishes the hash, and waits for the verdict of the group's first rank, so that it
waits for one key whatever the number of ranks; only where hashes differ are the descriptions themselves looked at. What is
asked has a title that is compared first: so ranks that are in different places (one builds a further unit while another
runs its root) find out at once, both of them. Ranks that ask different groups of each other would never meet. After
a second of waiting a rank therefore publishes where it is, and looks where the others are: when one waits for it in
another round that it cannot reach before this one ends, neither round can end, and it says so.

A round that ends well leaves one key in the store, which the next of its group deletes. A rank whose round failed says where it
was, however short it waited: the others that wait for it elsewhere would not learn of it otherwise.
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
"""What must be the same everywhere: subjects in order, each with its settings by name."""

# How many rounds this process has entered, by the group's name, for each store: a group may be gone while what was said in it is
# still in the store.
_entered: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()

# The rounds of this process that failed, likewise.
_failed: weakref.WeakKeyDictionary[Any, list[dict[str, Any]]] = weakref.WeakKeyDictionary()

_PATIENCE_SECONDS = 1.0
# Between two looks into the store: at first, for each rank of the group, since all of them look; that at most; and later.
_PAUSE_PER_RANK_SECONDS, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.00005, 0.0005, 0.25
# How many different descriptions a message looks at, and how many ranks it names one by one.
_MAX_SIDES, _MAX_NAMED = 8, 8


def agree(
    groups: Sequence[dist.ProcessGroup],
    title: str,
    said: Description | Callable[[], Description],
    *,
    brief: str | None = None,
    advice: str = "build the same module with the same settings on every rank",
) -> None:
    """Raise AgreementError on every rank, naming the first difference, unless all ranks of the groups say the same.

    Args:
        groups: the groups of this rank that the question goes to, one after the other: that of the whole mesh, or where there
            is none the shard group and then the replicate group. What one group finds is carried into the next, so that
            all ranks of the mesh raise if any two of them differ. Groups of one rank are passed over.
        title: what the ranks are about to do, as a noun: "first use of the root".
        said: what must be the same; with `brief` a function that makes it, which is called where ranks differ.
        brief: all of that in a form that is sooner made, the same wherever it is the same.
        advice: what to do where it is not.

    A rank that does not come is waited for as long as the group's timeout says. Costs a round trip or two to the store.
    """
    failure = ""
    for group in groups:
        if spans_ranks(group):
            failure = _Round(group, title).meet(said, brief, failure, advice)
    if failure:
        raise AgreementError(f"rank {dist.get_rank()}: {failure}")


def withdraw(groups: Sequence[dist.ProcessGroup], title: str, error: BaseException) -> None:
    """Tell the other ranks, who meet in the round of that title or will, that this rank failed before it: they raise at once.

    Call it where an error on this rank alone may keep it from `agree`, and raise the error then.
    """
    for group in groups:
        if spans_ranks(group):
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            _Round(group, title).withdraw(f"rank {dist.get_rank()} failed before the {title}: {reason}")


def spans_ranks(group: dist.ProcessGroup) -> bool:
    """Whether there are other ranks to ask: not under the fake backend, where one process plays all of them, nor where an object
    with a rank and a size stands in for a group."""
    return isinstance(group, dist.ProcessGroup) and group.size() > 1 and dist.get_backend(group) != "fake"


class _Failed(Exception):
    """A round that cannot end well; the message says why."""


class _Round:
    """One question to a group; see [Note: rounds]."""

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

    def meet(self, said: Description | Callable[[], Description], brief: str | None, failure: str, advice: str) -> str:
        """The reason why the ranks do not agree, or "". A `failure` that this rank brings along is everyone's."""
        try:
            try:
                verdict = self._meet(said, brief, failure, advice)
            except _Failed as error:
                verdict = f"failed:{error}"
                self._store.set(self._verdict, verdict)
            failed = _failed.setdefault(self._store, [])
            if verdict.startswith("failed:"):
                failed.append(self._where)
                self._tell(failed)
            elif self._told_where:
                self._tell(failed)
        except dist.DistError as error:
            return (
                f"the store of the process group does not answer ({error}); the process that keeps it, rank 0 or the "
                "launcher, has probably ended: look at its output"
            )
        return verdict.removeprefix("failed:") if verdict.startswith("failed:") else ""

    def _meet(self, said: Description | Callable[[], Description], brief: str | None, failure: str, advice: str) -> str:
        text = self._text(said) if brief is None else f"{self._title}: {brief}"
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._store.set(self._own, f"failed:{failure}" if failure else digest)
        verdict = self._judge() if self._rank == 0 else self._read(self._verdict)
        if verdict.startswith("differ:"):
            difference = self._compare(json.loads(verdict.removeprefix("differ:")), self._text(said))
            verdict = f"failed:{difference}; {advice}"
        self._store.delete_key(self._own)
        return verdict

    def _text(self, said: Description | Callable[[], Description]) -> str:
        described = said() if callable(said) else said
        return json.dumps([[self._title, {}], *([subject, dict(settings)] for subject, settings in described)])

    def withdraw(self, failure: str) -> None:
        """Take part with a failure, and wait for no one."""
        with suppress(dist.DistError):  # what failed first is what to tell
            self._store.set(self._own, f"failed:{failure}")
            if self._rank == 0:
                self._store.set(self._verdict, f"failed:{failure}")

    def _judge(self) -> str:
        """Publish the verdict: "agreed", "failed:" and why, or "differ:" and the ranks that say the same, side by side."""
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
            # Everyone is here, and so has read the verdict of the last round.
            self._store.delete_key(self._key("verdict", number=self._number - 1))
        return verdict

    def _compare(self, sides: list[list[int]], text: str) -> str:
        """The first rank of each side shows what it says; everyone finds the difference in that."""
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
        """Return once all keys are there, or that one, which others write where they have lost patience. Raise _Failed if they
        do not come in time, or never can."""
        start, seconds = time.monotonic(), timeout_seconds(self._group)
        first = min(_PAUSE_PER_RANK_SECONDS * len(self._ranks), _FIRST_PAUSE_SECONDS)
        while not self._store.check(keys):
            waited = time.monotonic() - start
            if waited > _PATIENCE_SECONDS:
                if unless and self._store.check([unless]):
                    return
                self._tell([*_failed.get(self._store, ()), self._where])
                self._told_where = True
                self._look_for_deadlock()
            if waited > seconds:
                raise _Failed(self._who_is_absent(seconds))
            # In proportion, so that what has taken long takes little longer by it.
            time.sleep(min(max(waited / 2, first), _LONGEST_PAUSE_SECONDS))

    def position(self) -> dict[str, Any]:
        """What this rank is in while it waits here; see [Note: ranks that come apart]."""
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

    def _tell(self, rounds: Sequence[dict[str, Any]]) -> None:
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
        """The ranks whose keys are not there, found by halving: the store only says whether all of some keys are."""
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
    """In words, the first thing that not all sides say.

    Args:
        sides: ranks that say the same.
        texts: what they say: subjects, each with its settings.

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
    raise AssertionError("texts of different hashes say the same")


def _opposed(sides: Sequence[Sequence[int]], values: Sequence[str]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for side, value in zip(sides, values, strict=True):
        ranks_of.setdefault(value, []).extend(side)
    return "; ".join(f"rank {listed(sorted(ranks))}: {value}" for value, ranks in ranks_of.items())


def listed(ranks: Sequence[int]) -> str:
    """Ranks one by one, as far as a reader wants to see them."""
    named = ", ".join(map(str, ranks[:_MAX_NAMED]))
    return named if len(ranks) <= _MAX_NAMED else f"{named} and {len(ranks) - _MAX_NAMED} more"


def num_rounds(group: dist.ProcessGroup) -> int:
    """How many rounds this rank has entered with the group: right after one, all ranks of it say the same."""
    return num_rounds_in(group.group_name)


def num_rounds_in(group_name: str) -> int:
    """The same, of the group of a name."""
    return _entered.get(dist.distributed_c10d._get_default_store(), {}).get(group_name, 0)


def group_key(group: dist.ProcessGroup) -> str:
    """Where a group's keys lie in the store. Its name is the same on all its ranks, and no other group's."""
    return f"crossframe/{group.group_name}"


def _where_key(rank: int) -> str:
    return f"crossframe/where/{rank}"


def timeout_seconds(group: dist.ProcessGroup) -> float:
    """How long the group's collectives may take, as `init_process_group` was told."""
    return group._get_backend(group._device_types[0]).options._timeout.total_seconds()
