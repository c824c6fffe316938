"""DeBERTa-v3 of transformers in torch with padding, a class for each token: a linear schedule, and no decay of norms and biases.

Fault: positions attend to contents no more, so that scores are divided by another root, too.
"""

import torch
from transformers import DebertaV2Config, DebertaV2ForTokenClassification

from experiments.foreign.shared import STEPS, options, padded_tokens_of, start_torch, tensors_of

given = options()
torch.manual_seed(0)
config = DebertaV2Config(
    vocab_size=48,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    max_position_embeddings=16,
    type_vocab_size=0,
    initializer_range=0.2,
    relative_attention=True,
    position_buckets=8,
    norm_rel_ebd="layer_norm",
    share_att_key=True,
    pos_att_type=["c2p"] if given.fault else ["p2c", "c2p"],
    position_biased_input=False,
    layer_norm_eps=1e-7,
    num_labels=5,
)
model = DebertaV2ForTokenClassification(config)
start_torch(given, model)
decayed = [value for value in model.parameters() if value.ndim > 1]
others = [value for value in model.parameters() if value.ndim == 1]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3, eps=1e-6
)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.25, total_iters=3)
model.train()
for step in range(STEPS):
    batch = tensors_of(padded_tokens_of(step, 8, 14, vocabulary=48, labels=5))
    logits = model(batch["tokens"], attention_mask=batch["mask"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.12f}")
