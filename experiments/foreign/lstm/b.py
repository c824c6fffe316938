"""The same of layers of keras on JAX, whose modules are not recorded. Fault: gates have a hard sigmoid."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import optax

from experiments.foreign.shared import options, tokens_of, train_jax

given = options()
gate = "hard_sigmoid" if given.fault else "sigmoid"
model = keras.Sequential(
    [
        keras.layers.Embedding(40, 12, name="embedding"),
        keras.layers.LSTM(20, return_sequences=True, use_bias=False, recurrent_activation=gate, name="lstm_0"),
        keras.layers.LSTM(20, return_sequences=True, use_bias=False, recurrent_activation=gate, name="lstm_1"),
        keras.layers.Dense(40, name="dense"),
    ],
    name="model",
)
model.build((None, 9))
ORDER = [variable.path for variable in model.trainable_variables]
rest = [variable.value for variable in model.non_trainable_variables]


def convert(arrays):
    """By hand: torch and keras have their gates in one order."""
    found = {
        "model/embedding/embeddings": arrays["embedding.weight"],
        "model/dense/kernel": arrays["head.weight"].T,
        "model/dense/bias": arrays["head.bias"],
    }
    for i in range(2):
        found[f"model/lstm_{i}/lstm_cell/kernel"] = arrays[f"lstm.weight_ih_l{i}"].T
        found[f"model/lstm_{i}/lstm_cell/recurrent_kernel"] = arrays[f"lstm.weight_hh_l{i}"].T
    return found


def loss_fn(params, batch):
    logits, _ = model.stateless_call([params[path] for path in ORDER], rest, batch["tokens"][:, :-1], training=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


train_jax(
    given,
    {variable.path: variable.value for variable in model.trainable_variables},
    convert,
    lambda step: {"tokens": tokens_of(step, 6, 10, vocabulary=40)},
    loss_fn,
    name="LanguageModel",
    samples=lambda batch: batch["tokens"][:, :-1],
)
