"""Steps that were not recorded and may contain a cause, and what is earlier in causal order."""

from types import SimpleNamespace

import pytest

from crossframe.recording import Schedule
from crossframe.verdict.compare import _before, _order
from crossframe.verdict.measure.locate import Divergence
from crossframe.verdict.unrecorded_causes import Unrecorded, unseen


def run(*, activations=True, local=True, dense=0):
    """A recording with these tensors at each step; local gradients on rank 1 alone."""
    return SimpleNamespace(
        activations=lambda step: [(0, "h", "output")] * activations,
        has=lambda phase, step, name, rank: (phase, step, name, rank) == ("backward", 5, "w", 1) and local,
        manifest=SimpleNamespace(schedule=Schedule(dense=dense, every=1)),
    )


def pair(a, b, steps=range(9), *, by_rank=True):
    return SimpleNamespace(a=a, b=b, steps=tuple(steps), by_rank=by_rank)


def where(phase, step=5):
    return Divergence(step, phase, 1, "", "w", None, None, phase)


@pytest.mark.parametrize(
    ("steps", "step", "found"),
    [
        pytest.param((0, 1, 4, 6), 4, Unrecorded(2, 5, True), id="after two steps"),
        pytest.param((0, 1, 3, 4), 4, None, id="after a recorded step"),
        pytest.param((4,), 4, Unrecorded(0, 5, True), id="after the first step"),
        pytest.param((0, 1), 0, None, id="in the first step"),
    ],
)
def test_steps_before_a_divergence_may_be_unrecorded(steps, step, found):
    assert unseen(pair(run(), run(), steps), where("update", step)) == found


@pytest.mark.parametrize(("dense", "again"), [((6, 6), False), ((5, 6), True), ((6, 5), True)])
def test_steps_are_recorded_again_unless_they_are_dense(dense, again):
    a, b = (run(dense=each) for each in dense)
    assert unseen(pair(a, b, (0, 1, 2, 3, 5)), where("update")) == Unrecorded(4, 6, again)


ALL, NO_ACTIVATIONS, NO_LOCAL = run(), run(activations=False), run(local=False)


@pytest.mark.parametrize(
    ("phase", "lacking", "by_rank", "is_seen"),
    [
        pytest.param("forward", NO_ACTIVATIONS, True, False, id="loss"),
        pytest.param("backward", NO_ACTIVATIONS, True, False, id="local gradient"),
        pytest.param("buffers", NO_ACTIVATIONS, True, False, id="buffer"),
        pytest.param("backward", NO_LOCAL, True, True, id="local gradient after activations"),
        pytest.param("reduce", NO_ACTIVATIONS, True, True, id="gradient after local ones"),
        pytest.param("reduce", NO_LOCAL, True, False, id="gradient"),
        pytest.param("reduce", NO_LOCAL, False, True, id="gradient of another world after activations"),
        pytest.param("reduce", NO_ACTIVATIONS, False, False, id="gradient of another world"),
        pytest.param("norm", NO_ACTIVATIONS, True, True, id="norm"),
        pytest.param("update", NO_ACTIVATIONS, True, True, id="update"),
        pytest.param("state", NO_LOCAL, True, True, id="state"),
    ],
)
def test_direct_causes_within_the_step_are_seen(phase, lacking, by_rank, is_seen):
    expected = None if is_seen else Unrecorded(5, 6, True)
    for sides in ((ALL, lacking), (lacking, ALL)):
        assert unseen(pair(*sides, by_rank=by_rank), where(phase)) == expected
    assert unseen(pair(ALL, ALL), where(phase)) is None


def test_a_norm_at_an_unrecorded_step_is_unseen():
    assert unseen(pair(ALL, ALL, (0, 1, 2, 3, 4)), where("norm")) == Unrecorded(5, 6, True)


def test_divergences_are_ordered_by_step_phase_and_activation():
    """The batch is before all activations, and the loss after them."""
    recording = SimpleNamespace(
        activations=lambda step: [(0, "h", "input"), (0, "h", "output"), (0, "", "output"), (1, "late", "output")]
    )

    def at(event, module=None, phase="forward", step=1):
        return Divergence(step, phase, None, "", None, None, None, event, module=module)

    places = [
        at("loss", step=0),
        at("optimizer", phase="update", step=0),
        at("input"),
        at("input", "h"),
        at("output", "h"),
        at("output"),
        at("output", "late"),
        at("loss"),
        at("backward", phase="backward"),
    ]
    assert [_order(each, recording)[2] for each in places[2:8]] == [0, 1, 2, 3, 4, 5]
    for i, one in enumerate(places):
        assert [_before(one, other, recording) for other in places] == [i < j for j in range(len(places))]
    assert not _before(None, places[0], recording)
