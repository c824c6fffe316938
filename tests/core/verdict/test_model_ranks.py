"""Values that the ranks which compute one replica together should share, and do not."""

import pytest

from crossframe.recording import Recording
from crossframe.recording.event_format import FORWARD, PARAMETERS, REDUCE, encode, place
from crossframe.verdict import Verdict, compare
from tests.core.helpers import synthetic

OUTPUT = ("block", FORWARD, "block", "output")
GRADIENT = ("block", REDUCE, "block.w", "reduced_grad")
BATCH = ("", FORWARD, "", "input")
PARAMETER = ("", PARAMETERS, "embed", "parameter")


def recorded(folder, *disagreements, difference=0.5):
    """A recording in which model ranks differ in these values at step 0."""
    synthetic.write_run(folder, synthetic.manifest())
    lines = ""
    for unit, phase, name, use in disagreements:
        fields = place(0, 0, phase, use, unit=unit, name=name)
        lines += encode("disagreement", fields | {"difference": difference, "axis": "tp", "ranks": [1, 3]})
    synthetic.edit_events(folder, '{"event": "step", "step": 0', lines + '{"event": "step", "step": 0')
    return Recording.open(folder)


@pytest.mark.parametrize(
    ("disagreements", "where", "said"),
    [
        ([OUTPUT, GRADIENT], (FORWARD, None, "block", "output"), "the output of module 'block'"),
        ([BATCH, GRADIENT], (FORWARD, None, None, "input"), "the batch in"),
        ([GRADIENT], (REDUCE, "block.w", None, "model_ranks"), "the reduced gradient of 'block.w'"),
        ([PARAMETER], (PARAMETERS, "embed", None, "model_ranks"), "'embed'"),
    ],
)
def test_the_first_value_that_differs_is_located(tmp_path, disagreements, where, said):
    right, wrong = recorded(tmp_path / "right"), recorded(tmp_path / "wrong", *disagreements)
    for a, b in ((right, wrong), (wrong, right)):
        found = compare(a, b)
        at = found.first_divergence
        assert found.verdict is Verdict.BUG and at is not None
        assert (at.phase, at.parameter, at.module, at.event, at.ranks, at.step) == (*where, (1, 3), 0)
        assert said in found.reason and "in wrong is not the same on all ranks" in found.reason
        assert "the mesh axis 'tp', ranks 1, 3 differ from the first by 5.0e-01" in found.reason


def test_what_both_runs_have_or_rounding_explains_is_no_bug(tmp_path):
    right = recorded(tmp_path / "right")
    outputs = recorded(tmp_path / "outputs", OUTPUT)  # a program may sum later what a module returns
    rounding = recorded(tmp_path / "rounding", GRADIENT, difference=1e-16)
    both = [recorded(tmp_path / name, GRADIENT) for name in ("a", "b")]
    for pair in ((right, outputs), (right, rounding), both):
        assert compare(*pair).verdict is Verdict.EQUAL
