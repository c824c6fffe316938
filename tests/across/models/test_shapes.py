"""The shapes of models: those that are named, and those that a file describes."""

import json

import numpy as np
import pytest

from crossframe.errors import CrossframeError, ParamError, UnitError, UsageError
from crossframe.layout import FlatLayout, PerParamLayout, RaggedLayout
from crossframe.params import ParamSpec
from crossframe.shapes import ModelShapes, model_shapes
from experiments.models import MODELS


def file_of(tmp_path, content) -> str:
    path = tmp_path / "shapes.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("name", "num_params", "numel", "num_units"),
    [("llama-3-8b", 291, 8_030_261_248, 32), ("llama-3-405b", 1137, 405_853_388_800, 126)],
)
def test_llama_has_the_published_number_of_parameters(name, num_params, numel, num_units):
    shapes = model_shapes(name, "bfloat16")
    assert (len(shapes.params), shapes.numel, len(shapes.units)) == (num_params, numel, num_units)
    assert {param.dtype for param in shapes.params} == {"bfloat16"} and shapes.name == name
    assert shapes.params[0].name == "model.embed_tokens.weight" and shapes.params[-1].name == "lm_head.weight"
    root, first, *_, last = shapes.unit_params()
    assert [param.name for param in root[1]] == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert (root[0], first[0], last[0]) == ("", "model.layers.0", f"model.layers.{num_units - 1}")
    assert {len(params) for _, params in shapes.unit_params()[1:]} == {9}


def test_a_block_of_llama_405b_is_as_the_configuration_says():
    block = dict(model_shapes("llama-3-405b").unit_params())["model.layers.7"]
    assert {param.name.removeprefix("model.layers.7."): param.shape for param in block} == {
        "self_attn.q_proj.weight": (16384, 16384),
        "self_attn.k_proj.weight": (1024, 16384),
        "self_attn.v_proj.weight": (1024, 16384),
        "self_attn.o_proj.weight": (16384, 16384),
        "mlp.gate_proj.weight": (53248, 16384),
        "mlp.up_proj.weight": (53248, 16384),
        "mlp.down_proj.weight": (16384, 53248),
        "input_layernorm.weight": (16384,),
        "post_attention_layernorm.weight": (16384,),
    }


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_models_here_have_the_shapes_of_their_torch_modules(name):
    module, _ = MODELS[name].make_torch()
    shapes = MODELS[name].model_shapes("float32")
    assert [(param.name, param.shape) for param in shapes.params] == [
        (name, tuple(parameter.shape)) for name, parameter in module.named_parameters()
    ]
    assert shapes.units == MODELS[name].units and shapes.numel == MODELS[name].numel


@pytest.mark.parametrize(
    ("kind", "layout"), [("flat", FlatLayout), ("per_param", PerParamLayout), ("ragged", RaggedLayout)]
)
def test_layouts_hold_every_parameter_once(kind, layout):
    shapes = model_shapes("gpt-tiny", "float64")
    layouts = shapes.layouts(kind, 3)
    assert [unit for unit, _ in layouts] == ["", "blocks.0", "blocks.1"]
    assert all(type(found) is layout and found.world_size == 3 for _, found in layouts)
    held = [param.name for _, found in layouts for param in found.params]
    assert sorted(held) == sorted(param.name for param in shapes.params)
    pieces = [piece for _, found in layouts for rank in range(3) for piece in found.pieces(rank)]
    assert sum(piece.numel for piece in pieces) == shapes.numel


def test_R02_options_of_flat_layouts_reach_them():
    shapes = model_shapes("gpt-tiny")
    ((_, first), *_) = shapes.layouts("flat", 2, keep_original=False)
    assert isinstance(first, FlatLayout) and not first.keep_original
    ((_, first), *_) = shapes.layouts("flat", 2, compute_dtype="bfloat16")
    assert isinstance(first, FlatLayout) and first.alignment_numel == 8


def test_R11_a_per_param_unit_that_mixes_dtypes_is_one_layout_for_each():
    params = (ParamSpec("a", (4,)), ParamSpec("b", (4,), "bfloat16"), ParamSpec("c", (2,)))
    layouts = ModelShapes("m", params).layouts("per_param", 2)
    assert [(unit, [param.name for param in layout.params]) for unit, layout in layouts] == [
        ("", ["a", "c"]),
        ("", ["b"]),
    ]
    with pytest.raises(CrossframeError, match="'a' is float32, 'b' is bfloat16"):
        ModelShapes("m", params).layouts("flat", 2)


