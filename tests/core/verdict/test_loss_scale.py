"""A loop that scales its loss and divides its gradients by hand differs in neither from one that uses a scaler."""

from dataclasses import replace

import numpy as np
import pytest

from crossframe.recording import Recording
from crossframe.recording.event_format import BACKWARD, FORWARD, REDUCE, perturbed_run_folder
from crossframe.verdict import Verdict, compare
from crossframe.verdict.measure.loss_scale import _factors, _is_nearer, _power_of_two, scaled_on_one_side, shares_of
from crossframe.verdict.measure.pair import Pair
from tests.core.helpers import synthetic
from tests.core.helpers.faulty import CLIP, Faults, record

SCALE = 4096.0


def scaled(by=SCALE, *, divided_by=None, loss=None, wrong=lambda step, rank, name: 1.0, undivided=()):
    """The faults of a loop that multiplies its loss by `by`, unless the recorder gets another multiple.

    Args:
        wrong: what local gradients are multiplied by besides.
        undivided: parameters whose gradients are not divided.
    """
    divided_by = by if divided_by is None else divided_by

    def local(step, rank, grads):
        return {name: by * wrong(step, rank, name) * grad for name, grad in grads.items()}

    def mean(step, name, grads, old):
        return np.mean([grad[name].astype(float) for grad in grads], axis=0) / (1 if name in undivided else divided_by)

    return Faults(loss=lambda step, x: x * (by if loss is None else loss), local=local, mean=mean)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("by", "loss"), [(SCALE, None), (SCALE, 1.0), (3.0, None)], ids=["4096", "unseen", "3"])
def test_a_scale_by_hand_is_no_difference(tmp_path, dtype, optimizer, by, loss):
    a = record(tmp_path / "a", optimizer=optimizer, dtype=dtype)
    b = record(tmp_path / "b", scaled(by, loss=loss), noise=1, optimizer=optimizer, dtype=dtype)
    for pair in ((a, b), (b, a)):
        found = compare(*pair)
        assert found.first_divergence is None and found.verdict is not Verdict.BUG, found.reason
        assert f"b multiplies its loss by {by:.6g} and divides its gradients" in found.notes[0]


def test_two_scaled_runs_are_compared_as_recorded(tmp_path):
    found = compare(*(record(tmp_path / str(i), scaled(), noise=i) for i in range(2)))
    assert found.verdict is Verdict.ROUNDING and not found.notes


def test_a_scale_by_hand_holds_for_steps_without_local_gradients(tmp_path):
    def by_hand(phase, step, rank, name, array):
        return SCALE * array if phase in ("forward", "backward") else array

    found = compare(synthetic.record(tmp_path / "a"), synthetic.record(tmp_path / "b", tamper=by_hand))
    assert found.verdict is Verdict.EQUAL, found.reason


@pytest.mark.parametrize(("by", "factor"), [(3.0, 3.0), (2.0, 2.0), (1.99, None)])
def test_factors_of_two_or_more_are_those_of_a_scale(tmp_path, by, factor):
    def by_hand(phase, step, rank, name, array):
        return by * array if phase in ("forward", "backward") else array

    a, b = synthetic.record(tmp_path / "a"), synthetic.record(tmp_path / "b", tamper=by_hand)
    for side, pair in enumerate((Pair(b, a), Pair(a, b))):
        found = scaled_on_one_side(pair, 0)
        assert (found is None) == (factor is None)
        assert found is None or (found.side, found.factor) == (side, pytest.approx(factor, rel=1e-12))


def small(phase, step, rank, name, array):
    """Gradients that float16 has only if they are scaled."""
    return array * np.asarray(1e-8, array.dtype) if phase in ("backward", "reduce") else array


def in_half(by):
    """Local gradients in float16, times a scale."""

    def change(phase, step, rank, name, array):
        return (by * array).astype(np.float16) if phase == "backward" else array

    return synthetic.both(small, change)


