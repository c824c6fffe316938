"""EnCodec of transformers in torch, as an autoencoder of waves: strided convolutions with weight norm, and an LSTM.

Fault: waves are padded with zeros instead of by reflection.
"""

import torch
from transformers import EncodecConfig, EncodecModel

from experiments.foreign.shared import STEPS, images_of, options, start_torch, tensors_of

given = options()
torch.manual_seed(0)
config = EncodecConfig(
    hidden_size=12,
    num_filters=4,
    num_residual_layers=1,
    upsampling_ratios=[4, 2],
    kernel_size=7,
    last_kernel_size=7,
    num_lstm_layers=1,
    codebook_dim=12,
    pad_mode="constant" if given.fault else "reflect",
)
whole = EncodecModel(config)
model = torch.nn.Sequential(whole.encoder, whole.decoder)
start_torch(given, model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.8, 0.99))
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
model.train()
for step in range(STEPS):
    batch = tensors_of({"waves": images_of(step, 4, 1, 160)})
    optimizer.zero_grad()
    loss = torch.nn.functional.smooth_l1_loss(model(batch["waves"]), batch["waves"])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    schedule.step()
    print(f"step {step} loss {loss.item():.12f}")
