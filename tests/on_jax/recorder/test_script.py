"""Scripts that know nothing of the recorder, recorded: what is recorded against what they compute."""

import inspect
import os
from importlib import import_module

import jax
import numpy as np
import pytest

from crossframe.operators import Request
from crossframe.recording import Recording
from crossframe.recording.event_format import FORWARD
from crossframe.recording.perturbed_runs import perturbed_values
from crossframe.recording.program import GRADIENTS, PROGRAM
from crossframe.scripts import NOT_RECORDED
from crossframe.verdict import Verdict, compare
from jax_backend.recorder import script
from jax_backend.recorder._patches import Patches
from tests.on_jax.helpers.scripts import (
    ADDED_BY_HAND,
    ADDED_IN_A_SCAN,
    EAGER,
    EVALUATED,
    FUNCTIONS,
    HEAD,
    IN_A_SCAN,
    IN_LOOPS,
    LINE_SEARCHED,
    MAPPED,
    MAPPED_SCAN,
    RECORDED,
    REFUSED,
    RESHARDED,
    SHARDED,
    TIED,
    TWO_CALLS,
)

OF_NNX = {"", "layers.0", "norm", "layers.1"}
MODULES = {
    "linen": {"", "Dense_0", "BatchNorm_0", "Dropout_0", "Dense_1"},
    "nnx": OF_NNX,
    "nnx_outside_of_jit": OF_NNX,
    "equinox": {"", "layers.0", "layers.2"},
    "added_one_by_one": {"", "layers.0", "layers.2"},
}
ADAM = {"optimizer": "Adam", "eps": 1e-8, "betas": [0.9, 0.999]}
ADAMW = {"optimizer": "AdamW", "lr": 0.01, "weight_decay": 1e-4, "eps": 1e-8, "betas": [0.9, 0.999]}
STATED = {
    "linen": {"optimizer": "SGD", "lr": 0.1, "momentum": 0.9},
    "nnx": ADAM | {"lr": 0.01},
    "nnx_outside_of_jit": ADAM | {"lr": 0.01},
    "nested": {},
    "added_in_jit": {},
    "added_by_hand": {"optimizer": "SGD", "lr": 0.1},
    "meta_learned": {},  # two optimizers
    "equinox": ADAMW | {"clip": 1.0},
    "added_one_by_one": ADAMW | {"clip": 1.0},
    "two_calls": ADAM,
    "eager": {"optimizer": "SGD", "lr": 0.1},
    "per_sample": {"optimizer": "SGD", "lr": 0.1},
}
OPTIONS = ("optimizer", "lr", "weight_decay", "momentum", "eps", "betas", "clip")
# optax.MultiSteps accumulates in float32.
PRECISION = {"accumulated": np.finfo(np.float32).eps}
# Of each kind of script one is recorded without --exhaustive.
KINDS = ("in_a_scan", "linen", "equinox", "two_calls", "sharded")


def plain(text):
    """The result of a script that is not recorded."""
    variables = {"__name__": "__main__"}
    exec(compile(text, "script.py", "exec"), variables)
    return jax.tree.leaves(variables["result"])


def differences(pairs):
    return [a.tolist() for a, b in pairs if not np.array_equal(a, b)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in KINDS else pytest.mark.exhaustive) for name in RECORDED]
)
def test_recorded_scripts_compute_the_same_bits_and_are_recorded(tmp_path, run, name):
    wanted = plain(RECORDED[name])
    status, variables = run(RECORDED[name])
    assert status == 0
    assert not differences(zip(wanted, jax.tree.leaves(variables["result"]), strict=True))
    found = Recording.open(tmp_path / "out")
    assert found.num_steps == 3 and found.recorded_steps() == (0, 2)
    last = {name: found.full("update", 2, name) for name in found.manifest.params}
    assert sorted(each.tobytes() for each in last.values()) == sorted(np.asarray(leaf).tobytes() for leaf in wanted)
    batches = [found.batch(1, rank) for rank in range(found.manifest.world_size)]
    assert sum(len(batch.sample_ids) for batch in batches) == 8
    assert all(len(batch.inputs) == 2 for batch in batches)  # no statistics of norms, no random keys
    modules = {module for _, module, _ in found.activations(0)}
    assert modules == MODULES.get(name, {"hidden", "out"}) and not found.activations(2)
    settings = found.manifest.settings
    assert {option: settings[option] for option in OPTIONS if option in settings} == STATED.get(name, ADAMW)
    if name == "two_calls":
        assert [found.learning_rates(step)[0] for step in range(3)] == pytest.approx([0.01, 0.009, 0.008])
    if name not in MODULES:
        check_gradients(found, variables, 64 * float(PRECISION.get(name, np.finfo(np.float64).eps)))


