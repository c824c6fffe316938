"""Detects ranks that issued different collectives, which would otherwise wait until the group's timeout.

[Note: ranks that come apart] If one rank evaluates alone, it issues collectives that no other rank joins, and all ranks hang
until the group's timeout. On the CPU this is detected earlier. Each rank keeps its last collectives in each group. A rank without
progress for one second publishes them under its key in the store, from the wait itself or from a thread, because the rank may be
in an uninterruptible call. A waiting rank reads the positions of the others and raises only if

- two ranks issued different collectives as their n-th in the group, which can never match; or
- the other rank has not issued the collective that this rank waits for, and is inside a call that needs this rank first: a
  collective of torch.distributed in the same group or among all ranks, or a round ([Note: rounds]) that this rank has not entered
  and cannot enter while it waits.

A straggler (loading data, evaluating without collectives, in a debugger) publishes that it is in neither, and the others wait for
it. A published position may be outdated, but the conclusion stays valid: issued collectives stay issued, and a call that needs
this rank cannot have returned. While ranks make progress, nothing is written or read. Not detected are a rank that waits for a
user's `Work`, for a point-to-point message, or for a collective in another group, and hangs on accelerators, where the host does
not wait. A rank inside a blocking gloo call (a user's collective, a reduce-scatter) raises only after the process of a raising
rank has ended. Collectives of the same kind and size for different units exchange data before the mismatch is detected.
"""

import atexit
import json
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from torch_backend.ranks._consensus import _Round, listed, num_rounds_in

_CPU = torch.device("cpu")

_PATIENCE_SECONDS = 1.0
# How many collectives of a group a rank remembers, and of how many groups it tells.
_NUM_RECENT, _NUM_GROUPS = 32, 8

# The functions of torch.distributed that return when all ranks of their group came, as their source names them.
_SOURCE = dist.distributed_c10d.__file__
_JOINT = frozenset(
    {
        *("barrier", "monitored_barrier", "all_reduce", "broadcast", "reduce", "gather", "scatter"),
        *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "gather_object"),
        *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
        *("broadcast_object_list", "scatter_object_list"),
    }
)


@dataclass
class _Trail:
    """The collectives of units that this rank issued in a group.

    Attributes:
        num: their number.
        recent: the last ones: (ordinal, kind, unit, phase, numel, number of collectives of any kind that this rank had issued in
            the group, and among all ranks).
    """

    num: int = 0
    recent: deque[tuple[int, str, str, str, int, int, int]] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT))


_trails: weakref.WeakKeyDictionary[dist.ProcessGroup, _Trail] = weakref.WeakKeyDictionary()
# Which of a group's backends is the CPU's, looked up once.
_backends: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()


def note_issued(group: dist.ProcessGroup, kind: str, unit: str, phase: str, numel: int) -> int:
    """Record an issued collective. Returns its ordinal in the group."""
    _watch.passes()
    trail = _trails.get(group)
    if trail is None:
        trail = _trails[group] = _Trail()
    trail.num += 1
    trail.recent.append((trail.num, kind, unit, phase, numel, _num_calls(group), _num_calls_in_world()))
    return trail.num


def _num_calls(group: dist.ProcessGroup) -> int:
    """The number of collectives, including the user's, that this rank issued in a CPU group; -1 if unknown."""
    backend: Any
    try:
        backend = _backends[group]
    except KeyError:
        try:
            backend = group._get_backend(_CPU)
        except RuntimeError:  # a group of accelerators alone
            backend = None
        _backends[group] = backend
    return -1 if backend is None else backend._get_sequence_number_for_group()


def _num_calls_in_world() -> int:
    world = dist.group.WORLD
    return -1 if world is None else _num_calls(world)


def find_apart(group: dist.ProcessGroup, ordinal: int) -> str:
    """The reason why this rank's n-th collective in the group can never complete; "" if this is not certain."""
    _watch.publish()
    store, own = dist.distributed_c10d._get_default_store(), dist.get_rank()
    for rank in dist.get_process_group_ranks(group):
        if rank == own or not store.check([_key(rank)]):
            continue
        posted = json.loads(store.get(_key(rank)))
        theirs = posted["groups"].get(group.group_name)
        if theirs is None:
            continue
        reason = _differs(group, rank, theirs["recent"]) or _is_elsewhere(
            group, ordinal, rank, theirs, posted["inside"]
        )
        if reason:
            return f"{reason}; {_ADVICE}"
    return ""


_ADVICE = "call the model (also to evaluate it), clip_grad_norm_ and state dicts on every rank, equally often and in one order"


