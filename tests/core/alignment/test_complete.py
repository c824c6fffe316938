"""Parameters whose values differ, matched by structure to compare them."""

import itertools

import numpy as np
import pytest

from crossframe.alignment import NAMES, SIMILAR, USE, Alignment, align, complete, unlike_other_layers
from crossframe.param_map import MapEntry, ParamMap
from tests.core.alignment import test_portions as models


def broken(params, *names):
    return {name: value + 0.5 if name in names else value for name, value in params.items()}


def completed(first, second):
    return complete(align(first, second), first, second)


def test_wrong_parameters_correspond_as_in_other_layers():
    params, shadow = (dict(models.model(seed)) for seed in (0, 1))
    wrong = ("h.1.attn.k.weight", "h.2.mlp.up.weight", "h.2.norm.weight")
    for second in (models.separate, lambda p: models.stacked(models.separate(p))):
        found, added = completed(broken(params, *wrong), second(params))
        assert set(wrong) <= set(added) and len(found.entries) == len(params)
        for entry in found.entries:
            assert np.array_equal(
                entry.to_canonical(*(second(shadow)[path] for path in entry.paths)), shadow[entry.name]
            )


def test_joined_parameters_correspond_as_in_other_layers():
    params, shadow = (dict(models.model(seed)) for seed in (0, 1))
    how = models.in_groups(0)
    first = broken(models.joined(params, *models.QKV, how), "h.1.attn.qkv.weight")
    found, added = completed(first, models.separate(params))
    assert "h.1.attn.qkv.weight" in added and len(found.entries) == len(first)
    second, wanted = models.separate(shadow), models.joined(shadow, *models.QKV, how)
    for entry in found.entries:
        assert np.array_equal(entry.to_canonical(*(second[path] for path in entry.paths)), wanted[entry.name])


def test_the_only_parameter_that_is_left_is_matched_and_two_are_not():
    params = dict(models.model(0))
    found, added = completed(broken(params, "embed.weight"), models.separate(params))
    assert added == ("embed.weight",) and found.by_name["embed.weight"].path == "embed.kernel"
    found, added = completed(broken(params, "embed.weight", "norm.weight"), models.separate(params))
    assert "embed.weight" not in added and "embed.weight" not in found.by_name
    # Of another shape it is another parameter.
    other = models.separate(params) | {"embed.kernel": np.ones((7, 3))}
    assert completed(broken(params, "embed.weight"), other)[1] == ()


def completed_map(rows, **shapes):
    """The map that is completed from these entries, and of shapes of both models by name; others have shape (4,)."""
    entries = tuple(MapEntry(*row) for row in rows)
    first, second = ({each: np.zeros(shapes.get(each, 4)) for each in names} for names in (
        [*(entry.name for entry in entries), *(each for each in shapes if each in ("w", "h.1.k"))],
        [*(path for entry in entries for path in entry.paths), *(each for each in shapes if each in ("x", "l.1.q"))],
    ))  # fmt: skip
    return complete(Alignment(ParamMap(entries), {}, ()), first, second)[0].by_name


def test_the_last_weight_has_the_order_of_other_weights():
    rows = [("a", "b", "a b -> b a"), *((f"a.{i}", f"b.{i}") for i in "xyz")]
    rows += [(f"qk.{i}", (f"q.{i}", f"k.{i}"), "a b -> a b") for i in "xy"]
    shapes = {"a": (4, 4), "b": (4, 4), "w": (4, 4), "x": (4, 4)}
    for each in "xy":
        shapes |= {f"qk.{each}": (8, 4), f"q.{each}": (4, 4), f"k.{each}": (4, 4)}
    assert completed_map(rows, **shapes)["w"] == MapEntry("w", "x", "a b -> b a")


def test_the_last_parameter_is_no_portion_of_an_array():
    rows = [
        (f"{part}{i}", f"qk{i}", f"a b[{start}:{start + 4}/8] -> a b")
        for i in "xy"
        for part, start in (("q", 0), ("k", 4))
    ]
    shapes = {f"{part}{i}": (4, 4) for i in "xy" for part in "qk"} | {
        "qkx": (4, 8),
        "qky": (4, 8),
        "w": (4, 4),
        "x": (4, 8),
    }
    assert "w" not in completed_map(rows, **shapes)


def test_a_path_that_another_parameter_has_is_not_taken():
    rows = [("h.0.q", "l.0.q"), ("h.0.k", "l.0.k"), ("h.1.q", "l.1.k")]
    assert completed_map(rows, **{"h.1.k": (4,), "l.1.q": (4,)})["h.1.k"].path == "l.1.q"


def test_portions_exchanged_in_one_layer_are_named():
    first, second = "a[0:4/8] b -> a b", "a[4:8/8] b -> a b"
    rows = [(f"h.{i}.{part}", f"l.{i}.qk", text) for i in range(3) for part, text in (("q", first), ("k", second))]
    rows[2:4] = [("h.1.q", "l.1.qk", second), ("h.1.k", "l.1.qk", first)]
    assert unlike_other_layers(ParamMap(tuple(MapEntry(*row) for row in rows))) == ("h.1.q", "h.1.k")


