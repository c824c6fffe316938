"""Full parameters for the user: enter and leave, whatever the face (R18-R24)."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from crossframe.unshard import UnshardRequest
from torch_backend.unit import Unit


@contextmanager
def summon_units(units: Sequence[Unit], request: UnshardRequest) -> Iterator[None]:
    """Show the user the full parameters of these units, and put everything back afterwards, an exception inside included.

    Raises:
        StateError: a unit that is in its forward or backward, or summoned already. Then none of the units is touched.
    """
    for unit in units:
        if unit.schedule is not None:
            unit.schedule.check_summon()
        unit.check_summon()
    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(_summon_unit(unit, request))
        yield


@contextmanager
def _summon_unit(unit: Unit, request: UnshardRequest) -> Iterator[None]:
    was_full = unit.summon(visible=request.visible(unit.communicator.rank))
    failed = True
    try:
        yield
        failed = False
    finally:
        unit.dismiss(writeback=request.writeback, was_full=was_full, failed=failed)
