"""BERT of transformers in torch, with masked tokens and padding."""

import numpy as np
import torch
from transformers import BertConfig, BertForMaskedLM

from experiments.foreign.shared import options, start_torch, tokens_of, train_torch

given = options()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
config = BertConfig(
    vocab_size=40,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=16,
    initializer_range=0.2,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    attn_implementation="eager",
)
model = BertForMaskedLM(config)


def batch_of(step):
    tokens = tokens_of(step, 6, 12, vocabulary=40)
    masked = np.random.default_rng(step).random(tokens.shape) < 0.25
    real = np.arange(12) < np.random.default_rng(step + 50).integers(8, 13, (6, 1))
    return {
        "tokens": np.where(masked, 1, tokens),
        "labels": np.where(masked & real, tokens, -100),
        "mask": real.astype(np.int64),
    }


def loss_of(model, batch):
    return model(batch["tokens"], attention_mask=batch["mask"], labels=batch["labels"]).loss


start_torch(given, model)
train_torch(model, batch_of, loss_of)
