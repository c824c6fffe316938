"""Alignment of two models by their values: names, dims and grouping differ, and nothing else is given."""

import itertools
from random import Random

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.alignment import GRADIENTS, MODULES, VALUES, align
from crossframe.alignment.solve import rearrangements, solve, solve_blocks
from crossframe.errors import MappingError
from crossframe.param_map import MapEntry, ParamMap
from crossframe.rearrange import Rearrangement
from tests.core.helpers.random_layouts import QUICK

PATTERNS = [
    "a b -> a b",
    "a b -> b a",
    "h w i o -> o i h w",
    "i h w=4 -> (h w) i",
    "h w=4 o -> o (h w)",
    "(h pair=3 two=2) i -> (h two pair) i",
    "a b=3 c -> 1 (a b) 1 c",
    "(a b=2) (c d=3) -> a c b d",
]


def values(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def block(layer, *, biases=0.0):
    """A transformer's block in torch: (name, value)."""
    at, seed = f"model.layers.{layer}", 100 * layer
    for i, part in enumerate(("q", "k", "v", "o")):
        yield f"{at}.attn.{part}.weight", values((12, 12), seed + i)
        yield f"{at}.attn.{part}.bias", np.full(12, biases, np.float32)
    yield f"{at}.norm1.weight", np.ones(12, np.float32)
    yield f"{at}.norm2.weight", np.ones(12, np.float32)
    yield f"{at}.fc.weight", values((20, 12), seed + 9)


def in_jax(name, value):
    """(path, value) of a parameter in the other model."""
    path = name.replace("model.", "").replace("attn", "attention").replace("norm", "ln").replace("weight", "kernel")
    if value.ndim == 1:
        return path, value.reshape(3, 4) if "attn" in name and not name.endswith("o.bias") else value
    if ".o." in name:
        return path, value.T.reshape(3, 4, 12)
    return path, value.T.reshape(12, 3, 4) if "attn" in name else value.T


@pytest.fixture
def models():
    first = {"embed.weight": values((30, 12), 7)} | dict(itertools.chain(block(0), block(1)))
    return first, dict(itertools.starmap(in_jax, first.items()))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16], ids=["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_rearrangement_is_found_from_the_values(pattern, dtype):
    form = Rearrangement(pattern)
    sizes = iter((6, 4, 12, 6))
    shape = tuple(next(sizes) if len(dim) < 2 else 12 for dim in form.left)
    if "w=4" in pattern or ("b=3" in pattern and len(form.left) == 3):
        shape = {"i h w=4 -> (h w) i": (6, 3, 4), "h w=4 o -> o (h w)": (3, 4, 6)}.get(pattern, (6, 3, 5))
    array = values(shape, dtype=dtype)
    found = solve(form(array), array)
    assert found is not None and np.array_equal(found(array), form(array))
    back = solve(array, form(array))
    assert back is not None and np.array_equal(back(form(array)), array)


def test_another_order_of_rows_is_no_rearrangement():
    array = values((5, 4))
    assert solve(array[[1, 0, 2, 4, 3]], array) is None
    changed = array.T.copy()
    changed[0, 0], changed[1, 0] = changed[1, 0], changed[0, 0]
    assert solve(changed, array) is None


def test_rows_with_the_elements_of_columns_are_no_rows():
    array = (values((4, 4)) + values((4, 4)).T)[[0, 1, 3, 2]]
    found = solve(array.T, array.reshape(2, 2, 2, 2))
    assert found is not None and found.text == "a b=2 c d=2 -> (c d) (a b)"


@QUICK
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_every_transposition_and_join_is_among_the_rearrangements(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    moved = tuple(shape[i] for i in order)
    at = data.draw(st.integers(0, len(shape) - 1))
    joined = (*moved[:at], int(np.prod(moved[at : at + 2])), *moved[at + 2 :])
    array = np.arange(int(np.prod(shape))).reshape(shape)
    wanted = array.transpose(order).reshape(joined)
    assert any(np.array_equal(each(array), wanted) for each in rearrangements(joined, tuple(shape)))


def test_all_weights_are_aligned_by_values_and_biases_by_their_modules(models):
    found = align(*models)
    assert len(found.param_map.entries) == len(models[0]) - 4
    for entry in found.param_map.entries:
        assert entry.path == in_jax(entry.name, models[0][entry.name])[0]
        assert np.array_equal(entry.to_canonical(models[1][entry.path]), models[0][entry.name])
        assert found.evidence[entry.name] == (MODULES if entry.name.endswith("bias") else VALUES)
    assert [len(each.names) for each in found.undecided] == [4]
    assert all("norm" in name for name in found.undecided[0].names) and "gradients" in found.undecided[0].why


def test_modules_are_read_from_names_with_slashes(models):
    first, second = models
    found = align(first, {path.replace(".", "/"): value for path, value in second.items()})
    assert [len(each.names) for each in found.undecided] == [4]  # the norms
    assert {each.replace("/", ".") for each in found.param_map.by_path} == align(*models).param_map.by_path.keys()


def test_gradients_decide_what_values_and_modules_do_not(models):
    gradients = {name: values(value.shape, i, np.float64) for i, (name, value) in enumerate(models[0].items())}
    others = dict(in_jax(name, value * (1 + 1e-6)) for name, value in gradients.items())
    found = align(*models, (gradients, others))
    assert not found.undecided and len(found.param_map.entries) == len(models[0])
    for entry in found.param_map.entries:
        assert entry.path == in_jax(entry.name, models[0][entry.name])[0]
    assert {found.evidence[name] for name in models[0] if "norm" in name} == {GRADIENTS}
    # Gradients that are as near to one another as to their own decide nothing.
    equal = {name: np.ones(value.shape) for name, value in models[0].items()}
    assert align(*models, (equal, {path: np.ones(v.shape) for path, v in models[1].items()})).undecided


@pytest.mark.parametrize(("shape", "other"), [((), (1,)), ((1,), ()), ((1, 1), ()), ((), ())])
def test_scalars_are_aligned_with_dims_of_size_one(shape, other):
    first = {"scale": np.full(shape, 2.5, np.float32), "fc": values((3, 4))}
    found = align(first, {"scale": np.full(other, 2.5, np.float32), "fc": values((3, 4))})
    assert not found.undecided
    assert np.array_equal(found.param_map.by_name["scale"].to_canonical(np.full(other, 2.5)), np.full(shape, 2.5))


def test_rows_of_several_parameters_are_joined(models):
    first, second = models
    for layer in range(2):
        at = f"model.layers.{layer}.attn"
        first[f"{at}.qkv.weight"] = np.concatenate([first.pop(f"{at}.{part}.weight") for part in "qkv"])
    entry = align(first, second).param_map.by_name["model.layers.1.attn.qkv.weight"]
    assert entry.paths == tuple(f"layers.1.attention.{part}.kernel" for part in "qkv")
    assert np.array_equal(entry.to_canonical(*(second[path] for path in entry.paths)), first[entry.name])
    # The other way round the parameters are portions of one array.
    entry = align(second, first).param_map.by_name["layers.0.attention.k.kernel"]
    assert entry.paths == ("model.layers.0.attn.qkv.weight",) and entry.pattern == "(b[3:6/9] c=4) a -> a b c"


def test_stacked_layers_are_aligned_by_their_slices(models):
    first, second = models
    stack = np.stack([second.pop(f"layers.{layer}.fc.kernel") for layer in range(2)])
    found = align(first, second | {"layers.fc.kernel": stack}).param_map
    entries = [found.by_name[f"model.layers.{layer}.fc.weight"] for layer in range(2)]
    assert [entry.pattern for entry in entries] == ["[0/2] a b -> b a", "[1/2] a b -> b a"]
    assert {entry.path for entry in entries} == {"layers.fc.kernel"}


def gates(array, order=(2, 0, 1), dim=0):
    """The array with its blocks in another order."""
    blocks = np.split(array, len(order), dim)
    return np.concatenate([blocks[i] for i in order], dim)


def recurrent():
    """A recurrent layer with the gates of torch, and with those of keras, which has both biases in one array."""
    parts = {"weight_ih": values((12, 5), 1), "weight_hh": values((12, 4), 2)}
    biases = {f"bias_{part}": values((12,), i) for i, part in enumerate(("ih", "hh"), 3)}
    first = {f"rnn.{name}": value for name, value in (parts | biases).items()}
    second = {"cell.kernel": gates(parts["weight_ih"]).T, "cell.recurrent_kernel": gates(parts["weight_hh"]).T}
    return first, second | {"cell.bias": np.stack([gates(bias) for bias in biases.values()])}


def test_gates_in_another_order_are_aligned(tmp_path):
    first, second = recurrent()
    found = align(first, second)
    assert not found.undecided and set(found.evidence.values()) == {VALUES}
    assert found.param_map.by_name["rnn.weight_ih"].pattern == "a (b0{1,2,0} b1) -> (b0 b1) a"
    assert found.param_map.by_name["rnn.bias_hh"].pattern == "[1/2] (a0{1,2,0} a1) -> (a0 a1)"
    found.param_map.save(tmp_path / "map.json")
    read = ParamMap.load(tmp_path / "map.json")
    assert read == found.param_map
    for entry in read.entries:
        assert np.array_equal(entry.to_canonical(second[entry.paths[0]]), first[entry.name])
    back = read.from_canonical(first)
    assert back.keys() == second.keys() and all(np.array_equal(back[path], second[path]) for path in second)


def test_equal_biases_have_the_order_of_gates_of_their_weight():
    first = {"rnn.weight": values((12, 5)), "rnn.bias": np.zeros(12, np.float32)}
    found = align(first, {"cell.kernel": gates(first["rnn.weight"]).T, "cell.bias": np.zeros(12, np.float32)})
    assert found.param_map.by_name["rnn.bias"].pattern == "(b0{1,2,0} b1) -> (b0 b1)"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: x[[1, 2, 3, 4, 5, 0, 6, 7, 8, 9, 10, 11]], id="single rows"),
        pytest.param(lambda x: np.where(np.arange(5) == 0, x, gates(x)), id="not all columns"),
        pytest.param(lambda x: x[:, [1, 2, 0, 4, 3]], id="blocks of one column"),
    ],
)
def test_rows_in_another_order_that_no_blocks_explain_are_undecided(change):
    array = values((12, 5))
    found = align({"a": array}, {"b": change(array)})
    assert [each.names for each in found.undecided] == [("a",)] and not found.param_map.entries
    assert "the same elements in another order" in found.undecided[0].why


