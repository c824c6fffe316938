"""Notes on activations and local gradients that one recording alone has."""

import pytest

from crossframe.recording import RecordingWriter
from crossframe.verdict import Verdict, compare
from tests.core.helpers import synthetic


def without(monkeypatch, directory, method, dropped=lambda *args: True):
    """A recording without some calls of a writer's method."""
    own = getattr(RecordingWriter, method)

    def call(writer, *args, **options):
        if not dropped(*args):
            own(writer, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(RecordingWriter, method, call)
        return synthetic.record(directory)


def test_activations_that_one_side_lacks_are_named(tmp_path, monkeypatch):
    a = synthetic.record(tmp_path / "a")
    b = without(monkeypatch, tmp_path / "b", "activation", lambda *args: args[2:4] == ("block", "output"))
    assert compare(a, a).notes == ()
    for order in ((a, b), (b, a)):
        found = compare(*order)
        assert found.verdict is Verdict.EQUAL, found.reason
        assert found.notes == ("the output of 'block', which a alone recorded, is not compared",)


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("parameters", "initial values"),
        ("activation", "activations"),
        ("local_grads", "local gradients"),
        ("reduced_grads", "reduced gradients"),
        ("state", "optimizer state"),
        ("updated", "the parameters after step 0 and 2 more steps"),
    ],
)
def test_tensors_that_one_side_lacks_are_named(tmp_path, monkeypatch, method, what):
    found = compare(synthetic.record(tmp_path / "a"), without(monkeypatch, tmp_path / "b", method))
    assert found.verdict is Verdict.EQUAL, found.reason
    assert found.notes == (f"{what}, which a alone recorded, are not compared",)


@pytest.mark.parametrize(
    ("method", "dropped", "what"),
    [
        pytest.param("updated", lambda *args: args[0] > 0, "the parameters after step 1 and 1 more step", id="steps"),
        # As of a module that is compiled.
        pytest.param(
            "local_grads",
            lambda *args: args[1] == "block",
            "the local gradient of 'block.k_bias' and 1 more parameter",
            id="gradients",
        ),
        pytest.param(
            "activation",
            lambda *args: args[2] == "block",
            "the input of 'block' and 1 more activation",
            id="activations",
        ),
    ],
)
def test_one_more_tensor_is_singular(tmp_path, monkeypatch, method, dropped, what):
    a = synthetic.record(tmp_path / "a")
    b = without(monkeypatch, tmp_path / "b", method, dropped)
    assert f"{what}, which a alone recorded, are not compared" in compare(a, b).notes


def test_parameters_after_the_last_step_may_be_unknown_to_one_side(tmp_path, monkeypatch):
    a = synthetic.record(tmp_path / "a")
    last = a.recorded_steps()[-1]
    b = without(monkeypatch, tmp_path / "b", "updated", lambda *args: args[0] == last)
    for order in ((a, b), (b, a)):
        found = compare(*order)
        assert found.verdict is Verdict.EQUAL, found.reason
        assert found.notes == (f"the parameters after step {last}, which a alone recorded, are not compared",)