def test_small_scaled_gradients_in_float16_keep_their_precision(tmp_path):
    made = synthetic.manifest(dtype="float32")
    a = synthetic.record(tmp_path / "a", made, tamper=small)
    b = synthetic.record(tmp_path / "b", made, tamper=in_half(2.0**16))
    for pair in ((a, b), (b, a)):
        found = compare(*pair)
        local = [each.difference for each in found.judged if each.phase == BACKWARD]
        assert local and found.notes, found.reason
        assert max(local) <= 2.0**-11  # one rounding to float16


def test_powers_of_two_leave_float16_gradients_equal(tmp_path):
    def by_hand(phase, step, rank, name, array):
        return array * np.float16(SCALE) if phase in ("forward", "backward") else array

    made = synthetic.manifest(dtype="float16")
    a, b = synthetic.record(tmp_path / "a", made), synthetic.record(tmp_path / "b", made, tamper=by_hand)
    for pair in ((a, b), (b, a)):
        found = compare(*pair)
        assert found.notes and found.verdict is Verdict.EQUAL, found.reason


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_scaled_loss_without_divided_gradients_is_a_bug(tmp_path, optimizer):
    """Adam's updates would not show it."""
    a = record(tmp_path / "a", optimizer=optimizer, clip=None)
    b = record(tmp_path / "b", scaled(divided_by=1.0), noise=1, optimizer=optimizer, clip=None)
    for pair in ((a, b), (b, a)):
        found = compare(*pair)
        assert found.verdict is Verdict.BUG, found.reason
        assert found.first_divergence and (found.first_divergence.step, found.first_divergence.event) == (0, "loss")
        assert not found.notes


@pytest.mark.parametrize("by_hand", [(False, True), (True, True)], ids=["one", "both"])
def test_clipping_by_hand_does_not_divide_a_scaled_loss(tmp_path, by_hand):
    """Gradients are recorded after it then, and it takes out any factor of a loss."""
    faults = [Faults(), scaled(divided_by=1.0)]
    runs = []
    for i in (0, 1):
        own = replace(faults[i], by_hand=CLIP if by_hand[i] else None)
        runs.append(record(tmp_path / str(i), own, noise=i))
    for pair in (runs, runs[::-1]):
        found = compare(*pair)
        assert found.verdict is Verdict.BUG and found.first_divergence, found.reason
        assert found.first_divergence.event == "loss"


def test_a_scaled_loss_alone_is_a_bug(tmp_path):
    a, b = record(tmp_path / "a"), record(tmp_path / "b", Faults(loss=lambda step, x: SCALE * x), noise=1)
    found = compare(a, b)
    assert found.verdict is Verdict.BUG and found.first_divergence and found.first_divergence.event == "loss"


FAULTY = {
    "divided by another scale": (scaled(divided_by=SCALE / 2), REDUCE),
    "one gradient not divided": (scaled(undivided=("norm.bias",)), REDUCE),
    "another loss": (scaled(loss=SCALE * (1 + 1e-6)), FORWARD),
    "a gradient of one rank": (scaled(wrong=lambda s, rank, n: 1 + 1e-6 * (rank == 1 and n == "norm.bias")), BACKWARD),
}


@pytest.mark.parametrize(("faults", "phase"), FAULTY.values(), ids=FAULTY)
def test_a_fault_beside_a_scale_by_hand_is_found(tmp_path, faults, phase):
    a, b = record(tmp_path / "a"), record(tmp_path / "b", faults, noise=1)
    for pair in ((a, b), (b, a)):
        found = compare(*pair)
        assert found.verdict is Verdict.BUG, found.reason
        assert found.first_divergence and (found.first_divergence.step, found.first_divergence.phase) == (0, phase)