@pytest.mark.parametrize(("rows", "num_blocks", "found"), [(2, 2, False), (4, 2, True), (16, 8, True), (18, 9, False)])
def test_up_to_eight_blocks_of_two_rows_or_more_have_an_order(rows, num_blocks, found):
    array = values((rows, 5))
    assert (solve_blocks(array, gates(array, (1, 0, *range(2, num_blocks)))) is not None) == found


def test_blocks_with_equal_values_have_no_order():
    array = np.repeat(np.float32([0, 1, 0, 2]), 3)
    assert solve_blocks(array, gates(array, (1, 2, 3, 0))) is None


def test_exchanged_blocks_of_one_of_several_layers_are_undecided():
    first = {f"h.{i}.w": values((12, 5), i) for i in range(3)}
    second = {f"l.{i}.k": first[f"h.{i}.w"].T for i in range(3)}
    found = align(first, second | {"l.1.k": gates(first["h.1.w"]).T})
    assert [each.names for each in found.undecided] == [("h.1.w",)]
    both = align(first, {path: gates(array, dim=1) for path, array in second.items()})
    assert not both.undecided and all("{1,2,0}" in (entry.pattern or "") for entry in both.param_map.entries)


def test_gradients_of_stacked_layers_decide_between_equal_values():
    layers = range(2)
    first = {
        f"h.{i}.{name}": value
        for i in layers
        for name, value in (("w", values((5, 4), i)), ("b", np.zeros(4)), ("c", np.zeros(4)))
    }
    gradients = {name: values(value.shape, i + 9) for i, (name, value) in enumerate(first.items())}
    paths = {"w": "stack.w", "b": "stack.x", "c": "stack.y"}
    second, others = (
        {path: np.stack([side[f"h.{i}.{name}"] for i in layers]) for name, path in paths.items()}
        for side in (first, gradients)
    )
    found = align(first, second, (gradients, others))
    assert {name: entry.path for name, entry in found.param_map.by_name.items()} == {
        name: paths[name[-1]] for name in first
    }
    without = align(first, second)
    assert set(without.param_map.by_name) == {"h.0.w", "h.1.w"}
    assert set(without.undecided[0].names) == first.keys() - {"h.0.w", "h.1.w"}