@pytest.mark.parametrize("mode", ["shard_map", "jit"])
def test_a_script_with_units_of_jax_backend_is_recorded(tmp_path, run, mode):
    text = RESHARDED.replace("MODE", mode)
    wanted = plain(text)
    status, variables = run(text)
    assert status == 0
    assert not differences(zip(wanted, jax.tree.leaves(variables["result"]), strict=True))
    found = Recording.open(tmp_path / "out")
    assert found.num_steps == 3
    batch, params = variables["batches"][0], variables["init"](jax.random.key(0))
    loss, grads = jax.value_and_grad(variables["loss_fn"])(params, batch["image"], batch["label"])
    assert found.losses()[0].mean() == pytest.approx(float(loss), rel=64 * np.finfo(np.float64).eps)
    np.testing.assert_allclose(
        found.full("reduce", 0, "hidden.w"),
        grads["hidden"]["w"],
        rtol=0,
        atol=64 * np.finfo(np.float64).eps,
    )
    assert run(text, "wrong", fault=1.01)[0] == 0
    assert compare(found, Recording.open(tmp_path / "wrong")).verdict is Verdict.BUG


BIASES = ["hidden.b", "out.b"]
MASKS = {
    "function": ("lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)", BIASES),
    "tree": ("{part: {'w': True, 'b': False} for part in params}", BIASES),
    "prefix": ("{'hidden': False, 'out': {'w': True, 'b': False}}", ["hidden.w", "hidden.b", "out.b"]),
    "everything decays": ("True", None),
}


@pytest.mark.parametrize(("mask", "exempt"), [pytest.param(*case, id=name) for name, case in MASKS.items()])
def test_parameters_without_decay_by_a_mask_are_a_group(tmp_path, run, mask, exempt):
    status, _ = run(IN_A_SCAN.replace("optax.adamw(0.01)", f"optax.adamw(0.01, mask={mask})"))
    assert status == 0
    settings = Recording.open(tmp_path / "out").manifest.settings
    assert settings["optimizer"] == "AdamW" and settings["weight_decay"] == 1e-4
    groups = settings.get("param_groups")
    named = None if groups is None else [(sorted(group.pop("params")), group) for group in groups]
    assert named == (None if exempt is None else [(sorted(exempt), {"weight_decay": 0.0})])


def check_gradients(found, variables, tolerance):
    """The first step's loss and gradients against those of its whole batch; they are sums of some tens of numbers of order 1."""
    initial = {name: found.full("parameters", 0, name) for name in found.manifest.params}
    params = {part: {leaf: initial[f"{part}.{leaf}"] for leaf in ("w", "b")} for part in ("hidden", "out")}
    batch = variables["batches"][0]
    loss, grads = jax.value_and_grad(variables["loss_fn"])(params, batch["image"], batch["label"])
    assert found.losses()[0].mean() == pytest.approx(float(loss), rel=tolerance)
    for name in initial:
        part, _, leaf = name.partition(".")
        np.testing.assert_allclose(found.full("reduce", 0, name), grads[part][leaf], rtol=0, atol=tolerance)


