"""ALBERT of transformers in torch: one layer is called three times, and embeddings are narrower than the rest."""

import torch
from transformers import AlbertConfig, AlbertForSequenceClassification

from experiments.foreign.shared import cross_entropy, options, start_torch, tokens_of, train_torch

given = options()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
config = AlbertConfig(
    vocab_size=40,
    embedding_size=12,
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=16,
    classifier_dropout_prob=0.0,
    num_labels=5,
    initializer_range=0.2,
    pad_token_id=None,
    attn_implementation="eager",
)
model = AlbertForSequenceClassification(config)
start_torch(given, model)
train_torch(
    model,
    lambda step: {"tokens": tokens_of(step, 6, 12, vocabulary=40), "labels": tokens_of(50 + step, 6, vocabulary=5)},
    lambda model, batch: cross_entropy(model(batch["tokens"]).logits, batch["labels"]),
)