def test_R01_a_parameter_belongs_to_the_nearest_unit_and_empty_units_are_left_out():
    params = tuple(ParamSpec(name, (2,)) for name in ("a.b.w", "a.bb.w", "c", "a.b.d.w"))
    shapes = ModelShapes("m", params, units=("a.bb", "a.b", "a", "a.b.d"))
    assert [(unit, [param.name for param in owned]) for unit, owned in shapes.unit_params()] == [
        ("", ["c"]),
        ("a.bb", ["a.bb.w"]),
        ("a.b", ["a.b.w"]),
        ("a.b.d", ["a.b.d.w"]),
    ]


def test_a_file_with_everything(tmp_path):
    entry = {"name": "a.w", "shape": [3, 2], "dtype": "bfloat16", "aliases": ["a.v"], "requires_grad": False}
    path = file_of(tmp_path, {"params": [entry, {"name": "b", "shape": []}], "units": ["a"]})
    shapes = model_shapes(path, "float16")
    assert shapes == ModelShapes(
        "shapes", (ParamSpec("a.w", (3, 2), "bfloat16", ("a.v",), False), ParamSpec("b", (), "float16")), ("a",)
    )


def test_a_plain_mapping_and_params_without_units(tmp_path):
    expected = ModelShapes("shapes", (ParamSpec("b.w", (3,), "float64"), ParamSpec("a", (2, 0), "float64")))
    assert model_shapes(file_of(tmp_path, {"b.w": [3], "a": [2, 0]}), "float64") == expected
    entries = [{"name": "b.w", "shape": [3]}, {"name": "a", "shape": [2, 0]}]
    assert model_shapes(file_of(tmp_path, {"params": entries}), "float64") == expected
    # With a byte order mark, as some editors write it.
    path = file_of(tmp_path, "")
    (tmp_path / "shapes.json").write_bytes(b"\xef\xbb\xbf" + json.dumps({"b.w": [3], "a": [2, 0]}).encode())
    assert model_shapes(path, "float64") == expected


