"""ESM-2 of transformers in torch. Fault: keys are not rotated."""

import torch
from transformers import EsmConfig, EsmForMaskedLM
from transformers.models.esm import modeling_esm

from experiments.foreign.shared import options, start_torch, tokens_of, train_torch

given = options()
torch.manual_seed(0)
config = EsmConfig(
    vocab_size=33,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    max_position_embeddings=26,
    position_embedding_type="rotary",
    emb_layer_norm_before=False,
    token_dropout=True,
    pad_token_id=1,
    mask_token_id=32,
    layer_norm_eps=1e-5,
    initializer_range=0.2,
    attn_implementation="eager",
)
if given.fault:
    rotated = modeling_esm.RotaryEmbedding.forward
    modeling_esm.RotaryEmbedding.forward = lambda self, query, key: (rotated(self, query, key)[0], key)
model = EsmForMaskedLM(config)
start_torch(given, model)


def batch_of(step):
    labels = 4 + tokens_of(step, 4, 14, vocabulary=26)
    tokens = labels.copy()
    tokens[:, 3::5] = 32  # masked
    return {"tokens": tokens, "labels": labels}


def loss_of(model, batch):
    tokens = batch["tokens"]
    logits = model(tokens).logits
    is_asked = tokens == 32
    return torch.nn.functional.cross_entropy(logits[is_asked], batch["labels"][is_asked])


train_torch(model, batch_of, loss_of)
