"""Two runs that call one module in different orders."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

from types import SimpleNamespace

import numpy as np
import pytest

from crossframe.verdict import Verdict, compare
from crossframe.verdict.call_orders import match_calls
from tests.core.helpers.synthetic import SHAPES, only, record
from tests.core.helpers.translated import translate

FIRST, SECOND = {"block": "same", "": "same (call 2)"}, {"block": "same (call 2)", "": "same"}
SAME_NAMES = {name: name for name in SHAPES}
ORDER = "the runs call 'same' in another order"


@pytest.fixture
def pair(tmp_path):
    """Makes two runs whose two calls have these names, of which the second is changed."""

    def made(modules, tamper=None, buffers=(None, None), **options):
        options = {"framework": "torch", **options}
        plain = record(tmp_path / "plain", buffers=buffers[0])
        other = record(tmp_path / "tampered", tamper=tamper, buffers=buffers[1])
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
    assert match_calls(*pair(FIRST)) is None


def test_calls_that_agree_with_no_other_stay_in_order(pair):
    assert match_calls(*pair(FIRST, activations=lambda name, array: array + 1)) is None


def test_inputs_are_the_same_up_to_rounding_and_in_the_rows_of_both(pair):
    a, b = pair(SECOND, activations=lambda name, array: array[:2] * (1 + 1e-6))
    view = match_calls(a, b).view(b)
    assert [at[1:] for at in view.activations(0)] == [at[1:] for at in a.activations(0)]
    assert view.activation(0, 0, 0, "same", "input").shape == (2, 4)


def test_a_bug_is_located_by_number_and_by_input(pair):
    found = compare(*pair(SECOND, tamper=only("forward", "", lambda array: array + 1)))
    where = found.first_divergence
    assert found.verdict is Verdict.BUG and where is not None and where.module == "same", found.reason
    (note,) = (note for note in found.notes if note.startswith(ORDER))
    assert note.startswith(f"{ORDER}; if calls with the same inputs are compared, at step 0 the loss (ranks 0 and 1")


@pytest.mark.parametrize("phase", ["reduce", "update"])
def test_a_bug_after_forward_is_located_where_it_is(pair, phase):
    found = compare(*pair(SECOND, tamper=only(phase, "embed", lambda array: array + 1)))
    where = found.first_divergence
    assert found.verdict is Verdict.BUG and where is not None, found.reason
    assert (where.phase, where.parameter) == (phase, "embed")
    assert f"{ORDER}: calls with the same inputs are compared" in found.notes


def test_buffers_of_a_module_are_compared_whatever_the_order_of_its_calls(pair):
    def mean(value):
        return lambda step, rank: {"same.mean": np.full(3, value * (step + 1))}

    found = compare(*pair(SECOND, buffers=(mean(1.0), mean(2.0))))
    where = found.first_divergence
    assert found.verdict is Verdict.BUG and where is not None and where.buffer == "same.mean", found.reason


class Run:
    """What `match_calls` reads of a recording of one step, in which a module gets these inputs."""

    num_steps, manifest = 1, SimpleNamespace(dtype="float64")

    def __init__(self, *inputs):
        self.inputs = {f"same (call {i + 1})" if i else "same": value for i, value in enumerate(inputs)}

    def recorded_steps(self):
        return (0,)

    def activations(self, step):
        return [(0, call, "input") for call in self.inputs]

    def activation(self, step, rank, microbatch, module, use):
        return self.inputs[module]

    def activation_sketch(self, *at):
        return None


def test_surplus_calls_are_left_out_where_their_names_are_taken():
    first, second, third = (np.full((2, 4), value) for value in (1.0, 2.0, 3.0))
    found = match_calls(Run(first, second), Run(third, second, first))
    assert {call: of for (call, _), ((of, _), _) in found.activations.items()} == {
        "same": "same (call 3)",
        "same (call 2)": "same (call 2)",
    }
    assert found.text == ORDER
    assert match_calls(Run(first, second), Run(first, second, third)) is None


def test_calls_of_one_run_alone_are_named(tmp_path, pair):
    a, b = pair(FIRST)
    once = translate(a, tmp_path / "once", SAME_NAMES, modules={"same": "same"}, framework="torch")
    assert any("of 'same (call 2)'" in note for note in compare(once, b).notes), compare(once, b).notes
