"""SigLIP of transformers in torch: a loss of all pairs, no decay of norms and biases, a cosine schedule, and clipping."""

import torch
from transformers import SiglipConfig, SiglipModel

from experiments.foreign.shared import STEPS, images_of, options, start_torch, tensors_of, tokens_of

given = options()
torch.manual_seed(0)
SHARED = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "gelu",
}
config = SiglipConfig(
    text_config=SHARED | {"vocab_size": 48, "max_position_embeddings": 12, "projection_size": 32},
    vision_config=SHARED | {"image_size": 16, "patch_size": 4},
    attn_implementation="eager",
)
model = SiglipModel(config)
with torch.no_grad():
    model.logit_scale.fill_(2.3)
    model.logit_bias.fill_(-2.0)
start_torch(given, model)
decayed = [value for value in model.parameters() if value.ndim > 1]
others = [value for value in model.parameters() if value.ndim == 1]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95)
)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS, eta_min=1e-5)
model.train()
for step in range(STEPS):
    batch = tensors_of({"images": images_of(step, 8, 3, 16, 16), "tokens": tokens_of(step, 8, 12, vocabulary=48)})
    optimizer.zero_grad()
    loss = model(input_ids=batch["tokens"], pixel_values=batch["images"], return_loss=True).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    print(f"step {step} loss {loss.item():.12f}")
