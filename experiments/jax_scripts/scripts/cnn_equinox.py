"""Convolutions in equinox: filter_jit around filter_value_and_grad and optax, a model that is mapped over the batch."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

SEED, STEPS, PRINT_EVERY = 5678, 8, 4


class CNN(eqx.Module):
    layers: list

    def __init__(self, key):
        key1, key2, key3 = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 3, kernel_size=3, key=key1),
            eqx.nn.MaxPool2d(kernel_size=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(243, 16, key=key2),
            jax.nn.sigmoid,
            eqx.nn.Linear(16, 10, key=key3),
            jax.nn.log_softmax,
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model, x, y):
    pred_y = jax.vmap(model)(x)
    return cross_entropy(y, pred_y)


def cross_entropy(y, pred_y):
    pred_y = jnp.take_along_axis(pred_y, jnp.expand_dims(y, 1), axis=1)
    return -jnp.mean(pred_y)


loss = eqx.filter_jit(loss)


@eqx.filter_jit
def compute_accuracy(model, x, y):
    return jnp.mean(y == jnp.argmax(jax.vmap(model)(x), axis=1))


def evaluate(model, testloader):
    avg_loss = avg_acc = 0
    for x, y in testloader:
        avg_loss += loss(model, x, y)
        avg_acc += compute_accuracy(model, x, y)
    return avg_loss / len(testloader), avg_acc / len(testloader)


def train(model, trainloader, testloader, optim, steps, print_every):
    opt_state = optim.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def make_step(model, opt_state, x, y):
        loss_value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
        updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        model = eqx.apply_updates(model, updates)
        return model, opt_state, loss_value

    def infinite_trainloader():
        while True:
            yield from trainloader

    for step, (x, y) in zip(range(steps), infinite_trainloader()):
        model, opt_state, train_loss = make_step(model, opt_state, x, y)
        print(f"step={step} loss={train_loss.item()}")
        if (step % print_every) == 0 or (step == steps - 1):
            test_loss, test_accuracy = evaluate(model, testloader)
            print(f"test={test_loss.item()} test_accuracy={test_accuracy.item()}")
    return model


def main():
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(8, 1, 12, 12)).astype(np.float32), rng.integers(10, size=8)) for _ in range(6)]
    model = CNN(jax.random.split(jax.random.key(SEED))[1])
    train(model, batches[:4], batches[4:], optax.adamw(1e-2), STEPS, PRINT_EVERY)


if __name__ == "__main__":
    main()
