"""Files of shapes as JSON: what they state, and what is refused with a reason."""

import json

import pytest

from crossframe.errors import CrossframeError, UsageError
from crossframe.layout import FlatLayout, PerParamLayout, RaggedLayout
from crossframe.params import ParamSpec
from crossframe.shapes import json_file
from crossframe.shapes.json_file import from_json
from crossframe.shapes.model_shapes import ModelShapes

FULL = {
    "params": [
        {"name": "a.w", "shape": [3, 2], "dtype": "bfloat16", "aliases": ["a.v"], "requires_grad": False},
        {"name": "b", "shape": []},
    ],
    "units": ["a"],
}


@pytest.fixture
def read(tmp_path):
    def write(content):
        path = tmp_path / "small.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return from_json(path, "float16")

    return write


def test_a_mapping_of_names_to_shapes(read):
    found = read({"b": [2, 3], "a": []})
    assert found == ModelShapes("small", (ParamSpec("b", (2, 3), "float16"), ParamSpec("a", (), "float16")))


def test_parameters_with_all_fields_and_units(read):
    params = (ParamSpec("a.w", (3, 2), "bfloat16", ("a.v",), False), ParamSpec("b", (), "float16"))
    assert read(FULL) == ModelShapes("small", params, ("a",))
    assert read({"params": FULL["params"]}).units == ()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[1", "cannot parse it"),
        ("[" * 100_000, "brackets nested too deep"),
        ('{"a": NaN}', "got the number NaN, which JSON has not"),
        ('{"a": [1], "b": [2], "a": [3]}', "the key 'a' stands twice in one mapping"),
        ([1], "got a list at the top"),
        (7, "got 7 at the top"),
        (None, "got null at the top"),
        ({}, "expected at least one parameter, got none"),
        (FULL | {"more": 1}, "alone, got ['more'] besides"),
        ({"params": {}}, '"params": expected a list of parameters, got a mapping'),
        ({"params": [], "units": "a"}, '"units": expected a list of names, got a string'),
        ({"params": ["w"]}, "params[0]: expected a parameter as a mapping"),
        ({"params": [{"name": "w"}]}, "parameter 'w': a parameter needs 'shape', got ['name']"),
        ({"params": [{}]}, "params[0]: a parameter needs 'name' and 'shape', got []"),
        ({"params": [{"name": "w", "shape": [1], "size": 2}]}, "unknown fields ['size'], expected among name, shape, dtype"),
        ({"params": [{"name": 1, "shape": [1]}]}, "params[0]: 'name': expected a string, got 1"),
        ({"w": "3"}, "parameter 'w': 'shape': expected a list, got a string"),
        ({"params": [{"name": "w", "shape": [1], "requires_grad": 1}]}, "'requires_grad': expected true or false, got 1"),
        ({"w": [-1]}, "small.json, parameter 'w': "),
        ({"w": [1] * 65}, "parameter 'w': expected at most 64 dims, got 65"),
        ({"params": FULL["params"], "units": ["c"]}, "no parameter lies under units ['c']: expected names among ['a']"),
        ({"params": FULL["params"], "units": ["a", "a"]}, "units ['a'] stand twice"),
        ({"params": FULL["params"], "units": [""]}, "expected the names of modules as units, got ('',)"),
    ],
)  # fmt: skip
def test_what_is_no_model_is_refused(read, content, reason):
    with pytest.raises(CrossframeError) as refused:
        read(content)
    assert "small.json" in str(refused.value) and reason in str(refused.value)


def test_sizes_are_bounded(read, tmp_path, monkeypatch):
    assert read({"w": [1] * 64}).numel == 1
    monkeypatch.setattr(json_file, "MAX_PARAMS", 2)
    monkeypatch.setattr(json_file, "MAX_UNITS", 1)
    assert len(read({"a": [1], "b": [1]}).params) == 2 and read(FULL).units == ("a",)
    with pytest.raises(UsageError, match="expected at most 2 parameters, got 3"):
        read({"a": [1], "b": [1], "c": [1]})
    params = [{"name": f"{name}.w", "shape": [1]} for name in "ab"]
    with pytest.raises(UsageError, match="expected at most 1 units, got 2"):
        read({"params": params, "units": ["a", "b"]})
    with pytest.raises(UsageError, match=r"absent\.json: expected a file with the shapes of a model, cannot read it"):
        from_json(tmp_path / "absent.json", "float32")


MIXED = ModelShapes(
    "m", (ParamSpec("u.a", (3,)), ParamSpec("b", (2,), "float16"), ParamSpec("u.c", (2,), "float16")), ("u",)
)


def test_units_own_what_lies_under_them():
    assert [(unit, [param.name for param in params]) for unit, params in MIXED.unit_params()] == [
        ("", ["b"]),
        ("u", ["u.a", "u.c"]),
    ]
    assert (MIXED.unit_of("u.a"), MIXED.unit_of("b"), MIXED.unit_of("u.x.y"), MIXED.numel) == ("u", "", "u", 7)


def test_layouts_of_each_kind():
    one, two = MIXED.params[1:2], (MIXED.params[0], MIXED.params[2])
    per_param = MIXED.layouts("per_param", {"": 2, "u": 3})
    assert per_param == (
        ("", PerParamLayout(one, 2)),
        ("u", PerParamLayout(two[:1], 3)),
        ("u", PerParamLayout(two[1:], 3)),
    )
    plain = ModelShapes("m", MIXED.params[1:])
    assert plain.layouts("flat", 2, keep_original=False) == (("", FlatLayout(plain.params, 2, False)),)
    assert plain.layouts("flat", 2) == (("", FlatLayout(plain.params, 2, True)),)
    assert plain.layouts("ragged", 2) == (("", RaggedLayout(plain.params, 2)),)
    with pytest.raises(UsageError, match="unknown kind of layout 'rows'"):
        plain.layouts("rows", 2)


def test_a_shared_parameter_lives_in_one_unit():
    with pytest.raises(CrossframeError, match=r"parameter 'u.a' of unit 'u' is shared with 'b' of unit ''"):
        ModelShapes("m", (ParamSpec("u.a", (3,), "float32", ("b",)),), ("u",))
    with pytest.raises(UsageError, match="expected a non-empty string, got ''"):
        ModelShapes("", MIXED.params)
