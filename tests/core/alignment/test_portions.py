"""Alignment of models that stack their layers, fuse their projections or pad their vocabulary.

Each model has random weights, and biases and norms with one value. A second set of values, all random, shows whether a map is
right where the values do not tell.
"""

from pathlib import Path

import numpy as np
import pytest

from crossframe.alignment import Alignment, align, align_either_way
from crossframe.alignment.portions import Rows, cut_text, joined_text
from crossframe.param_map import ParamMap
from crossframe.rearrange import Rearrangement
from tests.core.helpers.kept_texts import check_text

TEXTS = Path(__file__).with_name("maps.json")
LAYERS, WIDTH, HEADS, GROUPS, HEAD, HIDDEN, VOCAB = 3, 8, 4, 2, 2, 12, 20


def model(seed):
    """The parameters of a decoder, as torch has them; with seed 0 biases and norms have one value."""
    rng = np.random.default_rng([seed, 7])
    one_value = seed == 0

    def vector(size, value):
        return np.full(size, value) if one_value else rng.normal(size=size)

    yield "embed.weight", rng.normal(size=(VOCAB, WIDTH))
    for layer in range(LAYERS):
        at = f"h.{layer}"
        yield f"{at}.norm.weight", vector(WIDTH, 1.0)
        for part, num in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
            yield f"{at}.attn.{part}.weight", rng.normal(size=(num * HEAD, WIDTH))
            yield f"{at}.attn.{part}.bias", vector(num * HEAD, 0.0)
        yield f"{at}.attn.o.weight", rng.normal(size=(WIDTH, HEADS * HEAD))
        yield f"{at}.attn.o.bias", vector(WIDTH, 0.0)
        for part in ("gate", "up"):
            yield f"{at}.mlp.{part}.weight", rng.normal(size=(HIDDEN, WIDTH))
        yield f"{at}.mlp.down.weight", rng.normal(size=(WIDTH, HIDDEN))
    yield "norm.weight", vector(WIDTH, 1.0)


def separate(params):
    """The kernels of the other model: (in, heads, head width), (heads, head width, out), (in, out)."""
    found = {}
    for name, value in params.items():
        path = name.replace("weight", "kernel").replace("h.", "layers.").replace("attn", "attention")
        if any(f".{part}." in name for part in "qkv"):
            value = value.T.reshape(*value.T.shape[:-1], -1, HEAD)
        elif ".o.weight" in name:
            value = value.T.reshape(HEADS, HEAD, WIDTH)
        elif "mlp" in name:
            value = value.T
        found[path] = value
    return found


def stacked(params, dim=0):
    """All layers in one array."""
    found = {}
    for path, value in params.items():
        if path.startswith("layers.0."):
            rest = path.removeprefix("layers.0.")
            layers = [params[f"layers.{layer}.{rest}"] for layer in range(LAYERS)]
            found[f"layers.{rest}"] = np.stack(layers, min(dim, value.ndim))
        elif not path.startswith("layers."):
            found[path] = value
    return found


def joined(params, parts, to, how):
    """Several parameters of each module in one; `how` joins their arrays."""
    found, (first, *others) = {}, parts
    for name, value in params.items():
        module, _, kind = name.rpartition(".")
        outer, _, part = module.rpartition(".")
        if part == first:
            found[f"{outer}.{to}.{kind}"] = how(value, *(params[f"{outer}.{other}.{kind}"] for other in others))
        elif part not in others:
            found[name] = value
    return found


def in_groups(axis):
    """Joins arrays so that each group of heads has its rows of each."""

    def how(*arrays):
        apart = [
            np.moveaxis(array, axis, 0).reshape(GROUPS, -1, *np.moveaxis(array, axis, 0).shape[1:]) for array in arrays
        ]
        whole = np.concatenate(apart, 1)
        return np.moveaxis(whole.reshape(-1, *whole.shape[2:]), 0, axis)

    return how


def flat(params):
    """Without dims for heads."""

    def shape(path, value):
        if "attention.o." in path:
            return (-1, WIDTH) if value.ndim == 3 else value.shape
        return (WIDTH, -1) if value.ndim == 3 else (-1,)

    return {path: value.reshape(shape(path, value)) if "attention" in path else value for path, value in params.items()}


def concatenated(axis):
    return lambda *arrays: np.concatenate(arrays, axis)


def alternating(*arrays):
    return np.stack(arrays, 1).reshape(-1, *arrays[0].shape[1:])


QKV = (("q", "k", "v"), "qkv")
GATE_UP = (("gate", "up"), "gate_up")


