"""Two runs that call one module in different orders."""

import pytest

from crossframe.verdict import Verdict, compare
from crossframe.verdict.call_orders import in_order_of_calls
from tests.core.helpers.synthetic import SHAPES, only, record
from tests.core.helpers.translated import translate

FIRST, SECOND = {"block": "same", "": "same (call 2)"}, {"block": "same (call 2)", "": "same"}
SAME_NAMES = {name: name for name in SHAPES}
ORDER = "the runs call 'same' in another order"


@pytest.fixture
def pair(tmp_path):
    """Makes two runs whose two calls have these names, of which the second is changed."""

    def made(modules, tamper=None, **options):
        options = {"framework": "torch", **options}
        plain, other = (
            record(tmp_path / "plain"),
            record(tmp_path / "tampered", **({"tamper": tamper} if tamper else {})),
        )
        return (
            translate(plain, tmp_path / "a", SAME_NAMES, modules=FIRST, framework="torch"),
            translate(other, tmp_path / "b", SAME_NAMES, modules=modules, **options),
        )

    return made


def test_calls_with_the_same_inputs_are_compared(pair):
    found = compare(*pair(SECOND))
    assert found.verdict is Verdict.EQUAL, found.reason
    assert f"{ORDER}: calls with the same inputs are compared" in found.notes
    assert {"input of same", "output of same", "output of same (call 2)"} <= {each.name for each in found.judged}


def test_calls_in_the_same_order_need_no_view(pair):
    assert in_order_of_calls(*pair(FIRST)) is None


def test_calls_that_agree_with_no_other_stay_in_order(pair):
    assert in_order_of_calls(*pair(FIRST, activations=lambda name, array: array + 1)) is None


def test_inputs_are_the_same_up_to_rounding_and_in_the_rows_of_both(pair):
    a, b = pair(SECOND, activations=lambda name, array: array[:2] * (1 + 1e-6))
    view, _ = in_order_of_calls(a, b)
    assert [at[1:] for at in view.activations(0)] == [at[1:] for at in a.activations(0)]
    assert view.activation(0, 0, 0, "same", "input").shape == (2, 4)


def test_a_bug_is_located_by_number_and_by_input(pair):
    found = compare(*pair(SECOND, tamper=only("forward", "", lambda array: array + 1)))
    where = found.first_divergence
    assert found.verdict is Verdict.BUG and where is not None and where.module == "same", found.reason
    (note,) = (note for note in found.notes if note.startswith(ORDER))
    assert note.startswith(f"{ORDER}; if calls with the same inputs are compared, at step 0 the loss (ranks 0 and 1")