def test_a_module_that_another_applies_has_its_path_in_the_model(tmp_path, run):
    text = (
        HEAD
        + TIED
        + """
@jax.jit
def train_step(params, batch):
    loss_fn = lambda params: cross_entropy(net.apply({"params": params}, batch["image"]), batch["label"])
    grads = jax.grad(loss_fn)(params)
    return optax.apply_updates(params, optax.sgd(0.1).update(grads, optax.sgd(0.1).init(params))[0])
params = variables["params"]
for batch in batches:
    params = train_step(params, batch)
"""
    )
    status, variables = run(text)
    assert status == 0
    found = Recording.open(tmp_path / "out")
    assert {module for _, module, _ in found.activations(0)} == {"", "embed", "head"}
    net, initial, image = variables["net"], variables["variables"], variables["batches"][0]["image"]
    # Sums of some tens of numbers of order 1.
    tolerance = 64 * float(np.finfo(np.float32).eps)
    np.testing.assert_allclose(found.activation(0, 0, 0, "", "output"), net.apply(initial, image), atol=tolerance)


SHARED = {
    "linen": """
from flax import linen as nn
class Net(nn.Module):
    def setup(self):
        self.same, self.head = nn.Dense(6), nn.Dense(3)
    def __call__(self, x):
        return self.head(self.same(nn.relu(self.same(x))))
net = Net()
params = net.init(jax.random.key(0), batches[0]["image"])["params"]
def apply(params, x):
    return net.apply({"params": params}, x)
""",
    "functions": """
same = jax.jit(jax.named_call(lambda params, x: x @ params["kernel"], name="same"))
head = jax.named_call(lambda params, x: x @ params["kernel"], name="head")
keys = jax.random.split(jax.random.key(0))
params = {"same": {"kernel": jax.random.normal(keys[0], (6, 6))}, "head": {"kernel": jax.random.normal(keys[1], (6, 3))}}
def apply(params, x):
    return head(params["head"], same(params["same"], jax.nn.relu(same(params["same"], x))))
""",
    "nnx": """
from flax import nnx
class Net(nnx.Module):
    def __init__(self, rngs):
        self.same, self.head = nnx.Linear(6, 6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)
    def __call__(self, x):
        return self.head(self.same(nnx.relu(self.same(x))))
net, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)
def apply(params, x):
    return nnx.merge(net, params, rest)(x)
""",
}


@pytest.mark.parametrize("library", SHARED)
def test_further_calls_of_a_module_have_names_of_their_own(tmp_path, run, library):
    text = (
        HEAD
        + SHARED[library]
        + """
@jax.jit
def train_step(params, batch):
    loss_fn = lambda params: cross_entropy(apply(params, batch["image"]), batch["label"])
    grads = jax.grad(loss_fn)(params)
    return optax.apply_updates(params, optax.sgd(0.1).update(grads, optax.sgd(0.1).init(params))[0])
for batch in batches:
    params = train_step(params, batch)
"""
    )
    assert run(text)[0] == 0
    found = Recording.open(tmp_path / "out")
    inputs = [module for _, module, use in found.activations(0) if use == "input" and module]
    assert inputs == ["same", "same (call 2)", "head"]
    first, given, result, after = (
        found.activation(0, 0, 0, *of)
        for of in (("same", "output"), ("same (call 2)", "input"), ("same (call 2)", "output"), ("head", "input"))
    )
    np.testing.assert_array_equal(given, np.maximum(first, 0))
    np.testing.assert_array_equal(result, after)


def test_a_loss_with_derivatives_of_the_model_may_be_evaluated_first(tmp_path, run):
    text = (
        FUNCTIONS
        + """
@jax.jit
def equation(params, x):
    slope = jax.grad(lambda point: forward(params, point).sum())
    curvature = jax.vmap(jax.grad(lambda point: slope(point).sum()))(x)
    return jnp.square(forward(params, x).sum(1, keepdims=True) - jax.vmap(slope)(x) - curvature).mean()
@jax.jit
def train_step(params, batch):
    grads = jax.grad(lambda params: equation(params, batch["image"]))(params)
    return optax.apply_updates(params, optax.sgd(0.1).update(grads, optax.sgd(0.1).init(params))[0])
before = equation(params, batches[0]["image"])
for batch in batches:
    params = train_step(params, batch)
"""
    )
    status, variables = run(text)
    assert status == 0
    found = Recording.open(tmp_path / "out")
    assert found.num_steps == 3
    assert found.losses()[0].tolist() == pytest.approx([float(variables["before"])])
    assert {module for _, module, _ in found.activations(0)} == {"hidden", "out"}