CASES = {
    "stacked": (dict, lambda p: stacked(separate(p))),
    "stacked on dim 1": (dict, lambda p: stacked(separate(p), 1)),
    "other model joined": (dict, lambda p: joined(flat(separate(p)), *QKV, concatenated(-1))),
    "other model joined in groups": (dict, lambda p: joined(flat(separate(p)), *QKV, in_groups(-1))),
    "other model alternating": (dict, lambda p: joined(p, *GATE_UP, alternating)),
    "stacked and joined": (dict, lambda p: stacked(joined(flat(separate(p)), *QKV, concatenated(-1)))),
    "stacked and joined in groups": (dict, lambda p: stacked(joined(flat(separate(p)), *QKV, in_groups(-1)))),
    "joined": (lambda p: joined(p, *QKV, concatenated(0)), separate),
    "joined in the same order": (lambda p: joined(p, *QKV, concatenated(0)), dict),
    "joined in groups": (lambda p: joined(p, *QKV, in_groups(0)), separate),
    "joined in groups against flat": (lambda p: joined(p, *QKV, in_groups(0)), lambda p: flat(separate(p))),
    "joined on dim 1": (lambda p: joined(flat(separate(p)), *QKV, concatenated(-1)), lambda p: separate(p)),
    "joined against stacked": (lambda p: joined(p, *QKV, concatenated(0)), lambda p: stacked(separate(p))),
    "joined in groups against stacked": (lambda p: joined(p, *QKV, in_groups(0)), lambda p: stacked(separate(p))),
    "alternating": (lambda p: joined(p, *GATE_UP, alternating), separate),
    "alternating against stacked": (lambda p: joined(p, *GATE_UP, alternating), lambda p: stacked(separate(p))),
}


def check(found, one, other):
    """Every entry gives the parameter from the arrays of the other model."""
    for entry in found.param_map.entries:
        made = entry.to_canonical(*(other[path] for path in entry.paths))
        assert np.array_equal(made, one[entry.name]), entry


def told(found: Alignment) -> str:
    """What is found for all parameters but those of the first and the last layer."""
    lines = [
        f"{entry.name}: {' + '.join(entry.paths)} by {entry.pattern}, {entry.rows}, {found.evidence[entry.name]}"
        for entry in found.param_map.entries
    ]
    lines += [f"{each.names} and {each.paths} are undecided: {each.why}" for each in found.undecided]
    return " | ".join(line for line in lines if not line.startswith(("h.0.", "h.2.", "layers.0.", "layers.2.")))


@pytest.mark.parametrize("name", CASES)
def test_models_with_other_groupings_are_aligned(name):
    first, second = CASES[name]
    params, shadow = (dict(model(seed)) for seed in (0, 1))
    found = align(first(params), second(params))
    check_text(TEXTS, told(found))
    check_text(TEXTS, told(align(second(params), first(params))), "the other way round")
    check(found, first(shadow), second(shadow))
    undecided = {each for open_one in found.undecided for each in open_one.names}
    assert not undecided, undecided
    made = found.param_map.from_canonical(first(shadow))
    assert made.keys() == second(shadow).keys()
    assert all(np.array_equal(made[path], array) for path, array in second(shadow).items())
    assert ParamMap.from_json(found.param_map.to_json()) == found.param_map


def numbers(*shape):
    return np.random.default_rng(shape).normal(size=shape)


@pytest.mark.parametrize(
    ("stacked", "patterns"),
    [
        pytest.param(numbers(3, 9), "[{0}/3] a -> a", id="vectors"),
        pytest.param(numbers(3, 5, 4, 6), "[{0}/3] [{1}/5] a b -> b a", id="along two dims"),
        pytest.param(numbers(2, 2, 2), "[{0}/2] a b -> b a", id="two of two rows"),
    ],
)
def test_an_array_alone_is_stacked(stacked, patterns):
    places = list(np.ndindex(stacked.shape[: 2 if stacked.ndim == 4 else 1]))
    first = {".".join(map(str, ("h", *place, "w"))): stacked[place].T for place in places}
    found = align(first, {"stack": stacked, "other": numbers(3, 8)}).param_map
    assert [entry.pattern for entry in found.entries] == [patterns.format(*place) for place in places]


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("swapped", [False, True], ids=["joined in the other one", "joined"])
def test_stacked_arrays_alone_are_joined(layers, dim, swapped):
    parts = {part: numbers(layers, rows, 6) for part, rows in (("q", 4), ("k", 2))}
    whole = np.concatenate(list(parts.values()), 1)
    if swapped:
        first = {f"h.{i}.qk": whole[i] for i in range(layers)}
        second = {f"layers.{part}": np.moveaxis(each, 0, dim) for part, each in parts.items()}
    else:
        first = {f"h.{i}.{part}": each[i] for i in range(layers) for part, each in parts.items()}
        second = {"layers": np.moveaxis(whole, 0, dim)}
    found = align(first, second)
    assert not found.undecided
    check(found, first, second)


