"""Clipping by hand and by the framework is one thing, and gradients that were clipped otherwise are not."""

import numpy as np
import pytest

from crossframe.recording import RecordingWriter
from crossframe.recording.event_format import REDUCE, STATE, perturbed_run_folder
from crossframe.verdict import Verdict, compare
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
