"""Scripts that train several models at once in `jax.vmap`: the first is recorded, or an ensemble as one model."""

import numpy as np
import pytest

from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from tests.on_jax.helpers.scripts import FUNCTIONS

_TRAIN = (
    FUNCTIONS
    + """
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
images, labels = (jnp.stack([batch[name] for batch in batches]) for name in ("image", "label"))
def train(seed, rate, images=images):
    own = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(seed), leaf.shape), params)
    def step(carry, batch):
        own, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(own, *batch)
        updates, opt_state = tx.update(grads, opt_state, own)
        return (optax.apply_updates(own, jax.tree.map(lambda each: rate * each, updates)), opt_state), loss
    (own, _), losses = jax.lax.scan(step, (own, tx.init(own)), (images, labels))
    return own, losses
"""
)
ALONE = _TRAIN + "result, losses = jax.jit(train)(5, 1.0)\n"
SEEDS = _TRAIN + "result, losses = jax.jit(jax.vmap(train))(jnp.array([5, 6, 7]), jnp.array([1.0, 1.0, 0.5]))\n"
OTHER_AXES = (
    _TRAIN
    + "results, losses = jax.jit(jax.vmap(train, in_axes=[0, None], out_axes=(0, -1)))(jnp.array([5, 6]), 1.0)\n"
    + "assert losses.shape == (len(batches), 2)\n"
)
NAMED = _TRAIN + (
    "result, losses = jax.jit(jax.vmap(lambda seed, images: train(seed, 1.0, images)))(\n"
    "    jnp.array([5, 6]), images=jnp.stack([images, 2 * images]))\n"
)


# A body of a loop that is no closure, which JAX traces once.
NESTED = SEEDS.replace(
    "    own = jax.tree.map",
    "    return jax.lax.scan(both, (seed, rate), None, 1)\ndef both(carry, _):\n    seed, rate = carry\n    own = jax.tree.map",
).replace("    return own, losses", "    return carry, (own, losses)")


@pytest.mark.parametrize(
    ("text", "num_models"),
    [
        pytest.param(SEEDS, 3, id="seeds and rates"),
        pytest.param(NESTED, 3, id="in a loop"),
        pytest.param(OTHER_AXES, 2, id="other axes", marks=pytest.mark.exhaustive),
        pytest.param(NAMED, 2, id="named arguments", marks=pytest.mark.exhaustive),
    ],
)
def test_the_first_of_several_models_is_recorded(tmp_path, run, capsys, text, num_models):
    assert run(ALONE, "alone", every=1)[0] == run(text, "several", every=1)[0] == 0
    assert f"jax.vmap trains {num_models} models; the first is recorded" in capsys.readouterr().err
    alone, several = (Recording.open(tmp_path / name) for name in ("alone", "several"))
    assert several.num_steps == 3 and several.activations(0) and several.manifest.params == alone.manifest.params
    found = compare(alone, several)
    assert found.verdict in (Verdict.EQUAL, Verdict.ROUNDING), found.reason


def test_a_fault_of_several_models_is_located(tmp_path, run):
    wrong = SEEDS.replace(
        "opt_state, own)\n        return",
        "opt_state, own)\n        updates = jax.tree.map(jnp.abs, updates)\n        return",
    )
    assert run(SEEDS, "right", every=1)[0] == run(wrong, "wrong", every=1)[0] == 0
    found = compare(*(Recording.open(tmp_path / name) for name in ("right", "wrong")))
    assert found.verdict is Verdict.BUG and found.first_divergence is not None, found.reason
    assert (found.first_divergence.step, found.first_divergence.phase) == (0, "update")


def test_the_script_sees_the_same_results(run):
    _, variables = run(SEEDS)
    plain = {}
    exec(SEEDS, plain)
    assert np.array_equal(variables["losses"], plain["losses"])


WRAPPED = (
    _TRAIN
    + """
import equinox as eqx
draws = jax.jit(eqx.filter_vmap(lambda seed: jax.random.normal(jax.random.key(seed))))(jnp.array([5, 6]))
result, losses = jax.jit(eqx.filter_vmap(lambda seed: train(seed, 1.0)))(jnp.array([5, 6]))
"""
)


def test_models_are_found_though_a_library_wraps_other_functions_alike(run, capsys):
    assert run(WRAPPED, every=1)[0] == 0
    assert "jax.vmap trains 2 models" in capsys.readouterr().err