@pytest.mark.parametrize(
    "text", [pytest.param(IN_LOOPS, id="loops"), pytest.param(MAPPED_SCAN, id="mapped", marks=pytest.mark.exhaustive)]
)
def test_steps_inside_of_loops_are_recorded_in_order(tmp_path, run, text):
    status, variables = run(text, every=1)
    assert status == 0
    found, losses = Recording.open(tmp_path / "out"), np.asarray(variables["losses"])
    assert found.losses().mean(axis=1).tolist() == losses.tolist()
    assert found.recorded_steps() == tuple(range(len(losses)))
    assert {module for _, module, _ in found.activations(0)} == {"hidden", "out"}
    for name in found.manifest.params:
        part, _, leaf = name.partition(".")
        for phase, step, tree in (("parameters", 0, variables.get("start", variables["params"])),
                                  ("update", len(losses) - 1, variables["result"])):  # fmt: skip
            assert np.array_equal(found.full(phase, step, name), tree[part][leaf])
    moments = [found.full("state", step, "out.w", use="exp_avg") for step in (0, 1)]
    wanted = 0.9 * moments[0] + 0.1 * found.full("reduce", 1, "out.w")  # of Adam, in two operations each
    np.testing.assert_allclose(moments[1], wanted, rtol=8 * np.finfo(moments[0].dtype).eps)


def test_steps_of_a_line_search_are_recorded_with_their_losses(tmp_path, run):
    status, variables = run(LINE_SEARCHED)
    assert status == 0
    found = Recording.open(tmp_path / "out")
    assert found.losses()[:, 0].tolist() == variables["losses"] and found.recorded_steps() == (0, 2)
    assert np.array_equal(found.full("update", 2, "out.w"), variables["result"]["out"]["w"])


def test_more_values_of_steps_in_a_scan_than_fit_are_refused(run, capsys, monkeypatch):
    monkeypatch.setattr(script, "_MOST_BYTES", 1000)
    assert run(IN_A_SCAN)[0] == NOT_RECORDED
    errors = capsys.readouterr().err
    assert "3 steps run inside one call" in errors and "recorder.step(params=params" in errors


def test_operators_of_a_step_inside_of_a_scan_cannot_be_told_apart(tmp_path, run, capsys, monkeypatch):
    request = Request(str(tmp_path), 1, 0, FORWARD, "")
    for name, value in request.to_environment().items():
        monkeypatch.setenv(name, value)
    assert run(IN_A_SCAN)[0] == NOT_RECORDED
    assert "step 1 runs inside a jax.lax.scan over 3 steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "factor"),
    [
        pytest.param(ADDED_IN_A_SCAN, 1.0, id="in a scan"),
        pytest.param(ADDED_BY_HAND.replace("p + u", "p + 0.5 * u"), 0.5, id="another step"),
    ],
)
def test_parameters_are_recorded_where_the_script_shows_them(tmp_path, run, capsys, text, factor):
    assert run(text, every=1)[0] == 0
    assert "parameters after the last step are not recorded" in capsys.readouterr().err
    found = Recording.open(tmp_path / "out")
    assert found.recorded_steps() == (0, 1, 2)
    for name in found.manifest.params:
        assert [found.has("update", step, name) for step in range(3)] == [True, True, False]
        assert found.has("reduce", 2, name)
    if factor != 1.0:
        before, after = (found.full(phase, 0, "out.w") for phase in ("parameters", "update"))
        np.testing.assert_array_equal(after, before + factor * (-0.1 * found.full("reduce", 0, "out.w")))


def test_gradients_that_the_optimizer_does_not_get_are_left_out(tmp_path, run):
    status, variables = run(EVALUATED)
    assert status == 0
    found = Recording.open(tmp_path / "out")
    assert found.losses()[:, 0].tolist() == variables["losses"]
    assert {microbatch for microbatch, _, _ in found.activations(0)} == {0}


def test_a_replaced_function_has_the_signature_of_its_own():
    """haliax looks for the name of an option of `shard_map` that JAX has changed."""
    own = [inspect.signature(each) for each in (jax.shard_map, jax.lax.with_sharding_constraint)]
    with Patches():
        assert [inspect.signature(each) for each in (jax.shard_map, jax.lax.with_sharding_constraint)] == own