def test_an_array_with_a_row_of_a_parameter_is_not_stacked():
    first = {"q": numbers(4, 6), "k": numbers(5, 6)}
    second = {"q": first["q"], "other": np.stack([first["k"], np.concatenate([first["k"][:1], numbers(4, 6) + 1])])}
    second["other"][0, 1:] += 1
    found = align(first, second)
    assert found.param_map.by_name.keys() == {"q"}
    assert sorted(each.paths for each in found.undecided) == [(), ("other",)]


@pytest.mark.parametrize("layers_first", [True, False])
def test_layers_and_experts_are_stacked_in_one_array(layers_first):
    params, shadow = (dict(model(seed)) for seed in (0, 1))
    rng = np.random.default_rng(5)
    for values, is_random in ((params, False), (shadow, True)):
        for layer in range(LAYERS):
            values[f"h.{layer}.mlp.router.weight"] = rng.normal(size=(5, WIDTH))
            for expert in range(5):
                values[f"h.{layer}.mlp.experts.{expert}.weight"] = rng.normal(size=(HIDDEN, WIDTH))
                values[f"h.{layer}.mlp.experts.{expert}.bias"] = rng.normal(size=HIDDEN) * is_random

    def other(values):
        experts = {kind: np.stack([np.stack([values[f"h.{layer}.mlp.experts.{expert}.{kind}"] for expert in range(5)])
                   for layer in range(LAYERS)]) for kind in ("weight", "bias")}  # fmt: skip
        rest = stacked(separate({name: value for name, value in values.items() if "experts" not in name}))
        rest |= {
            "layers.mlp.experts.kernel": experts["weight"].swapaxes(2, 3),
            "layers.mlp.experts.bias": experts["bias"],
        }
        return {
            path: each.swapaxes(0, 1) if "layers" in path and not layers_first else each for path, each in rest.items()
        }

    found = align(params, other(params))
    assert not found.undecided
    check(found, shadow, other(shadow))
    assert found.param_map.by_name["h.1.mlp.experts.4.weight"].pattern == (
        f"[1/{LAYERS}] [4/5] a b -> b a" if layers_first else f"[4/5] [1/{LAYERS}] a b -> b a"
    )


@pytest.mark.parametrize("padding", [1, 4])
def test_a_padded_vocabulary_is_aligned_either_way(padding):
    params = dict(model(0))
    other = separate(params)
    rows = np.random.default_rng(3).normal(size=(padding, WIDTH))
    other["embed.kernel"] = np.concatenate([other["embed.kernel"], rows])
    entry = align(params, other).param_map.by_name["embed.weight"]
    assert entry.pattern == f"a[0:{VOCAB}/{VOCAB + padding}] b -> a b"
    assert np.array_equal(entry.to_canonical(other["embed.kernel"]), params["embed.weight"])
    entry = align(other, params).param_map.by_name["embed.kernel"]
    assert entry.pattern == f"a b -> a[0:{VOCAB}/{VOCAB + padding}] b"
    assert not entry.to_canonical(params["embed.weight"])[VOCAB:].any()


@pytest.mark.parametrize(
    ("start", "count", "padded"),
    [
        pytest.param(0, 11, True, id="first rows"),
        pytest.param(0, 10, False, id="half of the rows"),
        pytest.param(1, 15, False, id="later rows"),
    ],
)
def test_most_rows_from_the_first_one_are_padded(start, count, padded):
    whole = numbers(20, 3)
    arrays = {"a": whole}, {"b": whole[start : start + count]}
    assert all(bool(align(*pair).param_map.entries) == padded for pair in (arrays, arrays[::-1]))


def test_padding_of_rows_that_are_two_dims_is_undecided():
    whole, part = numbers(20, 3), numbers(20, 3)[:16].reshape(8, 2, 3)
    assert not align({"a": whole}, {"b": part}).param_map.entries


def test_a_value_that_differs_is_not_hidden_by_a_portion():
    params = dict(model(0))
    other = joined(flat(separate(params)), *QKV, concatenated(-1))
    wrong = other["layers.1.attention.qkv.kernel"].copy()
    wrong[0, -1] += 1e-9
    found = align(params, other | {"layers.1.attention.qkv.kernel": wrong})
    check_text(TEXTS, told(found))
    names = {name for name in params if name.startswith("h.1.attn.")} - {"h.1.attn.o.weight", "h.1.attn.o.bias"}
    assert not names & found.param_map.by_name.keys()
    assert names <= {name for each in found.undecided for name in each.names}
    # Nor are parameters with one value told apart by a module that is aligned in part.
    names |= {"h.1.attn.o.bias", "h.1.norm.weight"}
    assert len(found.param_map.entries) == len(params) - len(names)
    shadow = dict(model(1))
    check(found, shadow, joined(flat(separate(shadow)), *QKV, concatenated(-1)))


