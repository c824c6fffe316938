"""T5 of transformers in torch."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

from experiments.foreign.shared import cross_entropy, options, start_torch, tokens_of, train_torch

given = options()
torch.manual_seed(0)
config = T5Config(
    vocab_size=48,
    d_model=24,
    d_kv=6,
    d_ff=40,
    num_layers=2,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=16,
    dropout_rate=0.0,
    decoder_start_token_id=0,
    use_cache=False,
)
model = T5ForConditionalGeneration(config)
with torch.no_grad():
    model.shared.weight.mul_(0.3)  # T5's own 1.0 saturates the softmax of so small a model


def loss_of(model, batch):
    logits = model(batch["tokens"], decoder_input_ids=batch["targets"][:, :-1]).logits
    return cross_entropy(logits, batch["targets"][:, 1:])


start_torch(given, model)
train_torch(
    model,
    lambda step: {
        "tokens": tokens_of(step, 4, 14, vocabulary=48),
        "targets": tokens_of(100 + step, 4, 11, vocabulary=48),
    },
    loss_of,
)