def _differs(group: dist.ProcessGroup, rank: int, recent: Sequence[Sequence[Any]]) -> str:
    """The first collective in which this rank and another one differ."""
    theirs = {entry[0]: entry for entry in recent}
    for ordinal, kind, unit, phase, numel, *_ in _trails[group].recent:
        other = theirs.get(ordinal)
        if other is not None and [kind, unit, numel] != [other[1], other[2], other[4]]:
            return (
                f"the ranks issued different collectives: as number {ordinal} of their group rank {dist.get_rank()} "
                f"{kind} of unit {unit!r} ({phase}), rank {rank} {other[1]} of unit {other[2]!r} ({other[3]})"
            )
    return ""


def _is_elsewhere(
    group: dist.ProcessGroup, ordinal: int, rank: int, theirs: dict[str, Any], inside: dict[str, Any] | None
) -> str:
    """Whether a rank that has not issued this rank's collective is inside a call that needs this rank first."""
    own, last = dist.get_rank(), theirs["num"]
    if inside is None or last >= ordinal or own not in inside["ranks"]:
        return ""
    where = (
        f"rank {rank} is in {inside['what']} between ranks {listed(inside['ranks'])}, to which rank {own} did not come"
    )
    if "round" in inside:
        return where if num_rounds_in(inside["group"]) <= inside["round"] else ""
    # Since the last collective that both issued this rank has issued nothing where the other one is, but what it waits for.
    mine = {entry[0]: entry for entry in _trails[group].recent}.get(last)
    common = {entry[0]: entry for entry in theirs["recent"]}.get(last)
    if mine is None or common is None:
        return ""
    if inside["group"] == group.group_name:
        is_absent = mine[5] == common[5] and _num_calls(group) - mine[5] == _trails[group].num - last
    else:
        is_absent = inside["is_world"] and -1 < mine[6] == common[6] == _num_calls_in_world()
    return where if is_absent else ""


class _Watch:
    """Publishes this rank's position while it makes no progress, once for each position."""

    def __init__(self) -> None:
        self._num_passed, self._thread_id = 0, 0
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._published: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def passes(self) -> None:
        """Note that this thread issues a collective."""
        self._num_passed += 1
        self._thread_id = threading.get_ident()
        if self._thread is None or not self._thread.is_alive():  # none yet, or the process was forked
            self._ends = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._ends,), name="crossframe watch", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Stop the thread before the interpreter exits."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_SECONDS)

    def publish(self) -> None:
        """Publish this rank's position, unless already published."""
        store = dist.distributed_c10d._get_default_store()
        with self._lock:
            num_passed, inside = self._num_passed, self._inside()
            groups = list(_trails.items())[-_NUM_GROUPS:]
            posted = {group.group_name: {"num": trail.num, "recent": list(trail.recent)} for group, trail in groups}
            # Another thread may have left the call meanwhile, and issued what is posted here.
            text = json.dumps({"groups": posted, "inside": inside if num_passed == self._num_passed else None})
            if self._published.get(store) != text:
                store.set(_key(dist.get_rank()), text)
                self._published[store] = text

    def _run(self, ends: threading.Event) -> None:
        num_seen = -1
        while not ends.wait(_PATIENCE_SECONDS) and dist.is_initialized():
            if num_seen == self._num_passed:
                # A group that ends meanwhile, or its store, is no one's concern here.
                with suppress(Exception):
                    self.publish()
            num_seen = self._num_passed

    def _inside(self) -> dict[str, Any] | None:
        """The blocking call that needs all ranks of a group and that the issuing thread is in, or None."""
        frame: FrameType | None = sys._current_frames().get(self._thread_id)
        while frame is not None:
            # The locals of other frames are left alone: a frame keeps what it was once asked for, tensors too.
            name = frame.f_code.co_name
            if frame.f_code.co_filename == _SOURCE and name in _JOINT and not (local := frame.f_locals).get("async_op"):
                group = local.get("group") or dist.group.WORLD
                assert group is not None
                return {
                    "what": f"torch.distributed.{name}",
                    "group": group.group_name,
                    "ranks": dist.get_process_group_ranks(group),
                    "is_world": group is dist.group.WORLD,
                }
            if frame.f_code is _Round._await.__code__:
                return frame.f_locals["self"].position()
            frame = frame.f_back
        return None


_watch = _Watch()
atexit.register(_watch.end)


def _key(rank: int) -> str:
    return f"crossframe/position/{rank}"
