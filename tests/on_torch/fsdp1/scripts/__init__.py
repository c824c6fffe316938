"""Scripts that use FullyShardedDataParallel, in modules by subject. test_scripts.py runs each with torch's class and with ours.

To add one, write a function of a `Side` in the module of its subject and decorate it with `scenario`. It returns what a script
sees: tensors, names, dtypes, attributes, exceptions (see tests/on_torch/helpers/scripts.py).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.on_torch.helpers.fsdp1_models import Side
from tests.on_torch.helpers.scenarios import EVERY, Scenario

VARIANTS = ("orig", "flat")
SCENARIOS: dict[str, Scenario] = {}


def scenario(
    *variants: str, num_ranks: int = 2, differs: str = "", differs_with: Sequence[str] = VARIANTS
) -> Callable[[Callable], Callable]:
    """Register a scenario under its name and each variant.

    Args:
        variants: "orig" (`use_orig_params=True`) or "flat" (False); both by default. One is enough for a script that does not
            look at parameters, gradients or their names. `pytest --exhaustive` runs both.
        num_ranks: the number of ranks that run it.
        differs: how torch differs from ours; the test must fail.
        differs_with: the variants where it does.
    """

    def register(fn: Callable[[Side], Any]) -> Callable[[Side], Any]:
        for variant in VARIANTS if EVERY or not variants else variants:
            side = functools.partial(Side, use_orig_params=variant == "orig")
            fails = differs and variant in differs_with
            marks = (pytest.mark.xfail(strict=True, reason=differs),) if fails else ()
            SCENARIOS[f"{fn.__name__}-{variant}"] = Scenario(fn, side, num_ranks, marks)
        return fn

    return register
