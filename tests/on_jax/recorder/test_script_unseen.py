"""Scripts whose optimizer gets other gradients than those of `jax.grad`: of evolution strategies, by `jax.vjp` of outputs."""

import numpy as np
import pytest

from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from tests.on_jax.helpers.scripts import FUNCTIONS

STRATEGIES = (
    FUNCTIONS
    + """
from jax.flatten_util import ravel_pytree
tx = optax.adam(1e-2)
opt_state = tx.init(params)
def estimate(params, key, batch):
    flat, unravel = ravel_pytree(params)
    moves = jax.random.normal(key, (16, flat.size))
    values = jax.vmap(lambda move: loss_fn(unravel(flat + 0.1 * move), batch["image"], batch["label"]))(moves)
    return spoil(unravel((values - values.mean()) @ moves / 1.6))
@jax.jit
def step(params, opt_state, key, batch):
    grads = estimate(params, key, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state
for i, batch in enumerate(batches):
    params, opt_state = step(params, opt_state, jax.random.key(i), batch)
"""
)
EAGER = STRATEGIES.replace("@jax.jit\n", "")
OF_A_LOSS = STRATEGIES.replace(
    "estimate(params, key, batch)\n    up", "spoil(jax.grad(loss_fn)(params, *batch.values()))\n    up"
)
OF_OUTPUTS = STRATEGIES.replace(
    "    grads = estimate(params, key, batch)\n",
    "    logits, backward = jax.vjp(lambda params: forward(params, batch['image']), params)\n"
    "    wrong = (jax.nn.softmax(logits) - jax.nn.one_hot(batch['label'], 3)) / 8\n"
    "    grads = spoil(backward(wrong)[0])\n",
)


@pytest.mark.parametrize("text", [STRATEGIES, EAGER, OF_OUTPUTS])
def test_what_the_optimizer_gets_is_recorded(run, tmp_path, capsys, text):
    assert run(text, "a", every=1)[0] == run(text, "b", every=1)[0] == 0
    assert "the loss of a step is the norm of the gradients that the optimizer gets" in capsys.readouterr().err
    a, b = (Recording.open(tmp_path / name) for name in "ab")
    assert a.num_steps == 3 and compare(a, b).verdict is Verdict.EQUAL
    grads = [a.full("reduce", 0, name) for name in a.manifest.params]
    size = np.sqrt(sum(np.square(each.astype(np.float64)).sum() for each in grads))
    np.testing.assert_allclose(a.losses_at(0)[0], size, rtol=1e-6)
    assert run(text.replace("* FAULT", "* 1.5"), "wrong", every=1)[0] == 0
    found = compare(a, Recording.open(tmp_path / "wrong"))
    assert found.verdict is not Verdict.EQUAL and found.first_divergence.step == 0


def test_jit_and_eager_agree(run, tmp_path):
    assert run(STRATEGIES, "a", every=1)[0] == run(EAGER, "b", every=1)[0] == 0
    for number in (1, 2):
        assert run(STRATEGIES, "a", every=1, perturbed_run=number)[0] == 0
    found = compare(*(Recording.open(tmp_path / name) for name in "ab"))
    assert found.verdict in (Verdict.EQUAL, Verdict.ROUNDING), found.reason


@pytest.mark.parametrize("fault", [1.0, 1.5])
def test_losses_of_one_run_alone_are_not_compared(run, tmp_path, fault):
    assert run(OF_OUTPUTS, "a", every=1)[0] == run(OF_A_LOSS, "b", every=1, fault=fault)[0] == 0
    for number in (1, 2):
        assert run(OF_OUTPUTS, "a", every=1, perturbed_run=number)[0] == 0
    found = compare(*(Recording.open(tmp_path / name) for name in "ab"))
    assert found.verdict is (Verdict.ROUNDING if fault == 1 else Verdict.BUG), found.reason
    assert found.notes[0].startswith("losses and batches are not compared: a has the norm of the gradients")
    assert fault == 1 or (found.first_divergence.step, found.first_divergence.phase) == (0, "reduce")


def test_an_update_before_the_first_gradient_is_no_step(run, tmp_path):
    """As of a call that compiles the update."""
    start = "opt_state = tx.init(params)\n"
    compiles = f"{start}tx.update(jax.tree.map(jnp.zeros_like, params), opt_state, params)\n"
    assert run(OF_A_LOSS, "a", every=1)[0] == run(OF_A_LOSS.replace(start, compiles), "b", every=1)[0] == 0
    found = [Recording.open(tmp_path / name) for name in "ab"]
    assert [each.num_steps for each in found] == [3, 3] and compare(*found).verdict is Verdict.EQUAL