def test_values_exchanged_in_one_layer_are_named():
    params = dict(models.model(0))
    for second in (models.separate, lambda p: models.stacked(models.separate(p))):
        assert unlike_other_layers(align(params, second(params)).param_map) == ()
        changed = dict(params)
        changed["h.1.attn.k.weight"], changed["h.1.attn.v.weight"] = (
            params["h.1.attn.v.weight"],
            params["h.1.attn.k.weight"],
        )
        found = align(changed, second(params)).param_map
        assert {"h.1.attn.k.weight", "h.1.attn.v.weight"} <= set(unlike_other_layers(found))
        assert all(name.startswith("h.1.attn.") for name in unlike_other_layers(found))


def test_values_exchanged_in_one_expert_are_named():
    def entries(*exchanged):
        for layer, expert, k in itertools.product(range(3), range(4), "ab"):
            part = "ba"["ab".index(k)] if (layer, expert) in exchanged else k
            yield MapEntry(f"h.{layer}.experts.{expert}.{k}", f"layers.{layer}.experts.{expert}.{part}")

    assert unlike_other_layers(ParamMap(tuple(entries()))) == ()
    odd = unlike_other_layers(ParamMap(tuple(entries((1, 2), (2, 0)))))
    assert sorted(odd) == [f"h.{each}.{k}" for each in ("1.experts.2", "2.experts.0") for k in "ab"]
    # No majority shows where parameters belong.
    assert unlike_other_layers(ParamMap(tuple(entries(*((1, i) for i in range(4)), (0, 0), (0, 1))))) == ()


def test_similar_gradients_decide_between_equal_values_where_a_fault_may_be():
    rng = np.random.default_rng(0)
    names = [f"norm{i}.weight" for i in range(4)]
    ones = {name: np.ones(16) for name in names}
    true = {name: rng.normal(size=16) for name in names}
    faulty = {f"n.{name}": 3 * grad + 0.3 * rng.normal(size=16) for name, grad in true.items()}
    other = {f"n.{name}": value for name, value in ones.items()}
    assert len(align(ones, other, (true, faulty)).undecided) == 1
    found = align(ones, other, (true, faulty), may_differ=True)
    assert {entry.name: entry.path for entry in found.param_map.entries} == {name: f"n.{name}" for name in names}
    assert SIMILAR in found.evidence.values()
    unrelated = {path: rng.normal(size=16) for path in faulty}
    assert align(ones, other, (true, unrelated), may_differ=True).param_map.entries == ()


def with_norms(layers, norms, linears):
    """Weights of their own in the linear modules of each layer, and ones in its norms."""
    found = {}
    for i, layer in enumerate(layers):
        for k, each in enumerate(linears):
            found[f"{layer}.{each}.weight"] = np.random.default_rng((i, k)).normal(size=(5, 4))
        found |= {f"{layer}.{each}.weight": np.ones(4) for each in norms}
    return found


def faulty_gradients(*models):
    """Gradients that have nothing in common."""
    return tuple(
        {name: np.random.default_rng((k, i)).normal(size=array.shape) for i, (name, array) in enumerate(model.items())}
        for k, model in enumerate(models)
    )


@pytest.mark.parametrize(("apart", "decided"), [((-0.1, 0.5, 0.6), True), ((0.001, -0.001, 0.001), False)])
def test_layers_together_decide_what_one_leaves_open(apart, decided):
    first = with_norms(("h.0", "h.1", "h.2"), ("q_norm", "k_norm"), ("attn", "mlp"))
    second = with_norms(("layers.0", "layers.1", "layers.2"), ("early", "late"), ("attn", "mlp"))
    gradients = faulty_gradients(first, second)
    for i, distance in enumerate(apart):
        # All directions of a layer are similar. A negative distance makes those of the wrong ones the more similar ones.
        base, other = np.random.default_rng(i).normal(size=(2, 4)), np.random.default_rng((i, 1)).normal(size=(2, 4))
        for k, (name, path) in enumerate((("q_norm", "late"), ("k_norm", "early"))):
            away, sign = (1 - 2 * k) * base[1], np.sign(distance)
            gradients[0][f"h.{i}.{name}.weight"] = base[0] + abs(distance) * away
            gradients[1][f"layers.{i}.{path}.weight"] = base[0] + sign * abs(distance) * away + 0.05 * other[k]
    found = align(first, second, gradients, may_differ=True).param_map.by_name
    norms = {name: entry.path for name, entry in found.items() if "norm" in name}
    expected = {
        f"h.{i}.{name}_norm.weight": f"layers.{i}.{path}.weight"
        for i in range(3)
        for name, path in (("q", "late"), ("k", "early"))
    }
    assert norms == (expected if decided else {})


