"""Alignment of recordings in sketches: the same maps as from all values, where samples decide, and nothing where they do not."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from crossframe.alignment import GRADIENTS, MODULES, SAMPLES, SIMILAR, VALUES, align
from crossframe.alignment.sampled import order_of, parts_of
from crossframe.alignment.summary import Summary
from crossframe.param_map import MapEntry
from crossframe.rearrange import Rearrangement
from crossframe.recording.sample import merged, sample_of

PATTERNS = {
    "a b -> a b": (40, 64),
    "a b -> b a": (64, 64),
    "h w i o -> o i h w": (3, 3, 8, 16),
    "i h w=8 -> (h w) i": (40, 4, 8),
    "h w=8 o -> o (h w)": (4, 8, 40),
    "(h pair=8 two=2) i -> (h two pair) i": (64, 40),
    "i (h pair=8 two=2) -> (h two pair) i": (64, 64),
    "a b=16 c -> 1 (a b) 1 c": (4, 16, 40),
}


def values(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def summaries(arrays):
    return {name: Summary.of(array) for name, array in arrays.items()}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_order_of_dims_is_found_from_samples(pattern, dtype):
    array = values(PATTERNS[pattern], dtype=dtype)
    canonical = Rearrangement(pattern)(array)
    found = order_of(Summary.of(np.ascontiguousarray(canonical)), Summary.of(array))
    assert found is not None and np.array_equal(found(array), canonical)


def test_orders_that_samples_do_not_tell_apart_are_not_decided():
    rng = np.random.default_rng(1)
    array = values((64, 64))
    assert order_of(Summary.of(array[rng.permutation(64)]), Summary.of(array)) is None
    few = np.zeros((64, 64), np.float32)
    few[:3, :3] = values((3, 3))
    assert order_of(Summary.of(few.T.copy()), Summary.of(few)) is None
    both_fit = array + array.T
    both_fit[0, 1] += 100.0  # beyond the sample
    assert order_of(Summary.of(both_fit.T.copy()), Summary.of(both_fit)) is None
    exchanged = array.copy()  # two elements of the sample
    first, second = np.argsort(np.abs(array), axis=None)[:2]
    exchanged.flat[first], exchanged.flat[second] = array.flat[second], array.flat[first]
    assert order_of(Summary.of(exchanged), Summary.of(array)) is None
    coarse = np.round(array)  # many elements are equal
    assert order_of(Summary.of(coarse.T.copy()), Summary.of(coarse)) is None


def test_the_order_is_found_from_the_samples_of_pieces():
    array = values((40, 64))
    pieces = merged(sample_of(part, start) for part, start in ((array[:20], 0), (array[20:], 20 * 64)))
    found = order_of(Summary.of(array.T.copy()), replace(Summary.of(array), sample=pieces))
    assert found is not None and found.text == "a b -> b a"


def model(layers=3, width=64):
    found = {"embed.weight": values((100, width), 99)}
    for layer in range(layers):
        at = f"h.{layer}"
        for i, part in enumerate(("q", "k", "v")):
            found[f"{at}.attn.{part}.weight"] = values((width, width), 10 * layer + i)
            found[f"{at}.attn.{part}.bias"] = np.zeros(width, np.float32)
        found[f"{at}.norm.weight"] = np.ones(width, np.float32)
        found[f"{at}.mlp.weight"] = values((2 * width, width), 10 * layer + 5)
    return found


def gradients(params):
    return {name: values(array.shape, 1000 + i) for i, (name, array) in enumerate(params.items())}


def renamed(params, change=lambda name, array: array):
    return {name.replace("h.", "layers.").replace("weight", "w"): change(name, each) for name, each in params.items()}


def noisy(name, array):
    return array + 1e-6 * values(array.shape, 5)


def test_names_are_found_on_all_values_and_equal_values_by_gradients():
    params = model()
    grads = gradients(params)
    found = align(summaries(params), summaries(renamed(params)), (summaries(grads), summaries(renamed(grads, noisy))))
    assert not found.undecided
    assert {entry.name: entry.paths[0] for entry in found.param_map.entries} == dict(
        zip(params, renamed(params), strict=True)
    )
    varied = {name for name, array in params.items() if array.ndim > 1}
    assert {found.evidence[name] for name in varied} == {VALUES}
    assert {found.evidence[name] for name in params.keys() - varied} <= {GRADIENTS, MODULES}


def test_transposed_parameters_say_that_samples_decided():
    params = model()
    other = renamed(params, lambda name, array: array.T.copy() if array.ndim > 1 else array)
    found = align(summaries(params), summaries(other))
    for entry in found.param_map.entries:
        assert np.array_equal(entry.to_canonical(*(other[path] for path in entry.paths)), params[entry.name])
    assert found.evidence["h.1.mlp.weight"] == SAMPLES and len(found.param_map.entries) >= 13


def joined(params, dim):
    """The model with query, key and value in one array."""
    found = {}
    for name, array in params.items():
        if ".attn.q." in name:
            parts = [params[name.replace(".q.", f".{part}.")] for part in "qkv"]
            found[name.replace(".q.", ".qkv.")] = np.concatenate(parts, dim if array.ndim > 1 else 0)
        elif ".attn." not in name:
            found[name] = array
    return found


@pytest.mark.parametrize("dim", [0, 1])
def test_joined_parameters_are_found_in_their_array(dim):
    params = model()
    other = joined(params, dim)
    found = align(summaries(params), summaries(other))
    assert {f"h.{i}.attn.{part}.weight" for i in range(3) for part in "qkv"} <= found.param_map.by_name.keys()
    for entry in found.param_map.entries:
        assert np.array_equal(entry.to_canonical(*(other[path] for path in entry.paths)), params[entry.name])


def test_parts_follow_each_other_in_any_order_and_have_places():
    a, b = values((2, 30, 4))
    found = parts_of(Summary.of(np.concatenate([b, a])), summaries({"a": a, "b": b}))
    assert found == {"b": "a[0:30/60] b -> a b", "a": "a[30:60/60] b -> a b"}
    coarse = np.round(b)  # many elements are equal
    assert parts_of(Summary.of(np.concatenate([coarse, a])), summaries({"a": a, "b": coarse})) is None


def test_stacked_parameters_are_found_in_their_array():
    params = {name: array for name, array in model().items() if array.ndim > 1}
    other = {"embed": params["embed.weight"].T.copy()}
    for part in ("attn.q", "attn.k", "attn.v", "mlp"):
        other[part] = np.stack([params[f"h.{layer}.{part}.weight"].T for layer in range(3)])
    found = align(summaries(params), summaries(other))
    assert not found.undecided and found.param_map.by_name["h.2.mlp.weight"].pattern == "[2/3] a b -> b a"
    for entry in found.param_map.entries:
        assert np.array_equal(entry.to_canonical(*(other[path] for path in entry.paths)), params[entry.name])


def test_stacked_parameters_have_heads_in_another_order():
    form = Rearrangement("(h pair=8 two=2) i -> (h two pair) i")
    layers = [values((64, 40), layer) for layer in range(3)]
    first = {f"h.{i}.q": form(layer) for i, layer in enumerate(layers)}
    found = align(summaries(first), summaries({"q": np.stack(layers)}))
    for i, layer in enumerate(layers):
        assert np.array_equal(found.param_map.by_name[f"h.{i}.q"].to_canonical(np.stack(layers)), form(layer))


def test_a_changed_element_is_no_counterpart():
    params = {name: array for name, array in model().items() if array.ndim > 1}
    other = {name: array.T.copy() for name, array in params.items()}
    other["h.1.mlp.weight"][-1, -1] += 1.0
    found = align(summaries(params), summaries(other))
    assert found.param_map.by_name.keys() == params.keys() - {"h.1.mlp.weight"}
    assert all("--detail full" in each.why for each in found.undecided)
    # Nor is an array whose parts are joined, if one of them has another element.
    wrong = joined(params, 0)
    wrong["h.0.attn.qkv.weight"][-1, -1] += 1.0
    names = align(summaries(params), summaries(wrong)).param_map.by_name.keys()
    assert not any(name.startswith("h.0.attn") for name in names) and "h.1.attn.k.weight" in names


def test_an_array_of_parameters_in_an_unknown_order_is_undecided():
    params = {name: array for name, array in model().items() if array.ndim > 1}
    other = dict(params)
    q, k = (other.pop(f"h.0.attn.{part}.weight") for part in "qk")
    other["h.0.attn.qk.weight"] = np.random.default_rng(0).permutation(np.concatenate([q, k])).reshape(64, 128)
    found = align(summaries(params), summaries(other))
    (undecided,) = found.undecided
    assert undecided.names == ("h.0.attn.q.weight", "h.0.attn.k.weight") and undecided.paths == ("h.0.attn.qk.weight",)
    assert undecided.why.startswith(
        "the path has the elements of these parameters, in an order that their samples do not decide"
    )
    assert len(found.param_map.entries) == len(params) - 2


@pytest.mark.parametrize("sketched", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
def test_one_gradient_in_full_decides_the_order_of_square_zeros(sketched):
    zeros, gradient = np.zeros((64, 64), np.float32), values((64, 64))
    grads = [{"w": gradient}, {"w": gradient.T.copy()}]
    for side in sketched:
        grads[side] = summaries(grads[side])
    entries = align(summaries({"w": zeros}), summaries({"w": zeros}), tuple(grads)).param_map.entries
    assert [entry.pattern for entry in entries] == (["a b -> b a"] if len(sketched) == 1 else [])


@pytest.mark.parametrize("moves", [False, True])
def test_gradients_in_sketches_show_only_that_the_order_is_kept(moves):
    form = Rearrangement("o (h pair=8 two=2) -> o (h two pair)")
    weight, zeros, gradient = values((64, 64)), np.zeros(64, np.float32), values(64, 1)
    grads = {"fc.bias": form(gradient[None])[0] if moves else gradient}, {"dense.b": gradient}
    first, second = {"fc.weight": form(weight), "fc.bias": zeros}, {"dense.w": weight, "dense.b": zeros}
    found = align(summaries(first), summaries(second), (summaries(grads[0]), summaries(grads[1]))).param_map.by_name
    assert found["fc.weight"].pattern and found.get("fc.bias") == (None if moves else MapEntry("fc.bias", "dense.b"))


@pytest.mark.parametrize("shape", [(0, 4), (1, 64), (1, 1), ()])
def test_zeros_of_one_row_or_none_are_aligned(shape):
    params = {"w": values((40, 64)), "b": np.zeros(shape, np.float32)}
    found = align(summaries(params), summaries({f"{name}_2": each for name, each in params.items()}))
    assert found.param_map.entries == (MapEntry("w", "w_2"), MapEntry("b", "b_2"))


@pytest.mark.parametrize("noise", [0.1, 3.0], ids=["similar", "unrelated"])
def test_equal_values_are_matched_by_similar_gradients_in_sketches(noise):
    names, size = ("query", "key", "value"), 4096
    ones = {name: np.ones(size, np.float32) for name in names}
    grads = {name: values(size, i) for i, name in enumerate(names)}
    others = {
        f"{name}_b": array + np.float32(noise) * values(size, 9 + i) for i, (name, array) in enumerate(grads.items())
    }
    golden = {name: replace(each, sketch=each.sketch.folded(128)) for name, each in summaries(grads).items()}
    both = golden, {"query_b": Summary.of(others["query_b"]), **{n: others[n] for n in ("key_b", "value_b")}}
    found = align(summaries(ones), summaries(dict.fromkeys(others, ones["key"])), both, may_differ=True)
    decided = {name: entry.path for name, entry in found.param_map.by_name.items()}
    assert decided == ({name: f"{name}_b" for name in names} if noise < 1 else {})
    assert set(found.evidence.values()) <= {SIMILAR}
