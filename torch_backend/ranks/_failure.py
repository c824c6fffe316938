"""Errors of failed collectives, which name the collective, the unit and the cause, and recovery of an interrupted step.

torch.distributed says "Connection closed by peer" or "Timed out", and neither whose parameters were on the way nor what
befell the other rank. `issue`, and the `Pending` that it returns, say so. On the good path they cost a try.

[Note: a rank that leaves a step] A rank that raises in its forward or backward leaves the step; the others wait for it in a
collective that it will never issue. If all ranks raise at the same place nothing is out of step, and the next iteration is
right (R17). If one raises alone, and its user catches the exception, no rank can go on: the others have issued a collective
that it has not, and the next that it issues would be taken for that. So a rank that leaves says in the store after how many
collectives (`abandon`), and before its next step, or its next gather outside of one, all ranks compare these numbers (`rejoin`).
A rank that waits for a collective looks into the store once a second, and raises when another has left after fewer than
itself, or is certain never to come ([Note: ranks that come apart]). This needs a wait on the host that can be cut short, as for
tensors on CPU, but for gloo's reduce_scatter, which heeds no timeout but the group's; on CUDA `Work.wait` returns at once, and
NCCL's watchdog ends a process whose collective exceeds the timeout of the group.
"""

import json
import re
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from crossframe.errors import AgreementError, CollectiveError
from torch_backend.ranks._consensus import agree, group_key, listed, spans_ranks, timeout_seconds, withdraw
from torch_backend.ranks._desync import find_apart, note_issued

AFTER_AN_EXCEPTION = "first step after an exception"

_ADVICE = "start the processes again, from a checkpoint, and catch an exception on every rank or on none"
# What backends say when the process at the other end has ended.
_CONNECTION = ("connection", "closed by peer", "reset by peer", "broken pipe", "socket", "remote process")
_LOOK_EVERY = timedelta(seconds=1)


@dataclass
class _Standing:
    """How this rank stands in a group.

    Attributes:
        broken: how a collective failed, or the ranks came apart; "" while neither has happened.
        num_rejoined: how often all ranks came back after an exception, which makes what was said before old.
        num_notes, notes: how often ranks had left when this one last looked, and the last that each said then.
    """

    broken: str = ""
    num_rejoined: int = 0
    num_notes: int = 0
    notes: list[dict[str, Any]] = field(default_factory=list)


_standings: weakref.WeakKeyDictionary[dist.ProcessGroup, _Standing] = weakref.WeakKeyDictionary()
# Groups whose step this rank has left and not come back to.
_left: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


class _Over:
    def wait(self) -> bool:
        return True


_OVER = _Over()


class Pending:
    """A collective that was issued, and what for."""

    __slots__ = ("_group", "_kind", "_ordinal", "_phase", "_unit", "_wait_on_host", "_work")

    def __init__(
        self, work: Any, group: dist.ProcessGroup, kind: str, unit: str, phase: str, on_host: bool, ordinal: int = 0
    ) -> None:
        self._work = work
        self._group = group
        self._kind = kind
        self._unit = unit
        self._phase = phase
        self._wait_on_host = on_host
        # Which of this rank's collectives in the group it is; 0 where ranks do not tell each other.
        self._ordinal = ordinal

    def wait(self) -> bool:
        """As `Work.wait` does. Raises CollectiveError if the collective failed, or another rank has left the step."""
        if not self._wait_on_host:
            try:
                return self._work.wait()
            except RuntimeError as error:
                _fail(error, self._group, self._kind, self._unit, self._phase)
        while True:
            start = time.monotonic()
            try:
                return self._work.wait(_LOOK_EVERY)
            except RuntimeError as error:
                # Raised sooner it is no end of patience but a failure, which gloo's reduce_scatter never calls completed.
                if time.monotonic() - start < 0.9 * _LOOK_EVERY.total_seconds():
                    _fail(error, self._group, self._kind, self._unit, self._phase)
                if self._work.is_completed():  # since, well or badly: the next wait says at once
                    continue
                reason = _who_left(self._group) or self._who_is_elsewhere()
                if reason:
                    _break(self._group, _sentence(self._group, self._kind, self._unit, self._phase, reason), error)

    def _who_is_elsewhere(self) -> str:
        if not self._ordinal:
            return ""
        try:
            return find_apart(self._group, self._ordinal)
        except dist.DistError:  # the store has ended: its keeper has, and so will the collective
            return ""


def issue(
    collective: Callable[..., Any], *tensors: Tensor, group: dist.ProcessGroup, kind: str, unit: str, phase: str
) -> Pending:
    """Start a collective of torch.distributed, or of the user's own, on `tensors`, to be waited for.

    Args:
        kind, unit, phase: what an error calls it: "all_gather", the unit's name, "forward".

    Raises:
        CollectiveError: it cannot be issued.
    """
    try:
        work = collective(*tensors, group=group, async_op=True)
    except RuntimeError as error:
        _fail(error, group, kind, unit, phase)
    # A collective of the user's own may be over when it returns, or wait without a time.
    on_host = tensors[0].is_cpu and isinstance(work, dist.Work)
    ordinal = note_issued(group, kind, unit, phase, tensors[0].numel()) if on_host and spans_ranks(group) else 0
    return Pending(_OVER if work is None else work, group, kind, unit, phase, on_host, ordinal)