@pytest.mark.parametrize("size", [0.0, 1e-3], ids=["right", "wrong"])
@pytest.mark.parametrize("measured", [0, 1], ids=["unscaled", "scaled"])
def test_perturbed_runs_measure_in_the_units_of_their_run(tmp_path, measured, size):
    """Limits of the scaled run would excuse gradients of the other one that are wrong by as much as they are large."""
    wrong = scaled(wrong=lambda step, rank, name: 1 + size * (name == "norm.bias"))
    runs = [record(tmp_path / "a", dtype="float32"), record(tmp_path / "b", wrong, noise=1, dtype="float32")]
    for i in range(1, 5):
        folder = runs[measured].directory / perturbed_run_folder(i)
        record(folder, wrong if measured else None, noise=1 + i, dtype="float32")
    for pair in (runs, runs[::-1]):
        found = compare(*pair)
        assert found.verdict is (Verdict.BUG if size else Verdict.ROUNDING), found.reason
        assert found.first_divergence is None or found.first_divergence.phase == BACKWARD


@pytest.mark.parametrize(
    ("off", "exact", "attributed"),
    [
        pytest.param(1e-7, "", True, id="rounding"),
        pytest.param(1e-5, "", False, id="clipping"),
        # It has 35 % of the weight.
        pytest.param(1e-5, "embed.weight", False, id="clipping of most gradients"),
    ],
)
def test_reduced_gradients_are_the_mean_up_to_the_roundings_of_a_reduction(tmp_path, off, exact, attributed):
    """Two ranks round four times in float32, by 2.4e-7; anything else may have taken out a factor."""

    def both_times(faults):
        def mean(step, name, grads, old, of=faults.mean):
            return (1 - off * (name != exact)) * of(step, name, grads, old)

        return replace(faults, mean=mean)

    a, b = (
        record(tmp_path / str(i), both_times(f), noise=i, dtype="float32") for i, f in enumerate((Faults(), scaled()))
    )
    found = compare(a, b)
    assert (found.verdict is not Verdict.BUG) is attributed and bool(found.notes) is attributed, found.reason


def test_a_power_of_two_is_the_factor_within_the_uncertainty_of_the_median():
    common = 2.0**-7
    for off, snaps in ((0.9 * common, True), (1.1 * common, False)):
        factor = 1024 * (1 + off)
        assert (_power_of_two(factor, [factor], [1.0], common) == 1024) is snaps
    spread = [1024 * (1 + off) for off in (-2e-3, -1e-3, 1e-3, 2e-3, 3e-3)]
    assert _power_of_two(spread[2], spread, [1.0] * 5, 0.0) == 1024
    assert _power_of_two(1500.0, [1500.0], [1.0], common) == 1500.0


@pytest.mark.parametrize(("off", "snaps"), [(1.9, True), (2.1, False)])
def test_powers_of_two_are_near_by_two_roundings(tmp_path, off, snaps):
    """Of both losses."""
    factor = SCALE * (1 + off * 2.0**-8)

    def by_hand(phase, step, rank, name, array):
        return array.astype(np.float32) * np.float32(factor) if phase == "backward" else array

    made = synthetic.manifest(1, dtype="bfloat16")
    a, b = synthetic.record(tmp_path / "a", made), synthetic.record(tmp_path / "b", made, tamper=by_hand)
    found = scaled_on_one_side(Pair(a, b), 0)
    assert found is not None and found.factor == pytest.approx(SCALE if snaps else factor, rel=1e-4)


def test_factors_are_weighted_by_the_smaller_gradient():
    pairs = [
        ([1.0, 0.0], [3.0, 4.0]),  # 3 / 1, weight 1 of 1 and 25
        ([3.0, 4.0], [1.5, 2.0]),  # 12.5 / 25, weight 6.25 of 25 and 6.25
        ([0.0, 0.0], [1.0, 1.0]),
        ([1.0, 1.0], [0.0, 0.0]),
        ([np.nan, 1.0], [1.0, 1.0]),
        ([1e200, 0.0], [1e100, 0.0]),  # a square overflows
        ([1e100, 0.0], [1e250, 0.0]),  # the product overflows
    ]
    assert _factors([(np.array(a), np.array(b)) for a, b in pairs]) == ([3.0, 0.5], [1.0, 6.25])


