"""Clipping by hand and by the framework is one thing, and gradients that were clipped otherwise are not."""

import numpy as np
import pytest

from crossframe.recording import RecordingWriter
from crossframe.recording.event_format import REDUCE, STATE, perturbed_run_folder
from crossframe.verdict import Verdict, compare
from crossframe.verdict.measure.clipping import clipped_on_one_side
from crossframe.verdict.measure.pair import Pair
from tests.core.helpers import synthetic
from tests.core.helpers.faulty import CLIP, Faults, record


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("stated", [CLIP, None], ids=["clip stated", "clip unstated"])
def test_clipping_by_hand_is_no_difference(tmp_path, optimizer, stated):
    a = record(tmp_path / "a", optimizer=optimizer)
    b = record(tmp_path / "b", Faults(by_hand=CLIP), noise=1, optimizer=optimizer, clip=stated)
    for pair in ((a, b), (b, a)):
        found = compare(*pair)
        assert found.verdict is Verdict.ROUNDING, found.reason


def test_both_clipping_by_hand_is_no_difference(tmp_path):
    found = compare(*(record(tmp_path / str(i), Faults(by_hand=CLIP), noise=i) for i in range(2)))
    assert found.verdict is Verdict.ROUNDING


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("wrong", [CLIP / 2, 1.1 * CLIP], ids=["harder", "softer"])
def test_another_clipping_by_hand_is_found(tmp_path, optimizer, wrong):
    a = record(tmp_path / "a", optimizer=optimizer)
    b = record(tmp_path / "b", Faults(by_hand=wrong), noise=1, optimizer=optimizer)
    for pair in ((a, b), (b, a)):
        found = compare(*pair)
        assert found.verdict is Verdict.BUG
        assert found.first_divergence and found.first_divergence.phase in (REDUCE, STATE)


def test_a_fault_behind_clipping_by_hand_is_found(tmp_path):
    def mean(step, name, grads, old):
        terms = np.array([grad[name] for grad in grads])
        return terms[0] / 2 if name == "norm.bias" else terms.mean(axis=0)

    a, b = record(tmp_path / "a"), record(tmp_path / "b", Faults(by_hand=CLIP, mean=mean), noise=1)
    for pair in ((a, b), (b, a)):
        found = compare(*pair)
        assert found.verdict is Verdict.BUG, found.reason
        assert found.first_divergence and found.first_divergence.phase in (REDUCE, STATE)
        assert found.first_divergence.step == 0


def test_clipping_by_hand_is_known_beside_parameters_without_moments(tmp_path, monkeypatch):
    own = RecordingWriter.state

    def without_embedding(writer, step, unit, slot, pieces):
        own(writer, step, unit, slot, {name: piece for name, piece in pieces.items() if name != "embed.weight"})

    monkeypatch.setattr(RecordingWriter, "state", without_embedding)
    a, b = record(tmp_path / "a"), record(tmp_path / "b", Faults(by_hand=CLIP), noise=1)
    for pair in ((a, b), (b, a)):
        found = compare(*pair)
        assert found.verdict is Verdict.ROUNDING, found.reason


def _clipped(*names, off=0.0):
    """Half of the gradients; of these parameters with a part `off` of the largest error that is still the same factor."""

    def change(phase, step, rank, name, array):
        if phase != "reduce":
            return array
        error = np.random.default_rng(1).normal(size=array.shape) * (name in names)
        return 0.5 * array + off * 0.25 * np.linalg.norm(array) * error / max(np.linalg.norm(error), 1e-300)

    return change


def _updated(step_size, decay=0.0, noise=0.0):
    def change(phase, step, rank, name, array):
        if phase != "update":
            return array
        start = synthetic.initial(name, "float64")
        return (
            start * (1 - decay)
            + step_size * (array - start)
            + noise * np.random.default_rng(2).normal(size=array.shape)
        )

    return change


