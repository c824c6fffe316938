"""ESM-2 of esm2quinox in equinox: all layers are stacked, for a scan."""

import esm2quinox
import jax
import numpy as np
import optax

from experiments.foreign.shared import options, tokens_of, train_jax
from jax_backend.equinox import split, with_params

given = options()
model = esm2quinox.ESM2(2, 24, 4, token_dropout=True, key=jax.random.key(0))
static, params, _ = split(model)
LAYERS = {
    "attn.query_proj": "attention.self.query",
    "attn.key_proj": "attention.self.key",
    "attn.value_proj": "attention.self.value",
    "attn.output_proj": "attention.output.dense",
    "layer_norm1": "attention.LayerNorm",
    "layer_norm2": "LayerNorm",
    "linear1": "intermediate.dense",
    "linear2": "output.dense",
}


def convert(arrays):
    """By hand: esm2quinox converts models of fair-esm."""
    found = {
        "logit_head.linear2.weight": arrays["esm.embeddings.word_embeddings.weight"],  # tied
        "logit_head.linear2.bias": arrays["lm_head.bias"],
    }
    for kind in ("weight", "bias"):
        for mine, its in LAYERS.items():
            layers = [arrays[f"esm.encoder.layer.{i}.{its}.{kind}"] for i in range(2)]
            found[f"layers.{mine}.{kind}"] = np.stack(layers)
        found[f"layer_norm.{kind}"] = arrays[f"esm.encoder.emb_layer_norm_after.{kind}"]
        found[f"logit_head.linear1.{kind}"] = arrays[f"lm_head.dense.{kind}"]
        found[f"logit_head.layer_norm.{kind}"] = arrays[f"lm_head.layer_norm.{kind}"]
    return found


def batch_of(step):
    labels = 4 + tokens_of(step, 4, 14, vocabulary=26)
    tokens = labels.copy()
    tokens[:, 3::5] = 32  # masked
    return {"tokens": tokens, "labels": labels}


def loss_fn(params, batch):
    logits = jax.vmap(lambda tokens: with_params(static, params)(tokens).logits)(batch["tokens"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    is_asked = batch["tokens"] == 32
    return (losses * is_asked).sum() / is_asked.sum()


train_jax(
    given,
    params,
    convert,
    batch_of,
    loss_fn,
    name="EsmForMaskedLM",
    samples=lambda batch: batch["tokens"],
)
