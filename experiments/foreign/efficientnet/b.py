"""An EfficientNet of timm. Fault: after the evaluation the model stays in eval mode."""

from functools import partial

import torch

from experiments.foreign.shared import (
    STEPS,
    cross_entropy,
    declare_torchvision_operators,
    images_of,
    load_converted,
    options,
    tensors_of,
    tokens_of,
)

operators = declare_torchvision_operators()
from timm.models._efficientnet_builder import decode_arch_def  # noqa: E402
from timm.models.efficientnet import EfficientNet  # noqa: E402

given = options()
blocks = [["ds_r1_k3_s1_e1_c16_se0.25"], ["ir_r2_k3_s2_e4_c24_se0.25"], ["ir_r1_k5_s2_e4_c32_se0.25"]]
model = EfficientNet(
    decode_arch_def(blocks),
    num_classes=7,
    num_features=48,
    stem_size=16,
    round_chs_fn=lambda channels: channels,
    norm_layer=partial(torch.nn.BatchNorm2d, eps=1e-3, momentum=0.1),
    act_layer=torch.nn.SiLU,
)
SEPARABLE = {"conv_dw": "0.0", "bn1": "0.1", "se.conv_reduce": "1.fc1", "se.conv_expand": "1.fc2"}
SEPARABLE |= {"conv_pw": "2.0", "bn2": "2.1"}
INVERTED = {"conv_pw": "0.0", "bn1": "0.1", "conv_dw": "1.0", "bn2": "1.1"}
INVERTED |= {"se.conv_reduce": "2.fc1", "se.conv_expand": "2.fc2", "conv_pwl": "3.0", "bn3": "3.1"}


def convert(arrays):
    """By hand: timm has no converter of torchvision's names."""
    names = {"conv_stem": "features.0.0", "bn1": "features.0.1", "conv_head": "features.4.0", "bn2": "features.4.1"}
    names["classifier"] = "classifier.1"
    for stage, depth in enumerate((1, 2, 1)):
        for i in range(depth):
            for mine, its in (INVERTED if stage else SEPARABLE).items():
                names[f"blocks.{stage}.{i}.{mine}"] = f"features.{stage + 1}.{i}.block.{its}"
    found = {}
    for b, a in names.items():
        for kind in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            if f"{a}.{kind}" in arrays:
                found[f"{b}.{kind}"] = arrays[f"{a}.{kind}"]
    return found


load_converted(given, model, convert)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)


def batch_of(step):
    return tensors_of({"images": images_of(step, 8, 3, 32, 32), "labels": tokens_of(step, 8, vocabulary=7)})


def evaluate():
    model.eval()
    with torch.no_grad():
        batch = batch_of(100)
        print(f"evaluation {cross_entropy(model(batch['images']), batch['labels']).item():.12f}")
    if not given.fault:
        model.train()


model.train()
for step in range(STEPS):
    batch = batch_of(step)
    loss = cross_entropy(model(batch["images"]), batch["labels"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    print(f"step {step} loss {loss.item():.12f}")
    if step == 1:
        evaluate()
