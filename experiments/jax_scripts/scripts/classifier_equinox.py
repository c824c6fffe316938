"""A transformer in equinox with dropout keys, frozen embeddings by partition, and an average of the parameters (EMA)."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB, WIDTH, LENGTH = 20, 16, 6


class TransformerLayer(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=k1)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, activation=jax.nn.gelu, key=k2)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key, inference=False):
        y = jax.vmap(self.norm1)(x)
        x = x + self.dropout(self.attention(y, y, y), key=key, inference=inference)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


class Classifier(eqx.Module):
    embedding: eqx.nn.Embedding
    layers: list[TransformerLayer]
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.embedding = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
        self.layers = [TransformerLayer(keys[1]), TransformerLayer(keys[2])]
        self.head = eqx.nn.Linear(WIDTH, 3, key=keys[3])

    def __call__(self, tokens, key, inference=False):
        x = jax.vmap(self.embedding)(tokens)
        for layer, subkey in zip(self.layers, jax.random.split(key, 2), strict=True):
            x = layer(x, subkey, inference)
        return self.head(jnp.mean(x, axis=0))


@eqx.filter_value_and_grad
def compute_loss(trained, frozen, inputs, key):
    classifier = eqx.combine(trained, frozen)
    batch_keys = jax.random.split(key, num=inputs["tokens"].shape[0])
    logits = jax.vmap(classifier)(inputs["tokens"], batch_keys)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=inputs["label"]))


@eqx.filter_jit(donate="none")
def make_step(trained, frozen, ema, inputs, opt_state, key, tx):
    key, new_key = jax.random.split(key)
    loss, grads = compute_loss(trained, frozen, inputs, key)
    updates, opt_state = tx.update(grads, opt_state, trained)
    trained = eqx.apply_updates(trained, updates)
    ema = optax.incremental_update(trained, ema, step_size=0.1)
    return loss, trained, ema, opt_state, new_key


def main():
    model = Classifier(jax.random.key(0))
    spec = jax.tree_util.tree_map(eqx.is_inexact_array, model)
    spec = eqx.tree_at(lambda tree: tree.embedding.weight, spec, replace=False)
    trained, frozen = eqx.partition(model, spec)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate=1e-2))
    opt_state, ema, key = tx.init(trained), trained, jax.random.key(1)
    rng = np.random.default_rng(0)
    for step in range(6):
        inputs = {"tokens": rng.integers(VOCAB, size=(4, LENGTH)), "label": rng.integers(3, size=4)}
        loss, trained, ema, opt_state, key = make_step(trained, frozen, ema, inputs, opt_state, key, tx)
        print(f"step {step} loss {float(loss)}")
    averaged = eqx.combine(ema, frozen)
    print("ema", float(averaged(inputs["tokens"][0], key, inference=True).sum()))


if __name__ == "__main__":
    main()
