"""The foreign pairs are whole, and a map is judged by the elements of every parameter."""

import json

import numpy as np

from crossframe.param_map import MapEntry, ParamMap
from experiments.foreign.run import HERE, judge_map, pairs_of


def test_foreign_pairs_are_whole():
    pairs = pairs_of()
    assert len(pairs) >= 8
    for pair in pairs:
        expected = json.loads((HERE / pair.name / "expected.json").read_text())
        assert all(expected["parameters"].values())
        assert all(pair.script(side).is_file() for side in "ab")
        assert all((HERE / "environments" / f"{name}.txt").is_file() for name in pair.environments)
        assert "given.fault" in pair.script(pair.side).read_text()
        assert "given.fault" not in pair.script("ba"["ab".index(pair.side)]).read_text()


def test_a_map_is_judged_by_elements(tmp_path):
    numbers = {
        "fc.weight": np.arange(1.0, 5).reshape(2, 2),
        "fc.bias": np.array([5.0, 6.0]),
        "norm.weight": np.array([7.0]),
    }
    expected = {
        "fc.kernel": numbers["fc.weight"].T,
        "fc.bias": numbers["fc.bias"],
        "norm.scale": numbers["norm.weight"],
    }
    entries = (MapEntry("fc.weight", "fc.kernel"), MapEntry("fc.bias", "fc.bias"))  # the weight is not transposed
    ParamMap(entries).save(tmp_path / "map.json")
    assert judge_map(tmp_path / "map.json", numbers, expected) == {
        "matched": ["fc.bias"],
        "undecided": ["norm.scale"],
        "wrong": ["fc.kernel"],
    }
    assert judge_map(tmp_path / "none.json", numbers, expected)["undecided"] == list(expected)
