"""Scripts that update their parameters themselves, without an optimizer of optax."""

import jax
import numpy as np
import pytest

from crossframe.recording import Recording
from crossframe.recording.perturbed_runs import perturbed_values
from crossframe.scripts import NOT_RECORDED
from crossframe.verdict import Verdict, compare
from tests.on_jax.helpers.scripts import FUNCTIONS, HEAD

START = (
    FUNCTIONS
    + """
RATE = 0.1 * FAULT
def descend(params, grads):
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads)
"""
)
IN_JIT = (
    START
    + """
@jax.jit
def update(params, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch["image"], batch["label"])
    return descend(params, grads), loss
losses = []
for batch in batches:
    params, loss = update(params, batch)
    losses.append(float(loss))
result = params
"""
)
OUTSIDE_OF_JIT = (
    START
    + """
gradients = jax.jit(jax.value_and_grad(loss_fn))
losses = []
for batch in batches:
    loss, grads = gradients(params, batch["image"], batch["label"])
    params = descend(params, grads)
    losses.append(float(loss))
gradients(params, batch["image"], batch["label"])
result = params
"""
)
EAGER = OUTSIDE_OF_JIT.replace("jax.jit(jax.value_and_grad(loss_fn))", "jax.value_and_grad(loss_fn)")
BY_VJP = (
    START
    + """
@jax.jit
def update(params, batch):
    loss, backward = jax.vjp(lambda params: loss_fn(params, batch["image"], batch["label"]), params)
    return descend(params, *backward(jnp.ones_like(loss))), loss
losses = []
for batch in batches:
    params, loss = update(params, batch)
    losses.append(float(loss))
result = params
"""
)
EPOCH = (
    START
    + """
@jax.jit
def epoch(params, batches):
    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch["image"], batch["label"])
        return descend(params, grads), loss
    return jax.lax.scan(step, params, batches)
params, losses = epoch(params, jax.tree.map(lambda *parts: np.stack(parts), *batches))
result = params
"""
)
OPTAX = IN_JIT.replace(
    "    return descend(params, grads), loss",
    "    tx = optax.sgd(RATE)\n    return optax.apply_updates(params, tx.update(grads, tx.init(params))[0]), loss",
)
MICROBATCHES = (
    START
    + """
gradients = jax.jit(jax.value_and_grad(loss_fn))
for batch in batches:
    parts = [gradients(params, batch["image"][i::2], batch["label"][i::2])[1] for i in range(2)]
    params = descend(params, jax.tree.map(lambda a, b: (a + b) / 2, *parts))
gradients(params, batch["image"], batch["label"])
result = params
"""
)
MOMENTUM = (
    START
    + """
velocity = jax.tree.map(jnp.zeros_like, params)
@jax.jit
def update(params, velocity, batch):
    grads = jax.grad(loss_fn)(params, batch["image"], batch["label"])
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
    return descend(params, velocity), velocity
for batch in batches:
    params, velocity = update(params, velocity, batch)
result = params
"""
)
ADAM = (
    START
    + """
moments = {"first": jax.tree.map(jnp.zeros_like, params), "second": jax.tree.map(jnp.zeros_like, params)}
@jax.jit
def update(params, moments, t, batch):
    grads = jax.grad(loss_fn)(params, batch["image"], batch["label"])
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments["first"], grads)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, moments["second"], grads)
    change = lambda p, m, v: p - RATE * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return jax.tree.map(change, params, first, second), {"first": first, "second": second}
for i, batch in enumerate(batches):
    params, moments = update(params, moments, i + 1, batch)
result = params
"""
)
EXAMPLE_LIBRARY = (
    START
    + """
from jax.example_libraries import optimizers
opt_init, opt_update, get_params = optimizers.momentum(RATE, 0.9)
@jax.jit
def update(i, opt_state, batch):
    grads = jax.grad(loss_fn)(get_params(opt_state), batch["image"], batch["label"])
    return opt_update(i, grads, opt_state)
opt_state = opt_init(params)
for i, batch in enumerate(batches):
    opt_state = update(i, opt_state, batch)
result = get_params(opt_state)
"""
)
SCRIPTS = {
    "in jit": IN_JIT,
    "outside of jit": OUTSIDE_OF_JIT.replace("\ngradients(params, batch", "\n#"),
    "eager": EAGER.replace("\ngradients(params, batch", "\n#"),
    "vjp": BY_VJP,
    "eager vjp": BY_VJP.replace("@jax.jit", ""),
    "a scan": EPOCH,
    "microbatches": MICROBATCHES.replace("\ngradients(params, batch", "\n#"),
    "donated": IN_JIT.replace("@jax.jit", "@partial(jax.jit, donate_argnums=0)"),
    "momentum": MOMENTUM,
    "Adam": ADAM,
    "example library": EXAMPLE_LIBRARY,
    "equinox": IN_JIT.replace(
        "return descend(params, grads)",
        "return equinox.apply_updates(params, jax.tree.map(lambda g: -RATE * g, grads))",
    ).replace("RATE =", "import equinox\nRATE ="),
}
"""The parameters after the last step are known, if the last step returns them."""


