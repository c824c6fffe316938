"""Scripts that update their parameters themselves, without an optimizer of optax."""

import jax
import numpy as np
import pytest

from crossframe.recording import Recording
from crossframe.recording.perturbed_runs import perturbed_values
from crossframe.scripts import NOT_RECORDED
from crossframe.verdict import Verdict, compare
from tests.on_jax.helpers.scripts import FUNCTIONS, HEAD, IN_PMAP

START = (
    FUNCTIONS
    + """
RATE, SIGN = 0.1 * FAULT, 1.0 if FAULT > 0 else -1.0
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
    "a scan": EPOCH,
    "microbatches": MICROBATCHES.replace("\ngradients(params, batch", "\n#"),
    "donated": IN_JIT.replace("@jax.jit", "@partial(jax.jit, donate_argnums=0)"),
    "momentum": MOMENTUM,
    "Adam": ADAM,
    "example library": EXAMPLE_LIBRARY,
    "equinox": IN_JIT.replace("RATE, SIGN", "import equinox as eqx\nRATE, SIGN").replace(
        "descend(params, grads)", "eqx.apply_updates(params, jax.tree.map(lambda g: -RATE * g, grads))"
    ),
}
"""The parameters after the last step are known, if the last step returns them."""