def test_rows_of_one_value_do_not_tell_which_array_they_are():
    rows = values((3, 4))
    rows[1] = 1.0
    found = align({"w": rows}, {"a": rows[0], "b": rows[1], "c": rows[1], "d": rows[2]})
    assert found.param_map.entries == ()


def test_models_that_share_no_values_have_no_map(models):
    other = {path: value * 1.5 + 0.25 for path, value in models[1].items()}
    found = align(models[0], other)
    assert found.param_map == ParamMap(()) and all("initial values" in each.why for each in found.undecided)
    with pytest.raises(MappingError, match="expected parameters in both"):
        align(models[0], {})


def test_a_tied_copy_is_named():
    weight = values((6, 4))
    found = align({"embed.weight": weight, "head.weight": weight}, {"embed": weight})
    assert found.param_map.entries == (MapEntry("embed.weight", "embed"),)
    assert [(each.names, each.paths) for each in found.undecided] == [(("head.weight",), ())]
    assert "equal to 'embed.weight'; leave it out if the two are tied" in found.undecided[0].why
    # Values do not tell which of two arrays a parameter is.
    found = align({"embed.weight": weight}, {"embed": weight, "head": weight.T})
    assert found.param_map.entries == () and found.undecided[0].paths == ("embed", "head")


def test_dtypes_that_differ_are_compared_in_the_coarser_one():
    weight = values((6, 4))
    found = align({"w": weight.astype(ml_dtypes.bfloat16)}, {"k": weight.T})
    assert found.param_map.entries == (MapEntry("w", "k", "a b -> b a"),)


