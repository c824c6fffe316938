"""EnCodec of the package encodec in torch, whose weight norm has other names."""

import torch

from experiments.foreign.shared import STEPS, images_of, load_converted, options, tensors_of, without_init

without_init("encodec")
from encodec.modules import SEANetDecoder, SEANetEncoder  # noqa: E402

given = options()
sizes = {"dimension": 12, "n_filters": 4, "ratios": [4, 2], "lstm": 1, "causal": True}
model = torch.nn.Sequential(SEANetEncoder(**sizes), SEANetDecoder(**sizes))
KINDS = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1"}


def convert(arrays):
    """By hand: transformers' converter is a script."""
    found = {}
    for name in dict(model.named_parameters()):
        side, _, rest = name.partition(".model.")
        a = rest.replace("conv.conv", "conv").replace("convtr.convtr", "conv")
        for mine, its in KINDS.items():
            a = a.replace(mine, its)
        found[name] = arrays[f"{side}.layers.{a}"]
    return found


load_converted(given, model, convert)
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
