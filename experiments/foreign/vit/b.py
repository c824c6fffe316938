"""A vision transformer of equimo in equinox."""

import jax
import optax
from equimo.models.vit import VisionTransformer

from experiments.foreign.shared import images_of, options, tokens_of, train_jax
from jax_backend.equinox import split, with_params

given = options()
model = VisionTransformer(
    img_size=12,
    in_channels=3,
    dim=24,
    patch_size=4,
    num_heads=3,
    depths=[2],
    reg_tokens=0,
    num_classes=7,
    global_pool="token",
    act_layer="exactgelu",
    eps=1e-6,
    key=jax.random.key(0),
)
static, params, _ = split(model)
NAMES = {
    "patch_embed.proj": "patch_embed.proj",
    "blocks.{}.norm1": "blocks.0.blocks.{}.prenorm",
    "blocks.{}.norm2": "blocks.0.blocks.{}.norm",
    "blocks.{}.attn.qkv": "blocks.0.blocks.{}.attn.qkv",
    "blocks.{}.attn.proj": "blocks.0.blocks.{}.attn.proj",
    "blocks.{}.mlp.fc1": "blocks.0.blocks.{}.mlp.fc1",
    "blocks.{}.mlp.fc2": "blocks.0.blocks.{}.mlp.fc2",
    "norm": "norm",
    "head": "head",
}


def convert(arrays):
    """By hand: equimo converts such checkpoints with torch installed."""
    found = {"cls_token": arrays["cls_token"][0], "global_pos_embed.weight": arrays["pos_embed"][0]}
    for name, path in NAMES.items():
        for i in range(2 if "{}" in name else 1):
            for kind in ("weight", "bias"):
                found[f"{path.format(i)}.{kind}"] = arrays[f"{name.format(i)}.{kind}"]
    found["patch_embed.proj.bias"] = found["patch_embed.proj.bias"].reshape(24, 1, 1)
    return found


def loss_fn(params, batch):
    logits = jax.vmap(lambda image: with_params(static, params)(image, inference=True))(batch["images"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


train_jax(
    given,
    params,
    convert,
    lambda step: {
        "images": images_of(step, 6, 3, 12, 12),
        "labels": tokens_of(step, 6, vocabulary=7),
    },
    loss_fn,
    name="VisionTransformer",
    samples=lambda batch: batch["images"],
)