def test_square_zeros_need_gradients_for_their_order():
    zeros, gradient = np.zeros((4, 4)), values((4, 4))
    assert align({"w": zeros}, {"k": zeros}).param_map.entries == ()
    found = align({"w": zeros}, {"k": zeros}, ({"w": gradient}, {"k": gradient.T}))
    assert found.param_map.entries == (MapEntry("w", "k", "a b -> b a"),)
    assert align({"w": zeros}, {"k": zeros}, ({}, {"k": gradient.T})).param_map.entries == ()


@pytest.mark.parametrize("with_gradients", [False, True])
def test_zeros_are_permuted_as_the_weights_of_their_module(with_gradients):
    form, weight, bias = Rearrangement("(h kind=3 w=4) i -> (kind h w) i"), values((24, 5)), np.zeros(24, np.float32)
    rows = Rearrangement("(h kind=3 w=4) -> (kind h w)")
    gradient = values(24, 1)
    gradients = ({"fc.bias": rows(gradient)}, {"dense.b": gradient}) if with_gradients else None
    other = {"embed": values((7, 5), 2)}
    first, second = {"fc.weight": form(weight), "fc.bias": bias}, {"dense.w": weight, "dense.b": bias}
    found = align(other | first, other | second, gradients)
    assert np.array_equal(found.param_map.by_name["fc.bias"].to_canonical(gradient), rows(gradient))


@pytest.mark.parametrize(("name", "path"), [("fc.bias", "shift.b"), ("shift.bias", "dense.b")])
def test_zeros_beside_the_module_of_a_weight_keep_their_order(name, path):
    form, weight, bias = Rearrangement("(h kind=3 w=4) i -> (kind h w) i"), values((24, 5)), np.zeros(24, np.float32)
    found = align({"fc.weight": form(weight), name: bias}, {"dense.w": weight, path: bias})
    assert found.param_map.by_name[name] == MapEntry(name, path)


@pytest.mark.parametrize(
    ("change", "known", "joined"),
    [(1.0, "kv", True), (1.1, "kv", False), (1.1, "k", True)],
    ids=["gradients agree", "gradients differ", "no gradient"],
)
def test_equal_biases_are_joined_as_the_weights_of_their_module(change, known, joined):
    parts = {part: values((4, 5), i) for i, part in enumerate("kv")}
    first = {"kv.weight": np.concatenate(list(parts.values())), "kv.bias": np.zeros(8)}
    second = {
        f"{part}.{name}": value for part, weight in parts.items() for name, value in (("w", weight), ("b", np.zeros(4)))
    }
    second["k.empty"] = np.zeros((0, 4))
    gradients = {f"{part}.b": values(4, i) for i, part in enumerate(known)}
    both = {"kv.bias": change * np.concatenate([values(4, 0), values(4, 1)])}, gradients
    found = align(first, second, both)
    assert found.evidence.get("kv.bias") == (MODULES if joined else None)
    assert not joined or found.param_map.by_name["kv.bias"].paths == ("k.b", "v.b")