def _before(text, line, added):
    """A script with lines before a line."""
    assert line in text
    return text.replace(line, added.strip("\n") + "\n" + line)


_OF_ARGUMENTS = """
gradients = MADE
losses = []
for batch in batches:
    loss, (grads, _) = gradients(params, jnp.asarray(batch["image"]), batch["label"])
    params = descend(params, grads)
    losses.append(float(loss))
gradients(params, jnp.asarray(batch["image"]), batch["label"])
result = params
"""
_BY_VJP_OF_ALL = """
calls = []
def loss_of(params, image, label):
    calls.append(1)
    return loss_fn(params, image, label)
losses = []
for batch in batches + batches[-1:]:
    loss, backward = jax.vjp(loss_of, params, jnp.asarray(batch["image"]), jnp.asarray(batch["label"]))
    params = descend(params, backward(jnp.ones_like(loss))[0])
    losses.append(float(loss))
losses.pop()
"""
OTHERS = {
    "argnums": START + _OF_ARGUMENTS.replace("MADE", "jax.value_and_grad(loss_fn, (0, 1))"),
    "argnums in jit": START + _OF_ARGUMENTS.replace("MADE", "jax.jit(jax.value_and_grad(loss_fn, (0, 1)))"),
    "vjp": START + _BY_VJP_OF_ALL,
    "vjp in jit": _before(
        BY_VJP.replace(
            'lambda params: loss_fn(params, batch["image"], batch["label"]), params', "loss_fn, params, *batch"
        )
        .replace("descend(params, *backward(jnp.ones_like(loss)))", "descend(params, backward(jnp.ones_like(loss))[0])")
        .replace("update(params, batch)\n    losses", "update(params, (batch['image'], batch['label']))\n    losses"),
        "losses = []",
        "",
    ),
    "saliency": _before(
        EAGER, "    params = ", "    saliency = jax.grad(loss_fn, 1)(params, batch['image'], batch['label'])"
    ),
    "an attack": _before(
        IN_JIT,
        "    loss, grads = ",
        """
    image = batch["image"]
    for _ in range(2):
        image += 0.1 * jnp.sign(jax.grad(loss_fn, 1)(params, image, batch["label"]))
""",
    ),
    "an attack in a loop": _before(
        IN_JIT,
        "    loss, grads = ",
        """
    attacked = lambda _, x: x + 0.1 * jnp.sign(jax.grad(loss_fn, 1)(params, x, batch["label"]))
    image = jax.lax.fori_loop(0, 2, attacked, batch["image"])
""",
    ),
    "a hyperparameter": _before(
        EAGER,
        "    params = ",
        """
    scaled = lambda scale: loss_fn(jax.tree.map(lambda p: scale * p, params), batch["image"], batch["label"])
    slope = jax.grad(scaled)(1.0 + 0.01 * len(losses))
""",
    ),
}
"""Scripts that take gradients of other arrays too."""
_TWO_STEPS = """
@jax.jit
def update(params, batch):
    for _ in range(2):
        params = descend(params, jax.grad(loss_fn)(params, batch["image"], batch["label"]))
    return params
for batch in batches:
    params = update(params, batch)
"""
_TWO_MODELS = """
other = jax.tree.map(jnp.ones_like, params["out"])
train = jax.grad(loss_fn)
train_other = jax.grad(lambda p: cross_entropy(batch["image"][:, :5] @ p["w"] + p["b"], batch["label"]))
for batch in batches:
    params = descend(params, train(params, batch["image"], batch["label"]))
    other = descend(other, train_other(other))
"""
_MADE_INSIDE = """
from jax.flatten_util import ravel_pytree
flat, unravel = ravel_pytree(params)
@jax.jit
def update(flat, batch):
    params = unravel(flat)
    grads = jax.grad(loss_fn)(params, batch["image"], batch["label"])
    return ravel_pytree(descend(params, grads))[0]
for batch in batches:
    flat = update(flat, batch)
"""
_OPTAX_LATER = """
gradients = jax.grad(loss_fn)
for batch in batches:
    params = descend(params, gradients(params, batch["image"], batch["label"]))
tx = optax.sgd(0.1)
tx.update(gradients(params, batch["image"], batch["label"]), tx.init(params), params)
"""
_UNUSED_OPTIMIZER = """
tx = optax.sgd(0.1)
gradients = jax.jit(jax.grad(loss_fn))
for batch in batches:
    params = descend(params, gradients(params, batch["image"], batch["label"]))
"""
_INPUTS = """
gradients = jax.jit(jax.grad(loss_fn, 1))
for batch in batches:
    gradients(params, batch["image"], batch["label"])
"""
_TWINS = """
@jax.jit
def update(params, batch):
    return descend(params, jax.grad(loss_fn)(params, batch["image"], batch["label"]))
other = jax.tree.map(lambda leaf: leaf + 0.1, params)
for batch in batches:
    params = update(params, batch)
    other = update(other, batch)
"""
_EAGER_TWINS = """
train = jax.jit(jax.grad(loss_fn))
other = jax.tree.map(lambda leaf: leaf + 0.1, params)
for batch in batches:
    params = descend(params, train(params, batch["image"], batch["label"]))
    other = descend(other, train(other, batch["image"], batch["label"]))
"""
_AVERAGE = """
@jax.jit
def update(params, batch):
    return descend(params, jax.grad(loss_fn)(params, batch["image"], batch["label"]))
average = params
for batch in batches:
    params = update(params, batch)
    average = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, average, params)
jax.jit(jax.grad(loss_fn))(average, batch["image"], batch["label"])
"""
_TWINS_IN_A_CALL = """
@jax.jit
def update(params, other, batch):
    grads = [jax.grad(loss_fn)(each, batch["image"], batch["label"]) for each in (params, other)]
    return descend(params, grads[0]), descend(other, grads[1])
other = jax.tree.map(lambda leaf: leaf + 0.1, params)
for batch in batches:
    params, other = update(params, other, batch)
"""
_A_BATCH_AS_PARAMETERS = """
@jax.jit
def update(params, batch):
    loss, backward = jax.vjp(lambda params, image: loss_fn(params, image["x"], batch["label"]), params, {"x": batch["image"]})
    return descend(params, backward(jnp.ones_like(loss))[0])
for batch in batches:
    params = update(params, jax.tree.map(jnp.asarray, batch))
"""
_SAMPLER = """
def draw(sample, _):
    return descend(sample, jax.grad(lambda sample: loss_fn(PARAMS, sample["x"], LABELS))(sample)), None
@jax.jit
def update(params, batch):
    global PARAMS, LABELS
    PARAMS, LABELS = params, batch["label"]
    sample, _ = jax.lax.scan(draw, {"x": batch["image"]}, None, length=3)
    return descend(params, jax.grad(loss_fn)(params, sample["x"], batch["label"]))
"""
_SAMPLERS = (
    _SAMPLER
    + """
for batch in batches:
    params = update(params, batch)
"""
)
_SAMPLERS_IN_A_SCAN = (
    _SAMPLER
    + """
@jax.jit
def epoch(params, batches):
    return jax.lax.scan(lambda params, batch: (update.__wrapped__(params, batch), None), params, batches)[0]
epoch(params, jax.tree.map(lambda *parts: np.stack(parts), *batches))
"""
)
_ENSEMBLE_BY_LAST_DIMS = """
members = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf], -1), params)
@jax.jit
@partial(jax.vmap, in_axes=(-1, None, None), out_axes=-1)
def update(params, image, label):
    return descend(params, jax.grad(loss_fn)(params, image, label))
for batch in batches:
    members = update(members, batch["image"], batch["label"])
"""
_EAGER_ENSEMBLE = _ENSEMBLE_BY_LAST_DIMS.replace("@jax.jit\n", "").replace("-1", "0")
REFUSED = {
    "an optimizer that is not used": (_UNUSED_OPTIMIZER, "let it not make it"),
    "an eager ensemble": (_EAGER_ENSEMBLE, "jax.vmap"),
    "a sampler in a step": (_SAMPLERS, "the function around it takes gradients of"),
    "a sampler in a step in a scan": (_SAMPLERS_IN_A_SCAN, "the function around it takes gradients of"),
    "an ensemble by last dims": (_ENSEMBLE_BY_LAST_DIMS, "jax.vmap"),
    "a batch as parameters": (_A_BATCH_AS_PARAMETERS, "such as a batch"),
    "two models of one shape": (_TWINS, "two models of the same names and shapes"),
    "two models of one shape, eager": (_EAGER_TWINS, "two models of the same names and shapes"),
    "two models of one shape in a call": (_TWINS_IN_A_CALL, "if these are two models of the same names and shapes"),
    "an average": (_AVERAGE, "at others than the last step has returned"),
    "two updates in a call": (_TWO_STEPS, "at values that it is given and at others"),
    "two models": (_TWO_MODELS, "both of which change"),
    "parameters made inside": (_MADE_INSIDE, "nothing was trained that can be followed"),
    "optax later": (_OPTAX_LATER, "after the script had updated parameters without an optimizer"),
    "inputs alone": (_INPUTS, "nothing was trained that can be followed"),
}
"""Scripts that cannot be recorded, each with an excerpt of its error message."""