@pytest.mark.parametrize("counts", [(2, 1), (1, 2), (1, 1), (2, 2), (1, 3, 1)])
@pytest.mark.parametrize("blocks", [1, 3])
def test_rows_of_arrays_that_alternate_in_blocks_are_joined(counts, blocks):
    parts = [np.random.default_rng(i).normal(size=(blocks, count, 5)) for i, count in enumerate(counts)]
    first, second = np.concatenate(parts, 1).reshape(-1, 5), [part.reshape(-1, 5) for part in parts]
    for own, others in ((first, second), (first.T, second), (first, [part.T for part in second])):
        (entry,) = align({"p": own}, {str(i): other for i, other in enumerate(others)}).param_map.entries
        assert np.array_equal(entry.to_canonical(*others), own)


@pytest.mark.parametrize(
    ("pattern", "shape", "apart", "expected"),
    [
        ("a b -> a b", (3, 5), False, "a b -> (a +) b"),
        ("a b -> a b", (3, 5), True, "(a=3 c) b -> (a + c) b"),
        ("a b -> b a", (5, 6), True, "a (b=3 c) -> (b + c) a"),
        ("a=2 b c -> (b a) c", (2, 3, 5), False, "a b=3 c -> (b + a) c"),
        ("a=1 b c -> (a b) c", (1, 3, 5), True, "a=1 (b=3 d) c -> (a b + d) c"),
    ],
)
def test_arrays_of_three_blocks_are_joined_behind_an_axis(pattern, shape, apart, expected):
    form = Rearrangement(pattern)
    rows = form.shape(shape)[0]
    assert joined_text(form, shape, Rows(0, 3, 0, rows // 3, rows), apart=apart) == expected


@pytest.mark.parametrize(
    ("pattern", "blocks", "start", "period", "expected"),
    [
        ("(a b=2) c -> c (a b)", 1, 2, 16, "(a[1:7/8] b=2) c -> c (a b)"),
        ("(a b=2) c -> c (a b)", 3, 2, 8, "(a d[1:3/4] b=2) c -> c (a d b)"),
        ("(a b=2) c -> c (a b)", 6, 2, 6, "(a b[2:4/6]) c -> c (a b)"),
        ("(a b=2) c -> c (a b)", 12, 2, 5, "(a b=2 [2/5]) c -> c (a b)"),
        ("(a b=6) c -> (b a) c", 4, 2, 7, "(a=2 b=2 d[2:5/7]) c -> (b d a) c"),
        pytest.param("(a b=2) c -> c (a b)", 4, 2, 8, None, id="blocks end inside of an axis"),
        pytest.param("(a b=2 c=3) d -> (c a b) d", 3, 3, 9, None, id="axes end inside of blocks"),
        pytest.param("(a b=2) c -> c (a b)", 2, 3, 10, None, id="rows begin inside of an axis"),
        pytest.param("(a b=2) c -> c (a b)", 2, 2, 11, None, id="rows end inside of an axis"),
    ],
)
def test_rows_are_cut_where_axes_end(pattern, blocks, start, period, expected):
    rows, form = Rows(0, blocks, start, 12 // blocks, period), Rearrangement(pattern)
    text = cut_text(form, (12, 3), rows)
    assert text == expected
    if text is not None:
        whole = np.random.default_rng(0).normal(size=(blocks * period, 3))
        assert np.array_equal(Rearrangement(text)(whole), form(rows.of(whole)))


def test_rows_that_begin_inside_of_an_axis_are_undecided():
    q, k = numbers(2, 3, 5), numbers(2, 5)
    (open_one,) = align({"k": k, "q": q}, {"w": np.concatenate([k, q.reshape(6, 5)])}).undecided
    assert (
        open_one.names == ("k", "q")
        and "these parameters as its rows in an order that no pattern states" in open_one.why
    )


def test_arrays_of_other_dims_that_are_joined_have_the_names():
    draw = np.random.default_rng(0).normal
    queries, others = draw(size=(4, 6, 8)), draw(size=(2, 2, 6, 8))
    joined = np.concatenate([each.swapaxes(-1, -2).reshape(-1, 6) for each in (queries, others)])
    first, second = {"qkv.weight": joined}, {"q.w": queries, "kv.w": others}
    assert align(first, second).undecided
    found, is_swapped = align_either_way(first, second, ({}, {}))
    assert is_swapped and not found.undecided
    for name, array in second.items():
        assert np.array_equal(found.param_map.by_name[name].to_canonical(joined), array)
    assert align_either_way(second, first, ({}, {})) == (found, False)
