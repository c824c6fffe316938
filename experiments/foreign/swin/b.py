"""A Swin transformer of transformers in torch: queries, keys and values apart. Fault: windows are not shifted."""

import numpy as np
from transformers import SwinConfig, SwinForImageClassification

from experiments.foreign.shared import cross_entropy, images_of, load_converted, options, tokens_of, train_torch

given = options()
config = SwinConfig(
    image_size=32,
    patch_size=4,
    embed_dim=12,
    depths=[2, 2],
    num_heads=[2, 4],
    window_size=4,
    drop_path_rate=0.0,
    num_labels=7,
    attn_implementation="eager",
)
model = SwinForImageClassification(config)
if given.fault:
    model.swin.encoder.layers[0].blocks[1].shift_size = 0
NAMES = {
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.output.dense": "attn.proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}


def convert(arrays):
    """By hand: transformers' converter is a script."""
    found = {}
    for kind in ("weight", "bias"):
        found |= {
            f"swin.embeddings.patch_embeddings.projection.{kind}": arrays[f"patch_embed.proj.{kind}"],
            f"swin.embeddings.norm.{kind}": arrays[f"patch_embed.norm.{kind}"],
            f"swin.encoder.layers.0.downsample.norm.{kind}": arrays[f"layers.1.downsample.norm.{kind}"],
            f"swin.layernorm.{kind}": arrays[f"norm.{kind}"],
            f"classifier.{kind}": arrays[f"head.fc.{kind}"],
        }
        for stage in range(2):
            for i in range(2):
                a, b = f"layers.{stage}.blocks.{i}", f"swin.encoder.layers.{stage}.blocks.{i}"
                found |= {f"{b}.{mine}.{kind}": arrays[f"{a}.{its}.{kind}"] for mine, its in NAMES.items()}
                parts = np.split(arrays[f"{a}.attn.qkv.{kind}"], 3)
                for part, value in zip(("query", "key", "value"), parts, strict=True):
                    found[f"{b}.attention.self.{part}.{kind}"] = value
                table = "relative_position_bias_table"
                found[f"{b}.attention.self.{table}"] = arrays[f"{a}.attn.{table}"]
    found |= {name: index.numpy() for name, index in model.named_buffers() if name.endswith("relative_position_index")}
    return found | {"swin.encoder.layers.0.downsample.reduction.weight": arrays["layers.1.downsample.reduction.weight"]}


load_converted(given, model, convert)
train_torch(
    model,
    lambda step: {"images": images_of(step, 4, 3, 32, 32), "labels": tokens_of(step, 4, vocabulary=7)},
    lambda model, batch: cross_entropy(model(batch["images"]).logits, batch["labels"]),
)
