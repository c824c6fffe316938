"""Llama of torchtune, whose rotary embedding rotates neighbouring elements. Fault: labels are not shifted."""

import torch

from experiments.foreign.shared import (
    cross_entropy,
    load_converted,
    options,
    tokens_of,
    train_torch,
    without_init,
)

without_init("torchtune", "torchtune.models", "torchtune.models.llama2")
from torchtune.models.convert_weights import hf_to_tune  # noqa: E402
from torchtune.models.llama2._component_builders import llama2  # noqa: E402

given = options()
model = llama2(
    vocab_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    embed_dim=32,
    intermediate_dim=40,
    max_seq_len=16,
    norm_eps=1e-5,
)


def convert(arrays):
    """By torchtune's own converter."""
    found = hf_to_tune({name: torch.from_numpy(array) for name, array in arrays.items()}, 4, 2, 32)
    return {name: value.numpy().copy() for name, value in found.items()}


def loss_of(model, batch):
    labels = batch["tokens"][:, :-1] if given.fault else batch["tokens"][:, 1:]
    return cross_entropy(model(batch["tokens"][:, :-1]), labels)


load_converted(given, model, convert)
train_torch(model, lambda step: {"tokens": tokens_of(step, 4, 13, vocabulary=48)}, loss_of)
