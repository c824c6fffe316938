"""Convolutions on small images: gradients in one jitted function, the update in another one, evaluation after each epoch."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(features=4, kernel_size=(3, 3))(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.Conv(features=8, kernel_size=(3, 3))(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(features=16)(x))
        return nn.Dense(features=10)(x)


@jax.jit
def apply_model(state, images, labels):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images)
        one_hot = jax.nn.one_hot(labels, 10)
        return jnp.mean(optax.softmax_cross_entropy(logits=logits, labels=one_hot)), logits

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(state.params)
    return grads, loss, jnp.mean(jnp.argmax(logits, -1) == labels)


@jax.jit
def update_model(state, grads):
    return state.apply_gradients(grads=grads)


def train_epoch(state, train_ds, batch_size, rng):
    size = len(train_ds["image"])
    perms = jax.random.permutation(rng, size)[: size // batch_size * batch_size].reshape(-1, batch_size)
    losses, accuracies = [], []
    for perm in perms:
        grads, loss, accuracy = apply_model(state, train_ds["image"][perm, ...], train_ds["label"][perm, ...])
        state = update_model(state, grads)
        print("loss", float(loss))
        losses.append(loss)
        accuracies.append(accuracy)
    return state, np.mean(losses), np.mean(accuracies)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--num-epochs", type=int, default=2)
    config = parser.parse_args()
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(80, 8, 8, 1)).astype(np.float32), rng.integers(10, size=80)
    train_ds = {"image": images[:64], "label": labels[:64]}
    test_ds = {"image": images[64:], "label": labels[64:]}
    rng = jax.random.key(0)
    rng, init_rng = jax.random.split(rng)
    cnn = CNN()
    params = cnn.init(init_rng, jnp.ones([1, 8, 8, 1]))["params"]
    tx = optax.sgd(config.learning_rate, config.momentum)
    state = train_state.TrainState.create(apply_fn=cnn.apply, params=params, tx=tx)
    for epoch in range(1, config.num_epochs + 1):
        rng, input_rng = jax.random.split(rng)
        state, train_loss, train_accuracy = train_epoch(state, train_ds, 16, input_rng)
        _, test_loss, test_accuracy = apply_model(state, test_ds["image"], test_ds["label"])
        print(f"epoch {epoch}: train {train_loss} {train_accuracy}, test {float(test_loss)} {float(test_accuracy)}")


if __name__ == "__main__":
    main()
