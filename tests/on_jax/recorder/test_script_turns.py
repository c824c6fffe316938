"""Scripts of JAX that train several models: what is recorded of them as one, against what they compute."""

import jax
import numpy as np
import pytest

from crossframe.recording import Recording
from crossframe.recording.perturbed_runs import perturbed_values
from crossframe.verdict import Verdict, compare
from jax_backend.recorder._optimizer_settings import Noted
from tests.on_jax.helpers.scripts import FUNCTIONS, HEAD
from tests.on_jax.recorder.test_script import plain

NETS = (
    HEAD
    + """
def net(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]
def made(seed, width, out):
    keys = jax.random.split(jax.random.key(seed))
    return {"v": jax.random.normal(keys[0], (4, out)), "w": jax.random.normal(keys[1], (width, 4))}
def updated(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state
tx, losses, no_pytree = optax.adam(0.01), [], {0: "a", "b": 1}
"""
)
GENERATOR = (
    NETS
    + """
maker, judge = made(0, 3, 6), made(1, 6, 1)
maker_state, judge_state = tx.init(maker), tx.init(judge)
@jax.jit
def step(maker, judge, maker_state, judge_state, real, noise):
    def judge_loss(judge):
        return jnp.square(net(judge, real) - 1).mean() + jnp.square(net(judge, net(maker, noise))).mean()
    first, grads = jax.value_and_grad(judge_loss)(judge)
    judge, judge_state = updated(judge, judge_state, jax.tree.map(lambda grad: grad * FAULT, grads))
    def maker_loss(maker):
        return jnp.square(net(judge, net(maker, noise)) - 1).mean()
    second, grads = jax.value_and_grad(maker_loss)(maker)
    maker, maker_state = updated(maker, maker_state, grads)
    return maker, judge, maker_state, judge_state, [first, second]
for batch in batches:
    *found, both = step(maker, judge, maker_state, judge_state, batch["image"], batch["image"][:, :3])
    maker, judge, maker_state, judge_state = found
    losses.append(both)
result, states = {"maker": maker, "judge": judge}, {"maker": maker_state, "judge": judge_state}
"""
)
BOTH_FIRST = (
    NETS
    + """
maker, judge = made(0, 3, 6), made(1, 6, 1)
maker_state, judge_state = tx.init(maker), tx.init(judge)
@jax.jit
def step(maker, judge, maker_state, judge_state, real, noise):
    first, grads = jax.value_and_grad(lambda params: jnp.square(net(params, real) - 1).mean())(judge)
    updates, judge_state = tx.update(jax.tree.map(lambda grad: grad * FAULT, grads), judge_state, judge)
    second, others = jax.value_and_grad(lambda params: jnp.square(net(params, noise)).mean())(maker)
    more, maker_state = tx.update(others, maker_state, maker)
    judge, maker = optax.apply_updates(judge, updates), optax.apply_updates(maker, more)
    return maker, judge, maker_state, judge_state, [first, second]
for batch in batches:
    *found, both = step(maker, judge, maker_state, judge_state, batch["image"], batch["image"][:, :3])
    maker, judge, maker_state, judge_state = found
    losses.append(both)
result, states = {"maker": maker, "judge": judge}, {"maker": maker_state, "judge": judge_state}
"""
)
CRITICS = (
    NETS
    + """
class Agent: pass
agent = Agent()
agent.actor, agent.first, agent.second = made(0, 6, 2), made(1, 8, 1), made(2, 8, 1)
agent.states = [tx.init(agent.actor), tx.init(agent.first), tx.init(agent.second)]
def value(params, x, actions):
    return net(params, jnp.concatenate([x, actions], 1))
slow = jax.tree.map(jnp.copy, agent.first)
@jax.jit
def criticise(bare, critics, states, x):
    actions = net({"v": bare[0], "w": bare[1]}, x)
    after, losses = [], []
    for params, state, factor in zip(critics, states, (1, FAULT)):
        loss, grads = jax.value_and_grad(lambda params: jnp.square(value(params, x, actions) - 1).mean())(params)
        updates, state = tx.update(jax.tree.map(lambda grad: grad * factor, grads), state, params)
        after.append((params, updates, state))
        losses.append(loss)
    added = [optax.apply_updates(params, updates) for params, updates, _ in after]
    return added, [state for _, _, state in after], losses
@jax.jit
def act(actor, slow, state, x):
    loss, grads = jax.value_and_grad(lambda actor: -value(slow, x, net(actor, x)).mean())(actor)
    return *updated(actor, state, grads), [loss]
for i in range(5):
    x = batches[i % 3]["image"]
    slow = jax.tree.map(lambda own, slow: 0.9 * slow + 0.1 * own, agent.first, slow)
    (agent.first, agent.second), agent.states[1:], both = criticise(
        [agent.actor["v"], agent.actor["w"]], [agent.first, agent.second], agent.states[1:], x
    )
    losses.append(both)
    if i % 2:
        agent.actor, agent.states[0], own = act(agent.actor, slow, agent.states[0], x)
        losses.append(own)
        result = {"actor": agent.actor, "first": agent.first, "second": agent.second}
        states = dict(zip(result, agent.states))
"""
)
TWINS = "critics of the same shapes, an actor in every second call"
SCRIPTS = {
    "in one call": (GENERATOR, {"judge": 1, "maker": 2}, 3, 2, 2),
    "updates are added when all are made": (BOTH_FIRST, {"judge": 1, "maker": 2}, 3, 2, 2),
    TWINS: (
        CRITICS,
        {"first": 3, "second": 4, "actor": 5},
        2,
        5,
        1,
    ),
}
"""Each with the number of forwards before the last update of a model in a step, of steps, of losses of a step, and of arrays
of a batch."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_models_that_take_turns_are_recorded_as_one(tmp_path, run, name):
    text, turns, num_steps, num_losses, num_inputs = SCRIPTS[name]
    wanted = plain(text)
    status, variables = run(text, every=1)
    assert status == 0
    found, last = Recording.open(tmp_path / "out"), jax.tree.leaves(variables["result"])
    assert [leaf.tobytes() for leaf in map(np.asarray, wanted)] == [leaf.tobytes() for leaf in map(np.asarray, last)]
    assert found.num_steps == num_steps
    assert sorted(found.manifest.params) == sorted(f"{model}.{own}" for model in turns for own in "vw")
    for model, params in variables["result"].items():
        for own, values in params.items():
            np.testing.assert_array_equal(found.full("update", num_steps - 1, f"{model}.{own}"), values)
            assert found.turn(0, f"{model}.{own}") == turns[model]
            moments = variables["states"][model][0].mu[own]
            np.testing.assert_array_equal(found.full("state", num_steps - 1, f"{model}.{own}", use="exp_avg"), moments)
    losses = [float(loss) for own in variables["losses"] for loss in own][: num_steps * num_losses]
    each = [found.backwards(step, 0) for step in range(num_steps)]
    assert [forwards for own in each for forwards, _ in own] == [*range(1, num_losses + 1)] * num_steps
    np.testing.assert_allclose([loss for own in each for _, loss in own], losses, rtol=1e-6)
    np.testing.assert_allclose(found.losses_at(0)[0], sum(losses[:num_losses]), rtol=1e-6)
    # Parameters of other models, and slow copies of them, are no samples.
    assert [len(found.batch(step, 0).inputs) for step in range(num_steps)] == [num_inputs] * num_steps
    assert {len(found.batch(step, 0).sample_ids) % 8 for step in range(num_steps)} == {0}


# Of several updates in a step the last one is recorded: the first fault of the critic is seen in its next loss.
@pytest.mark.parametrize(
    ("name", "places"), [*zip(SCRIPTS, ({"judge.w", "judge.v"}, {"judge.w", "judge.v"}, {None}), strict=True)]
)
def test_a_fault_in_one_turn_is_found_before_the_next(tmp_path, run, name, places):
    for folder, fault in (("a", 1.0), ("b", 1.0), ("c", 1.5)):
        assert run(SCRIPTS[name][0], folder, fault, every=1)[0] == 0
    a, b, c = (Recording.open(tmp_path / folder) for folder in "abc")
    assert compare(a, b).verdict is Verdict.EQUAL
    found = compare(a, c)
    where = found.first_divergence
    assert found.verdict is Verdict.BUG and where is not None and where.step == 0
    assert where.parameter in places and where.phase == ("forward" if where.parameter is None else "reduce")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == TWINS else pytest.mark.exhaustive) for name in SCRIPTS]
)
def test_each_model_of_a_perturbed_run_is_moved_once(tmp_path, run, name):
    for number in range(2):
        assert run(SCRIPTS[name][0], perturbed_run=number, every=1)[0] == 0
    found = Recording.open(tmp_path / "out")
    (other,) = found.perturbed_runs()
    for param in found.manifest.params:
        own, moved = (each.full("parameters", 0, param) for each in (found, other))
        np.testing.assert_array_equal(moved, perturbed_values(param.partition(".")[2], own, 1))
        last = [each.full("update", found.num_steps - 1, param) for each in (found, other)]
        np.testing.assert_allclose(*last, rtol=0, atol=1e-5)


PASSED = (
    NETS
    + """
