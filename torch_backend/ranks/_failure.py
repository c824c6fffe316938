"""Errors of failed collectives, which name the collective, the unit and the cause, and recovery of an interrupted step.

torch.distributed reports "Connection closed by peer" or "Timed out" without the parameters or the cause on the other rank.
`issue`, and the `Pending` that it returns, add these. Without an error they cost a try block.

[Note: a rank that leaves a step] If a rank raises in forward or backward, the other ranks wait for it in a collective that it
will never issue. If all ranks raise at the same point, the next iteration is correct (R17). If one rank raises alone and its user
catches the exception, no rank can continue, because its next collective would be matched with the one that it did not issue. So a
rank that leaves a step publishes its number of collectives (`abandon`), and before the next step, or the next all-gather outside
of one, all ranks compare these numbers (`rejoin`). A rank that waits for a collective checks the store once per second and raises
if another rank left after fewer collectives, or can never arrive ([Note: ranks that come apart]). This requires an interruptible
wait on the host, as for CPU tensors, except gloo's reduce_scatter, which only has the group's timeout. On CUDA, `Work.wait` does
not block, and NCCL's watchdog ends a process whose collective exceeds the group's timeout.
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
# Messages of backends when the peer process has ended.
_CONNECTION = (
    *("connection", "closed by peer", "reset by peer", "broken pipe", "socket", "remote process"),
    *("no route to host", "host is down", "host is unreachable", "network is unreachable"),
)
_LOOK_EVERY = timedelta(seconds=1)


@dataclass
class _Standing:
    """This rank's state in a group.

    Attributes:
        broken: the reason of a failed collective or a desynchronization; "" without one.
        num_rejoined: how often all ranks rejoined after an exception, which invalidates earlier notes.
        num_notes, notes: the number of notes of leaving ranks at the last check, and the last note of each rank.
    """

    broken: str = ""
    num_rejoined: int = 0
    num_notes: int = 0
    notes: list[dict[str, Any]] = field(default_factory=list)


_standings: weakref.WeakKeyDictionary[dist.ProcessGroup, _Standing] = weakref.WeakKeyDictionary()
# Groups whose step this rank left without rejoining.
_left: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


class _Over:
    def wait(self) -> bool:
        return True


_OVER = _Over()


class Pending:
    """An issued collective and its purpose."""

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
        # Its ordinal in the group; 0 if positions are not published.
        self._ordinal = ordinal

    def wait(self) -> bool:
        """Wait like `Work.wait`. Raises CollectiveError if the collective failed or another rank left the step."""
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
                # Raised before the timeout, it is a failure, which gloo's reduce_scatter never reports as completed.
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
    collective: Callable[..., Any],
    *tensors: Tensor,
    group: dist.ProcessGroup,
    spans: bool,
    kind: str,
    unit: str,
    phase: str,
) -> Pending:
    """Issue a collective of torch.distributed or of the user on `tensors`.

    Args:
        spans: `spans_ranks(group)`, which takes longer than the rest of this function.
        kind, unit, phase: for errors: "all_gather", the unit's name, "forward".

    Raises:
        CollectiveError: it cannot be issued.
    """
    try:
        work = collective(*tensors, group=group, async_op=True)
    except RuntimeError as error:
        _fail(error, group, kind, unit, phase)
    # A user's collective may be synchronous, or its wait may not accept a timeout.
    on_host = tensors[0].is_cpu and isinstance(work, dist.Work)
    ordinal = note_issued(group, kind, unit, phase, tensors[0].numel()) if on_host and spans else 0
    return Pending(_OVER if work is None else work, group, kind, unit, phase, on_host, ordinal)


def abandon(groups: Sequence[dist.ProcessGroup], what: str) -> None:
    """Publish that this rank leaves its step because of `what`: "ValueError in the forward of unit 'blocks.1'"."""
    for group in groups:
        if spans_ranks(group) and group not in _left:
            _left.add(group)
            _publish(group, _num_issued(group), what)


def rejoin(groups: Sequence[dist.ProcessGroup]) -> None:
    """Check, before a step or an all-gather outside of one, that all ranks of the groups left an abandoned step at the same
    point.

    Raises:
        CollectiveError: a collective of the groups failed before, or the ranks are desynchronized.
        AgreementError: ranks left the step after different numbers of collectives, or not all ranks left it.
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
            description = [("the step that was left", {"end": f"after {_num_issued(group)} collectives of the group"})]
            try:
                agree([group], AFTER_AN_EXCEPTION, description, advice=_ADVICE)
            except AgreementError as error:
                standing.broken = str(error)
                withdraw(groups[i + 1 :], AFTER_AN_EXCEPTION, error)
                raise
            _left.discard(group)
            standing.num_rejoined += 1


def _fail(error: RuntimeError, group: dist.ProcessGroup, kind: str, unit: str, phase: str) -> NoReturn:
    """Convert an error of torch.distributed to CollectiveError, except out-of-memory errors."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    # The first sentence, without the source location before it.
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
    """Raise CollectiveError, and publish that the group is unusable."""
    failure = CollectiveError(f"rank {dist.get_rank()}: {sentence}")
    standing = _standing(group)
    if not standing.broken:
        standing.broken = sentence
        _left.add(group)
        # After 0 collectives: no rank can complete anything in this group.
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
    """A description of a rank that left the current step after fewer collectives than this rank issued; "" if there is none."""
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
    """The number of collectives, including the user's, that this rank issued in the group."""
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