def opened(tmp_path, *names):
    return [Recording.open(tmp_path / name) for name in names]


@pytest.mark.parametrize("name", SCRIPTS)
def test_updates_without_an_optimizer_are_recorded(tmp_path, run, capsys, name):
    status, variables = run(SCRIPTS[name])
    assert status == 0 and "the parameters are the arrays hidden.b" in capsys.readouterr().err
    (found,) = opened(tmp_path, "out")
    assert found.num_steps == 3 and found.recorded_steps() == (0, 2)
    assert {module for _, module, _ in found.activations(0)} == {"hidden", "out"}
    assert "optimizer" not in found.manifest.settings and not found.buffers(2)
    assert len(found.batch(1, 0).sample_ids) == 8
    if "losses" in variables:
        assert found.losses()[:, 0].tolist() == np.asarray(variables["losses"]).tolist()
    params = {
        part: {leaf: found.full("parameters", 0, f"{part}.{leaf}") for leaf in ("w", "b")} for part in ("hidden", "out")
    }
    batch = variables["batches"][0]
    grads = jax.grad(variables["loss_fn"])(params, batch["image"], batch["label"])
    for param in found.manifest.params:
        part, _, leaf = param.partition(".")
        atol = 64 * np.finfo(grads[part][leaf].dtype).eps  # sums of some tens of numbers of order 1
        np.testing.assert_allclose(found.full("reduce", 0, param), grads[part][leaf], rtol=0, atol=atol)
        if name not in ("outside of jit", "eager", "eager vjp", "microbatches"):
            assert np.array_equal(found.full("update", 2, param), variables["result"][part][leaf])


