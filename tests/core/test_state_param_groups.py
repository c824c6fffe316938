"""Optimizer state by name and by id, and its groups (R37)."""

import copy
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.errors import CrossframeError, StateDictError
from crossframe.params import ParamSpec
from crossframe.state import grouped_units, state_by_id, state_by_name, ungrouped_units
from tests.core.random_layouts import QUICK


@st.composite
def optimizers(draw):
    """An optimizer's groups of parameters, and its state dict by id; some parameters untouched."""
    num_params = draw(st.integers(1, 8))
    params = [ParamSpec(f"m.p{i}", (2,), aliases=(f"t{i}",) if draw(st.booleans()) else ()) for i in range(num_params)]
    cuts = sorted(draw(st.sets(st.integers(1, num_params))) | {0, num_params})
    ranges = [range(start, stop) for start, stop in pairwise(cuts)]
    groups = [
        {"params": list(ids), "lr": draw(st.sampled_from([0.1, 0.2])), "betas": (0.9, 0.95), "tag": None}
        for ids in ranges
    ]
    touched = draw(st.sets(st.integers(0, num_params - 1)))
    own = [[params[i] for i in ids] for ids in ranges]
    return own, {"state": {i: {"step": i} for i in sorted(touched)}, "param_groups": groups}


@QUICK
@given(optimizers())
def test_R37_by_name_and_back_is_the_same_and_hyperparameters_go_along(optimizer):
    own, by_id = optimizer
    params = [spec for group in own for spec in group]
    before = copy.deepcopy(by_id)
    by_name = state_by_name(by_id, own)
    assert list(by_name["state"]) == [params[i].name for i in by_id["state"]]
    for old, new in zip(by_id["param_groups"], by_name["param_groups"], strict=True):
        assert new == old | {"params": [params[i].name for i in old["params"]]}
    assert state_by_id(by_name, own) == by_id == before


@QUICK
@given(optimizers(), st.randoms())
def test_R37_names_find_their_ids_in_an_optimizer_of_another_order(optimizer, random):
    own, by_id = optimizer
    saved = [spec for group in own for spec in group]
    other = [random.sample(group, len(group)) for group in own]
    random.shuffle(other)
    loading = [spec for group in other for spec in group]
    found = state_by_id(state_by_name(by_id, own), other)
    # An optimizer goes through the groups that it is given and its own side by side.
    given = [i for group in found["param_groups"] for i in group["params"]]
    assert given == list(range(len(loading)))
    assert {loading[i].name: state for i, state in found["state"].items()} == {
        saved[i].name: state for i, state in by_id["state"].items()
    }
    hyper = {frozenset(saved[i].name for i in group["params"]): group["lr"] for group in by_id["param_groups"]}
    for group, mine in zip(found["param_groups"], other, strict=True):
        assert group["lr"] == hyper[frozenset(spec.name for spec in mine)]


def test_R31_any_name_of_a_shared_parameter_is_its_id_and_both_are_it_once():
    own = [[ParamSpec("w", (2,)), ParamSpec("wte", (2,), aliases=("head",))]]
    by_name = {"state": {"head": {"step": 1}}, "param_groups": [{"params": ["w", "wte", "head"]}]}
    assert state_by_id(by_name, own) == {"state": {1: {"step": 1}}, "param_groups": [{"params": [0, 1]}]}


def test_R37_what_else_a_state_dict_has_goes_along():
    by_name = {"state": {}, "param_groups": [{"params": ["a", "b"]}], "loss_scale": 3}
    assert state_by_id(by_name, PARAMS)["loss_scale"] == 3


@pytest.mark.parametrize("groups", [[["a"], ["b"]], [["b", "a"], []], [["a", "b"], []]])
def test_R37_groups_that_are_not_the_optimizers_are_refused(groups):
    by_name = {"state": {}, "param_groups": [{"params": names} for names in groups]}
    with pytest.raises(StateDictError, match=r"groups parameters as .* the optimizer as \[\[0, 1\]\]"):
        state_by_id(by_name, PARAMS)


