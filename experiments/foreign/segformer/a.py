"""SegFormer of transformers in torch: ten times the rate in the head, a polynomial schedule, two microbatches, and clipping."""

import torch
from transformers import SegformerConfig, SegformerForSemanticSegmentation

from experiments.foreign.shared import STEPS, halves_of, images_of, options, start_torch, tensors_of, tokens_of

given = options()
torch.manual_seed(0)
config = SegformerConfig(
    depths=[1, 2, 1, 1],
    hidden_sizes=[8, 16, 24, 32],
    num_attention_heads=[1, 2, 3, 4],
    sr_ratios=[4, 2, 2, 1],
    decoder_hidden_size=20,
    num_labels=5,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    classifier_dropout_prob=0.0,
    drop_path_rate=0.0,
    initializer_range=0.2,
)
model = SegformerForSemanticSegmentation(config)
start_torch(given, model)
groups = []
for name, value in model.named_parameters():
    rate = 6e-3 if name.startswith("decode_head.") else 6e-4
    groups.append({"params": [value], "lr": rate, "weight_decay": 0.01 if value.ndim > 1 else 0.0})
optimizer = torch.optim.AdamW(groups)
schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=STEPS, power=1.0)
model.train()
for step in range(STEPS):
    batch = tensors_of({"images": images_of(step, 4, 3, 64, 64), "labels": tokens_of(step, 4, 16, 16, vocabulary=5)})
    optimizer.zero_grad()
    total = 0.0
    for half in halves_of(batch):
        loss = torch.nn.functional.cross_entropy(model(half["images"]).logits, half["labels"]) / 2
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    print(f"step {step} loss {total:.12f}")