@pytest.mark.parametrize("name", ["in jit", "outside of jit", "eager", "vjp", "a scan", "microbatches", "donated"])
def test_descent_by_hand_agrees_with_that_of_optax(tmp_path, run, name):
    assert run(OPTAX, "optax", every=1)[0] == run(SCRIPTS[name], "own", every=1)[0] == 0
    found = compare(*opened(tmp_path, "optax", "own"))
    assert found.verdict in (Verdict.EQUAL, Verdict.ROUNDING), found.reason


@pytest.mark.parametrize(
    ("text", "wrong", "phase"),
    [
        pytest.param(IN_JIT, "RATE = 0.2", "update", id="rate"),
        pytest.param(EAGER, "RATE = -0.1", "update", id="sign"),
        pytest.param(EPOCH, "RATE = 0.2", "update", id="in a scan"),
    ],
)
def test_a_wrong_update_by_hand_is_located(tmp_path, run, text, wrong, phase):
    assert run(text, "a", every=1)[0] == run(text.replace("RATE = 0.1 * FAULT", wrong), "b", every=1)[0] == 0
    found = compare(*opened(tmp_path, "a", "b"))
    where = found.first_divergence
    assert found.verdict is Verdict.BUG and where is not None and (where.step, where.phase) == (0, phase)


