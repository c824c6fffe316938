"""Pure functions with an optimizer of many parts: injected hyperparameters, masked weight decay, two labels, frozen leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

jax.config.update("jax_enable_x64", True)


def init(rng, sizes):
    layer = lambda n, m: {"w": rng.normal(size=(n, m)) / np.sqrt(n), "b": np.zeros(m)}
    return {f"layer{i}": layer(n, m) for i, (n, m) in enumerate(zip(sizes[:-1], sizes[1:]))}


def model(params, x):
    for i, (name, layer) in enumerate(sorted(params.items())):

        def apply(x, layer=layer):
            return x @ layer["w"] + layer["b"]

        x = jax.named_call(apply, name=name)(x)
        x = jnp.tanh(x) if i < len(params) - 1 else x
    return x


def loss_fn(params, x, y):
    return optax.huber_loss(model(params, x), y).mean()


def labels(params):
    return {name: "frozen" if name == "layer0" else "adam" for name in params}


@optax.inject_hyperparams
def make_optimizer(learning_rate, weight_decay):
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(),
        optax.masked(
            optax.add_decayed_weights(weight_decay), lambda params: jax.tree.map(lambda x: jnp.ndim(x) > 1, params)
        ),
        optax.scale_by_learning_rate(learning_rate),
    )


def main():
    rng = np.random.default_rng(0)
    params = jax.tree.map(jnp.asarray, init(rng, [6, 12, 12, 2]))
    optimizer = optax.multi_transform(
        {"adam": make_optimizer(learning_rate=1e-2, weight_decay=0.1), "frozen": optax.set_to_zero()}, labels
    )
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, x, y):
        value, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, optax.global_norm(grads)

    for i in range(6):
        x = rng.normal(size=(16, 6))
        y = np.stack([x.sum(axis=1), x.prod(axis=1)], axis=1)
        if i == 3:
            opt_state.inner_states["adam"].inner_state.hyperparams["learning_rate"] = jnp.asarray(1e-3)
        params, opt_state, value, norm = step(params, opt_state, x, y)
        print(f"{i}: loss {float(value)} norm {float(norm)}")


if __name__ == "__main__":
    main()