@pytest.mark.parametrize(
    ("factor", "nearer"),
    [(1.99, True), (2.0, False), (2.01, False), (0.01, True), (0.0, False), (-1.0, False), (np.inf, False)],
)
def test_factors_are_near_as_ratios(factor, nearer):
    assert _is_nearer(factor, 1.0, 4.0) is nearer


def shares(world):
    """A loop that divides the loss of a rank by the samples of all ranks, and sums gradients over ranks."""

    def share(phase, step, rank, name, array):
        return array / world if phase in ("forward", "backward") else array

    return share


def test_losses_that_are_shares_are_added_at_another_world_size(tmp_path):
    def run(world, tamper=None):
        name = f"{world}{tamper is not None}"
        return synthetic.record(tmp_path / name, synthetic.manifest(world), tamper=tamper)

    one, means, two, three = run(1), run(3), run(2, shares(2)), run(3, shares(3))
    for pair in ((one, two), (two, one), (two, three), (two, means), (means, two)):
        found = compare(*pair)
        assert found.verdict in (Verdict.EQUAL, Verdict.ROUNDING), found.reason


def test_shares_are_told_by_local_and_reduced_gradients(tmp_path):
    def run(world, tamper=None, **fields):
        name = f"{world}{tamper is not None}{len(fields)}"
        return synthetic.record(tmp_path / name, synthetic.manifest(world, **fields), tamper=tamper)

    one, two, three, means = run(1), run(2, shares(2)), run(3, shares(3)), run(2)
    for pair, factors in (
        ((one, two), (1.0, 2.0)),
        ((two, one), (2.0, 1.0)),
        ((two, three), (2.0, 3.0)),
        ((three, means), (3.0, 1.0)),
        ((one, run(2, shares(2), settings={"losses": "mean"})), (1.0, 1.0)),
    ):
        assert shares_of(Pair(*pair)) == factors


@pytest.mark.parametrize("factor", [2.0, 1.9])
def test_losses_times_the_number_of_ranks_agree_if_gradients_do(tmp_path, factor):
    def multiplied(phase, step, rank, name, array):
        return factor * array if phase == "forward" else array

    one = synthetic.record(tmp_path / "one", synthetic.manifest(1))
    two = synthetic.record(tmp_path / "two", synthetic.manifest(2), tamper=multiplied)
    for pair in ((one, two), (two, one)):
        found = compare(*pair)
        assert found.verdict is (Verdict.ROUNDING if factor == 2 else Verdict.BUG), found.reason
        note = "the losses of two are multiplied by the number of ranks; gradients agree"
        assert (note in found.notes) is (factor == 2)


def test_a_sum_instead_of_a_mean_is_no_share(tmp_path):
    def summed(phase, step, rank, name, array):
        return 2 * array if phase == "reduce" else array

    one = synthetic.record(tmp_path / "one", synthetic.manifest(1))
    two = synthetic.record(tmp_path / "two", tamper=summed)
    for pair in ((one, two), (two, one)):
        found = compare(*pair)
        assert found.verdict is Verdict.BUG and found.first_divergence is not None
        assert found.first_divergence.phase == REDUCE


def repeated(by=1.0):
    """A loop of two microbatches, each with the loss of the whole batch, whose gradients are multiplied by `by`."""
    return scaled(by, divided_by=1.0, loss=2.0)


def added(recording, number=2):
    """The recording again, whose losses are sums of so many."""
    for rank in range(recording.manifest.world_size):
        synthetic.edit_events(
            recording.directory, '"use": "loss", ', f'"use": "loss", "num_losses": {number}, ', rank=rank
        )
    return Recording.open(recording.directory)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("also", [False, True], ids=["one loss", "mean of microbatches"])
