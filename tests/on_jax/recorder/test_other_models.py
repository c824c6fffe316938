"""Modules of a model that a loss function calls, but is not differentiated by."""

import pytest

from crossframe.recording import Recording
from tests.on_jax.helpers.scripts import HEAD

LINEN = (
    HEAD
    + """
import flax.linen as nn
class Net(nn.Module):
    width: int
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=True)(nn.relu(nn.Dense(self.width)(x))))
def made(seed, width, inputs):
    net = Net(width)
    return net.init(jax.random.key(seed), jnp.ones((1, inputs)))["params"], lambda p, x: net.apply({"params": p}, x)
"""
)
EQUINOX = (
    HEAD
    + """
import equinox as eqx
class Net(eqx.Module):
    first: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear
    def __call__(self, x):
        return self.last(self.dropout(jax.nn.relu(self.first(x)), inference=True))
def made(seed, width, inputs):
    a, b = jax.random.split(jax.random.key(seed))
    net = Net(eqx.nn.Linear(inputs, width, key=a), eqx.nn.Dropout(0.5), eqx.nn.Linear(width, 1, key=b))
    params, static = eqx.partition(net, eqx.is_inexact_array)
    return params, lambda p, x: jax.vmap(eqx.combine(p, static))(x)
"""
)
TURNS = """
critic, value = made(0, 5, 1)
maker, make = made(1, 4, 6)
tx = optax.sgd(0.1)
@jax.jit
def step(critic, maker, states, x):
    grads = jax.grad(lambda critic: value(critic, x[:, :1]).mean() - value(critic, make(maker, x)).mean())(critic)
    updates, first = tx.update(grads, states[0], critic)
    critic = optax.apply_updates(critic, updates)
    grads = jax.grad(lambda maker: -value(critic, make(maker, x)).mean())(maker)
    updates, second = tx.update(grads, states[1], maker)
    return critic, optax.apply_updates(maker, updates), (first, second)
states = tx.init(critic), tx.init(maker)
for batch in batches:
    critic, maker, states = step(critic, maker, states, batch["image"])
"""
TAUGHT = """
teacher, teach = made(0, 5, 6)
student, learn = made(1, 4, 6)
tx = optax.sgd(0.1)
@jax.jit
def step(teacher, student, state, x):
    grads = jax.grad(lambda student: jnp.square(teach(teacher, x) - learn(student, x)).mean())(student)
    updates, state = tx.update(grads, state, student)
    return optax.apply_updates(student, updates), state
state = tx.init(student)
for batch in batches:
    student, state = step(teacher, student, state, batch["image"])
"""
NAMES = {LINEN: ("Dense_1", "Dropout_0", "Dense_0"), EQUINOX: ("first", "dropout", "last")}
BOTH = pytest.mark.parametrize("library", [pytest.param(LINEN, id="linen"), pytest.param(EQUINOX, id="equinox")])


def outputs(recording, microbatch, lead=""):
    """The modules below the root that gave outputs, with their shapes."""
    return {
        module.removeprefix(lead): recording.activation_shape(0, 0, microbatch, module, use)
        for at, module, use in recording.activations(0)
        if at == microbatch and use == "output" and module.startswith(lead) and module != lead.rstrip(".")
    }


@BOTH
def test_in_the_turn_of_a_model_another_one_has_its_name(tmp_path, run, library):
    assert run(library + TURNS, every=1)[0] == 0
    found, (first, dropout, last) = Recording.open(tmp_path / "out"), NAMES[library]
    own = outputs(found, 1, "maker.")
    assert {name: shape for name, shape in own.items() if name} == {first: (8, 4), dropout: (8, 4), last: (8, 1)}
    assert outputs(found, 1, "critic.") == {first: (8, 5), dropout: (8, 5), last: (8, 1)}
    of_critic = outputs(found, 0, "critic.")
    assert of_critic[first] == of_critic[f"{first} (call 2)"] == (8, 5)


@BOTH
def test_modules_of_a_teacher_are_no_calls_of_those_of_its_student(tmp_path, run, library):
    assert run(library + TAUGHT, every=1)[0] == 0
    found, (first, dropout, last) = Recording.open(tmp_path / "out"), NAMES[library]
    own = {name: shape for name, shape in outputs(found, 0).items() if name}
    assert own == {first: (8, 4), dropout: (8, 4), last: (8, 1)}