# A bare array, with the shape of Adam's count, whose sharding is constrained before and after the step.
CONSTRAINED = """
import functools, jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
where = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec())
tx = optax.adam(0.1)

@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(scale, state, x):
    scale, state = jax.lax.with_sharding_constraint((scale, state), where)
    grad = jax.grad(lambda scale: jnp.mean((scale * x - 2 * x) ** 2))(scale)
    updates, state = tx.update(grad, state, scale)
    return jax.lax.with_sharding_constraint((optax.apply_updates(scale, updates), state), where)

scale = jnp.asarray(1.0)
state = tx.init(scale)
kept = []
for i in range(3):
    scale, state = step(scale, state, jnp.arange(1.0 + i, 4.0 + i))
    kept.append(float(scale))
"""


@pytest.mark.parametrize(
    "call", ["jax.lax.with_sharding_constraint(", "jax.device_put(", "jax.sharding.reshard(out_shardings=where, xs="]
)
def test_a_bare_array_under_constraints_of_its_sharding_is_recorded(tmp_path, run, call):
    text = CONSTRAINED.replace("jax.lax.with_sharding_constraint(", call)
    status, variables = run(text.replace(", where)", ")") if "where" in call else text)
    assert status == 0
    found = Recording.open(tmp_path / "out")
    assert list(found.manifest.params) == ["param"] and found.full("parameters", 0, "param") == 1.0
    assert [found.full("update", step, "param").item() for step in (0, 2)] == variables["kept"][::2]
    assert found.state_slots(0, "param") == ("exp_avg", "exp_avg_sq")


CUT_INSIDE = """parts = jax.tree.map(lambda leaf: leaf.reshape(2, 4, *leaf.shape[1:]), batch)
    def add(sums, part):
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_fn)(params, part["image"], part["label"])), None
    sums, _ = jax.lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), parts)
    loss, grads = jax.tree.map(lambda leaf: leaf / 2, sums)"""


ADDED = (
    FUNCTIONS
    + """
tx = optax.adamw(0.01)
opt_state = tx.init(params)
@jax.jit
def step(params, opt_state, batch):
    of_part = lambda part: jax.value_and_grad(loss_fn)(params, part["image"], part["label"])
    loss, grads = of_part(batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return jax.tree.map(jnp.add, params, updates), opt_state, loss
for batch in batches:
    params, opt_state, loss = step(params, opt_state, batch)
result = params
"""
)
IN_A_MAP = """parts = jax.tree.map(lambda leaf: leaf.reshape(2, 4, *leaf.shape[1:]), batch)
    loss, grads = jax.tree.map(lambda leaf: leaf.mean(0), jax.lax.map(of_part, parts))"""


def test_gradients_in_a_map_over_parts_of_a_batch_are_recorded(tmp_path, run):
    assert run(ADDED, "a")[0] == run(ADDED.replace("loss, grads = of_part(batch)", IN_A_MAP), "b")[0] == 0
    a, b = Recording.open(tmp_path / "a"), Recording.open(tmp_path / "b")
    assert [each.manifest.settings[PROGRAM][GRADIENTS] for each in (a, b)] == [1, 2]
    assert b.num_steps == a.num_steps == 3 and compare(a, b).verdict is Verdict.ROUNDING


TWO_LOSSES = """squared = lambda params: loss_fn(params, batch["image"], batch["label"]) ** 2
    both = lambda params: loss_fn(params, batch["image"], batch["label"]) + squared(params)
    loss, grads = jax.tree.map(jnp.add, of_part(batch), jax.value_and_grad(squared)(params))"""


