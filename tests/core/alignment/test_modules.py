"""Modules and activations of two recordings with different names, matched by parameters, values and order."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
from types import SimpleNamespace

import numpy as np
import pytest

from crossframe.alignment import match_activations
from crossframe.param_map import MapEntry, ParamMap
from crossframe.rearrange import Rearrangement
from crossframe.recording.sketch import sketches_of

MAP = ParamMap(
    tuple(
        MapEntry(f"h.{i}.{a}.weight", f"layers.{i}.{b}.kernel")
        for i in range(3)
        for a, b in (("up", "wi"), ("down", "wo"))
    )
)


class Run:
    """What `match_activations` reads of a recording of one step: (module, use) to an array, recorded as a sketch or in full."""

    def __init__(self, values, dtype="float64", *, params=None, loss=1.0, sketched=False, seed=""):
        params = {name: SimpleNamespace(shape=shape) for name, shape in (params or {}).items()}
        self.values, self.num_steps, self._loss = values, 1, loss
        self._sketches = {of: sketches_of([array], seed=seed)[0] for of, array in values.items()} if sketched else {}
        self.manifest = SimpleNamespace(dtype=dtype, params=params)

    def losses(self):
        return np.array([[self._loss]])

    def activations(self, step):
        return [*((0, *of) for of in self.values), *((1, "of the second microbatch", use) for _, use in self.values)]

    def activation(self, *at):
        return self._first(self.values, *at)

    def activation_shape(self, *at):
        return self._first(self.values, *at).shape

    def activation_sketch(self, *at):
        return self._first(self._sketches, *at)

    def _first(self, found, step, rank, microbatch, *of):
        assert (step, rank, microbatch) == (0, 0, 0)
        return found.get(of)


def values(*seed, shape=(2, 3, 4)):
    return np.random.default_rng(seed).normal(size=shape)


def model(names, act, *, fault=None, change=lambda array: array, low=lambda array: array):
    """The activations of three layers with a nonlinearity without parameters; from a fault on, all values are others."""
    up, down, outer = names
    found = {}
    for layer in range(3):
        wrong = fault is not None and layer >= fault
        for i, module in enumerate((up, act, down)):
            for j, use in enumerate(("input", "output")):
                off = 10 * (wrong and (layer > fault or i > 1 or (i, j) == (1, 1)))
                array = values(layer, 2 * i + j + off)
                found[f"{outer}.{layer}.{module}", use] = change(low(array) if module == act else array)
    return Run(found)


def modules_of(found):
    return {ours[0]: theirs[0] for ours, (theirs, _) in found.items()}


FIRST = model(("up", "down", "h"), "gelu")


@pytest.mark.parametrize("fault", [None, 0, 1, 2])
def test_modules_are_matched_before_and_after_a_fault(fault):
    found = match_activations(FIRST, model(("wi", "wo", "layers"), "act", fault=fault), MAP)
    wanted = {
        f"h.{i}.{a}": f"layers.{i}.{b}" for i in range(3) for a, b in (("up", "wi"), ("gelu", "act"), ("down", "wo"))
    }
    assert modules_of(found) == wanted and len(found) == 18
    assert all(ours[1] == theirs[1] and form is None for ours, (theirs, form) in found.items())


def test_behind_a_fault_a_module_is_matched_as_in_layers_before_it():
    """One of two modules without parameters has no counterpart, so that places do not tell which."""

    def layers(outer, up, act, down, *others, fault):
        found = {}
        for layer in range(3):
            for i, module in enumerate(("", up, act, down, *others)):
                for j, use in enumerate(("input", "output")):
                    key = f"{outer}.{layer}.{module}" if module else f"{outer}.{layer}"
                    found[key, use] = values(layer, 2 * i + j + 20 * (fault and (layer, j) > (0, 1)))
        order = ["", up, *others, act, down]  # as forward calls them
        return Run(
            {
                of: found[of]
                for of in sorted(
                    found, key=lambda of: (of[0].split(".")[1], order.index(of[0].partition(".")[2].partition(".")[2]))
                )
            }
        )

    first, second = (
        layers("h", "up", "gelu", "down", "drop", fault=False),
        layers("layers", "wi", "act", "wo", fault=True),
    )
    found = modules_of(match_activations(first, second, MAP))
    assert [found.get(f"h.{i}.gelu") for i in range(3)] == [f"layers.{i}.act" for i in range(3)]
    assert not any(name.endswith("drop") for name in found)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda x: np.moveaxis(x, -1, 1), "a b c -> a c b"),
        (lambda x: x.transpose(1, 0, 2), "a b c -> b a c"),
        (lambda x: x.reshape(6, 4), "(a b=3) c -> a b c"),
        (lambda x: x.reshape(2, 3, 2, 2), "a b c d=2 -> a b (c d)"),
    ],
    ids=["channels first", "time first", "flat tokens", "heads"],
)
@pytest.mark.parametrize("fault", [None, 1])
def test_the_order_of_dims_is_that_of_the_values_also_after_a_fault(change, pattern, fault):
    found = match_activations(FIRST, model(("wi", "wo", "layers"), "act", fault=fault, change=change), MAP)
    assert len(found) == 18 and {form.text for _, form in found.values()} == {pattern}


@pytest.mark.parametrize("low", [np.zeros_like, np.ones_like, lambda x: (x > 0) * 1.0], ids=["zeros", "ones", "mask"])
def test_activations_of_few_values_are_not_matched_by_them(low):
    first = Run({("a", "input"): low(values(0)), ("b", "input"): values(1)})
    second = Run({("c", "input"): values(1), ("d", "input"): low(values(0))})
    assert modules_of(match_activations(first, second, ParamMap(()))) == {"b": "c"}
    # Their place between others still matches them.
    found = match_activations(
        model(("up", "down", "h"), "gelu", low=low), model(("wi", "wo", "layers"), "act", low=low), MAP
    )
    assert modules_of(found)["h.1.gelu"] == "layers.1.act"


def test_values_that_are_near_but_not_equal_up_to_rounding_do_not_match():
    x = values(0)
    near, far = Run({("b", "input"): x * (1 + 1e-7)}), Run({("b", "input"): x + 1e-3 * values(1)})
    first = Run({("a", "input"): x})
    assert match_activations(first, near, ParamMap(())).keys() == {("a", "input")}
    assert match_activations(first, far, ParamMap(())) == {}
    # A permutation of elements that is no order of dims has the same sorted values.
    mixed = np.random.default_rng(3).permutation(x.reshape(-1)).reshape(x.shape)
    assert match_activations(first, Run({("b", "input"): mixed}), ParamMap(())) == {}


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 3, 4)], ids=["batch of 2", "batch of 1"])
@pytest.mark.parametrize("other", ["sketch", "full"])
def test_sketched_activations_are_matched_by_their_values(shape, other):
    x, zeros = values(0, shape=shape), np.zeros(shape)
    first = Run({("a", "input"): zeros, ("b", "input"): x}, sketched=True)

    def matches(array, **options):
        second = Run({("c", "input"): array, ("d", "input"): zeros}, sketched=other == "sketch", **options)
        return match_activations(first, second, ParamMap(()))

    assert matches(x * (1 + 1e-7)) == {("b", "input"): (("c", "input"), None)}
    infinite = np.where(x == x.max(), np.inf, x)
    assert matches(x * 1.01) == matches(infinite) == {}
    first = Run({("b", "input"): infinite}, sketched=True)
    assert matches(np.where(np.isinf(infinite), 0.0, x)) == {}
    first = Run({("b", "input"): x}, sketched=True)
    pattern = "a b c -> a c b" if shape[0] > 1 else "1 a b -> 1 b a"
    found = {of: form.text for of, (_, form) in matches(x.swapaxes(1, 2)).items()}
    assert found == ({("b", "input"): pattern} if other == "full" else {})


def test_sketches_with_other_keys_match_nothing():
    run = Run({("a", "input"): values(0)}, sketched=True)
    assert match_activations(run, Run({("b", "input"): values(0)}, sketched=True, seed="b"), ParamMap(())) == {}


def test_modules_whose_inputs_and_outputs_agree_are_matched_before_those_of_equal_inputs():
    first, second = (
        Run(used("drop", inputs={"drop": 3}, drop=4)),
        Run(used("a", "b", inputs={"a": 3, "b": 3}, a=5, b=4)),
    )
    assert modules_of(match_activations(first, second, ParamMap(()))) == {"drop": "b"}


def test_one_input_of_a_projection_is_matched_with_that_of_one_of_its_parts():
    x = values(0)
    first = Run({("qkv", "input"): x, ("qkv", "output"): values(1, shape=(2, 3, 12))})
    parts = {
        (part, use): x if use == "input" else values(2, i)
        for i, part in enumerate("qkv")
        for use in ("input", "output")
    }
    entries = (MapEntry("qkv.weight", ("q.kernel", "k.kernel", "v.kernel"), "i o -> o i"),)
    found = match_activations(first, Run(parts), ParamMap(entries))
    assert found == {("qkv", "input"): (("q", "input"), None)}


def used(*modules, seed=0, inputs=None, **outputs):
    """Inputs and outputs of modules: those of these seeds, or else values of their own."""
    return {
        (module, use): values(given[module]) if module in given else values(seed, i, j)
        for i, module in enumerate(modules)
        for j, (use, given) in enumerate((("input", inputs or {}), ("output", outputs)))
    }


def test_a_module_without_parameters_is_not_one_that_encloses_some():
    # The decoder gives the output of all modules around it, and in the second model one more is around it.
    first = Run(
        used("head", "head.norm", "head.decoder", inputs={"head": 3}, head=9, **{"head.norm": 5, "head.decoder": 9})
    )
    seeds = {"out": 9, "out.inner": 9, "out.inner.norm": 5}
    second = Run(used("out", "out.inner", "out.inner.norm", seed=2, inputs={"out": 3, "out.inner": 3}, **seeds))
    found = match_activations(first, second, ParamMap((MapEntry("head.norm.weight", "out.inner.norm.scale"),)))
    assert modules_of(found)["head.norm"] == "out.inner.norm"
    assert ("head.decoder", "input") not in found and ("head.decoder", "output") in found


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        pytest.param("a x b", "a y b", {"x": "y"}, id="between the same ones"),
        pytest.param("a x z b", "a y w b", {"x": "y", "z": "w"}, id="equally many"),
        pytest.param("a x b", "a y w b", {}, id="not equally many"),
        pytest.param("a b x c", "b a y c", {}, id="after another one"),
        pytest.param("a x wide b", "a y z b", {}, id="of another size"),
    ],
)
def test_modules_without_parameters_are_matched_by_place(ours, theirs, found):
    runs = []
    for seed, modules in enumerate((ours.split(), theirs.split())):
        runs.append(
            Run(
                used(*modules, seed=seed) | ({("wide", "output"): values(1, shape=(9, 9))} if "wide" in modules else {})
            )
        )
    weights = ParamMap(tuple(MapEntry(f"{each}.w", f"{each}.w") for each in "abc"))
    assert {
        ours: theirs for ours, theirs in modules_of(match_activations(*runs, weights)).items() if ours not in "abc"
    } == found


def test_modules_of_equal_inputs_have_outputs_of_one_size():
    first = Run(
        {**used("outer", "outer.a", inputs={"outer": 3, "outer.a": 3}), ("outer", "output"): values(5, shape=(2, 3, 5))}
    )
    second = Run(used("b", seed=1, inputs={"b": 3}))
    assert match_activations(first, second, ParamMap((MapEntry("outer.a.w", "b.w"),)))["outer.a", "input"][0] == (
        "b",
        "input",
    )


def test_a_module_is_matched_once():
    first, second = Run(used("a", "b", inputs={"a": 3, "b": 3})), Run(used("c", inputs={"c": 3}, seed=1))
    assert modules_of(match_activations(first, second, ParamMap(()))) == {"a": "c"}


def test_the_order_of_dims_is_that_of_the_same_activation_of_other_layers():
    made = {(f"h.{i}.{part}", use): values(i, k, shape=(2, 3, 3)) for i in range(3) for k, part in enumerate(("norm", "fc", "up"))
            for use in ("input", "output")}  # fmt: skip
    moved = {of: x.swapaxes(1, 2) if "fc" in of[0] and "output" in of else x for of, x in made.items()}
    moved["h.2.fc", "output"] = values(7, shape=(2, 3, 3))
    names = ParamMap(tuple(MapEntry(f"{of}.w", f"{of}.k") for of, use in made if use == "input"))
    found = match_activations(Run(made), Run(moved), names)
    assert {of for of, (_, form) in found.items() if form is not None} == {(f"h.{i}.fc", "output") for i in range(3)}
    assert len(found) == len(made)


def test_modules_with_different_parameters_are_not_matched_by_place():
    first = Run(used("embed", "norm", "head", seed=1))
    second = Run(used("layers.0", "scale", "out", seed=2) | {("layers.0.attn", "input"): values(7)})
    names = (
        ("embed.weight", "embedding"),
        ("norm.weight", "scale.w"),
        ("head.weight", "out.w"),
        ("qkv", "layers.0.attn.w"),
    )
    found = match_activations(first, second, ParamMap(tuple(MapEntry(*each) for each in names)))
    assert modules_of(found) == {"norm": "scale", "head": "out"}


def test_a_projection_is_not_the_attention_that_encloses_it():
    first = Run(used("norm", "q", "k", "out", seed=1, inputs={"q": 3, "k": 3}))
    second = Run(used("norm", "attn", seed=2, inputs={"attn": 3}))
    weights = [("norm.weight", "norm.scale"), ("out.weight", "attn.out.weight")]
    halves = (
        MapEntry("q.weight", "attn.qk", "a b[0:6/12] -> a b"),
        MapEntry("k.weight", "attn.qk", "a b[6:12/12] -> a b"),
    )
    found = match_activations(first, second, ParamMap((*(MapEntry(*each) for each in weights), *halves)))
    assert ("norm", "output") in found
    assert "attn" not in {theirs[0] for (_, use), (theirs, _) in found.items() if use == "output"}


@pytest.mark.parametrize("fault", [False, True])
def test_features_are_permuted_as_the_weights_are(fault):
    pattern = "(h w=2 c=3) i -> (h c w) i"
    to_first = Rearrangement("a b (h w=2 c=3) -> a b (h c w)")
    x, y, z = values(0), values(1, shape=(2, 3, 12)), values(2)
    first = Run({("q", "input"): x, ("q", "output"): to_first(y), ("o", "input"): z})
    second = Run(
        {("wq", "input"): x, ("wq", "output"): y + fault * values(3, shape=y.shape), ("wo", "input"): z + fault},
        params={"wq.w": (12, 4)},
    )
    entries = (MapEntry("q.weight", "wq.w", pattern), MapEntry("o.weight", "wo.w"))
    (theirs, form) = match_activations(first, second, ParamMap(entries))["q", "output"]
    assert theirs == ("wq", "output") and form is not None
    assert np.array_equal(form(y), to_first(y))


def test_features_that_are_all_equal_stay_in_place():
    x, y = values(0), np.repeat(values(1, shape=(2, 3, 1)), 12, axis=2)
    first = Run({("q", "input"): x, ("q", "output"): y})
    second = Run({("wq", "input"): x, ("wq", "output"): y}, params={"wq.w": (12, 4)})
    entry = MapEntry("q.weight", "wq.w", "(h w=2 c=3) i -> (h c w) i")
    found = match_activations(first, second, ParamMap((entry,)))
    assert found["q", "output"] == (("wq", "output"), None)


@pytest.mark.parametrize(
    ("loss", "compared"), [(1 + 9e-5, False), (1 + 2e-4, True)], ids=["loss agrees", "loss differs"]
)
def test_what_differs_without_effect_is_not_one_activation(loss, compared):
    # The second attention adds the residual, which in the first model its layer does.
    first = Run(used("layer", "layer.attn", seed=1, inputs={"layer": 3, "layer.attn": 3}, layer=4))
    second = Run(used("block", "block.mix", seed=2, inputs={"block": 3, "block.mix": 3}, block=4), loss=loss)
    entries = (MapEntry("layer.attn.w", "block.mix.w"), MapEntry("layer.scale", "block.scale"))
    found = match_activations(first, second, ParamMap(entries))
    assert (("layer.attn", "output") in found) == compared and ("layer.attn", "input") in found


ACTIVATIONS = {"relu": lambda x: np.maximum(x, 0.0), "silu": lambda x: x / (1 + np.exp(-x))}


@pytest.mark.parametrize("act", [pytest.param(act, id=name) for name, act in ACTIVATIONS.items()])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_norm_is_not_one_that_applies_an_activation_too(act, swapped):
    x, y = values(1), values(2)
    plain = {("bn", "input"): x, ("bn", "output"): y, ("act", "input"): y, ("act", "output"): act(y)}
    joined = {("norm", "input"): x.transpose(0, 2, 1), ("norm", "output"): act(y).transpose(0, 2, 1)}
    names = ("norm", "bn") if swapped else ("bn", "norm")
    runs = (Run(joined), Run(plain)) if swapped else (Run(plain), Run(joined))
    found = match_activations(*runs, ParamMap((MapEntry(f"{names[0]}.weight", f"{names[1]}.scale"),)))
    pairs = {(ours, theirs) for ours, (theirs, _) in found.items()}
    pairs = {pair[::-1] if swapped else pair for pair in pairs}
    assert pairs == {(("bn", "input"), ("norm", "input")), (("act", "output"), ("norm", "output"))}


def test_recordings_without_a_step_of_activations_in_common_match_none():
    some = Run(used("a", seed=1))
    assert match_activations(Run({}), some, MAP) == match_activations(some, Run({}), MAP) == {}
    assert match_activations(some, some, MAP).keys() == {("a", "input"), ("a", "output")}


@pytest.mark.parametrize("sketched", [False, True])
def test_a_norm_with_a_fault_is_still_that_norm(sketched):
    x, y = values(1), values(2)
    first = Run({("bn", "input"): x, ("bn", "output"): y}, sketched=sketched)
    second = Run({("norm", "input"): x, ("norm", "output"): 1.01 * np.maximum(y, -0.5)}, sketched=sketched)
    found = match_activations(first, second, ParamMap((MapEntry("bn.weight", "norm.scale"),)))
    assert found["bn", "output"][0] == ("norm", "output")


@pytest.mark.parametrize("fault", [None, 1])
def test_further_calls_are_those_of_the_matched_module(fault):
    def twice(run):
        further = {(f"{module} (call 2)", use): array + 1 for (module, use), array in run.values.items()}
        return Run(run.values | further)

    first, second = (twice(run) for run in (FIRST, model(("wi", "wo", "layers"), "act", fault=fault)))
    found = modules_of(match_activations(first, second, MAP))
    calls = {call: other for call, other in found.items() if call.endswith("(call 2)")}
    once = {call: other for call, other in found.items() if call not in calls}
    assert len(once) == 9 and calls == {f"{call} (call 2)": f"{other} (call 2)" for call, other in once.items()}
