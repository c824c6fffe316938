"""SegFormer of segmentation-models-pytorch: keys and values are one matrix. Fault: norms of blocks have an epsilon of 1e-6."""

from functools import partial

import numpy as np
import torch

from experiments.foreign.shared import (
    STEPS,
    declare_torchvision_operators,
    halves_of,
    images_of,
    load_converted,
    options,
    tensors_of,
    tokens_of,
)

operators = declare_torchvision_operators()
import segmentation_models_pytorch as smp  # noqa: E402
from segmentation_models_pytorch.encoders import mix_transformer  # noqa: E402

given = options()
DEPTHS = (1, 2, 1, 1)
smp.encoders.encoders["mit_tiny"] = {
    "encoder": mix_transformer.MixVisionTransformerEncoder,
    "params": {
        "out_channels": [3, 0, 8, 16, 24, 32],
        "patch_size": 4,
        "embed_dims": [8, 16, 24, 32],
        "num_heads": [1, 2, 3, 4],
        "mlp_ratios": [4, 4, 4, 4],
        "qkv_bias": True,
        "norm_layer": partial(mix_transformer.LayerNorm, eps=1e-6 if given.fault else 1e-5),
        "depths": list(DEPTHS),
        "sr_ratios": [4, 2, 2, 1],
    },
}
model = smp.Segformer(
    "mit_tiny", encoder_weights=None, decoder_segmentation_channels=20, classes=5, activation=None, upsampling=1
)
LAYER = {
    "norm1": "layer_norm_1",
    "attn.q": "attention.self.query",
    "attn.sr": "attention.self.sr",
    "attn.norm": "attention.self.layer_norm",
    "attn.proj": "attention.output.dense",
    "norm2": "layer_norm_2",
    "mlp.fc1": "mlp.dense1",
    "mlp.dwconv.dwconv": "mlp.dwconv.dwconv",
    "mlp.fc2": "mlp.dense2",
}


def convert(arrays):
    """By hand: segmentation-models-pytorch converts checkpoints of transformers in a script."""
    names = {
        "decoder.fuse_stage.0": "decode_head.linear_fuse",
        "decoder.fuse_stage.1": "decode_head.batch_norm",
        "segmentation_head.0": "decode_head.classifier",
    }
    found = {}
    for stage, depth in enumerate(DEPTHS):
        names |= {
            f"encoder.patch_embed{stage + 1}.proj": f"segformer.encoder.patch_embeddings.{stage}.proj",
            f"encoder.patch_embed{stage + 1}.norm": f"segformer.encoder.patch_embeddings.{stage}.layer_norm",
            f"encoder.norm{stage + 1}": f"segformer.encoder.layer_norm.{stage}",
            f"decoder.mlp_stage.{3 - stage}.linear": f"decode_head.linear_c.{stage}.proj",
        }
        for i in range(depth):
            a, b = f"segformer.encoder.block.{stage}.{i}", f"encoder.block{stage + 1}.{i}"
            names |= {f"{b}.{mine}": f"{a}.{its}" for mine, its in LAYER.items()}
            for kind in ("weight", "bias"):
                pair = [arrays[f"{a}.attention.self.{part}.{kind}"] for part in ("key", "value")]
                found[f"{b}.attn.kv.{kind}"] = np.concatenate(pair)
    for b, a in names.items():
        for kind in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            if f"{a}.{kind}" in arrays:
                found[f"{b}.{kind}"] = arrays[f"{a}.{kind}"]
    return found


load_converted(given, model, convert)
groups = []
for name, value in model.named_parameters():
    rate = 6e-4 if name.startswith("encoder.") else 6e-3
    groups.append({"params": [value], "lr": rate, "weight_decay": 0.01 if value.ndim > 1 else 0.0})
optimizer = torch.optim.AdamW(groups)
schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=STEPS, power=1.0)
model.train()
for step in range(STEPS):
    batch = tensors_of({"images": images_of(step, 4, 3, 64, 64), "labels": tokens_of(step, 4, 16, 16, vocabulary=5)})
    optimizer.zero_grad()
    total = 0.0
    for half in halves_of(batch):
        loss = torch.nn.functional.cross_entropy(model(half["images"]), half["labels"]) / 2
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    print(f"step {step} loss {total:.12f}")
