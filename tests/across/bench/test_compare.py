"""The benchmark of a comparison: its recordings are valid, and differ where they are meant to."""

from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from experiments.bench.verdict_cost import QUICK, write_sketched


def test_recordings_of_the_benchmark_are_valid(tmp_path):
    for name, noise in (("a", 0.0), ("b", 1e-9), ("again", 0.0)):
        write_sketched(tmp_path / name, QUICK, noise=noise)
    a, b, again = (Recording.open(tmp_path / name) for name in ("a", "b", "again"))
    assert a.num_steps == QUICK.num_steps and a.recorded_steps() == tuple(range(QUICK.num_steps))
    assert compare(a, again).verdict is Verdict.EQUAL
    found = compare(a, b)
    assert found.verdict is Verdict.ROUNDING and found.max_relative_parameter_difference
