"""Activations of two world sizes are held against one another sample by sample."""

from types import SimpleNamespace

import numpy as np
import pytest

from crossframe.recording import Recording
from crossframe.recording.batches import Batch
from crossframe.recording.event_format import perturbed_run_folder
from crossframe.verdict import Verdict, compare
from crossframe.verdict.measure.aligned_samples import Rows, aligned, in_place, rows_of, unmatched
from tests.core.helpers import synthetic


def run(folder, world_size, **options):
    made = {name: options.pop(name) for name in ("schedule", "settings") if name in options}
    return synthetic.record(folder, synthetic.manifest(world_size, **made), **options)


@pytest.mark.parametrize("worlds", [(1, 2), (2, 3), (3, 1)])
def test_rows_of_the_same_sample_are_held_against_one_another(tmp_path, worlds):
    a, b = (run(tmp_path / name, world) for name, world in zip("ab", worlds, strict=True))
    found = list(aligned(a, b, 0))
    assert [at for at, rank, *_ in found if rank == 0] == [
        (0, "block", "input"),
        (0, "block", "output"),
        (0, "", "output"),
    ]
    for _, rank, ours, theirs in found:
        assert ours.shape == (synthetic.SAMPLES // worlds[0], 4)
        assert np.array_equal(ours, theirs), rank
    assert len({rank for _, rank, *_ in found}) == worlds[0]


def test_a_sample_that_differs_shows_in_what_the_module_made_of_it(tmp_path):
    def off(phase, step, rank, name, array):
        if (phase, rank, name) == ("output", 1, "block"):
            array = array.copy()
            array[-1, 2] += 1
        return array + 1e-3 if phase == "forward" else array

    found = compare(run(tmp_path / "a", 1), run(tmp_path / "b", 3, tamper=off))
    assert found.verdict is Verdict.BUG
    where = found.first_divergence
    assert where is not None
    # The last of rank 1's samples 1 and 4 is the fifth of six: its element 2 is the 18th of 24.
    assert (where.event, where.unit, where.rank, where.start, where.stop) == ("output", "block", None, 18, 19)


def test_the_limit_of_more_samples_is_that_of_so_many_elements(tmp_path):
    def noise(seed, size):
        return synthetic.jitter(seed, size, by_rank=True)

    a = run(tmp_path / "a", 1)
    for i in range(1, 5):
        synthetic.record(a.directory / perturbed_run_folder(i), a.manifest, tamper=noise(i, 1e-6))
    for world_size in (2, 3):
        quiet = run(tmp_path / f"b{world_size}", world_size, tamper=noise(9, 1e-6))
        assert compare(a, quiet).verdict is compare(quiet, a).verdict is Verdict.ROUNDING
        loud = run(tmp_path / f"c{world_size}", world_size, tamper=noise(9, 1e-3))
        for found in (compare(a, loud), compare(loud, a)):
            assert found.verdict is Verdict.BUG and found.first_divergence is not None
            assert found.first_divergence.event == "input"


def test_rows_that_cannot_be_told_are_left_out(tmp_path):
    a, b = run(tmp_path / "a", 1), run(tmp_path / "b", 2)
    for recording, rank in ((a, 0), (b, 1)):
        synthetic.edit_events(recording.directory, '"shape": [', '"shape": [1, ', rank=rank)
    opened = [Recording.open(recording.directory) for recording in (a, b)]
    for pair in ((opened[0], b), (a, opened[1])):
        assert {at for at, *_ in aligned(*pair, 0)} == {(0, "block", "output"), (0, "", "output")}
        shape, samples = ((1, 6, 4), 6) if pair[0] is not a else ((1, 3, 4), 3)
        assert compare(*pair).notes[-1] == (
            f"the values of the input of 'block' are not compared: its shape is {shape} for {samples} samples, which must be "
            "the first dim"
        )
    synthetic.edit_events(a.directory, '"sample_ids": [0, 1, 2, 3, 4, 5]', '"sample_ids": []')
    assert rows_of(Recording.open(a.directory), 0) is None
    found = compare(Recording.open(a.directory), b)
    assert found.verdict is Verdict.INCOMPARABLE and "has no sample ids" in found.reason
    first = '"event": "activation", "step": 0, "microbatch": {}'
    for rank in (0, 1):
        synthetic.edit_events(b.directory, first.format(0), first.format(1), rank=rank)
    assert rows_of(Recording.open(b.directory), 0) is None  # three samples in two microbatches


def test_activations_that_cannot_be_matched_say_why(tmp_path, monkeypatch):
    a, b = run(tmp_path / "a", 1), run(tmp_path / "b", 2)
    at = (0, "block", "input")
    assert unmatched(a, b, 0, at) == "not all of its samples were recorded on both sides"
    for rank in (0, 1):
        synthetic.edit_events(b.directory, '"shape": [3, 4]', '"shape": [3, 2, 2]', rank=rank)
    flat = Recording.open(b.directory)
    assert unmatched(a, flat, 0, at) == "its samples have the shapes [(2, 2), (4,)]"
    assert [each[0] for each in aligned(a, flat, 0)] == [(0, "block", "output"), (0, "", "output")]
    synthetic.edit_events(b.directory, '"sample_ids": [0, 2, 4]', '"sample_ids": [0, 2, 7]')
    assert unmatched(a, Recording.open(b.directory), 0, at) == ""
    synthetic.edit_events(b.directory, '"sample_ids": [0, 2, 7]', '"sample_ids": []')
    unknown = "sample ids are not known on all ranks, or do not divide into microbatches"
    assert (
        unmatched(a, Recording.open(b.directory), 0, at) == unmatched(Recording.open(b.directory), a, 0, at) == unknown
    )
    assert list(aligned(a, Recording.open(b.directory), 0)) == list(aligned(Recording.open(b.directory), a, 0)) == []
    monkeypatch.setattr("crossframe.recording.manifest.WHOLE", 0)
    sketched = synthetic.record(tmp_path / "c", synthetic.manifest(3, detail="sketch"))
    too_large = "it is too large to be recorded whole, and a sketch cannot be divided into samples"
    assert unmatched(a, sketched, 0, at) == unmatched(sketched, a, 0, at) == too_large
    assert list(aligned(a, sketched, 0)) == []


def test_a_further_array_next_to_the_same_samples_leaves_activations_whole(tmp_path):
    """Such as a mask that one script passes to its model, which the other one makes inside."""

    def off(phase, step, rank, name, array):
        return array + 1 if (phase, rank, name) == ("input", 1, "block") else array

    a, same, other = run(tmp_path / "a", 2), run(tmp_path / "same", 2), run(tmp_path / "other", 2, tamper=off)
    for recording in (a, same, other):
        for rank, ids in enumerate(("[0, 2, 4]", "[1, 3, 5]")):
            # What is no row of a sample, such as flattened tokens or a sketch, is compared too.
            synthetic.edit_events(recording.directory, '"shape": [', '"shape": [1, ', rank=rank)
            more = "" if recording is a else ", [3, 4]"
            old = f'"sample_ids": {ids}'
            synthetic.edit_events(recording.directory, old, f'{old}, "inputs": [[1, 2]{more}]', rank=rank)
        if recording is not a:
            digest = Recording.open(recording.directory).batch(0, 0).digest
            synthetic.edit_events(recording.directory, digest, "0" * 64)
    a, same, other = (Recording.open(each.directory) for each in (a, same, other))
    found = compare(a, same)
    assert found.verdict is Verdict.EQUAL and "further arrays next to the same samples" in found.notes[0]
    assert len(found.notes) == 1
    where = compare(a, other).first_divergence
    assert where is not None and (where.event, where.module, where.rank) == ("input", "block", 1)


def test_modules_that_see_the_other_samples_of_a_rank_make_another_world_incomparable(tmp_path):
    settings = {"per_rank_statistics": ["stem.norm"]}
    a, b = run(tmp_path / "a", 2, settings=settings), run(tmp_path / "b", 3, settings=settings)
    found = compare(a, b)
    assert found.verdict is Verdict.INCOMPARABLE
    assert "'stem.norm'" in found.reason and "normalises over the samples of its own rank" in found.reason
    assert compare(a, run(tmp_path / "c", 2, settings=settings)).verdict is Verdict.EQUAL


def test_samples_in_another_order_on_a_rank_agree(tmp_path):
    def swapped(phase, step, rank, name, array):
        return array[[1, 0, 2]] if phase in ("input", "output") and rank == 0 else array

    a = run(tmp_path / "a", 2)
    run(tmp_path / "b", 2, tamper=swapped)
    synthetic.edit_events(tmp_path / "b", '"sample_ids": [0, 2, 4]', '"sample_ids": [2, 0, 4]')
    b = Recording.open(tmp_path / "b")
    for found in (compare(a, b), compare(b, a)):
        assert found.verdict is Verdict.EQUAL, found.reason
        assert not found.settings and found.notes[0].startswith(
            "from step 0 on, ranks received the same samples in a different order"
        )
    wrong = run(tmp_path / "c", 2, tamper=swapped)
    assert compare(a, wrong).verdict is Verdict.BUG


class Fed:
    """A fake recording of step 1: batches by rank, and activations by rank and (microbatch, module, use)."""

    def __init__(self, batches, arrays=({},)):
        self.manifest = SimpleNamespace(world_size=len(batches))
        self._batches, self._arrays = batches, arrays

    def batch(self, step, rank):
        assert step == 1
        return self._batches[rank]

    def activations(self, step):
        assert step == 1
        return list(self._arrays[0])

    def activation(self, step, rank, *at):
        return self._arrays[rank][at]

    def activation_shape(self, step, rank, *at):
        return self.activation(step, rank, *at).shape

    def activation_sketch(self, step, rank, *at):
        return None


def of_ids(*ids):
    return [Batch("", each) for each in ids]


def outputs(*microbatches, module="h"):
    """The outputs of a module for samples of these ids: one element for each, its id."""
    return {(i, module, "output"): np.array(ids, float).reshape(-1, 1) for i, ids in enumerate(microbatches)}


def test_samples_are_located_by_rank_microbatch_and_row():
    run = Fed(of_ids((5, 6, 7, 8), (9, 5, 3, 4)), [outputs((), ()), {}])
    ids = [[((5, 0), (6, 0)), ((7, 0), (8, 0))], [((9, 0), (5, 1)), ((3, 0), (4, 0))]]
    places = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
    place = dict(zip([sample for rank in ids for samples in rank for sample in samples], places, strict=True))
    assert rows_of(run, 1) == Rows(ids, place)
    numbered = rows_of(run, 1, numbered=True)
    assert numbered is not None and list(numbered.place.items()) == [((i, 0), at) for i, at in enumerate(places)]
    for ids in ((5, 6, 7), ()):
        assert rows_of(Fed(of_ids((1, 2), ids), [outputs((), ()), {}]), 1) is None


def test_samples_are_aligned_across_ranks_and_microbatches():
    a = Fed(of_ids((1, 2, 3, 4)), [outputs((1, 2), (3, 4))])
    b = Fed(of_ids((4, 2), (3, 1)), [outputs((4,), (2,)), outputs((3,), (1,))])
    found = [(at, rank, ours.tolist(), theirs.tolist()) for at, rank, ours, theirs in aligned(a, b, 1)]
    assert found == [
        ((0, "h", "output"), 0, [[1.0], [2.0]], [[1.0], [2.0]]),
        ((1, "h", "output"), 0, [[3.0], [4.0]], [[3.0], [4.0]]),
    ]
    assert [each[0][0] for each in aligned(b, a, 1)] == [0, 0, 1, 1]


def test_repeated_samples_are_aligned_by_occurrence():
    """As where models take turns with one batch, whole and in halves."""
    values = [np.array(each, float).reshape(-1, 1) for each in ((1, 2), (10, 20), (1,), (2,), (10,), (20,))]
    whole = {(i, "h", "output"): values[i] for i in range(2)}
    halves = {(i, "h", "output"): values[2 + i] for i in range(4)}
    a, b = Fed(of_ids((5, 6, 5, 6)), [whole]), Fed(of_ids((5, 6, 5, 6)), [halves])
    assert [theirs.ravel().tolist() for *_, theirs in aligned(a, b, 1)] == [[1, 2], [10, 20]]
    assert [theirs.ravel().tolist() for *_, theirs in aligned(b, a, 1)] == [[1], [2], [10], [20]]


def test_samples_that_one_side_lacks_are_left_out():
    a = Fed(of_ids((1, 2, 3, 4)), [outputs((1, 2), (3, 4)) | outputs((1, 2), (3, 4), module="more")])
    fewer = Fed(of_ids((1, 2, 3, 5)), [outputs((1, 2), (3, 5))])
    assert [(at, rank) for at, rank, *_ in aligned(a, fewer, 1)] == [((0, "h", "output"), 0)]
    arrays = outputs((1, 2), (3, 4))
    del arrays[0, "h", "output"]
    assert [(at, rank) for at, rank, *_ in aligned(a, Fed(of_ids((1, 2, 3, 4)), [arrays]), 1)] == [
        ((1, "h", "output"), 0)
    ]
    wider = {at: np.repeat(array, 2, axis=1) for at, array in outputs((1, 2), (3, 4)).items()}
    assert list(aligned(a, Fed(of_ids((1, 2, 3, 4)), [wider]), 1)) == []


def test_numbers_are_not_aligned_by_samples():
    arrays = outputs((1, 2), (3, 4)) | {(i, "loss", "output"): np.array(1.0) for i in (0, 1)}
    run = Fed(of_ids((1, 2, 3, 4)), [arrays])
    assert {at[1] for at, *_ in aligned(run, run, 1)} == {"h"}


X, Y, Z = (1, 1), (2, 2), (3, 3)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        pytest.param(((5, 6), (X,)), ((7, 8), (X, Y)), True, id="further array"),
        pytest.param(((5, 6), (X,)), ((7, 8), (X,)), False, id="as many arrays"),
        pytest.param(((5, 6), (Z,)), ((7, 8), (X, Y)), False, id="another array"),
        pytest.param(((5, 5), (X,)), ((7, 8), (X, Y)), False, id="equal samples in a"),
        pytest.param(((5, 6), (X,)), ((7, 7), (X, Y)), False, id="equal samples in b"),
        pytest.param(((5, 5), (X,)), ((7, 7), (X, Y)), False, id="equal samples"),
    ],
)
def test_samples_beside_a_further_array_keep_their_order(first, second, same):
    ranks = [Batch("", (1, 2), (X,)), Batch("", *first)], [Batch("", (3, 4), (X, Y)), Batch("", *second)]
    a, b = (Fed(batches, [outputs(()), {}]) for batches in ranks)
    assert in_place(a, b, 1) is in_place(b, a, 1) is same
    assert in_place(a, Fed(ranks[1], [outputs((), module="other"), {}]), 1) is same
    more = Fed(ranks[1], [outputs((), ()), {}])  # another number of microbatches
    assert not in_place(a, more, 1) and not in_place(a, Fed(ranks[1][1:], [outputs(())]), 1)


def test_samples_beside_a_further_array_align_in_order():
    a = Fed([Batch("", (1, 2, 3, 4), (X,))], [outputs((1, 2), (3, 4))])
    b = Fed([Batch("", (5, 6, 7, 8), (X, Y))], [outputs((1, 2, 3, 4))])
    assert [theirs.tolist() for *_, theirs in aligned(a, b, 1)] == [[[1.0], [2.0]], [[3.0], [4.0]]]