def test_two_losses_of_one_batch_agree_with_their_sum(tmp_path, run):
    two = ADDED.replace("loss, grads = of_part(batch)", TWO_LOSSES)
    one = two.replace(
        "jax.tree.map(jnp.add, of_part(batch), jax.value_and_grad(squared)(params))", "jax.value_and_grad(both)(params)"
    )
    wrong = two.replace("grads, opt_state, params)", "jax.tree.map(lambda grad: grad / 2, grads), opt_state, params)")
    assert len({one, two, wrong}) == 3
    assert [run(text, name)[0] for name, text in (("one", one), ("two", two), ("wrong", wrong))] == [0, 0, 0]
    one, two, wrong = (Recording.open(tmp_path / name) for name in ("one", "two", "wrong"))
    assert one.batch(0, 0).sample_ids == two.batch(0, 0).sample_ids
    found = compare(one, two)
    assert found.verdict is Verdict.ROUNDING, found.reason
    assert "the losses of two are means of 2, and those of one their sums; gradients agree" in found.notes
    assert compare(one, wrong).verdict is Verdict.BUG


@pytest.mark.skipif(jax.device_count() < 2, reason="cuts a batch over 2 devices")
@pytest.mark.parametrize("adds", ["jax.tree.map", "optax.apply_updates"])
def test_activations_of_parts_of_unknown_samples_are_left_out(tmp_path, run, adds):
    """The loss function gets images with other values than those of the batch, and of each label there are several."""
    cut = CUT_INSIDE.replace('part["image"]', '2 * part["image"]')
    if adds == "optax.apply_updates":  # which then adds gradients, no updates
        cut = cut.replace("jax.tree.map(jnp.add, sums,", "optax.apply_updates(sums,")
    whole = 'loss, grads = jax.value_and_grad(loss_fn)(params, batch["image"], batch["label"])'
    doubled = SHARDED.replace(whole, whole.replace('batch["image"]', '2 * batch["image"]'))
    assert run(doubled, "a")[0] == run(SHARDED.replace(whole, cut), "b")[0] == 0
    a, b = Recording.open(tmp_path / "a"), Recording.open(tmp_path / "b")
    found = compare(a, b)
    # Sums of two parts are rounded otherwise: other bits are no evidence of another computation.
    assert found.verdict is Verdict.ROUNDING, found.reason
    assert [each.manifest.settings[PROGRAM][GRADIENTS] for each in (a, b)] == [1, 2]
    assert "activations, which a alone recorded, are not compared" in found.notes and a.manifest.world_size == 2


def test_a_script_that_does_not_train_is_told_early_what_to_add(run, capsys, monkeypatch):
    monkeypatch.setattr(script, "_NOTICE_SECONDS", 0.01)
    run(
        "import sys, time\nwhile 'nothing to record' not in sys.stderr.getvalue(): time.sleep(0.01)\nprint('goes on')\n"
    )
    printed = capsys.readouterr()
    assert "recorder.step(params=params" in printed.err and printed.out == "goes on\n"


@pytest.mark.parametrize("name", REFUSED)
def test_scripts_that_cannot_be_recorded_show_lines_to_add(run, capsys, name):
    text, said = REFUSED[name]
    assert run(text)[0] == NOT_RECORDED
    errors = capsys.readouterr().err
    assert said in errors and "recorder.step(params=params" in errors


@pytest.mark.parametrize(
    "text", [pytest.param(SHARDED, id="sharded", marks=pytest.mark.exhaustive), pytest.param(EAGER, id="eager")]
)
def test_a_fault_in_a_script_is_found_where_it_begins(tmp_path, run, text):
    for name, fault in (("a", 1.0), ("b", 1.0), ("c", 1.5)):
        assert run(text, name, fault)[0] == 0
    a, b, c = (Recording.open(tmp_path / name) for name in "abc")
    assert compare(a, b).verdict is Verdict.EQUAL
    found = compare(a, c)
    where = found.first_divergence
    assert found.verdict is Verdict.BUG and where is not None
    assert (where.step, where.phase, where.parameter) == (0, "reduce", "out.w")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(TWO_CALLS, id="two calls"),
        pytest.param(ADDED_BY_HAND, id="added by hand", marks=pytest.mark.exhaustive),
        pytest.param(MAPPED, id="one call", marks=pytest.mark.exhaustive),
        pytest.param(IN_A_SCAN, id="a scan"),
    ],
)
def test_a_perturbed_run_begins_one_unit_away_and_rounds_otherwise(tmp_path, run, text):
    for number in range(2):
        assert run(text, perturbed_run=number)[0] == 0
    found = Recording.open(tmp_path / "out")
    (other,) = found.perturbed_runs()
    for name in found.manifest.params:
        initial = found.full("parameters", 0, name)
        np.testing.assert_array_equal(
            other.full("parameters", 0, name), perturbed_values(name, initial, 1), strict=True
        )
        after = [each.full("update", 2, name) for each in (found, other)]
        np.testing.assert_allclose(*after, rtol=0, atol=1e-10)
    assert differences((found.full("reduce", 0, name), other.full("reduce", 0, name)) for name in ("out.w",))


