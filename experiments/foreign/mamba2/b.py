"""Mamba-2 of mamba2-jax in flax.nnx, tied. Fault: time steps are limited to 0.03."""

import optax
from flax import nnx
from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

from experiments.foreign.shared import options, tokens_of, train_jax, watch_all
from jax_backend.nnx import split, with_params

given = options()
config = Mamba2Config(
    vocab_size=48,
    hidden_size=24,
    state_size=10,
    head_dim=8,
    chunk_size=8,
    num_hidden_layers=2,
    time_step_limit=(0.0, 0.03 if given.fault else float("inf")),
)
graphdef, params, state = split(Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)))


def convert(arrays):
    """By hand: mamba2-jax reads checkpoints with torch installed."""
    found = {
        "backbone.embedder.embedding": arrays["backbone.embeddings.weight"],  # tied
        "backbone.final_norm.weight": arrays["backbone.norm_f.weight"],
    }
    for i in range(2):
        layer = f"backbone.layers.{i}"
        for same in ("norm.weight", "mixer.norm.weight", "mixer.dt_bias", "mixer.A_log", "mixer.D"):
            found[f"{layer}.{same}"] = arrays[f"{layer}.{same}"]
        for linear in ("in_proj", "out_proj"):
            found[f"{layer}.mixer.{linear}.kernel"] = arrays[f"{layer}.mixer.{linear}.weight"].T
        found[f"{layer}.mixer.conv1d.conv.kernel"] = arrays[f"{layer}.mixer.conv1d.weight"].transpose(2, 1, 0)
        found[f"{layer}.mixer.conv1d.conv.bias"] = arrays[f"{layer}.mixer.conv1d.bias"]
    return found


def loss_fn(params, batch):
    model = with_params(graphdef, params, state)
    watch_all(model)
    logits = model(batch["tokens"][:, :-1])["logits"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


train_jax(
    given,
    params,
    convert,
    lambda step: {"tokens": tokens_of(step, 4, 14, vocabulary=48)},
    loss_fn,
    name="Mamba2ForCausalLM",
    samples=lambda batch: batch["tokens"][:, :-1],
)
