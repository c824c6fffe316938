"""A residual network with batch norm in float16: dynamic loss scaling, a state with batch statistics, skipped updates."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import dynamic_scale as dynamic_scale_lib
from flax.training import train_state


class ResNetBlock(nn.Module):
    filters: int
    norm: Any
    dtype: Any

    @nn.compact
    def __call__(self, x):
        y = nn.relu(self.norm()(nn.Conv(self.filters, (3, 3), use_bias=False, dtype=self.dtype)(x)))
        y = self.norm(scale_init=nn.initializers.zeros_init())(
            nn.Conv(self.filters, (3, 3), use_bias=False, dtype=self.dtype)(y)
        )
        return nn.relu(x + y)


class ResNet(nn.Module):
    dtype: Any = jnp.float16

    @nn.compact
    def __call__(self, x, train=True):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        x = nn.Conv(8, (3, 3), use_bias=False, dtype=self.dtype, name="conv_init")(x)
        x = nn.relu(norm(name="bn_init")(x))
        for _ in range(2):
            x = ResNetBlock(8, norm, self.dtype)(x)
        x = jnp.mean(x, axis=(1, 2))
        return jnp.asarray(nn.Dense(5, dtype=self.dtype)(x), jnp.float32)


class TrainState(train_state.TrainState):
    batch_stats: Any
    dynamic_scale: dynamic_scale_lib.DynamicScale


def cross_entropy_loss(logits, labels):
    return jnp.mean(optax.softmax_cross_entropy(logits=logits, labels=jax.nn.one_hot(labels, num_classes=5)))


def train_step(state, batch, learning_rate_fn):
    def loss_fn(params):
        logits, new_model_state = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats}, batch["image"], mutable=["batch_stats"]
        )
        loss = cross_entropy_loss(logits, batch["label"])
        weight_l2 = sum(jnp.sum(x**2) for x in jax.tree_util.tree_leaves(params) if x.ndim > 1)
        return loss + 1e-4 * 0.5 * weight_l2, (new_model_state, logits)

    dynamic_scale, is_fin, aux, grads = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True)(state.params)
    loss, (new_model_state, logits) = aux
    new_state = state.apply_gradients(grads=grads, batch_stats=new_model_state["batch_stats"])
    select_fn = functools.partial(jnp.where, is_fin)
    new_state = new_state.replace(
        opt_state=jax.tree_util.tree_map(select_fn, new_state.opt_state, state.opt_state),
        params=jax.tree_util.tree_map(select_fn, new_state.params, state.params),
        dynamic_scale=dynamic_scale,
    )
    metrics = {"loss": loss, "accuracy": jnp.mean(jnp.argmax(logits, -1) == batch["label"])}
    metrics |= {"scale": dynamic_scale.scale, "learning_rate": learning_rate_fn(state.step)}
    return new_state, metrics


def main():
    rng = np.random.default_rng(0)
    model = ResNet()
    variables = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 8, 8, 3)))
    schedule = optax.join_schedules(
        [optax.linear_schedule(0.0, 0.1, 3), optax.cosine_decay_schedule(0.1, 10)], boundaries=[3]
    )
    state = TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optax.sgd(schedule, momentum=0.9, nesterov=True),
        batch_stats=variables["batch_stats"],
        dynamic_scale=dynamic_scale_lib.DynamicScale(scale=jnp.asarray(1024.0)),
    )
    step = jax.jit(functools.partial(train_step, learning_rate_fn=schedule))
    for _ in range(6):
        batch = {"image": rng.normal(size=(8, 8, 8, 3)).astype(np.float32), "label": rng.integers(5, size=8)}
        state, metrics = step(state, batch)
        print(" ".join(f"{key} {float(value)}" for key, value in metrics.items()))


if __name__ == "__main__":
    main()
