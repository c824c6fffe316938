"""A video classifier of V-JEPA 2, of transformers in torch, whose predictor is not used: a cosine schedule with a warm-up, labels
that are smoothed, and clipping.
"""

import torch
from transformers import VJEPA2Config, VJEPA2ForVideoClassification, get_cosine_schedule_with_warmup

from experiments.foreign.shared import STEPS, images_of, options, start_torch, tensors_of, tokens_of

given = options()
torch.manual_seed(0)
config = VJEPA2Config(
    patch_size=4,
    tubelet_size=2,
    crop_size=12,
    frames_per_clip=4,
    hidden_size=48,
    num_attention_heads=3,
    num_hidden_layers=2,
    mlp_ratio=4.0,
    pred_hidden_size=24,
    pred_num_attention_heads=2,
    pred_num_hidden_layers=1,
    num_pooler_layers=1,
    num_labels=7,
    initializer_range=0.2,
    attn_implementation="eager",
)
model = VJEPA2ForVideoClassification(config)
start_torch(given, model)
decayed = [value for value in model.parameters() if value.ndim > 1]
others = [value for value in model.parameters() if value.ndim == 1]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.04}, {"params": others, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.98)
)
schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=6)
model.train()
for step in range(STEPS):
    frames = images_of(step, 6, 4, 3, 12, 12)
    batch = tensors_of({"frames": frames, "labels": tokens_of(step, 6, vocabulary=7)})
    logits = model(batch["frames"]).logits
    loss = torch.nn.functional.cross_entropy(logits, batch["labels"], label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    schedule.step()
    print(f"step {step} loss {loss.item():.12f}")