def test_zeros_of_a_square_weight_need_gradients_for_their_order():
    first, second = {"fc.weight": values((12, 12)), "fc.bias": np.zeros(12)}, {"dense.b": np.zeros(12)}
    form = Rearrangement("o (h kind=3 w=2) -> o (kind h w)")
    second["dense.w"] = form.inverse(first["fc.weight"])
    assert [entry.name for entry in align(first, second).param_map.entries] == ["fc.weight"]
    gradient = values(12, 1)
    found = align(first, second, ({"fc.bias": gradient}, {"dense.b": gradient}))
    assert np.array_equal(found.param_map.by_name["fc.bias"].to_canonical(gradient), gradient)


@pytest.mark.parametrize("degrees", [(6.6, 9.7), (-4.5, 0.4)], ids=["exchange is as good", "each has its own"])
def test_similar_gradients_decide_unless_an_exchange_is_better(degrees):
    def gradients(*angles):
        return [np.array([np.cos(angle), np.sin(angle)]) for angle in np.radians(angles)]

    values = [np.zeros(2), np.zeros(2)]
    ours = dict(zip(("query", "key"), gradients(0, -4.9), strict=True))
    theirs = dict(zip(("first", "second"), gradients(*degrees), strict=True))
    found = align(
        dict(zip(ours, values, strict=True)), dict(zip(theirs, values, strict=True)), (ours, theirs), may_differ=True
    )
    decided = {name: entry.path for name, entry in found.param_map.by_name.items()}
    assert decided == ({} if degrees[0] > 0 else {"key": "first", "query": "second"})


def _random_value(random, numbers, shape):
    kind = random.choice(["normal"] * 6 + ["zeros", "ones", "few", "counted", "nan"])
    made = {
        "normal": lambda: numbers.normal(size=shape),
        "zeros": lambda: np.zeros(shape),
        "ones": lambda: np.ones(shape),
        "few": lambda: numbers.integers(0, 3, size=shape),
        "counted": lambda: np.arange(np.prod(shape, dtype=int)).reshape(shape),
        "nan": lambda: np.full(shape, np.nan),
    }[kind]()
    return made.astype(np.float32)


def _random_models(seed):
    """A model, and another one that joins, stacks, cuts, pads, drops or rearranges its parameters."""
    random, numbers = Random(seed), np.random.default_rng(seed)
    width = random.choice([1, 4, 6])
    shapes = {"q": (width, width), "k": (width, width), "up": (2 * width, width), "norm": (width,)}
    shapes |= {"conv": (width, width, 3), "scale": (), "empty": (0, width)}
    first = {
        f"h.{layer}.{name}.weight": _random_value(random, numbers, shape)
        for layer in range(random.randint(1, 3))
        for name, shape in random.sample(list(shapes.items()), random.randint(1, 6))
    }
    second, waiting = {}, list(first)
    while waiting:
        value, name = first[waiting[0]], waiting.pop(0)
        following = first[waiting[0]] if waiting and first[waiting[0]].shape == value.shape else None
        match random.choice(["join", "stack", "cut", "pad", "drop", "other", "move", "move", "move", "move"]):
            case "join" if following is not None and value.ndim:
                second[name] = np.concatenate([value, first[waiting.pop(0)]])
            case "stack" if following is not None:
                second[name] = np.stack([value, first[waiting.pop(0)]])
            case "cut" if value.ndim and value.shape[0] > 1 and value.shape[0] % 2 == 0:
                second |= {f"{name}.{i}": half for i, half in enumerate(np.split(value, 2))}
            case "pad" if value.ndim:
                second[name] = np.concatenate([value, np.zeros((2, *value.shape[1:]), np.float32)])
            case "drop" if second:
                pass
            case "other":
                second[name] = _random_value(random, numbers, value.shape)
            case _:
                moved = value.transpose(random.sample(range(value.ndim), value.ndim))
                split = moved.ndim and random.random() < 0.5 and moved.shape[0] % 2 == 0
                second[name] = moved.reshape(2, moved.shape[0] // 2, *moved.shape[1:]) if split else moved
    gradients = ({n: numbers.normal(size=v.shape) for n, v in side.items()} for side in (first, second))
    return first, second, tuple(gradients) if random.random() < 0.5 else None


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_aligned_has_the_values_of_the_other_model(seed):
    first, second, gradients = _random_models(seed)
    for entry in align(first, second, gradients).param_map.entries:
        found = entry.to_canonical(*(second[path] for path in entry.paths))
        assert np.array_equal(found, first[entry.name], equal_nan=True), entry
