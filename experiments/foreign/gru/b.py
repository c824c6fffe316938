"""The same of layers of keras on JAX, whose modules are not recorded. Fault: the two betas of Adam are exchanged."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import keras
import numpy as np
import optax

from experiments.foreign.shared import STEPS, halves_of, options, start_jax, tokens_of
from jax_backend import Recorder, apply_updates, clip_grad_norm, sharded_optimizer

given = options()
model = keras.Sequential(
    [
        keras.layers.Embedding(40, 12, name="embedding"),
        keras.layers.Bidirectional(keras.layers.GRU(16, return_sequences=True, name="gru_0"), name="both_0"),
        keras.layers.Bidirectional(keras.layers.GRU(16, return_sequences=True, name="gru_1"), name="both_1"),
        keras.layers.Dense(5, name="dense"),
    ],
    name="model",
)
model.build((None, 10))
ORDER = [variable.path for variable in model.trainable_variables]
rest = [variable.value for variable in model.non_trainable_variables]


def gates_of(array):
    """In keras the gate of updates is before that of resets."""
    reset, kept, new = np.split(array, 3)
    return np.concatenate([kept, reset, new])


def convert(arrays):
    """By hand: torch and keras have their gates in other orders."""
    found = {
        "model/embedding/embeddings": arrays["embedding.weight"],
        "model/dense/kernel": arrays["head.weight"].T,
        "model/dense/bias": arrays["head.bias"],
    }
    for i in range(2):
        for direction, suffix in (("forward", ""), ("backward", "_reverse")):
            b, a = f"model/both_{i}/{direction}_gru_{i}/gru_cell", f"l{i}{suffix}"
            found[f"{b}/kernel"] = gates_of(arrays[f"gru.weight_ih_{a}"]).T
            found[f"{b}/recurrent_kernel"] = gates_of(arrays[f"gru.weight_hh_{a}"]).T
            found[f"{b}/bias"] = np.stack([gates_of(arrays[f"gru.bias_{kind}_{a}"]) for kind in ("ih", "hh")])
    return found


def loss_fn(params, batch):
    logits, _ = model.stateless_call([params[path] for path in ORDER], rest, batch["tokens"], training=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


sharded = start_jax(given, {variable.path: variable.value for variable in model.trainable_variables}, convert)
rate = optax.exponential_decay(5e-3, 1, 0.8)
b1, b2 = (0.999, 0.9) if given.fault else (0.9, 0.999)
optimizer = sharded_optimizer(optax.adam(rate, b1=b1, b2=b2))
opt_state, update = optimizer.init(sharded), jax.jit(optimizer.update)
with Recorder(
    given.record,
    sharded,
    name="Tagger",
    samples=lambda batch: batch["tokens"],
    settings={"optimizer": "Adam"},
) as recorder:
    value_and_grad = recorder.value_and_grad(loss_fn)
    for step in range(STEPS):
        batch = {"tokens": tokens_of(step, 8, 10, vocabulary=40), "labels": tokens_of(100 + step, 8, 10, vocabulary=5)}
        results = [value_and_grad(sharded, half) for half in halves_of(batch)]
        grads = jax.tree.map(lambda first, second: (first + second) / 2, *(result.grads for result in results))
        loss = sum(result.loss for result in results) / 2
        clipped, norm = clip_grad_norm(grads, 0.25)
        updates, opt_state = update(clipped, opt_state, sharded)
        sharded = apply_updates(sharded, updates)
        recorder.step(
            loss=loss,
            params=sharded,
            grads=grads,
            opt_state=opt_state,
            batch=batch,
            grad_norm=norm,
            learning_rate=rate(step),
        )
        print(f"step {step} loss {float(loss):.12f}")
