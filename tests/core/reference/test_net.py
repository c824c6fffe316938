"""The network and the optimizers that the reference trains, beside slopes and beside formulas, element by element."""

import math

import numpy as np
import pytest

from crossframe.reference import SGD, AdamW, Layers

NET = Layers(("a", "b", ""), (3, 5, 4, 2))


def loss_of(params, batch, rank=0):
    NET.start(rank, batch)
    for unit, specs in NET.specs().items():
        NET.forward(unit, rank, {spec.name: params[spec.name] for spec in specs})
    return NET.loss(rank)


def test_the_gradient_is_the_slope_of_the_loss():
    """A central difference of a smooth function is off by h^2 times a third derivative of order 1, and by u / h of rounding:
    with h = 1e-5 by some 1e-10, for gradients of order 0.1."""
    params, batch, h = NET.initial(seed=3), NET.batch(seed=4), 1e-5
    loss_of(params, batch)
    grads = {}
    for unit, specs in reversed(NET.specs().items()):
        grads |= NET.backward(unit, 0, {spec.name: params[spec.name] for spec in specs})
    assert set(grads) == set(params)
    for name, grad in grads.items():
        assert grad.shape == params[name].shape
        slopes = np.zeros_like(grad)
        for at in np.ndindex(grad.shape):
            sides = []
            for step in (h, -h):
                moved = {k: v.copy() for k, v in params.items()}
                moved[name][at] += step
                sides.append(loss_of(moved, batch))
            slopes[at] = (sides[0] - sides[1]) / (2 * h)
        assert np.abs(slopes - grad).max() < 1e-8, name
    assert max(np.abs(grad).max() for grad in grads.values()) > 1e-3


def test_ranks_keep_their_own_activations():
    params = NET.initial()
    alone = [loss_of(params, NET.batch(seed)) for seed in (1, 2)]
    for rank, seed in ((0, 1), (1, 2)):
        NET.start(rank, NET.batch(seed))
    for unit, specs in NET.specs().items():
        for rank in (1, 0):
            NET.forward(unit, rank, {spec.name: params[spec.name] for spec in specs})
    assert [NET.loss(rank) for rank in (0, 1)] == alone


def sgd(value, grads, lr, momentum, decay):
    """torch.optim.SGD's documentation, one number at a time."""
    kept = None
    for grad in grads:
        grad = grad + decay * value
        if momentum:
            kept = grad if kept is None else momentum * kept + grad
            grad = kept
        value = value - lr * grad
    return value


def adamw(value, grads, lr, betas, eps, decay):
    """Loshchilov and Hutter, algorithm 2, one number at a time."""
    m = v = 0.0
    for step, grad in enumerate(grads, start=1):
        value = value - lr * decay * value
        m, v = betas[0] * m + (1 - betas[0]) * grad, betas[1] * v + (1 - betas[1]) * grad**2
        value = value - lr * (m / (1 - betas[0] ** step)) / (math.sqrt(v / (1 - betas[1] ** step)) + eps)
    return value


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (SGD(lr=0.1), lambda x, g: sgd(x, g, 0.1, 0.0, 0.0)),
        (SGD(lr=0.1, momentum=0.9), lambda x, g: sgd(x, g, 0.1, 0.9, 0.0)),
        (SGD(lr=0.1, momentum=0.9, weight_decay=0.3), lambda x, g: sgd(x, g, 0.1, 0.9, 0.3)),
        (AdamW(lr=0.1), lambda x, g: adamw(x, g, 0.1, (0.9, 0.999), 1e-8, 1e-2)),
        (AdamW(0.2, (0.5, 0.7), 0.1, 0.3), lambda x, g: adamw(x, g, 0.2, (0.5, 0.7), 0.1, 0.3)),
    ],
)
def test_an_optimizer_is_its_formula_at_every_element(optimizer, expected):
    generator = np.random.default_rng(7)
    start, grads = generator.standard_normal(6), generator.standard_normal((5, 6))
    values, state = start.copy(), optimizer.init(start)
    for step, grad in enumerate(grads, start=1):
        before = grad.copy()
        optimizer.update(values, grad, state, step)
        assert np.array_equal(grad, before)
    for i in range(6):
        # Five steps of about ten roundings, of numbers of order 1.
        assert values[i] == pytest.approx(expected(start[i], grads[:, i]), rel=0, abs=5 * 10 * 2**-52)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9, weight_decay=0.1), AdamW()])
def test_an_optimizer_computes_in_the_dtype_of_the_values(optimizer, dtype):
    values = np.ones(3, dtype)
    state = optimizer.init(values)
    optimizer.update(values, np.ones(3, dtype), state, 1)
    assert {array.dtype.name for array in (values, *state.values())} == {dtype}