@pytest.mark.parametrize(
    ("gradients", "updates", "clipped"),
    [
        pytest.param(_clipped(), (_updated(1.0), _updated(1.0)), True, id="same updates"),
        pytest.param(_clipped(), (_updated(1.0, 0.01), _updated(1.0, 0.01)), True, id="same updates with decay"),
        pytest.param(_clipped(), (_updated(1.0), _updated(0.7)), False, id="other updates"),
        pytest.param(_clipped(), (_updated(1.0), _updated(0.85)), True, id="nearer to the same updates"),
        pytest.param(_clipped(), (_updated(1.0, noise=0.1),) * 2, False, id="updates that are not linear"),
        pytest.param(_clipped("embed", "bias", off=1.1), (_updated(1.0),) * 2, False, id="two factors of four"),
        pytest.param(_clipped("embed", "bias", off=0.9), (_updated(1.0),) * 2, True, id="one factor with noise"),
        pytest.param(_clipped("bias", off=1.1), (_updated(1.0),) * 2, True, id="one factor of three"),
    ],
)
def test_updates_show_clipping_without_moments(tmp_path, monkeypatch, gradients, updates, clipped):
    monkeypatch.setattr(RecordingWriter, "state", lambda *args: None)
    made = synthetic.manifest(1, steps=1)
    a = synthetic.record(tmp_path / "a", made, tamper=updates[0])
    b = synthetic.record(tmp_path / "b", made, tamper=synthetic.both(updates[1], gradients))
    for side, pair in enumerate((Pair(b, a), Pair(a, b))):
        found = clipped_on_one_side(pair, 0)
        assert (found is not None) == clipped, found
        assert found is None or (found.side == side and found.factor == pytest.approx(0.5, rel=1e-9))


@pytest.mark.parametrize("entry", [1.0, 0.5], ids=["equal", "halved"])
def test_state_of_an_unknown_optimizer_shows_other_gradients(tmp_path, monkeypatch, entry):
    own = RecordingWriter.state
    monkeypatch.setattr(
        RecordingWriter,
        "state",
        lambda writer, step, unit, slot, pieces: own(writer, step, unit, f"1.0.{slot}", pieces),
    )

    def halved(phase, step, rank, name, array):
        return entry * array if phase.startswith("state") else array

    made = synthetic.manifest(1, steps=1)
    a = synthetic.record(tmp_path / "a", made)
    b = synthetic.record(tmp_path / "b", made, tamper=synthetic.both(halved, _clipped()))
    assert a.state_slots(0, "embed") and a.state_slots(0, "embed")[0].startswith("1.0.")
    assert (clipped_on_one_side(Pair(a, b), 0) is not None) == (entry == 1.0)


def test_an_update_of_few_elements_shows_no_clipping(tmp_path, monkeypatch):
    """Adam's first update is the sign of the gradient: two terms fit it for one or two elements alone."""
    monkeypatch.setattr(RecordingWriter, "state", lambda *args: None)

    def signs(phase, step, rank, name, array):
        if phase != "update":
            return array
        start = synthetic.initial(name, "float64")
        return start - 0.01 * np.sign(start - array)

    made = synthetic.manifest(1, steps=1)
    a = synthetic.record(tmp_path / "a", made, tamper=signs)
    b = synthetic.record(tmp_path / "b", made, tamper=synthetic.both(signs, _clipped()))
    assert clipped_on_one_side(Pair(a, b), 0) is None


@pytest.mark.parametrize("measured", [0, 1], ids=["before", "after"])
def test_perturbed_runs_measure_before_or_after_clipping_as_their_run(tmp_path, measured):
    """Clipping divides gradients by 500 here: limits of gradients before it would be 500 times too large after it."""

    def mean(step, name, grads, old):
        factor = 1 + 1e-4 * (name == "norm.bias")
        return factor * np.mean([grad[name].astype(float) for grad in grads], axis=0)

    small, right = CLIP / 100, Faults(by_hand=CLIP / 100)
    for faults, verdict in ((right, Verdict.ROUNDING), (Faults(by_hand=small, mean=mean), Verdict.BUG)):
        folder = tmp_path / verdict.value
        runs = [
            record(folder / "a", dtype="float32", clip=small),
            record(folder / "b", faults, noise=1, dtype="float32", clip=small),
        ]
        for i in range(1, 5):
            own = (None, faults)[measured]
            record(runs[measured].directory / perturbed_run_folder(i), own, noise=1 + i, dtype="float32", clip=small)
        for pair in (runs, runs[::-1]):
            found = compare(*pair)
            assert found.verdict is verdict, found.reason
            assert found.first_divergence is None or found.first_divergence.phase == REDUCE
