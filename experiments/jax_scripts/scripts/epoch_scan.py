"""An epoch in one jitted call: jax.lax.scan over the batches of an epoch, a Python loop over epochs."""

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(24)(x))
        x = nn.LayerNorm()(x)
        return nn.Dense(4)(x)


def train_step(state, batch):
    images, labels = batch

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def train_epoch(state, images, labels):
    return jax.lax.scan(train_step, state, (images, labels))


@jax.jit
def accuracy(state, images, labels):
    return (state.apply_fn({"params": state.params}, images).argmax(-1) == labels).mean()


def main():
    rng = np.random.default_rng(0)
    images = rng.normal(size=(4, 8, 10)).astype(np.float32)
    labels = rng.integers(4, size=(4, 8))
    model = Net()
    params = model.init(jax.random.key(0), images[0])["params"]
    tx = optax.adamw(1e-2, weight_decay=0.1)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    for epoch in range(3):
        order = rng.permutation(4)
        state, losses = train_epoch(state, images[order], labels[order])
        for loss in np.asarray(losses):
            print("loss", float(loss))
        print(f"epoch {epoch}: accuracy {float(accuracy(state, images[0], labels[0]))}")


if __name__ == "__main__":
    main()
