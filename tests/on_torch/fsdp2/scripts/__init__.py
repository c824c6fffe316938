"""Scripts that use fully_shard, in modules by subject. test_scripts.py runs each with torch's function and with ours.

To add one, write a function of a `Side` in the module of its subject and decorate it with `scenario`. It returns what a script
sees: tensors, names, dtypes, attributes, exceptions (see tests/on_torch/helpers/scripts.py). `refusal` is for scripts that torch
rejects.

Models have sizes that no world size divides, so that shards are uneven and padded.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed.fsdp

from tests.on_torch.helpers.scenarios import Scenario
from tests.on_torch.helpers.scripts import Side, raised

SCENARIOS: dict[str, Scenario] = {}


def scenario(
    num_ranks: int = 2, needs: str = "", name: str = "", differs: str = "", exhaustive: bool = False
) -> Callable[[Callable], Callable]:
    """Register a scenario.

    Args:
        num_ranks: the number of ranks that run it.
        needs: a method or class that older versions of torch lack; the test is skipped there.
        name: of the test, if not the function's.
        differs: how torch differs from ours; the test must fail.
        exhaustive: run it with `pytest --exhaustive` alone.
    """
    fsdp = torch.distributed.fsdp
    marks: list[pytest.MarkDecorator] = []
    if needs and not any(hasattr(owner, needs) for owner in (fsdp.FSDPModule, fsdp)):
        marks.append(pytest.mark.skip(reason=f"this version of torch has no {needs}"))
    elif differs:
        marks.append(pytest.mark.xfail(strict=True, reason=differs))
    if exhaustive:
        marks.append(pytest.mark.exhaustive)

    def register(fn: Callable[[Side], Any]) -> Callable[[Side], Any]:
        SCENARIOS[name or fn.__name__] = Scenario(fn, Side, num_ranks, tuple(marks))
        return fn

    return register


def refusal(num_ranks: int = 2, needs: str = "") -> Callable[[Callable], Callable]:
    """Register a script that torch rejects; the exceptions are compared."""

    def register(fn: Callable[[Side], Any]) -> Callable[[Side], Any]:
        def refused(side: Side) -> Any:
            return [raised(lambda: fn(side))]

        scenario(num_ranks, needs, f"refused_{fn.__name__}")(refused)
        return fn

    return register