both = {"maker": made(0, 3, 6), "judge": made(1, 6, 1)}
states = {name: tx.init(params) for name, params in both.items()}
def step_of(name, loss_of):
    @jax.jit
    def step(both, states, real, noise):
        loss, grads = jax.value_and_grad(lambda params: loss_of(both | {name: params}, real, noise))(both[name])
        params, state = updated(both[name], states[name], grads)
        return both | {name: params}, states | {name: state}, loss
    return step
first = step_of("judge", lambda both, real, noise: (net(both["judge"], real) - net(both["judge"], noise)).mean())
second = step_of("maker", lambda both, real, noise: net(both["judge"], net(both["maker"], noise[:, :3])).mean())
result = []
for batch in batches:
    for step in (first, second):
        both, states, loss = step(both, states, batch["image"], batch["image"][::-1])
    result.append(both)
"""
)


def test_models_that_a_function_returns_as_they_are_keep_their_names(tmp_path, run):
    status, variables = run(PASSED, every=1)
    found = Recording.open(tmp_path / "out")
    assert status == 0 and sorted(found.manifest.params) == ["judge.v", "judge.w", "maker.v", "maker.w"]
    for step, both in enumerate(variables["result"]):
        for name in found.manifest.params:
            model, _, own = name.partition(".")
            np.testing.assert_array_equal(found.full("update", step, name), both[model][own])


UNTRAINED = (
    FUNCTIONS
    + """
