"""Whatever is passed to the core's descriptions, nothing but a CrossframeError comes out, and it says something."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossframe.errors import CrossframeError
from crossframe.layout import FlatLayout, PerParamLayout, layout_from_json
from crossframe.mesh import MeshSpec
from crossframe.names import MapEntry, ParamMap
from crossframe.params import ParamSpec
from crossframe.precision import Precision
from crossframe.reduction import custom_factors, divide_factors, mean_factors
from tests.core.random_layouts import QUICK

W, B = ParamSpec("w", (2, 3)), ParamSpec("b", (3,), "bfloat16", requires_grad=False)
ATOMS = (
    st.none() | st.booleans() | st.integers(-2, 4) | st.floats() | st.text("w(.", max_size=2) | st.binary(max_size=1)
    | st.sampled_from(["float32", "bfloat16", W, B, MapEntry("w", "w"), object(), np.ones(2), int])
)  # fmt: skip
KEYS = st.none() | st.integers() | st.text(max_size=2)
ANYTHING = (
    ATOMS
    | st.lists(ATOMS, max_size=3)
    | st.lists(ATOMS, max_size=3).map(tuple)
    | st.dictionaries(KEYS, ATOMS, max_size=2)
)
SCALARS = st.none() | st.booleans() | st.integers(-2, 4) | st.floats() | st.text("w(.", max_size=2)
JSON_VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.text(max_size=1), SCALARS, max_size=1)
RIGHT = {
    ParamSpec: {"name": "w", "shape": (2,), "dtype": "float32", "aliases": ("v",), "requires_grad": True},
    MeshSpec: {"shard": 2, "replicate": 2},
    FlatLayout: {"params": (W,), "world_size": 2, "keep_original": True, "compute_dtype": None},
    PerParamLayout: {"params": (W,), "world_size": 2},
    MapEntry: {"name": "w", "path": "k", "axes": (1, 0)},
    ParamMap: {"entries": (MapEntry("w", "k"),)},
    ParamMap.from_json: {"rows": [["w", "k", [1, 0]]]},
    Precision: {"stored": "float32", "gathered": "float32", "reduced": "float32", "kept": "float32"},
    custom_factors: {"factor": 2.0},
    divide_factors: {"num_ranks": 2},
    mean_factors: {"num_ranks": 2, "dtype": "float32"},
    layout_from_json: {"fields": FlatLayout((W,), 2, True).to_json(), "params": (W,)},
}
JSON = FlatLayout((W,), 2, True).to_json()


def made_or_refused(make: Any, *args: Any, **fields: Any) -> Any:
    """What is made of these; any error but a CrossframeError with a message goes through."""
    try:
        return make(*args, **fields)
    except CrossframeError as error:
        assert len(str(error)) > 10
        return None


@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__qualname__)
@settings(QUICK, max_examples=60)
@given(st.data())
def test_one_or_more_wrong_fields(make, data):
    wrong = data.draw(st.sets(st.sampled_from(sorted(RIGHT[make])), min_size=1))
    made_or_refused(make, **(RIGHT[make] | {name: data.draw(ANYTHING) for name in sorted(wrong)}))


@settings(QUICK, max_examples=100)
@given(st.data())
def test_json_of_a_layout_with_wrong_fields_gives_a_layout_or_an_error(data):
    kind = data.draw(st.sampled_from(["flat", "per_param"]))
    wrong = data.draw(st.dictionaries(st.sampled_from(sorted(JSON)), JSON_VALUES))
    gone = data.draw(st.sets(st.sampled_from(sorted(JSON))))
    fields = {name: value for name, value in (JSON | {"kind": kind} | wrong).items() if name not in gone}
    made = made_or_refused(layout_from_json, fields, (W,))
    if made is not None:  # and what is made can be used
        hash(made)
        assert layout_from_json(made.to_json(), (W,)) == made
        assert sum(piece.numel for rank in range(made.world_size) for piece in made.pieces(rank)) == W.numel


@settings(QUICK, max_examples=100)
@given(st.lists(ANYTHING, max_size=3) | ANYTHING)
def test_rows_that_are_no_map(rows):
    made = made_or_refused(ParamMap.from_json, rows)
    assert made is None or ParamMap.from_json(made.to_json()) == made


@settings(QUICK, max_examples=100)
@given(ANYTHING, ANYTHING, ANYTHING, ANYTHING, ANYTHING)
def test_a_parameter_that_is_made_can_be_used(name, shape, dtype, aliases, requires_grad):
    for fields in ((name, shape), ("w", shape, "float32", aliases), ("w", (2,), dtype, (), requires_grad)):
        made = made_or_refused(ParamSpec, *fields)
        if made is not None:
            hash(made)
            assert made.numel >= 0
            assert FlatLayout((made,), 2, True).gathered_numel >= made.numel


def test_the_right_fields_are_right():
    for make, fields in RIGHT.items():
        assert make(**fields) is not None