def test_jax_is_as_before_after_a_recording(run):
    own = jax.jit, jax.grad, jax.value_and_grad, jax.lax.scan, jax.lax.fori_loop, jax.lax.map, jax.shard_map
    assert run(EAGER, every=9)[0] == 0
    now = jax.jit, jax.grad, jax.value_and_grad, jax.lax.scan, jax.lax.fori_loop, jax.lax.map, jax.shard_map
    assert own == now
    assert "FAULT" in os.environ


def test_settings_in_the_environment_count_when_the_script_imports_jax(run, monkeypatch):
    """As they do without the recorder, which has imported JAX before the script."""
    monkeypatch.delenv("JAX_NUMPY_RANK_PROMOTION", raising=False)
    was = jax.config.jax_numpy_rank_promotion, jax.config.jax_debug_nans  # pyright: ignore[reportAttributeAccessIssue]
    setting = "import os\nos.environ['JAX_NUMPY_RANK_PROMOTION'] = 'warn'\nos.environ['JAX_DEBUG_NANS'] = 'true'\n"
    late = "\nos.environ['JAX_DEBUG_INFS'] = '1'\nsettings = [jax.config.jax_numpy_rank_promotion, jax.config.jax_debug_nans]\n"
    try:
        _, variables = run(setting + HEAD + late + "settings.append(jax.config.jax_debug_infs)")
    finally:
        jax.config.update("jax_numpy_rank_promotion", was[0])
        jax.config.update("jax_debug_nans", was[1])
        for name in ("JAX_NUMPY_RANK_PROMOTION", "JAX_DEBUG_NANS", "JAX_DEBUG_INFS"):
            monkeypatch.delenv(name, raising=False)
    assert variables["settings"] == ["warn", True, False]


COMPLEX = """
import jax, jax.numpy as jnp, optax
params = {"w": jnp.full((4, 3), 1 + 1j, jnp.complex64), "b": jnp.zeros(3)}
optimizer = optax.sgd(0.1)
state = optimizer.init(params)
for x in jnp.ones((2, 5, 4)):
    grads = jax.grad(lambda params: jnp.mean(jnp.abs(x @ params["w"] + params["b"]) ** 2))(params)
    updates, state = optimizer.update(jax.tree.map(jnp.conj, grads), state, params)
    params = optax.apply_updates(params, updates)
"""


@pytest.mark.parametrize("text", [COMPLEX, COMPLEX.replace('"b": jnp.zeros(3)', '"b": jnp.zeros(3, complex)')])
def test_complex_parameters_are_recorded_as_pairs_of_real_numbers(run, tmp_path, text):
    """With the gradients that the optimizer gets."""
    text = text.replace("optax.sgd(0.1)", "optax.adam(0.1)").replace("for x in", "given = []\nfor x in")
    keeps = "given.append(jax.tree.map(jnp.conj, grads))\n    updates, state ="
    _, variables = run(text.replace("updates, state =", keeps), every=1)
    assert run(text, every=1, perturbed_run=1)[0] == 0
    found = Recording.open(tmp_path / "out")
    assert found.manifest.params["w"].shape == (4, 3, 2) and found.manifest.params["w"].dtype == "float32"
    pairs = lambda array: np.stack([array.real, array.imag], -1)  # noqa: E731
    np.testing.assert_array_equal(found.full("reduce", 0, "w"), pairs(np.asarray(variables["given"][0]["w"])))
    np.testing.assert_array_equal(found.full("update", 1, "w"), pairs(np.asarray(variables["params"]["w"])))
    assert found.state_slots(0, "w") == ("exp_avg", "exp_avg_sq")
    [perturbed] = found.perturbed_runs()
    moved = np.abs(perturbed.full("parameters", 0, "w") - found.full("parameters", 0, "w"))
    assert 0 < moved.max() < 1e-6


