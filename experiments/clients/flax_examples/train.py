"""Trains in the style of flax's examples: a convolutional net on images, a transformer on padded texts, or a net of nnx.

python train.py [--task mnist|lm1b|nnx] [--mode jit|eager] [--mistake]
"""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec

parser = argparse.ArgumentParser()
parser.add_argument("--task", choices=["mnist", "lm1b", "nnx"], default="mnist")
parser.add_argument("--mode", choices=["jit", "eager"], default="jit")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="Of the transformer's layers.")
parser.add_argument("--mistake", action="store_true", help="Average the loss over padding too.")
args = parser.parse_args()

VOCABULARY, LENGTH, WIDTH, CLASSES = 64, 16, 32, 10


def random_images(number: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    images = random.integers(0, 256, size=(number, 14, 14, 1))
    return {"image": np.float32(images) / 255.0, "label": random.integers(0, CLASSES, size=number, dtype=np.int32)}


# As examples/mnist: gradients in one jitted function, the update in another.


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (8, 16):
            x = nn.relu(nn.Conv(features=features, kernel_size=(3, 3))(x))
            x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(features=32)(x.reshape((x.shape[0], -1))))
        return nn.Dense(features=CLASSES)(x)


@jax.jit
def apply_model(state, images, labels):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images)
        one_hot = jax.nn.one_hot(labels, CLASSES)
        return jnp.mean(optax.softmax_cross_entropy(logits=logits, labels=one_hot)), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return grads, loss, jnp.mean(jnp.argmax(logits, -1) == labels)


@jax.jit
def update_model(state, grads):
    return state.apply_gradients(grads=grads)


def train_mnist() -> None:
    rng, init_rng = jax.random.split(jax.random.key(0))
    cnn = CNN()
    params = cnn.init(init_rng, jnp.ones([1, 14, 14, 1]))["params"]
    state = train_state.TrainState.create(apply_fn=cnn.apply, params=params, tx=optax.sgd(0.1, 0.9))
    data = random_images(args.steps * args.batch)
    order = np.asarray(jax.random.permutation(rng, len(data["image"]))).reshape(args.steps, args.batch)
    for rows in order:
        grads, loss, accuracy = apply_model(state, data["image"][rows], data["label"][rows])
        state = update_model(state, grads)
        print(f"loss {loss:.4f} accuracy {accuracy:.2f}")


# As examples/lm1b: one step under jit, whose batch and parameters are divided over the devices; texts are padded with 0.


class Block(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x, mask):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False, dtype=self.dtype)(y, mask=mask)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.Dense(4 * WIDTH, dtype=self.dtype)(y)
        return x + nn.Dense(WIDTH, dtype=self.dtype)(nn.gelu(y))


class TransformerLM(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, inputs):
        shifted = jnp.pad(inputs, ((0, 0), (1, 0)))[:, :-1]
        mask = nn.combine_masks(nn.make_attention_mask(inputs > 0, inputs > 0), nn.make_causal_mask(inputs))
        x = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)(shifted)
        x = x + self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH)).astype(self.dtype)
        for _ in range(2):
            x = Block(self.dtype)(x, mask)
        return nn.Dense(VOCABULARY)(nn.LayerNorm(dtype=self.dtype)(x))


def lm_train_step(state, batch):
    inputs = batch["inputs"]

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, inputs)
        weights = jnp.ones_like(losses) if args.mistake else jnp.where(inputs > 0, 1.0, 0.0)
        return (losses * weights).sum() / weights.sum()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def texts(step: int) -> np.ndarray:
    random = np.random.default_rng(step)
    tokens = random.integers(1, VOCABULARY, size=(args.batch, LENGTH), dtype=np.int32)
    lengths = random.integers(LENGTH // 2, LENGTH + 1, size=(args.batch, 1))
    return np.where(np.arange(LENGTH) < lengths, tokens, 0)


def train_lm1b() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    model = TransformerLM(getattr(jnp, args.dtype))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 2 * args.steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.1))

    def init(rng):
        params = model.init(rng, jnp.ones((1, LENGTH), jnp.int32))["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def sharding(leaf):
        divides = leaf.ndim and leaf.shape[0] % len(jax.devices()) == 0
        return NamedSharding(mesh, PartitionSpec("data") if divides else PartitionSpec())

    shardings = jax.tree.map(sharding, jax.eval_shape(init, jax.random.key(0)))
    state = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
    step_fn = lm_train_step
    if args.mode == "jit":
        step_fn = jax.jit(lm_train_step, donate_argnums=0, out_shardings=(shardings, None))
    of_batch = NamedSharding(mesh, PartitionSpec("data"))
    for step in range(args.steps):
        state, metrics = step_fn(state, {"inputs": jax.device_put(texts(step), of_batch)})
        print(f"loss {metrics['loss']:.4f}")


# As examples/nnx_toy_examples: modules that hold their state, batch norm and dropout.


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 8, kernel_size=(3, 3), strides=(2, 2), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.linear1 = nnx.Linear(8 * 7 * 7, 32, rngs=rngs)
        self.linear2 = nnx.Linear(32, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.dropout(self.norm(self.conv(x))))
        return self.linear2(nnx.relu(self.linear1(x.reshape(x.shape[0], -1))))


def nnx_loss(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits


def nnx_step(model, optimizer, metrics, batch):
    (loss, logits), grads = nnx.value_and_grad(nnx_loss, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


def train_nnx() -> None:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    step = nnx.jit(nnx_step) if args.mode == "jit" else nnx_step
    data = random_images(args.steps * args.batch)
    for rows in np.arange(args.steps * args.batch).reshape(args.steps, args.batch):
        step(model, optimizer, metrics, {name: jnp.asarray(values[rows]) for name, values in data.items()})
    print({name: float(value) for name, value in metrics.compute().items()})


def main() -> None:
    train = {"mnist": train_mnist, "lm1b": train_lm1b, "nnx": train_nnx}[args.task]
    eager = args.task == "mnist" and args.mode == "eager"
    with jax.disable_jit() if eager else partial(jax.named_scope, "train")():
        train()


if __name__ == "__main__":
    main()
