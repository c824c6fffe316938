"""The list of checks: a new one is a function and a line here.

A check is a function `(tallies, scope)`: it tries the cases that the scope hands out and counts them in `tallies[rule]`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TypeVar

from experiments.spec.tally import Tallies

TORCH, REFERENCE, CLOSED_FORM = "torch", "reference", "closed form"
SEED = 0
T = TypeVar("T")


@dataclass(frozen=True)
class Scope:
    """Which cases to try: everything, in `num_parts` parts of which this is one, or a sample."""

    quick: bool = False
    part: int = 0
    num_parts: int = 1

    def take(self, cases: Sequence[T], num_quick: int) -> Sequence[T]:
        """This part of the cases; in the quick form `num_quick` of them, the same ones every time.

        >>> Scope(part=1, num_parts=3).take(range(8), num_quick=2)
        range(1, 8, 3)
        """
        if self.quick:
            return random.Random(SEED).sample(cases, min(num_quick, len(cases)))
        return cases[self.part :: self.num_parts]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        target: "module:function", inside this folder; the module is imported when the check runs.
        rules: the rules that it counts cases of.
        against: what the core is compared with.
        num_parts: into how many parts the full form is cut.
    """

    target: str
    rules: tuple[str, ...]
    against: str
    num_parts: int = 1

    def run(self, scope: Scope) -> Tallies:
        """The tallies of this check over a scope. What the check raises is one unexplained case of each of its rules."""
        tallies = Tallies(self.rules)
        module, _, function = self.target.partition(":")
        try:
            getattr(import_module(f"experiments.spec.{module}"), function)(tallies, scope)
        except Exception as error:
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            at = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where else "?"
            for tally in tallies.values():
                tally.fail(f"{self.target} {scope} stopped at {at}: {type(error).__name__}: {error}")
        return tallies


FLAT = ("R01", "R02", "R03", "R04", "R05", "R06")
STEPS = ("R13", "R14", "R15", "R16", "R28")
LIFECYCLE = ("R12", "R17", "R18", "R19", "R20", "R21", "R22", "R23", "R24")
CHECKS = (
    Check("flat:flat_units", FLAT, TORCH, num_parts=48),
    Check("refusals:zero_dim", ("R07",), TORCH),
    Check("partition:flat_elements", ("R02", "R03", "R04", "R06"), CLOSED_FORM, num_parts=4),
    Check("partition:per_param_elements", ("R07",), CLOSED_FORM),
    Check("partition:shards_and_gather", ("R04", "R05", "R07"), REFERENCE, num_parts=4),
    Check("ragged:blocks_stay_whole", ("R09",), CLOSED_FORM, num_parts=8),
    Check("per_param:single", ("R07",), TORCH, num_parts=8),
    Check("per_param:units", ("R07",), TORCH, num_parts=4),
    Check("post_forward:smaller_groups", ("R08",), TORCH),
    Check("post_forward:groups", ("R08",), TORCH),
    Check("post_forward:other_dims", ("R08",), TORCH),
    Check("trees:flat_order", ("R01",), TORCH, num_parts=4),
    Check("trees:per_param_order", ("R01",), TORCH, num_parts=4),
    Check("mesh:coordinates", ("R10",), TORCH, num_parts=4),
    Check("refusals:flat_unit", ("R11",), TORCH),
    Check("refusals:per_param_unit", ("R11",), TORCH),
    Check("reduction:flat_factors", ("R26",), TORCH),
    Check("reduction:per_param_factors", ("R26", "R27"), TORCH),
    Check("closed_form:divide_products", ("R26",), CLOSED_FORM),
    Check("precision:flat_dtypes", ("R33",), TORCH),
    Check("precision:per_param_dtypes", ("R34",), TORCH),
    Check("steps:flat_plans", STEPS, TORCH, num_parts=8),
    Check("steps:per_param_plans", STEPS, TORCH, num_parts=8),
    Check("norms:norms", ("R30",), TORCH, num_parts=4),
    Check("norms:dtypes", ("R30",), TORCH),
    Check("sums:sums_in_order", ("R32",), CLOSED_FORM),
    Check("sums:any_order", ("R32",), CLOSED_FORM),
    Check("inputs:casts", ("R35",), TORCH),
    Check("unused:missing", ("R29",), TORCH, num_parts=4),
    Check("replaced:data", ("R25",), TORCH),
    Check("shared:sums", ("R31",), TORCH),
    Check("model_state:dicts", ("R36",), TORCH, num_parts=2),
    Check("clean_names:names", ("R36",), TORCH),
    Check("optim_state:states", ("R37",), TORCH, num_parts=4),
    Check("initial:streams", ("R38",), TORCH, num_parts=4),
    Check("model_axes:groups", ("R39",), TORCH, num_parts=4),
    Check("model_axes:parts", ("R39",), TORCH, num_parts=4),
    Check("lifecycle:histories", LIFECYCLE, REFERENCE, num_parts=16),
)
