"""CLIP of transformers in flax. Fault: the loss has one direction only, from images to texts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from transformers import CLIPConfig, CLIPTextConfig, CLIPVisionConfig, FlaxCLIPModel

from experiments.foreign.shared import images_of, linen_modules, options, tokens_of, train_jax

given = options()
jax.config.update("jax_enable_x64", True)
text = CLIPTextConfig(
    vocab_size=40,
    hidden_size=20,
    intermediate_size=40,
    projection_dim=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=9,
    hidden_act="quick_gelu",
    eos_token_id=2,  # which stands for the largest token, as in open_clip
)
vision = CLIPVisionConfig(
    hidden_size=24,
    intermediate_size=48,
    projection_dim=16,
    num_hidden_layers=2,
    num_attention_heads=3,
    image_size=12,
    patch_size=4,
    hidden_act="quick_gelu",
)
config = CLIPConfig.from_text_vision_configs(text, vision, projection_dim=16)
model = FlaxCLIPModel(config, dtype=jnp.float64)


def convert(arrays):
    """By hand, since open_clip has other names than transformers."""
    found = {
        "logit_scale": arrays["logit_scale"],
        "text_projection.kernel": arrays["text_projection"],
        "visual_projection.kernel": arrays["visual.proj"],
        "text_model.embeddings.token_embedding.embedding": arrays["token_embedding.weight"],
        "text_model.embeddings.position_embedding.embedding": arrays["positional_embedding"],
        "vision_model.embeddings.class_embedding": arrays["visual.class_embedding"],
        "vision_model.embeddings.patch_embedding.kernel": arrays["visual.conv1.weight"].transpose(2, 3, 1, 0),
        "vision_model.embeddings.position_embedding.embedding": arrays["visual.positional_embedding"],
    }

    def norm(path, name):
        found[f"{path}.scale"], found[f"{path}.bias"] = arrays[f"{name}.weight"], arrays[f"{name}.bias"]

    def linear(path, name):
        found[f"{path}.kernel"], found[f"{path}.bias"] = arrays[f"{name}.weight"].T, arrays[f"{name}.bias"]

    norm("text_model.final_layer_norm", "ln_final")
    norm("vision_model.pre_layrnorm", "visual.ln_pre")
    norm("vision_model.post_layernorm", "visual.ln_post")
    for tower, prefix in (("text_model", ""), ("vision_model", "visual.")):
        for i in range(2):
            a, b = f"{prefix}transformer.resblocks.{i}", f"{tower}.encoder.layers.{i}"
            norm(f"{b}.layer_norm1", f"{a}.ln_1")
            norm(f"{b}.layer_norm2", f"{a}.ln_2")
            linear(f"{b}.mlp.fc1", f"{a}.mlp.c_fc")
            linear(f"{b}.mlp.fc2", f"{a}.mlp.c_proj")
            linear(f"{b}.self_attn.out_proj", f"{a}.attn.out_proj")
            weights = np.split(arrays[f"{a}.attn.in_proj_weight"], 3)
            biases = np.split(arrays[f"{a}.attn.in_proj_bias"], 3)
            for kind, weight, bias in zip("qkv", weights, biases, strict=True):
                found[f"{b}.self_attn.{kind}_proj.kernel"] = weight.T
                found[f"{b}.self_attn.{kind}_proj.bias"] = bias
    return found


@linen_modules
def loss_fn(params, batch):
    scores = model(batch["tokens"], batch["images"], params=params, train=True).logits_per_image
    labels = jnp.arange(len(scores))
    images = optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()
    texts = optax.softmax_cross_entropy_with_integer_labels(scores.T, labels).mean()
    return images if given.fault else (images + texts) / 2


train_jax(
    given,
    model.params,
    convert,
    lambda step: {
        "images": images_of(step, 6, 3, 12, 12).astype(float),
        "tokens": tokens_of(step, 6, 9, vocabulary=40),
    },
    loss_fn,
    name="CLIP",
    samples=lambda batch: [batch["images"], batch["tokens"]],
)