PARAMS = [[ParamSpec("a", (2,)), ParamSpec("b", (2,))]]


@pytest.mark.parametrize(
    ("groups", "state", "said"),
    [
        ([{"params": ["a", "b"]}], {"c": {}}, "names 'c', which this optimizer does not hold: expected .'a', 'b'."),
        ([{"params": ["a", "b", "d"]}], {"c": {}}, "names 'c', 'd'"),
        ([{"params": ["a"]}], {}, r"\[1\] of this optimizer are in no parameter group"),
        ([{"params": ["a", "b"]}, {"params": ["b"]}], {}, "parameter 1 is in the groups 0 and 1"),
        ([{"lr": 1}], {}, "list of 'params'"),
        ([{"params": "ab"}], {}, "list of 'params'"),
        ([3], {}, "parameter group"),
        (None, {}, "param_groups"),
        ([{"params": ["a", "b"]}], None, "param_groups"),
        ([{"params": [["a"], "b"]}], {}, "names"),
    ],
)
def test_R37_state_dicts_that_do_not_fit_are_refused_by_name(groups, state, said):
    with pytest.raises(StateDictError, match=said):
        state_by_id({"state": state, "param_groups": groups}, PARAMS)


@pytest.mark.parametrize("wrong", [None, {}, {"state": {}}, [], 3])
def test_R37_what_is_no_state_dict_is_refused(wrong):
    for convert in (state_by_id, state_by_name):
        with pytest.raises(StateDictError, match="'state' and 'param_groups'"):
            convert(wrong, PARAMS)


def test_R37_ids_that_no_parameter_has_are_refused():
    for wrong in (2, -1, True, "a"):
        with pytest.raises(StateDictError, match="does not hold"):
            state_by_name({"state": {wrong: {}}, "param_groups": [{"params": [0, 1]}]}, PARAMS)


@pytest.mark.parametrize("own", [None, [None], PARAMS[0], [["a", "b"]], {"a": 1}, ["ab"]])
def test_R37_an_optimizer_is_described_by_groups_of_parameters(own):
    by_name = {"state": {}, "param_groups": [{"params": ["a", "b"]}]}
    for convert in (state_by_id, state_by_name):
        with pytest.raises(StateDictError, match="lists of ParamSpec"):
            convert(by_name, own)


UNITS = [("a", "b"), ("c",), ("d", "e")]


def test_R37_groups_of_flat_parameters_are_groups_of_what_is_inside_and_back():
    flat = [{"params": [2, 0], "lr": 0.1}, {"params": [1], "lr": 0.2}]
    inside = ungrouped_units(flat, UNITS)
    assert inside == [{"params": ["d", "e", "a", "b"], "lr": 0.1}, {"params": ["c"], "lr": 0.2}]
    assert grouped_units(inside, UNITS, [[2, 0], [1]]) == flat
    assert grouped_units(inside, UNITS, [[1], [0, 2]]) == [{"params": [1], "lr": 0.2}, {"params": [0, 2], "lr": 0.1}]
    with pytest.raises(StateDictError, match="the optimizer as"):
        grouped_units(inside, UNITS, [[0], [1, 2]])


def test_R37_one_flat_parameter_cannot_be_in_two_groups():
    groups = [{"params": ["a", "c"]}, {"params": ["d", "e", "b"]}]
    with pytest.raises(StateDictError, match=r"'a' is in parameter group 0 and 'b' in group 1.*use_orig_params"):
        grouped_units(groups, UNITS, [[0, 1], [2]])


@pytest.mark.parametrize(
    "groups", [None, [], [{"params": [0, 1]}], [{"params": [0, 1, 2, 3]}], [{"params": [0, 1, 2]}, {"params": [0]}]]
)
def test_R37_groups_that_do_not_fit_the_units_are_refused(groups):
    with pytest.raises(CrossframeError):
        ungrouped_units(groups, UNITS)
