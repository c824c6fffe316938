"""`summon_full_params` for both APIs: unsharded parameters for the user: enter, write back and leave (R18-R24)."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from crossframe.errors import CrossframeError, StateError
from crossframe.unshard import UnshardRequest
from torch_backend.engine._bucket import Writeback
from torch_backend.engine._unit import Unit


@contextmanager
def summon_units(units: Sequence[Unit], request: UnshardRequest) -> Iterator[None]:
    """Summon the full parameters of these units, and reshard them on exit, also after an exception.

    Raises:
        StateError: a unit in forward or backward, or already summoned. No unit changes then.
    """
    _check(units, request)
    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(_summon_unit(unit, request))
        yield


@contextmanager
def _summon_unit(unit: Unit, request: UnshardRequest) -> Iterator[None]:
    unit.summon(request, visible=request.visible(unit.mesh.group_rank))
    failed = True
    try:
        yield
        failed = False
    finally:
        writeback = Writeback.OWN if request.writeback else Writeback.NOTHING
        unit.dismiss(writeback, failed=failed)


@contextmanager
def summon_on_first(units: Sequence[Unit], *, offload_to_cpu: bool) -> Iterator[None]:
    """Summon the full parameters on the first rank only, and scatter its edits to all ranks on exit (R23).

    Raises:
        StateError: as for `summon_units`, and on all other ranks if the first rank raises inside the context. Nothing is written
            then.
        ParamError: on the first rank, a parameter that was replaced by one of another shape.
    """
    request = UnshardRequest(writeback=False, rank0_only=True, offload_to_cpu=offload_to_cpu)
    _check(units, request)
    summoned: list[Unit] = []
    try:
        for unit in units:
            unit.summon(request, visible=_is_first(unit), aside=True)
            summoned.append(unit)
    except BaseException:
        for unit in summoned:
            unit.dismiss(Writeback.NOTHING, failed=True)
        raise
    failed = True
    try:
        yield
        failed = False
    finally:
        _end_on_first(units, failed)


def _is_first(unit: Unit) -> bool:
    return unit.mesh.shards.rank == 0 and unit.mesh.replicas.rank == 0


def _end_on_first(units: Sequence[Unit], failed: bool) -> None:
    """Write back and reshard. All ranks call this, also after an exception; the first rank decides whether to write."""
    refusal: CrossframeError | None = None
    first_failed = failed
    for unit in units:
        try:
            for bucket in unit.buckets:
                bucket.check_shown()
        except CrossframeError as error:
            refusal = refusal or error
    for unit in [unit for unit in units if unit.buckets][:1]:
        flag = torch.tensor([failed or refusal is not None], dtype=torch.uint8, device=unit.device)
        unit.mesh.replicas.broadcast([flag])
        unit.mesh.shards.broadcast([flag])
        first_failed = bool(flag.item())
    for unit in units:
        writeback = Writeback.NOTHING if first_failed else Writeback.FIRST
        unit.dismiss(writeback, failed=first_failed)  # the same on all ranks
    if refusal is not None:
        raise refusal
    if first_failed and not failed:
        raise StateError(
            "the first rank raised inside the context in which it alone may edit full parameters: no rank's parameters "
            "were changed; see its traceback"
        )


def _check(units: Sequence[Unit], request: UnshardRequest) -> None:
    for unit in units:
        if unit.executor is not None:
            unit.executor.check_summon()
        unit.check_summon()
    if request.warning:
        warnings.warn(request.warning, stacklevel=6)
