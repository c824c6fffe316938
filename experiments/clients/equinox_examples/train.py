"""Trains a convolutional net on images, or a recurrent net on spirals, in the style of equinox's examples.

python train.py [--task cnn|rnn] [--mode jit|eager] [--mistake]
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.sharding as jshard
import numpy as np
import optax

parser = argparse.ArgumentParser()
parser.add_argument("--task", choices=["cnn", "rnn"], default="cnn")
parser.add_argument("--mode", choices=["jit", "eager"], default="jit")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--mistake", action="store_true", help="Give dropout the same key at every step.")
args = parser.parse_args()


class CNN(eqx.Module):
    """Images of 1 x 14 x 14 to the logarithms of the probabilities of 10 classes."""

    conv: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d
    dropout: eqx.nn.Dropout
    mlp: eqx.nn.MLP

    def __init__(self, key):
        key1, key2 = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(1, 4, kernel_size=3, key=key1)
        self.pool = eqx.nn.MaxPool2d(kernel_size=2, stride=2)
        self.dropout = eqx.nn.Dropout(0.2)
        self.mlp = eqx.nn.MLP(144, 10, 32, 1, key=key2)

    def __call__(self, x, key):
        x = jnp.ravel(jax.nn.relu(self.pool(self.conv(x))))
        return jax.nn.log_softmax(self.mlp(self.dropout(x, key=key)))


def cnn_loss(model, images, labels, key):
    keys = jax.random.split(key, len(images))
    log_probabilities = jax.vmap(model)(images, keys)
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=1))


class RNN(eqx.Module):
    """Whether a spiral, of points in the plane, turns left."""

    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear

    def __init__(self, key):
        key1, key2 = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(2, 16, key=key1)
        self.linear = eqx.nn.Linear(16, 1, key=key2)

    def __call__(self, points):
        hidden, _ = jax.lax.scan(lambda state, point: (self.cell(point, state), None), jnp.zeros(16), points)
        return jax.nn.sigmoid(self.linear(hidden))[0]


def rnn_loss(model, points, labels, key):
    predicted = jax.vmap(model)(points)
    return -jnp.mean(labels * jnp.log(predicted) + (1 - labels) * jnp.log(1 - predicted))


def images(step):
    random = np.random.default_rng(step)
    pictures = random.normal(size=(args.batch, 1, 14, 14)).astype(np.float32)
    return pictures, random.integers(0, 10, size=args.batch, dtype=np.int32)


def spirals(step):
    random = np.random.default_rng(step)
    time = np.linspace(0, 2 * np.pi, 16)
    start = random.uniform(0, 2 * np.pi, size=(args.batch, 1))
    left = np.arange(args.batch) % 2
    angle = start + time * np.where(left, 1, -1)[:, None]
    points = np.stack([np.cos(angle), np.sin(angle)], axis=-1) / (1 + time[:, None])
    return points.astype(np.float32), left.astype(np.float32)


def main() -> None:
    model_key, key = jax.random.split(jax.random.key(5678))
    model = CNN(model_key) if args.task == "cnn" else RNN(model_key)
    loss_fn, data = (cnn_loss, images) if args.task == "cnn" else (rnn_loss, spirals)
    optim = optax.adam(1e-2)
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))

    # As equinox's example of parallelism: the batch is divided over the devices, and every device has the model.
    mesh = jshard.Mesh(np.array(jax.devices()), ("batch",))
    divided = jshard.NamedSharding(mesh, jshard.PartitionSpec("batch"))
    replicated = jshard.NamedSharding(mesh, jshard.PartitionSpec())
    model, opt_state = eqx.filter_shard((model, opt_state), replicated)

    def make_step(model, opt_state, x, y, key):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y, key)
        updates, opt_state = optim.update(grads, opt_state)
        return loss, eqx.apply_updates(model, updates), opt_state

    if args.mode == "jit":
        make_step = eqx.filter_jit(make_step)
    for step in range(args.steps):
        x, y = eqx.filter_shard(data(step), divided)
        if not args.mistake:
            key, step_key = jax.random.split(key)
        else:
            _, step_key = jax.random.split(key)
        loss, model, opt_state = make_step(model, opt_state, x, y, step_key)
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
