"""What comparisons in this folder say is kept in comparisons/, next to what each test asserts."""

import re
from pathlib import Path

import pytest

from crossframe.verdict import PairVerdict
from tests.core.helpers.kept_texts import keep_calls

FOLDER = Path(__file__).with_name("comparisons")
# The former keeps figures of its own, and tests of the latter share comparisons.
LEFT_OUT = ("test_golden_verdicts", "test_sketched")
# An edit of a bias that is rounding alone: whether a fit explains it depends on the machine's instructions.
OF_ROUNDING = (
    "test_an_edit_that_rounding_leaves_out_of_one_run_is_rounding",
    "test_edits_that_differ_between_runs_are_found",
)
A_PATH = re.compile(r"(?<!\S)/\w\S*")


@pytest.fixture(autouse=True)
def kept_comparisons(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the result of each call of `compare` in a test module with the one that is kept."""
    if request.path.stem not in LEFT_OUT and request.node.name not in OF_ROUNDING:
        keep_calls(request, monkeypatch, "compare", FOLDER, told)


def told(found: PairVerdict) -> str:
    """The verdict and its reason, where runs part, and sums over the quantities beyond their bounds.

    Within bounds a difference is rounding, whose size depends on the machine's instructions.
    """
    beyond = [each for each in found.judged if each.beyond]
    within = any(not each.beyond and not each.equal for each in found.judged)
    lines = [
        f"{found.verdict.value}: {found.reason}",
        f"{found.steps} steps, {len(found.judged)} quantities, {_few(len(beyond))} beyond, "
        f"{'some' if within else 'none'} within, {sum(each.used is not None for each in found.judged)} with a bound",
        f"differences {sum(min(each.difference, 1e9) for each in beyond):.3g}, "
        f"multiples of bounds {sum(min(each.used or 0.0, 1e9) for each in beyond):.3g}",
    ]
    for what, number in (
        ("losses", found.max_relative_loss_difference),
        ("parameters", found.max_relative_parameter_difference),
        ("share of the spread", found.limit_used),
        ("share that is judged", found.judged_share),
    ):
        if number is not None:
            lines.append(f"{what} {number:.3g}")
    if where := found.first_divergence:
        lines.append(f"parts in {where.event} on rank {where.rank}, elements {where.start}:{where.stop}")
    if found.diagnosis:
        lines.append(f"{found.diagnosis.signature}, {found.diagnosis.evidence}")
    return A_PATH.sub("PATH", " | ".join([*lines, *found.zero_gradient_parameters, *found.settings, *found.notes]))


def _few(number: int) -> str:
    """A number of quantities. Of many, one may lie at its bound."""
    return str(number) if number < 10 else "many"