UNPACKED = """
import jax, jax.numpy as jnp, optax
params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
init, update = optax.adam(1e-2)
state = init(params)
@jax.jit
def step(params, state, x):
    grads = jax.grad(lambda params: jnp.mean((x @ params["w"] + params["b"]) ** 2))(params)
    updates, state = update(grads, state)
    return optax.apply_updates(params, updates), state
for x in jnp.ones((3, 5, 4)):
    params, state = step(params, state, x)
"""


def test_an_optimizer_that_is_unpacked_into_two_functions_is_followed(run, tmp_path):
    assert run(UNPACKED)[0] == 0
    recording = Recording.open(tmp_path / "out")
    assert recording.num_steps == 3 and set(recording.state_slots(0, "w")) == {"exp_avg", "exp_avg_sq"}


COPIED = UNPACKED.replace(
    "    updates, state = update(grads, state)",
    """    params = jax.tree.map(lambda leaf: jnp.stack([*leaf]), params)
    updates, state = update(grads, state, params)""",
)


def test_copies_of_parameters_given_to_optimizers_are_known(run, tmp_path):
    """As the state of layers that nnx.remat returns, or of layers that a loop takes from a stack and stacks again."""
    for name, text in (("given", UNPACKED), ("copied", COPIED)):
        assert run(text, name)[0] == 0
    given, copied = (Recording.open(tmp_path / name) for name in ("given", "copied"))
    assert not given.full("parameters", 0, "b").any()
    assert compare(given, copied).verdict is Verdict.EQUAL


OLDER = {"shard_map": (MAPPED, "jax.shard_map"), "pjit": (TWO_CALLS, "jax.jit")}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", OLDER)
def test_functions_are_followed_under_their_older_names(tmp_path, run, name):
    text, new = OLDER[name]
    older = f"from jax.experimental.{name} import {name}\n{text.replace(new, name)}"
    for folder, each in (("new", text), ("old", older)):
        assert run(each, folder)[0] == 0
    assert compare(*(Recording.open(tmp_path / folder) for folder in ("new", "old"))).verdict is Verdict.EQUAL
    module = import_module(f"jax.experimental.{name}")
    assert name not in vars(module)  # as before


def test_a_model_that_computes_in_bfloat16_has_that_dtype(tmp_path, run):
    product = 'x @ params["w"] + params["b"]'
    assert product in TWO_CALLS
    cast = TWO_CALLS.replace(product, f"({product}).astype(jnp.bfloat16)")
    assert run(cast)[0] == 0
    found = Recording.open(tmp_path / "out").manifest
    assert found.dtype == "bfloat16" and {spec.dtype for spec in found.params.values()}.isdisjoint({"bfloat16"})


OF_DTYPES = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import linen as nn

class Table(nn.Module):
    @nn.compact
    def __call__(self, size, dtype):
        return self.param("table", nn.initializers.ones, size, dtype)

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * Table(name="table")((3,), jnp.float32)

net = Net()
tx, x = optax.sgd(0.1), np.ones((4, 3), np.float32)
params = net.init(jax.random.key(0), x)
opt_state = tx.init(params)
@jax.jit
def step(params, opt_state, x):
    loss, grads = jax.value_and_grad(lambda params: jnp.mean(net.apply(params, x) ** 2))(params)
    updates, opt_state = tx.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss
for _ in range(2):
    params, opt_state, loss = step(params, opt_state, x)
"""


def test_a_module_that_is_given_a_dtype_is_recorded(run, tmp_path):
    """jnp.float32 has a dtype, and is no array."""
    status, _ = run(OF_DTYPES)
    recording = Recording.open(tmp_path / "out")
    assert status == 0 and recording.num_steps == 2
    assert [use for _, module, use in recording.activations(0) if not module] == ["input", "output"]
