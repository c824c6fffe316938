"""Stacked layers in a scan under jax.checkpoint, a norm with a custom_vjp, bfloat16 compute and a constant loss scale."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH, DEPTH, SCALE = 16, 3, 128.0


@jax.custom_vjp
def rms_norm(x, weight):
    return _rms_norm(x, weight)[0]


def _rms_norm(x, weight):
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * inverse * weight).astype(x.dtype), (wide, inverse, weight)


def _rms_norm_backward(residuals, grad):
    x, inverse, weight = residuals
    dtype, grad = grad.dtype, grad.astype(jnp.float32)
    normed = x * inverse
    weighted = grad * weight
    dx = inverse * (weighted - normed * jnp.mean(weighted * normed, axis=-1, keepdims=True))
    return dx.astype(dtype), jnp.sum(grad * normed, axis=tuple(range(grad.ndim - 1))).astype(weight.dtype)


rms_norm.defvjp(_rms_norm, _rms_norm_backward)


@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
def layer(x, block):
    y = rms_norm(x, block["norm"])
    return x + jax.nn.gelu(y @ block["up"]) @ block["down"], None


def loss_fn(params, batch):
    x = params["embed"][batch["tokens"]]
    x, _ = jax.lax.scan(layer, x, params["blocks"])
    logits = (rms_norm(x, params["norm"]) @ params["embed"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def main():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "embed": jax.random.normal(keys[0], (32, WIDTH)) * 0.5,
        "blocks": {
            "norm": jnp.ones((DEPTH, WIDTH)),
            "up": jax.random.normal(keys[1], (DEPTH, WIDTH, 2 * WIDTH)) / 4,
            "down": jax.random.normal(keys[2], (DEPTH, 2 * WIDTH, WIDTH)) / 8,
        },
        "norm": jnp.ones(WIDTH),
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3))
    opt_state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, batch):
        def scaled(params):
            low = jax.tree.map(lambda p: p.astype(jnp.bfloat16) if p.ndim > 1 else p, params)
            return loss_fn(low, batch) * SCALE

        loss, grads = jax.value_and_grad(scaled)(params)
        grads = jax.tree.map(lambda g: g / SCALE, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss / SCALE

    rng = np.random.default_rng(0)
    for step in range(6):
        tokens = rng.integers(32, size=(4, 9))
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        params, opt_state, loss = train_step(params, opt_state, batch)
        print(f"step {step} loss {float(loss)}")


if __name__ == "__main__":
    main()