MEMBERS = (
    FUNCTIONS
    + """
tx = optax.MultiSteps(optax.chain(optax.clip(0.1), optax.adam(1e-2)), 2)
members = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.9 * leaf, leaf + 0.1]), params)
weights = jnp.array([[1.0] * 8, [0.5] * 8, [2.0] * 8])
"""
)
INSIDE = MEMBERS + (
    """
def step(params, opt_state, batch, weight):
    loss, grads = jax.value_and_grad(lambda p: weight.mean() * loss_fn(p, batch["image"], batch["label"]))(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss
step = jax.jit(jax.vmap(step, in_axes=[0, 0, None, 0]))
opt_state = jax.vmap(tx.init)(members)
for batch in batches + batches[::-1]:
    members, opt_state, losses = step(members, opt_state, batch, weights)
"""
)
OUTSIDE = MEMBERS + (
    """
def gradient(params, batch, weight):
    return jax.value_and_grad(lambda p: weight.mean() * loss_fn(p, batch["image"], batch["label"]))(params)
@jax.jit
def step(params, opt_state, batch, weight):
    losses, grads = jax.vmap(gradient, in_axes=(0, None, 0))(params, batch, weight)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, losses
opt_state = tx.init(members)
for batch in batches + batches[::-1]:
    members, opt_state, losses = step(members, opt_state, batch, weights)
"""
)


def test_an_ensemble_is_one_model_wherever_its_optimizer_is(tmp_path, run):
    """Its parameters, with a leading dim of members, are arguments of each step."""
    wrong = INSIDE.replace("(params, updates)", "(params, jax.tree.map(lambda leaf: weight[0] * leaf, updates))")
    for name, text in (("inside", INSIDE), ("outside", OUTSIDE), ("wrong", wrong)):
        assert run(text, name, every=1)[0] == 0
    inside, outside, wrong = (Recording.open(tmp_path / name) for name in ("inside", "outside", "wrong"))
    assert inside.num_steps == 3 and inside.manifest.params == outside.manifest.params
    assert {spec.shape[0] for spec in inside.manifest.params.values()} == {3}
    assert inside.activations(0) == outside.activations(0) != []
    assert inside.has("state", 2, next(iter(inside.manifest.params)), use="exp_avg")
    found = compare(inside, outside)
    assert found.verdict in (Verdict.EQUAL, Verdict.ROUNDING), found.reason
    found = compare(inside, wrong)
    assert found.verdict is Verdict.BUG and found.first_divergence is not None, found.reason
    assert (found.first_divergence.step, found.first_divergence.phase) == (0, "update")


META = (
    FUNCTIONS
    + """
inner, tx = optax.sgd(0.01), optax.sgd(0.1)
def adapted_loss(params, x, y):
    grads = jax.grad(loss_fn)(params, x, y)
    return loss_fn(optax.apply_updates(params, inner.update(grads, inner.init(params))[0]), x, y)
of_tasks = jax.vmap(jax.value_and_grad(adapted_loss), (None, 0, 0))
@jax.jit
def step(params, opt_state, batch):
    losses, grads = of_tasks(params, *(batch[name].reshape(2, 4, *batch[name].shape[1:]) for name in ("image", "label")))
    updates, opt_state = tx.update(jax.tree.map(lambda leaf: leaf.mean(0), grads), opt_state, params)
    return optax.apply_updates(params, updates), opt_state, losses.mean()
opt_state = tx.init(params)
for batch in batches:
    params, opt_state, loss = step(params, opt_state, batch)
"""
)


def test_an_optimizer_inside_of_a_mapped_loss_trains_no_model_of_its_own(tmp_path, run, capsys):
    """As in meta-learning, where the gradient passes through steps of each task."""
    assert run(META, every=1)[0] == 0
    assert "jax.vmap trains" not in capsys.readouterr().err
    recording = Recording.open(tmp_path / "out")
    assert recording.num_steps == 3


METHODS = SEEDS.replace(
    "result, losses = jax.jit(jax.vmap(train))(jnp.array([5, 6, 7]), jnp.array([1.0, 1.0, 0.5]))",
    """class Agent:
    def __init__(self, trains):
        self.trains = trains
    def run(self, seed):
        return train(seed, 1.0)[1] if self.trains else seed * jnp.ones(3)
losses = jax.jit(jax.vmap(Agent(True).run))(jnp.array([5, 6]))
result = jax.jit(jax.vmap(Agent(False).run))(jnp.array([5, 6]))""",
)


def test_methods_of_other_objects_may_not_train(tmp_path, run):
    assert run(METHODS, every=1)[0] == 0
    assert Recording.open(tmp_path / "out").num_steps == 3
