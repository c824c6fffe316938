"""Two large recordings are told to be equal by the checksums that they state."""

import pytest

from crossframe.cli.compare import equal_as_stated
from crossframe.recording.equal_digests import Stated, exceeds
from tests.core.helpers import synthetic


def test_equal_checksums_tell_that_runs_are_equal(tmp_path):
    for name in ("a", "b"):
        synthetic.write_run(tmp_path / name, synthetic.manifest(settings={"command": f"crossframe record {name}"}))
    said = equal_as_stated(tmp_path / "a", tmp_path / "b", read_anyway=0)
    assert said is not None and said.startswith("equal") and "3 steps on 2 ranks" in said and "not read" in said
    # Small recordings are read: that also verifies them.
    assert equal_as_stated(tmp_path / "a", tmp_path / "b") is None


def last_bit(phase, step, rank, name, array):
    return array + 2e-16 if (phase, step, rank, name) == ("update", 2, 1, "bias") else array


@pytest.mark.parametrize(
    ("fields", "options"),
    [({}, {"tamper": last_bit}), ({}, {"stop_before": 2}), ({"seed": 7}, {}), ({"world_size": 3}, {})],
    ids=["an element", "cut off", "settings", "ranks"],
)
def test_whatever_differs_is_read(tmp_path, fields, options):
    synthetic.write_run(tmp_path / "a", synthetic.manifest())
    synthetic.write_run(tmp_path / "b", synthetic.manifest(**fields), **options)
    for pair in (("a", "b"), ("b", "a")):
        assert equal_as_stated(*(tmp_path / name for name in pair), read_anyway=0) is None


@pytest.mark.parametrize("old", ['"content": ', '"event": "end"'])
def test_an_end_that_states_nothing_is_no_answer(tmp_path, old):
    synthetic.write_run(tmp_path, synthetic.manifest())
    assert Stated.read(tmp_path) is not None
    synthetic.edit_events(tmp_path, old, '"was": ', seal=False)
    assert Stated.read(tmp_path) is None


def test_ranks_without_a_file_or_with_other_steps_state_nothing(tmp_path):
    synthetic.write_run(tmp_path, synthetic.manifest())
    synthetic.edit_events(tmp_path, '"end", "steps": 3', '"end", "steps": 2', seal=False)
    assert Stated.read(tmp_path) is None
    synthetic.write_run(tmp_path, synthetic.manifest(), overwrite=True)
    (tmp_path / "rank00001" / "events.jsonl").unlink()
    assert Stated.read(tmp_path) is None


def test_files_are_counted_up_to_a_limit(tmp_path):
    synthetic.write_run(tmp_path, synthetic.manifest())
    total = sum(file.stat().st_size for file in tmp_path.glob("rank*/*"))
    assert exceeds(tmp_path, total - 1) and not exceeds(tmp_path, total)