def test_the_order_of_use_decides_between_equal_values_where_a_fault_may_be():
    first = with_norms(("h.0", "h.1"), ("norm1", "norm2"), ("attn", "mlp"))
    second = with_norms(("layers.0", "layers.1"), ("post", "pre"), ("attn", "mlp"))
    uses = (
        [f"h.{i}.{each}" for i in range(2) for each in ("norm1", "attn", "norm2", "mlp")],
        [f"layers.{i}.{each}" for i in range(2) for each in ("pre", "attn", "post", "mlp")],
    )
    found = align(first, second, faulty_gradients(first, second), may_differ=True, uses=uses)
    names = {entry.name: entry.path for entry in found.param_map.entries}
    assert names["h.0.norm2.weight"] == "layers.0.post.weight" and names["h.1.norm1.weight"] == "layers.1.pre.weight"
    assert len(names) == len(first) and USE in found.evidence.values()
    # In another order nothing is decided by it.
    other = uses[0], [f"layers.{i}.{each}" for i in range(2) for each in ("mlp", "post", "attn", "pre")]
    found = align(first, second, faulty_gradients(first, second), may_differ=True, uses=other)
    assert not any("norm" in entry.name for entry in found.param_map.entries)


@pytest.mark.parametrize("beside", ["ours", "theirs"])
def test_the_order_of_use_leaves_out_parameters_beside_modules(beside):
    weights = {
        f"{i}{each}": np.random.default_rng((k, m)).normal(size=(5, 4))
        for k, i in enumerate(("image", "text"))
        for m, each in enumerate((".token.weight", ".position.weight", "_fc.weight"))
    }
    first = weights | {f"{i}_norm.weight": np.ones(4) for i in ("image", "text")}
    second = {name.replace("position.weight", "positions"): value for name, value in weights.items()}
    second |= {f"{i}_scale.weight": np.ones(4) for i in ("text", "image")}
    uses = (
        [f"{i}{each}" for i in ("image", "text") for each in (".token", ".position", "_norm", "_fc")],
        [f"{i}{each}" for i in ("image", "text") for each in ("", ".token", "_scale", "_fc")],
    )
    if beside == "ours":
        first, second, uses = second, first, uses[::-1]
    found = align(first, second, faulty_gradients(first, second), may_differ=True, uses=uses)
    ours, theirs = ("norm", "scale") if beside == "theirs" else ("scale", "norm")
    assert found.param_map.by_name[f"image_{ours}.weight"].path == f"image_{theirs}.weight"
    assert not found.undecided and USE in found.evidence.values()


def test_equal_names_in_corresponding_modules_decide_last():
    first = with_norms(("h.0", "h.1"), ("norm1", "norm2"), ("attn", "mlp"))
    second = with_norms(("layers.0", "layers.1"), ("norm2", "norm1"), ("mixer", "mlp"))
    gradients = faulty_gradients(first, second)
    found = align(first, second, gradients, may_differ=True)
    assert {found.param_map.by_name[f"h.{i}.norm{k}.weight"].path for i in range(2) for k in (1, 2)} == {
        f"layers.{i}.norm{k}.weight" for i in range(2) for k in (1, 2)
    }
    assert found.param_map.by_name["h.1.norm2.weight"].path == "layers.1.norm2.weight"
    assert NAMES in found.evidence.values()
    assert len(align(first, second, gradients).param_map.entries) == 4  # not in a map that is not checked against a run


@pytest.mark.parametrize("pairs", [{"a": "b", "b": "c", "x": "x"}, {"b": "a", "c": "b", "x": "x"}])
def test_equal_names_do_not_take_a_parameter_that_has_a_counterpart(pairs):
    """A correct gradient decides about the first parameter, the name about the last one."""
    first, second = (
        {f"{outer}.{each}": np.ones(4) for each in names}
        for outer, names in zip("hl", zip(*pairs.items(), strict=True), strict=True)
    )
    gradients = faulty_gradients(first, second)
    known, *_ = pairs.items()
    gradients[1][f"l.{known[1]}"] = gradients[0][f"h.{known[0]}"]
    found = align(first, second, gradients, may_differ=True)
    assert {entry.name: entry.path for entry in found.param_map.entries} == {
        f"h.{a}": f"l.{b}" for a, b in pairs.items()
    }
    assert found.evidence["h.x"] == NAMES


def test_the_last_parameter_does_not_take_the_order_of_gates():
    draw = np.random.default_rng(0).normal
    first = {"rnn.0.w": draw(size=(6, 5)), "rnn.1.w": draw(size=(6, 5)), "head.w": draw(size=(6, 4))}
    second = {f"cell.{i}.k": first[f"rnn.{i}.w"][[2, 3, 0, 1, 4, 5]].T for i in range(2)}
    found, added = completed(first, second | {"head.k": first["head.w"].T + 1})
    assert added == () and found.by_name.keys() == {"rnn.0.w", "rnn.1.w"}
    assert all(entry.reorders for entry in found.entries)