def abandon(groups: Sequence[dist.ProcessGroup], what: str) -> None:
    """Say that this rank leaves its step, since `what` came: "ValueError in the forward of unit 'blocks.1'"."""
    for group in groups:
        if spans_ranks(group) and group not in _left:
            _left.add(group)
            _publish(group, _num_issued(group), what)


def rejoin(groups: Sequence[dist.ProcessGroup]) -> None:
    """Before a step, or a gather outside of one: if the last step was abandoned, go on only if all ranks of the groups left it
    at the same place.

    Raises:
        CollectiveError: a collective of the groups has failed before, or the ranks have come apart.
        AgreementError: ranks left the step after different numbers of collectives, or did not leave it.
    """
    if not _left:
        return
    for i, group in enumerate(groups):
        standing = _standing(group)
        if standing.broken:
            error = CollectiveError(
                f"rank {dist.get_rank()}: no further step is possible between ranks {listed(_ranks(group))}, whose collectives "
                f"no longer match; {_ADVICE}. What came first: {standing.broken}"
            )
            withdraw(groups[i + 1 :], AFTER_AN_EXCEPTION, error)
            raise error
        if group in _left:
            said = [("the step that was left", {"end": f"after {_num_issued(group)} collectives of the group"})]
            try:
                agree([group], AFTER_AN_EXCEPTION, said, advice=_ADVICE)
            except AgreementError as error:
                standing.broken = str(error)
                withdraw(groups[i + 1 :], AFTER_AN_EXCEPTION, error)
                raise
            _left.discard(group)
            standing.num_rejoined += 1


def _fail(error: RuntimeError, group: dist.ProcessGroup, kind: str, unit: str, phase: str) -> NoReturn:
    """Raise CollectiveError for what torch.distributed raised; lack of memory stays what it is."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    # The first sentence, without the place in the source that is told before it.
    cause = re.sub(r"^\[[^]]*\] ", "", str(error)).split("\n")[0].split(". ")[0]
    reason = f"{cause}; {_who_left(group) or _likely_reason(cause, group)}"
    _break(group, _sentence(group, kind, unit, phase, reason), error)


def _sentence(group: dist.ProcessGroup, kind: str, unit: str, phase: str, reason: str) -> str:
    return f"{kind} of unit {unit!r} ({phase}) between ranks {listed(_ranks(group))} failed: {reason}"


def _likely_reason(cause: str, group: dist.ProcessGroup) -> str:
    lower = cause.lower()
    if "timed out" in lower or "timeout" in lower:
        return (
            f"within {timeout_seconds(group):g} s, the timeout of the process group, not all ranks came to it: one of them has "
            "ended, hangs, or took another way through the model; look at the first traceback of the other ranks"
        )
    if any(word in lower for word in _CONNECTION):
        return "a rank has probably ended: look at the first traceback of the other ranks"
    return "look at the dtype and device of the unit's parameters, and whether the group's backend serves them"


def _break(group: dist.ProcessGroup, sentence: str, error: RuntimeError) -> NoReturn:
    """Raise CollectiveError, and let the other ranks know that nothing more can come of the group."""
    failure = CollectiveError(f"rank {dist.get_rank()}: {sentence}")
    standing = _standing(group)
    if not standing.broken:
        standing.broken = sentence
        _left.add(group)
        # After none: whatever a rank waits for in this group, it waits for in vain.
        _publish(group, -1, sentence)
        withdraw([group], AFTER_AN_EXCEPTION, failure)
    raise failure from error


def _publish(group: dist.ProcessGroup, after: int, what: str) -> None:
    note = {
        "rank": dist.get_rank(),
        "what": " ".join(what.split()),
        "num_issued": after,
        "num_rejoined": _standing(group).num_rejoined,
    }
    with suppress(dist.DistError):  # the store has ended too; what failed first is what to tell
        _store().set(_note_key(group, dist.get_rank()), json.dumps(note))
        _store().add(_count_key(group), 1)


def _who_left(group: dist.ProcessGroup) -> str:
    """Which rank left the step that this rank is in, after fewer collectives than this one has issued; "" if none."""
    standing, store = _standing(group), _store()
    with suppress(dist.DistError):  # as above
        num_notes = store.add(_count_key(group), 0)
        if num_notes != standing.num_notes:
            keys = [_note_key(group, rank) for rank in _ranks(group) if rank != dist.get_rank()]
            standing.notes = [json.loads(store.get(key)) for key in keys if store.check([key])]
            standing.num_notes = num_notes
    for note in standing.notes:
        if note["num_rejoined"] == standing.num_rejoined and note["num_issued"] < _num_issued(group):
            return f"rank {note['rank']} has left the step: {note['what']}"
    return ""


def _num_issued(group: dist.ProcessGroup) -> int:
    """How many collectives this rank has issued in the group, the user's own among them."""
    backends: list[Any] = [group._get_backend(device) for device in group._device_types]
    return sum(backend._get_sequence_number_for_group() for backend in backends)


def _standing(group: dist.ProcessGroup) -> _Standing:
    return _standings.setdefault(group, _Standing())


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _note_key(group: dist.ProcessGroup, rank: int) -> str:
    return f"{group_key(group)}/left/{rank}"


def _count_key(group: dist.ProcessGroup) -> str:
    return f"{group_key(group)}/num_left"
