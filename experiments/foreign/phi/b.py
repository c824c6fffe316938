"""Phi-2 of litgpt in torch. Fault: all of a head is rotated instead of a half."""

import torch
from litgpt import GPT, Config
from litgpt.scripts.convert_hf_checkpoint import copy_weights_phi

from experiments.foreign.shared import cross_entropy, load_converted, options, tokens_of, train_torch

given = options()
config = Config(
    name="phi-tiny",
    block_size=16,
    vocab_size=48,
    padded_vocab_size=48,
    n_layer=2,
    n_head=4,
    n_embd=32,
    intermediate_size=64,
    rotary_percentage=1.0 if given.fault else 0.5,
    shared_attention_norm=True,
    lm_head_bias=True,
    gelu_approximate="tanh",
)
model = GPT(config)


def convert(arrays):
    """By litgpt's own converter."""
    found = {}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    copy_weights_phi(config, {}, found, tensors)
    return {name: value.numpy() for name, value in found.items()}


load_converted(given, model, convert)
train_torch(
    model,
    lambda step: {"tokens": tokens_of(step, 4, 13, vocabulary=48)},
    lambda model, batch: cross_entropy(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]),
)