def test_losses_of_the_whole_batch_count_once(tmp_path, world_size, also):
    a = record(tmp_path / "a", world_size=world_size)
    b = added(record(tmp_path / "b", repeated(), noise=1, world_size=world_size))
    for pair in ((added(a) if also else a, b), (b, a)):
        found = compare(*pair)
        assert found.verdict is Verdict.ROUNDING, found.reason
        assert max(found.loss_differences) < 1e-12
        assert (
            "each of the 2 losses that b adds in a step is that of the whole batch; their mean is compared"
            in found.notes
        )


def test_repeated_losses_of_both_runs_are_compared_as_recorded(tmp_path):
    a, b = (added(record(tmp_path / str(i), repeated(), noise=i)) for i in range(2))
    found = compare(a, b)
    assert found.verdict is Verdict.ROUNDING and not found.notes


@pytest.mark.parametrize(
    ("faults", "number"),
    [
        pytest.param(repeated(2.0), 2, id="gradients"),
        pytest.param(replace(repeated(2.0), by_hand=CLIP), 2, id="clipped gradients"),
        pytest.param(scaled(1.0, loss=1.9), 2, id="another factor"),
        pytest.param(scaled(1.0, loss=-2.0), 2, id="another sign"),
        pytest.param(repeated(), 1, id="a loss that the loop stated"),
        pytest.param(scaled(1.0, loss=1e-320), 2, id="tiny"),
    ],
)
def test_other_multiples_of_a_loss_are_a_bug(tmp_path, faults, number):
    by_hand = faults.by_hand
    a = record(tmp_path / "a", Faults(by_hand=by_hand), clip=by_hand)
    b = record(tmp_path / "b", faults, noise=1, clip=by_hand, other={"accumulate": 2})
    for pair in ((a, added(b, number)), (b, a)):
        found = compare(*pair)
        assert found.verdict is Verdict.BUG and found.first_divergence, found.reason
        assert found.first_divergence.event == "loss" and not any("whole batch" in note for note in found.notes)


def replaced(noise):
    """A loop that gives the optimizer other gradients than those of the loss, with two backwards of losses of its own."""

    def mean(step, name, grads, old):
        own = np.random.default_rng([step, *name.encode()]).normal(size=grads[0][name].shape)
        return own + noise * np.mean([grad[name].astype(float) for grad in grads], axis=0)

    return mean


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        pytest.param(0.0, 0.0, Verdict.ROUNDING, id="the same gradients"),
        pytest.param(0.0, 1e-3, Verdict.BUG, id="other gradients"),
    ],
)
def test_losses_decide_nothing_where_the_optimizer_gets_other_gradients(tmp_path, first, second, verdict):
    a = record(tmp_path / "a", Faults(mean=replaced(first)))
    b = added(record(tmp_path / "b", replace(scaled(1.5, loss=1.9), mean=replaced(second)), noise=1))
    for pair in ((a, b), (b, a)):
        found = compare(*pair)
        assert found.verdict is verdict, found.reason
        note = "losses and local gradients differ ("
        assert any(note in each for each in found.notes) is (verdict is Verdict.ROUNDING)


@pytest.mark.parametrize("number", [1, 2])
def test_calls_of_steps_that_add_other_losses_need_not_agree(tmp_path, number):
    def other_call(use, step, rank, name, array):
        return array + 1 if use == "output" else array

    a = synthetic.record(tmp_path / "a")
    b = added(synthetic.record(tmp_path / "b", tamper=other_call), number)
    found = compare(a, b)
    note = "activations differ, since a step adds 1 loss in a and 2 losses in b; losses and gradients agree"
    assert found.verdict is (Verdict.BUG if number == 1 else Verdict.ROUNDING), found.reason
    assert (note in found.notes) is (number == 2)
