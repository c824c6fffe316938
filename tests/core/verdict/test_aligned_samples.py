"""Activations of two world sizes are held against one another sample by sample."""

import numpy as np
import pytest

from crossframe.recording import Recording
from crossframe.recording.event_format import perturbed_run_folder
from crossframe.verdict import Verdict, compare
from crossframe.verdict.measure.aligned_samples import aligned, rows_of, unmatched
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