tx = optax.adam(0.1)
state, unused = tx.init(params), tx.init({"w": jnp.ones((2, 2))})
@partial(jax.jit, donate_argnums=(0, 1))
def step(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, state = tx.update(grads, state)
    return optax.apply_updates(params, updates), state, loss
trail = []
for i in range(NUMBER):
    params, state, loss = step(params, state, batches[i % 3]["image"], batches[i % 3]["label"])
    trail.append(np.asarray(params["out"]["w"]))
result = trail
"""
)


@pytest.mark.parametrize("number", [4, 12])
def test_a_model_that_is_never_trained_costs_no_step(tmp_path, run, number):
    status, variables = run(UNTRAINED.replace("NUMBER", str(number)), every=1)
    found = Recording.open(tmp_path / "out")
    assert status == 0 and found.num_steps == number and "out.w" in found.manifest.params
    for step, wanted in enumerate(variables["trail"]):
        np.testing.assert_array_equal(found.full("update", step, "out.w"), wanted)


def test_an_actor_and_a_critic_with_other_heads_are_two_models(monkeypatch):
    """On two devices too, although the head of one is twice that of the other."""
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    noted = Noted()
    for outputs in (2, 1):
        noted.initialised({"w": np.zeros((4, 8)), "head": np.zeros((8, outputs))})
    assert noted.num_models == 2


def test_a_model_and_its_shards_are_one_model():
    whole = {"k": (8, 4), "b": (4,), "v": (4, 6)}
    noted = Noted()
    for shapes in (whole, {"k": (4, 4), "b": (4,), "v": (4, 3)}, {"k": (8, 4), "b": (4,), "v": (4, 5)}):
        noted.initialised({name: np.zeros(shape) for name, shape in shapes.items()})
    assert noted.trees == [whole, {"k": (8, 4), "b": (4,), "v": (4, 5)}]