W = {"name": "w", "shape": [2]}
DEEP = 200_000


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        ("", UsageError, ["as JSON", "cannot parse"]),
        ("{'a': [1]}", UsageError, ["as JSON", "line 1"]),
        ("[" * DEEP + "]" * DEEP, UsageError, ["nested too deep"]),
        ('{"w": [' + "9" * 5000 + "]}", UsageError, ["as JSON", "digits"]),
        ('{"w": [NaN]}', UsageError, ["NaN"]),
        ([1, 2], UsageError, ["mapping", "a list at the top"]),
        ("null", UsageError, ["null at the top"]),
        ("3", UsageError, ["got 3 at the top"]),
        ({}, UsageError, ["at least one parameter"]),
        ({"params": []}, UsageError, ["at least one parameter"]),
        ({"params": {}}, UsageError, ['"params"', "a list of parameters", "a mapping"]),
        ({"params": [W], "units": "w"}, UsageError, ['"units"', "a list of names", "a string"]),
        ({"params": [W], "unit": []}, UsageError, ["unit", "besides"]),
        ({"params": [W, 3]}, ParamError, ["params[1]", "a mapping", "got 3"]),
        ({"params": [{"shape": [2]}]}, ParamError, ["params[0]", "'name'", "shape"]),
        ({"params": [{"name": "w"}]}, ParamError, ["params[0]", "'w'", "'shape'"]),
        ({"params": [W | {"size": 3}]}, ParamError, ["'w'", "size", "requires_grad"]),
        ({"params": [W | {"name": 3}]}, ParamError, ["params[0]", "'name'", "a string", "got 3"]),
        ({"params": [W | {"name": ""}]}, ParamError, ["params[0]", "non-empty"]),
        ({"params": [W | {"dtype": "int8"}]}, ParamError, ["'w'", "int8", "float32"]),
        ({"params": [W | {"dtype": None}]}, ParamError, ["'w'", "'dtype'", "null"]),
        ({"params": [W | {"aliases": "v"}]}, ParamError, ["'w'", "'aliases'", "a list"]),
        ({"params": [W | {"aliases": [3]}]}, ParamError, ["'w'", "names as aliases"]),
        ({"params": [W | {"requires_grad": 1}]}, ParamError, ["'w'", "'requires_grad'", "true or false", "got 1"]),
        ({"params": [W, W]}, ParamError, ["'w'", "two parameters"]),
        ('{"w": [1], "v": [2], "w": [1]}', UsageError, ["'w'", "twice"]),
        ({"w": 3}, ParamError, ["'w'", "'shape'", "a list", "got 3"]),
        ({"w": [3, -1]}, ParamError, ["'w'", "sizes >= 0", "-1"]),
        ({"w": [2.0]}, ParamError, ["'w'", "2.0"]),
        ('{"w": [1e999]}', ParamError, ["'w'", "inf"]),
        ({"w": [True]}, ParamError, ["'w'", "True"]),
        ({"w": [2**62, 2]}, ParamError, ["'w'", "overflows"]),
        ({"": [2]}, ParamError, ["non-empty"]),
        ({"w": [2], "units": ["a"]}, ParamError, ["'units'", "sizes"]),
        ({"params": [W], "units": ["a"]}, UnitError, ["'a'", "no parameter lies under"]),
        ({"params": [W | {"name": "ab.w"}], "units": ["a"]}, UnitError, ["'a'", "'ab'"]),
        ({"params": [W | {"name": "a.w"}], "units": ["a", "a"]}, UnitError, ["'a'", "twice"]),
        ({"params": [W], "units": [""]}, UnitError, ["names of modules"]),
        ({"params": [W], "units": [["a"]]}, UnitError, ["names of modules"]),
        ({"params": [{"name": "a.w", "shape": [2], "aliases": ["b.w"]}], "units": ["a"]}, UnitError, ["a.w", "b.w", "R01"]),
    ],
)  # fmt: skip
def test_a_malformed_file_is_refused_by_name(tmp_path, content, kind, words):
    path = file_of(tmp_path, content)
    with pytest.raises(CrossframeError) as caught:
        model_shapes(path)
    assert type(caught.value) is kind
    for word in (path, *words):
        assert word in str(caught.value), (word, str(caught.value))
    assert len(str(caught.value)) < 1500


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00\xd8")
    for path in (str(tmp_path / "none.json"), str(tmp_path / "folder.json"), str(tmp_path / "binary.json"), "a\0.json"):
        with pytest.raises(UsageError, match="shapes of a model"):
            model_shapes(path)


@pytest.mark.parametrize("name", ["llama", "", "gpt.jsn", None, 3, ["gpt"]])
def test_an_unknown_model_is_refused(name):
    with pytest.raises(UsageError, match=r"gpt-tiny, llama-3-8b, llama-3-70b|expected the name of a model"):
        model_shapes(name)


@pytest.mark.parametrize("dtype", ["int8", None, 3, []])
def test_an_unknown_dtype_is_refused(dtype):
    with pytest.raises(ParamError, match="unknown dtype"):
        model_shapes("gpt-tiny", dtype)


def test_wrong_types_give_errors_of_ours():
    w = ParamSpec("a.w", (2,))
    for make, kind in (
        (lambda: ModelShapes("", (w,)), UsageError),
        (lambda: ModelShapes(None, (w,)), UsageError),  # pyright: ignore[reportArgumentType]
        (lambda: ModelShapes("m", [w]), ParamError),  # pyright: ignore[reportArgumentType]
        (lambda: ModelShapes("m", (w,), ["a"]), UnitError),  # pyright: ignore[reportArgumentType]
        (lambda: ModelShapes("m", (w,)).layouts("columns", 2), UsageError),
        (lambda: ModelShapes("m", (w,)).layouts(None, 2), UsageError),  # pyright: ignore[reportArgumentType]
        (lambda: ModelShapes("m", (w,)).layouts("flat", 0), CrossframeError),
    ):
        with pytest.raises(kind):
            make()


def test_the_layouts_of_a_definition_are_those_of_its_shapes():
    definition = MODELS["gpt-tiny"]
    assert definition.unit_layouts(3, "float64") == definition.model_shapes("float64").layouts("flat", 3)
    assert definition.numel == sum(int(np.prod(shape)) for shape in definition.shapes.values())