@pytest.mark.parametrize("name", OTHERS)
def test_gradients_of_other_arrays_are_no_steps(tmp_path, run, name):
    status, variables = run(OTHERS[name])
    assert status == 0
    (found,) = opened(tmp_path, "out")
    assert sorted(found.manifest.params) == ["hidden.b", "hidden.w", "out.b", "out.w"]
    assert found.losses()[:3, 0].tolist() == variables["losses"]
    assert len(found.batch(1, 0).sample_ids) == 8


ENSEMBLE = (
    START
    + """
members = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf]), params)
@jax.jit
@partial(jax.vmap, in_axes=(0, None, None))
def update(params, image, label):
    return descend(params, jax.grad(loss_fn)(params, image, label))
for batch in batches:
    members = update(members, batch["image"], batch["label"])
"""
)


def test_an_ensemble_is_one_model(tmp_path, run):
    status, variables = run(ENSEMBLE, every=1)
    assert status == 0
    (found,) = opened(tmp_path, "out")
    assert found.num_steps == 3
    assert np.array_equal(found.full("update", 2, "out.w"), variables["members"]["out"]["w"])
    grads = jax.vmap(jax.grad(variables["loss_fn"]), (0, None, None))
    params = {
        part: {leaf: found.full("parameters", 0, f"{part}.{leaf}") for leaf in "wb"} for part in ("hidden", "out")
    }
    batch = variables["batches"][0]
    expected = grads(params, batch["image"], batch["label"])["out"]["w"]
    np.testing.assert_allclose(
        found.full("reduce", 0, "out.w"), expected, rtol=0, atol=64 * np.finfo(expected.dtype).eps
    )


def test_vjp_calls_a_function_as_often_as_the_script(tmp_path, run):
    logits = """
    outputs, backward = jax.vjp(lambda params: jnp.tanh(loss_of(params, batch["image"], batch["label"])) * jnp.ones(2), params)
    backward(outputs)
"""
    text = START + _before(_BY_VJP_OF_ALL, "    loss, backward", logits)
    status, variables = run(text, dense=0)
    assert status == 0 and len(variables["calls"]) == 8
    (found,) = opened(tmp_path, "out")
    assert found.num_steps == 4 and found.losses()[:3, 0].tolist() == variables["losses"]


EVALUATED = _before(
    IN_JIT.replace("result = params", "evaluate(params, batch)\nresult = params"),
    "losses = []",
    """
@jax.jit
def evaluate(params, batch):
    return jax.grad(loss_fn)(params, batch["image"], batch["label"])
""",
)


def test_a_saliency_map_after_the_last_step_keeps_its_parameters(tmp_path, run):
    saliency = "jax.jit(jax.grad(loss_fn, 1))(params, batch['image'], batch['label'])\n"
    status, variables = run(_before(IN_JIT, "result = params", saliency), every=1)
    assert status == 0
    (found,) = opened(tmp_path, "out")
    assert np.array_equal(found.full("update", 2, "out.w"), variables["result"]["out"]["w"])


def test_an_evaluation_after_training_is_no_step(tmp_path, run, capsys):
    status, variables = run(EVALUATED, every=1)
    assert status == 0
    (found,) = opened(tmp_path, "out")
    assert found.num_steps == 3
    assert np.array_equal(found.full("update", 2, "out.w"), variables["result"]["out"]["w"])
    assert "are not recorded" not in capsys.readouterr().err


@pytest.mark.parametrize("name", REFUSED)
def test_updates_by_hand_that_cannot_be_told_apart_are_refused(run, capsys, name):
    text, said = REFUSED[name]
    assert run(START + text)[0] == NOT_RECORDED
    errors = capsys.readouterr().err
    assert said in errors and "recorder.step(params=params" in errors


@pytest.mark.parametrize("name", ["in jit", "outside of jit", "eager", "eager vjp", "a scan"])
def test_a_perturbed_run_stays_one_unit_away(tmp_path, run, name):
    for number in range(2):  # at a low rate, which turns few elements around
        assert run(SCRIPTS[name], every=1, fault=0.01, perturbed_run=number)[0] == 0
    (found,) = opened(tmp_path, "out")
    (other,) = found.perturbed_runs()
    for param in ("hidden.w", "out.w"):
        initial = found.full("parameters", 0, param)
        moved = perturbed_values(param, initial, 1)
        np.testing.assert_array_equal(other.full("parameters", 0, param), moved, strict=True)
        after = [each.full("update", 1, param) for each in (found, other)]
        assert np.mean(np.sign(after[1] - after[0]) == np.sign(moved - initial)) > 0.8


