"""Clipping by hand and by the framework is one thing, and gradients that were clipped otherwise are not."""

import numpy as np
import pytest

from crossframe.recording import RecordingWriter
from crossframe.recording.event_format import REDUCE, STATE, perturbed_run_folder
from crossframe.verdict import Verdict, compare
from crossframe.verdict.measure.clipping import Clipped, clipped_on_one_side
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


def test_clipping_is_undone_on_its_side():
    assert Clipped(0, 0.25).undone == (4.0, 1.0) and Clipped(1, 0.25).undone == (1.0, 4.0)
    assert Clipped(1, 0.25).describe(("a", "b"), 3) == (
        "from step 3 on, gradients were recorded after clipping by 0.25 in b and before it in a; they are compared before "
        "clipping"
    )


def _times(factor, phase=REDUCE):
    return lambda at, step, rank, name, array: factor * array if at == phase else array


OTHER_NORM = _times(2.0, "norm")
"""One that does not show whether the recorded gradients are those before clipping."""


@pytest.mark.parametrize(
    ("factor", "clipped"),
    [(0.5, True), (1 - 3e-11, True), (1 - 3e-12, False), (1.0, False), (-0.5, False), (0.0, False), (np.inf, False)],
)
def test_factors_below_one_beyond_rounding_are_clipping(tmp_path, factor, clipped):
    made = synthetic.manifest(1, steps=1)
    by_hand = synthetic.both(_times(factor), OTHER_NORM)
    a, b = synthetic.record(tmp_path / "a", made), synthetic.record(tmp_path / "b", made, tamper=by_hand)
    found = clipped_on_one_side(Pair(a, b), 0)
    assert (found is not None) is clipped
    assert found is None or (found.side, found.factor) == (1, pytest.approx(factor, rel=1e-15))


@pytest.mark.parametrize(("factor", "clipped"), [(0.985, True), (0.995, False)])
def test_coarse_gradients_show_clipping_by_a_hundredth(tmp_path, factor, clipped):
    def by_hand(phase, step, rank, name, array):
        return array.astype(np.float32) * np.float32(factor) if phase == REDUCE else array

    made = synthetic.manifest(1, steps=1, dtype="bfloat16")
    a = synthetic.record(tmp_path / "a", made)
    b = synthetic.record(tmp_path / "b", made, tamper=synthetic.both(by_hand, OTHER_NORM))
    assert (clipped_on_one_side(Pair(a, b), 0) is not None) is clipped


@pytest.mark.parametrize(("norm", "clipped"), [(1.0100, False), (1.0103, True), (0.9902, False), (0.9900, True)])
def test_a_norm_of_recorded_gradients_shows_no_clipping(tmp_path, norm, clipped):
    """Up to a hundredth of the norm that the loop computed."""
    made = synthetic.manifest(1, steps=1)
    a = synthetic.record(tmp_path / "a", made)
    b = synthetic.record(tmp_path / "b", made, tamper=synthetic.both(_clipped(), _times(0.5 * norm, "norm")))
    assert (clipped_on_one_side(Pair(a, b), 0) is not None) is clipped


@pytest.mark.parametrize(
    ("slot", "settings", "share"),
    [
        pytest.param("exp_avg", {}, 0.1, id="default betas"),
        pytest.param("exp_avg", {"betas": [0.6, 0.9]}, 0.4, id="stated betas"),
        pytest.param("momentum_buffer", {}, 1.0, id="momentum"),
    ],
)
@pytest.mark.parametrize(("off", "clipped"), [(0.99, True), (1.01, False)])
def test_momenta_agree_to_half_of_clipping(tmp_path, monkeypatch, slot, settings, share, off, clipped):
    """Halved gradients would change momenta by half of their share of the gradient: agreement is to half of this."""
    own = RecordingWriter.state
    monkeypatch.setattr(
        RecordingWriter, "state", lambda writer, step, unit, _, pieces: own(writer, step, unit, slot, pieces)
    )

    def moved(phase, step, rank, name, array):
        if phase != "state":
            return array
        gradient = np.mean([synthetic.sample_grad(0, each, name) for each in range(synthetic.SAMPLES)], axis=0)
        return array + off * share * (1 - 0.5) / 2 * gradient

    made = synthetic.manifest(1, steps=1, settings=settings)
    a, b = (
        synthetic.record(tmp_path / name, made, tamper=tamper)
        for name, tamper in (("a", None), ("b", synthetic.both(moved, _clipped())))
    )
    assert (clipped_on_one_side(Pair(a, b), 0) is not None) is clipped


@pytest.mark.parametrize(
    "entry", [1.0, 0.76, 0.74, 0.5], ids=["equal", "less than half apart", "more than half apart", "halved"]
)
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
    assert (clipped_on_one_side(Pair(a, b), 0) is not None) == (entry > 0.75)


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


@pytest.mark.parametrize(
    ("stated", "clipped"),
    [((1.0, None), True), ((1.009, None), True), ((1.02, None), False), ((None, None), False), ((1.0, 1.0), False)],
    ids=["stated", "stated to a hundredth", "another norm", "not stated", "stated by both"],
)
def test_a_stated_norm_shows_clipping_without_known_state(tmp_path, monkeypatch, stated, clipped):
    monkeypatch.setattr(RecordingWriter, "state", lambda *args: None)
    tampers = [_updated(1.0, noise=0.1), synthetic.both(_updated(1.0, noise=0.1), _clipped())]
    plain = [
        synthetic.record(tmp_path / f"plain{i}", synthetic.manifest(1, steps=1), tamper=each)
        for i, each in enumerate(tampers)
    ]
    norm = np.sqrt(sum(np.square(plain[1].full(REDUCE, 0, name)).sum() for name in plain[1].manifest.params))
    runs = []
    for i, (tamper, clip) in enumerate(zip(tampers, stated, strict=True)):
        settings = {} if clip is None else {"clip": float(clip * norm)}
        runs.append(
            synthetic.record(tmp_path / str(i), synthetic.manifest(1, steps=1, settings=settings), tamper=tamper)
        )
    for side, pair in enumerate((runs, runs[::-1])):
        found = clipped_on_one_side(Pair(*pair), 0)
        assert (found is not None and found.side == 1 - side) == clipped
