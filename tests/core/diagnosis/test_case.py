"""What a hypothesis is given: a quantity, its sides, and values of both recordings."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossframe.recording import Recording
from crossframe.recording.event_format import BACKWARD, FORWARD, REDUCE, STATE, UNSHARDED, UPDATE
from crossframe.verdict.diagnosis.case import Case, case_of
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import Quantity
from tests.core.helpers import synthetic
from tests.core.helpers.quantities import quantity


def run(folder: Path, world_size: int = 2, **fields: Any) -> Recording:
    tamper = fields.pop("tamper", None)
    return synthetic.record(folder, synthetic.manifest(world_size, **fields), tamper=tamper)


def case(pair: Pair, phase: str = REDUCE, name: str = "embed", **other: Any) -> Case:
    shape = pair.a.manifest.params[name].shape
    made: Quantity = quantity(np.zeros(shape), np.ones(shape), phase=phase, parameter=name, unit="", **other)
    return case_of(pair, made, lambda each: 0.25)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(run(tmp_path / "a"), run(tmp_path / "b"))


def test_sides_and_names_of_a_case(pair: Pair) -> None:
    own = case(pair)
    assert (own.names, own.right is pair.a, own.wrong is pair.b, own.limit, own.step) == (
        ("a", "b"),
        True,
        True,
        0.25,
        0,
    )
    assert own.both.right.sum() == 0 and own.both.wrong.sum() == 12 and own.both.limit == 0.25 and own.whole
    other = own.swap()
    assert (other.names, other.right is pair.b, other.swapped, other.both.right.sum()) == (("b", "a"), True, True, 12)
    assert other.swap().swapped is False
    part = own.within(2, 5)
    assert part.sides.wrong.size == 3 and not part.whole and part.cut(np.arange(12)).tolist() == [2, 3, 4]
    assert own.cut(np.arange(12)).size == 12 and own.sides is own.both
    unbound = case_of(pair, quantity(1.0, 2.0, bound=None), lambda each: 0.25)
    assert unbound.limit == 0.0


@pytest.mark.parametrize(("within", "names"), [("", ("a", "b")), ("a", ("a", "a")), ("b", ("b", "b"))])
def test_a_check_within_a_recording_has_it_on_both_sides(pair: Pair, within: str, names: tuple[str, str]) -> None:
    own = case(pair, within=within)
    assert own.names == names
    assert [own.right is pair.a, own.wrong is pair.a] == [name == "a" for name in names]


def test_values_are_read_where_they_are(pair: Pair) -> None:
    own = case(pair)
    first, second = (own.read(pair.a, UPDATE, step, "embed") for step in (0, 1))
    assert first is not None and second is not None
    before = own.before(pair.a, 0, "embed")
    assert before is not None and np.array_equal(before, synthetic.initial("embed", "float64"))
    for step, expected in ((1, first), (2, second)):
        found = own.before(pair.a, step, "embed")
        assert found is not None and np.array_equal(found, expected)
    assert own.read(pair.a, UPDATE, -1, "embed") is None and own.read(pair.a, UPDATE, 3, "embed") is None
    assert (
        own.read(pair.a, STATE, 0, "embed", "exp_avg_sq") is None
        and own.read(pair.a, STATE, 0, "embed", "exp_avg") is not None
    )
    start = own.moment(pair.a, -1, "embed", "exp_avg")
    assert start is not None and start.shape == (4, 3) and not start.any()
    moment = own.moment(pair.a, 0, "embed", "exp_avg")
    assert moment is not None and moment.any()
    assert own.own(pair.a, UNSHARDED, 0, 1, "embed") is not None
    assert own.own(pair.a, UNSHARDED, 1, 1, "embed") is None and own.own(pair.a, UNSHARDED, 3, 1, "embed") is None
    assert own.own(pair.a, UNSHARDED, -1, 1, "embed") is None


def test_parameters_as_a_rank_used_them(tmp_path: Path) -> None:
    other = run(tmp_path / "b", tamper=synthetic.only("unsharded", "embed", lambda array: array + 1, rank=1))
    pair = Pair(run(tmp_path / "a"), other)
    found = [case(pair, BACKWARD, rank=rank).as_used(other, "embed") for rank in (0, 1, None)]
    start = synthetic.initial("embed", "float64")
    for array, more in zip(found, (0, 1, 0), strict=True):
        assert array is not None and np.array_equal(array, start + more)


def test_local_gradients_are_those_of_all_ranks_if_finite(tmp_path: Path, pair: Pair) -> None:
    found = case(pair).local_grads(pair.a, "embed")
    assert found is not None and len(found) == 2 and not np.array_equal(found[0], found[1])
    assert case(pair).local_grads(pair.a, "embed") is not None
    later = case(pair, step=1)
    assert later.local_grads(pair.a, "embed") is None  # step 1 is not dense
    assert case(pair, step=3).local_grads(pair.a, "embed") is None
    spoilt = run(tmp_path / "c", tamper=synthetic.only("backward", "embed", lambda array: array * np.inf, rank=1))
    assert case(Pair(pair.a, spoilt)).local_grads(spoilt, "embed") is None


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {}, 0.0),
        ({"reduce_dtype": "bfloat16"}, {}, 2.0**-8),
        ({}, {"reduce_dtype": "bfloat16"}, 0.0),
        ({"param_dtype": "float16"}, {}, 2.0**-11),
        ({"reduce_dtype": "float32", "param_dtype": "bfloat16"}, {}, 2.0**-24),
    ],
)
def test_the_roundoff_of_a_reduction_is_the_stated_one(
    first: dict, second: dict, expected: float, tmp_path: Path
) -> None:
    runs = [run(tmp_path / side, settings=settings) for side, settings in (("a", first), ("b", second))]
    assert case(Pair(*runs)).reduce_roundoff == expected
    assert case(Pair(*runs)).compute_roundoff == 2.0**-53


def test_runs_of_two_dtypes_reduce_as_the_coarser_one(tmp_path: Path) -> None:
    wide, narrow = run(tmp_path / "a"), run(tmp_path / "b", dtype="float32")
    assert case(Pair(wide, narrow)).reduce_roundoff == case(Pair(wide, narrow)).compute_roundoff == 2.0**-24
    stated = run(tmp_path / "c", dtype="float32", settings={"reduce_dtype": "bfloat16"})
    assert case(Pair(wide, stated)).reduce_roundoff == 2.0**-8
    stated = run(tmp_path / "d", dtype="float32", settings={"reduce_dtype": "float64"})
    assert case(Pair(wide, stated)).reduce_roundoff == 2.0**-53


@pytest.mark.parametrize("kind", ["flat", "per_param"])
def test_elements_of_a_rank_are_those_of_its_shard(kind: str, tmp_path: Path) -> None:
    pair = Pair(run(tmp_path / "a", kind=kind), run(tmp_path / "b", kind=kind))
    own = case(pair)
    layout = dict(pair.b.manifest.units)[""]
    for rank in range(2):
        expected = [
            i
            for piece in layout.pieces(rank)
            if piece.name == "embed"
            for i in range(piece.param_start, piece.param_stop)
        ]
        assert own.elements_of(rank).tolist() == expected
        assert own.elements_of(rank, "block.w").size + own.elements_of(1 - rank, "block.w").size == 15


def activation_case(pair: Pair, module: str, use: str, **other: Any) -> Case:
    value = np.asarray(pair.a.activation(0, 0, 0, module, use))
    made = quantity(value, value + 1, phase=FORWARD, module=module, use=use, parameter="", rank=0, **other)
    return case_of(pair, made, lambda each: 0.25)


def test_earlier_activations_are_the_nearest_first(pair: Pair) -> None:
    last = activation_case(pair, "", "output")
    assert list(last.earlier(same_shape=True)) == [(0, "block", "output"), (0, "block", "input")]
    assert list(activation_case(pair, "block", "output").earlier(same_shape=False)) == [(0, "block", "input")]
    assert list(activation_case(pair, "block", "input").earlier(same_shape=False)) == []
    nobody = case_of(pair, quantity(1.0, 2.0, phase=FORWARD, module="", use="output", parameter=""), lambda each: 0.0)
    assert list(nobody.earlier(same_shape=False)) == []


def test_activations_are_those_of_the_rank(pair: Pair) -> None:
    own = activation_case(pair, "block", "output")
    found = own.activation(pair.a, 0, (0, "block", "input"))
    assert found is not None and np.array_equal(found, pair.a.activation(0, 0, 0, "block", "input"))
    for step in (-1, 1, 3):
        assert own.activation(pair.a, step, (0, "block", "input")) is None
    assert own.activation(pair.a, 0, (1, "block", "input")) is None
    assert (own.module, activation_case(pair, "block", "input").module) == ("block", "")


def test_replicas_are_those_that_a_recording_has(tmp_path: Path) -> None:
    pair = Pair(run(tmp_path / "a", 4, replicate=2), run(tmp_path / "b", 4))
    own = case(pair, replica=1)
    assert own.replicas == (1, 0) and own.replica_of(pair.a) == 1 and own.replica_of(pair.b) == 0
    assert own.swap().replicas == (0, 1) and own.swap().replica_of(pair.a) == 1
