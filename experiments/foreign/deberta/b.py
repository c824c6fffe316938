"""DeBERTa-v3 of keras-hub on JAX, whose modules are not recorded."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras
import keras_hub
import optax

from experiments.foreign.shared import STEPS, options, padded_tokens_of, start_jax
from jax_backend import Recorder, apply_updates, clip_grad_norm, sharded_optimizer

given = options()
backbone = keras_hub.models.DebertaV3Backbone(
    vocabulary_size=48,
    num_layers=2,
    num_heads=4,
    hidden_dim=32,
    intermediate_dim=64,
    dropout=0.0,
    max_sequence_length=16,
    bucket_size=8,
)
model = keras.Model(backbone.input, keras.layers.Dense(5, name="logits")(backbone.output))
ORDER = [variable.path for variable in model.trainable_variables]
rest = [variable.value for variable in model.non_trainable_variables]


def convert(arrays):
    """By hand: keras-hub converts checkpoints in a script."""
    found = {
        "token_embedding/embeddings": arrays["deberta.embeddings.word_embeddings.weight"],
        "rel_embedding/rel_embedding": arrays["deberta.encoder.rel_embeddings.weight"],
        "logits/kernel": arrays["classifier.weight"].T,
        "logits/bias": arrays["classifier.bias"],
    }

    def norm(b, a):
        found[f"{b}/gamma"], found[f"{b}/beta"] = arrays[f"{a}.LayerNorm.weight"], arrays[f"{a}.LayerNorm.bias"]

    norm("embeddings_layer_norm", "deberta.embeddings")
    norm("rel_embedding/rel_embeddings_layer_norm", "deberta.encoder")
    for i in range(2):
        a, b = f"deberta.encoder.layer.{i}", f"disentangled_attention_encoder_layer_{i}"
        norm(f"{b}/self_attention_layer_norm", f"{a}.attention.output")
        norm(f"{b}/feedforward_layer_norm", f"{a}.output")
        for part in ("query", "key", "value"):
            mine, its = f"{b}/self_attention_layer/{part}", f"{a}.attention.self.{part}_proj"
            found[f"{mine}/kernel"] = arrays[f"{its}.weight"].T.reshape(32, 4, 8)
            found[f"{mine}/bias"] = arrays[f"{its}.bias"].reshape(4, 8)
        names = {
            "self_attention_layer/attention_output": "attention.output.dense",
            "feedforward_intermediate_dense": "intermediate.dense",
            "feedforward_output_dense": "output.dense",
        }
        for mine, its in names.items():
            found[f"{b}/{mine}/kernel"] = arrays[f"{a}.{its}.weight"].T
            found[f"{b}/{mine}/bias"] = arrays[f"{a}.{its}.bias"]
    return found


def loss_fn(params, batch):
    inputs = {"token_ids": batch["tokens"], "padding_mask": batch["mask"]}
    logits, _ = model.stateless_call([params[path] for path in ORDER], rest, inputs, training=True)
    is_labeled = batch["labels"] >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(is_labeled, batch["labels"], 0))
    return jnp.mean(losses, where=is_labeled)


def is_decayed(params):
    return {path: path.endswith(("/kernel", "/embeddings", "/rel_embedding")) for path in params}


sharded = start_jax(given, {variable.path: variable.value for variable in model.trainable_variables}, convert)
rate = optax.linear_schedule(1e-3, 2.5e-4, 3)
optimizer = sharded_optimizer(optax.adamw(rate, eps=1e-6, weight_decay=0.1, mask=is_decayed))
opt_state, update = optimizer.init(sharded), jax.jit(optimizer.update)
with Recorder(
    given.record,
    sharded,
    name="DebertaV2ForTokenClassification",
    samples=lambda batch: [batch["tokens"], batch["mask"]],
    settings={"optimizer": "AdamW", "weight_decay": 0.1},
) as recorder:
    value_and_grad = recorder.value_and_grad(loss_fn)
    for step in range(STEPS):
        batch = padded_tokens_of(step, 8, 14, vocabulary=48, labels=5)
        result = value_and_grad(sharded, batch)
        clipped, norm = clip_grad_norm(result.grads, 1.0)
        updates, opt_state = update(clipped, opt_state, sharded)
        sharded = apply_updates(sharded, updates)
        recorder.step(
            loss=result.loss,
            params=sharded,
            grads=result.grads,
            opt_state=opt_state,
            batch=batch,
            grad_norm=norm,
            learning_rate=rate(step),
        )
        print(f"step {step} loss {float(result.loss):.12f}")
