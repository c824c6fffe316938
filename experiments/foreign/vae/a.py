"""The autoencoder of Stable Diffusion, of diffusers: the mean of the latent code, betas of a GAN, a warm-up, and clipping.

Fault: images are padded on all sides before they are halved, instead of on the right and below.
"""

import torch
from diffusers import AutoencoderKL

from experiments.foreign.shared import STEPS, images_of, options, start_torch, tensors_of

given = options()
torch.manual_seed(0)
model = AutoencoderKL(
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    block_out_channels=(8, 16),
    layers_per_block=2,
    latent_channels=2,
    norm_num_groups=4,
    sample_size=16,
)
if given.fault:
    model.encoder.down_blocks[0].downsamplers[0].padding = 1
    model.encoder.down_blocks[0].downsamplers[0].conv.padding = (1, 1)
start_torch(given, model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.5, 0.9))
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=3)
model.train()
for step in range(STEPS):
    images = tensors_of({"images": images_of(step, 4, 3, 16, 16)})["images"]
    optimizer.zero_grad()
    reconstruction = model(images, sample_posterior=False).sample
    loss = torch.nn.functional.l1_loss(reconstruction, images) + torch.nn.functional.mse_loss(reconstruction, images)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    print(f"step {step} loss {loss.item():.12f}")