SHARDED = (
    START
    + """
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=CHECKS)
def update(params, batch):
    grads = jax.grad(loss_fn)(params, batch["image"], batch["label"])
    return descend(params, REDUCED)
for batch in batches:
    params = update(params, batch)
"""
)
IN_PMAP = (
    START
    + """
@partial(jax.pmap, axis_name="data")
def update(params, batch):
    grads = jax.grad(loss_fn)(params, batch["image"], batch["label"])
    return descend(params, REDUCED)
params = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params)
for batch in batches:
    params = update(params, jax.tree.map(lambda part: part.reshape(2, 4, *part.shape[1:]), batch))
"""
)
MEAN, SUM = 'jax.lax.pmean(grads, "data")', 'jax.lax.psum(grads, "data")'
SHARED = {
    "shard_map": SHARDED.replace("CHECKS", "False"),
    "shard_map with checks": SHARDED.replace("CHECKS", "True"),
    "pmap": IN_PMAP,
}


@pytest.mark.skipif(jax.device_count() < 2, reason="divides a batch over 2 devices")
@pytest.mark.parametrize(
    ("name", "reduced", "wrong", "phase"),
    [
        pytest.param("shard_map", MEAN, SUM, "update", id="shard_map"),
        pytest.param("shard_map", f"jax.tree.map(lambda g: g / 2, {SUM})", SUM, "update", id="shard_map, sum"),
        # JAX has added the gradients of replicated parameters: their mean is their sum.
        pytest.param(
            "shard_map with checks", "jax.tree.map(lambda g: g / 2, grads)", MEAN, "update", id="added by JAX"
        ),
        pytest.param("pmap", MEAN, SUM, "update", id="pmap"),
    ],
)
def test_gradients_of_ranks_are_averaged(tmp_path, run, name, reduced, wrong, phase):
    for each, text in (
        ("alone", IN_JIT),
        *((each, SHARED[name].replace("REDUCED", r)) for each, r in (("right", reduced), ("wrong", wrong))),
    ):
        assert run(text, each, every=1)[0] == 0
    alone, right, wrong = opened(tmp_path, "alone", "right", "wrong")
    found = compare(alone, right)
    assert found.verdict in (Verdict.EQUAL, Verdict.ROUNDING), found.reason
    assert right.manifest.world_size == 2 and right.has("reduce", 0, "out.w") == (reduced == MEAN)
    found = compare(right, wrong)
    where = found.first_divergence
    assert where is not None and (where.step, where.phase) == (0, phase)


def test_steps_with_more_detail_are_known_before_they_run(tmp_path, run):
    longer = IN_JIT.replace("for batch in batches:", "for batch in batches * 3:")
    assert run(longer, dense=0, every=100, windows=((4, 6),))[0] == 0
    (found,) = opened(tmp_path, "out")
    assert found.num_steps == 9 and found.recorded_steps() == (0, 4, 5)
    assert [bool(list(found.activations(step))) for step in found.recorded_steps()] == [False, True, True]
    assert all(found.has("reduce", step, "out.w") for step in found.recorded_steps())


OF_NNX = (
    HEAD
    + """
from flax import nnx
class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.norm, self.out = nnx.Linear(6, 5, rngs=rngs), nnx.BatchNorm(5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)
    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.hidden(x))))
net = Net(nnx.Rngs(0))
optimizer = MADE
@nnx.jit
def step(net, optimizer, batch):
    grads = nnx.grad(lambda net: cross_entropy(net(batch["image"]), batch["label"]))(net)
    UPDATE
for batch in batches:
    step(net, optimizer, batch)
"""
)


def test_modules_of_nnx_have_the_names_that_they_have_with_optax(tmp_path, run):
    by_optax = "nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)", "optimizer.update(net, grads)"
    by_hand = "None", "nnx.update(net, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(net, nnx.Param), grads))"
    for name, (made, update) in (("optax", by_optax), ("own", by_hand)):
        assert run(OF_NNX.replace("MADE", made).replace("UPDATE", update), name, every=1)[0] == 0
    a, b = opened(tmp_path, "optax", "own")
    found = compare(a, b)
    assert found.verdict in (Verdict.EQUAL, Verdict.ROUNDING), found.reason
    assert not found.notes and b.buffers(0) == a.buffers(0) != []
    assert [*b.activations(0)] == [*a.activations(0)] and b.has("update", 2, "out.kernel")
