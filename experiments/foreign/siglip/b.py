"""SigLIP of open_clip in torch, images by timm. Fault: the first token of a text stands for it, not the last."""

from functools import partial

import numpy as np
import torch

from experiments.foreign.shared import (
    STEPS,
    declare_torchvision_operators,
    images_of,
    load_converted,
    options,
    tensors_of,
    tokens_of,
)

operators = declare_torchvision_operators()
import timm  # noqa: E402
from open_clip.loss import SigLipLoss  # noqa: E402
from open_clip.model import CustomTextCLIP  # noqa: E402

given = options()


@timm.models.register_model
def vit_tiny_patch4_siglip_16(**unused):
    return timm.models.VisionTransformer(
        img_size=16,
        num_classes=0,
        patch_size=4,
        embed_dim=32,
        depth=2,
        num_heads=4,
        mlp_ratio=2.0,
        class_token=False,
        global_pool="map",
        norm_layer=partial(torch.nn.LayerNorm, eps=1e-6),
    )


model = CustomTextCLIP(
    embed_dim=32,
    vision_cfg={
        "image_size": 16,
        "timm_model_name": "vit_tiny_patch4_siglip_16",
        "timm_model_pretrained": False,
        "timm_pool": "map",
        "timm_proj": "none",
    },
    text_cfg={
        "context_length": 12,
        "vocab_size": 48,
        "width": 32,
        "heads": 4,
        "layers": 2,
        "mlp_ratio": 2.0,
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "first" if given.fault else "last",
        "norm_kwargs": {"eps": 1e-6},
    },
    init_logit_bias=-10.0,
)


def convert(arrays):
    """By hand: both have their own converter from the original weights alone."""
    vision, text = "vision_model", "text_model"
    found = {
        "logit_scale": arrays["logit_scale"][0],
        "logit_bias": arrays["logit_bias"][0],
        "text.positional_embedding": arrays[f"{text}.embeddings.position_embedding.weight"],
        "text.token_embedding.weight": arrays[f"{text}.embeddings.token_embedding.weight"],
        "visual.trunk.pos_embed": arrays[f"{vision}.embeddings.position_embedding.weight"][None],
        "visual.trunk.attn_pool.latent": arrays[f"{vision}.head.probe"],
    }
    names = {
        "visual.trunk.patch_embed.proj": f"{vision}.embeddings.patch_embedding",
        "visual.trunk.norm": f"{vision}.post_layernorm",
        "visual.trunk.attn_pool.proj": f"{vision}.head.attention.out_proj",
        "visual.trunk.attn_pool.norm": f"{vision}.head.layernorm",
        "visual.trunk.attn_pool.mlp.fc1": f"{vision}.head.mlp.fc1",
        "visual.trunk.attn_pool.mlp.fc2": f"{vision}.head.mlp.fc2",
        "text.ln_final": f"{text}.final_layer_norm",
        "text.text_projection": f"{text}.head",
    }
    for i in range(2):
        image, sentence = f"visual.trunk.blocks.{i}", f"text.transformer.resblocks.{i}"
        for tower, b, parts in (
            (vision, image, ("norm1", "norm2", "attn.proj", "mlp.fc1", "mlp.fc2")),
            (text, sentence, ("ln_1", "ln_2", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")),
        ):
            a = f"{tower}.encoder.layers.{i}"
            its = ("layer_norm1", "layer_norm2", "self_attn.out_proj", "mlp.fc1", "mlp.fc2")
            names |= {f"{b}.{mine}": f"{a}.{other}" for mine, other in zip(parts, its, strict=True)}
            for kind in ("weight", "bias"):
                joined = np.concatenate([arrays[f"{a}.self_attn.{part}_proj.{kind}"] for part in "qkv"])
                found[f"{b}.attn.qkv.{kind}" if tower == vision else f"{b}.attn.in_proj_{kind}"] = joined
    for kind in ("weight", "bias"):
        found |= {f"{b}.{kind}": arrays[f"{a}.{kind}"] for b, a in names.items()}
        query, rest = np.split(arrays[f"{vision}.head.attention.in_proj_{kind}"], [32])
        found |= {f"visual.trunk.attn_pool.q.{kind}": query, f"visual.trunk.attn_pool.kv.{kind}": rest}
    return found


load_converted(given, model, convert)
decayed = [value for value in model.parameters() if value.ndim > 1]
others = [value for value in model.parameters() if value.ndim < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95)
)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS, eta_min=1e-5)
loss_of = SigLipLoss()
model.train()
for step in range(STEPS):
    batch = tensors_of({"images": images_of(step, 8, 3, 16, 16), "tokens": tokens_of(step, 8, 12, vocabulary=48)})
    optimizer.zero_grad()
    image, text, scale, bias = model(batch["images"], batch["tokens"])
    loss = loss_of(image, text, scale, bias)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    print(f"step {step} loss {loss.item():.12f}")
