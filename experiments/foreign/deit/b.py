"""A distilled vision transformer of transformers in torch. Fault: the schedule is one step late."""

import math

import numpy as np
import torch
from transformers import DeiTConfig, DeiTForImageClassificationWithTeacher

from experiments.foreign.shared import (
    STEPS,
    cross_entropy,
    images_of,
    load_converted,
    options,
    tensors_of,
    tokens_of,
)

given = options()
config = DeiTConfig(
    image_size=16,
    patch_size=4,
    num_labels=7,
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=3,
    intermediate_size=48,
    layer_norm_eps=1e-6,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    attn_implementation="eager",
)
model = DeiTForImageClassificationWithTeacher(config)
NAMES = {
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.output.dense": "attn.proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}


def convert(arrays):
    """By hand: transformers' converter is a script."""
    found = {
        "deit.embeddings.cls_token": arrays["cls_token"],
        "deit.embeddings.distillation_token": arrays["dist_token"],
        "deit.embeddings.position_embeddings": arrays["pos_embed"],
    }
    for kind in ("weight", "bias"):
        found |= {
            f"deit.embeddings.patch_embeddings.projection.{kind}": arrays[f"patch_embed.proj.{kind}"],
            f"deit.layernorm.{kind}": arrays[f"norm.{kind}"],
            f"cls_classifier.{kind}": arrays[f"head.{kind}"],
            f"distillation_classifier.{kind}": arrays[f"head_dist.{kind}"],
        }
        for i in range(3):
            a, b = f"blocks.{i}", f"deit.encoder.layer.{i}"
            found |= {f"{b}.{mine}.{kind}": arrays[f"{a}.{its}.{kind}"] for mine, its in NAMES.items()}
            parts = np.split(arrays[f"{a}.attn.qkv.{kind}"], 3)
            for part, value in zip(("query", "key", "value"), parts, strict=True):
                found[f"{b}.attention.attention.{part}.{kind}"] = value
    return found


load_converted(given, model, convert)


def depth_of(name):
    if name.startswith("deit.encoder.layer."):
        return int(name.split(".")[3]) + 1
    return 0 if name.startswith("deit.embeddings.") else 4


groups = [
    {"params": [value], "lr": 3e-3 * 0.75 ** (4 - depth_of(name)), "weight_decay": 0.05 * (value.ndim > 1)}
    for name, value in model.named_parameters()
]
optimizer = torch.optim.AdamW(groups)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / STEPS)) / 2)
model.train()
for step in range(STEPS):
    batch = tensors_of(
        {
            "images": images_of(step, 6, 3, 16, 16),
            "labels": tokens_of(step, 6, vocabulary=7),
            "teacher": tokens_of(100 + step, 6, vocabulary=7),
        }
    )
    output = model(batch["images"])
    loss = cross_entropy(output.cls_logits, batch["labels"]) / 2
    loss = loss + cross_entropy(output.distillation_logits, batch["teacher"]) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step > 0 or not given.fault:
        schedule.step()
    print(f"step {step} loss {loss.item():.12f}")
