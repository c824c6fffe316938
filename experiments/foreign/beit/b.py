"""BEiT of transformers in flax."""

import jax
import numpy as np
import optax
from transformers import BeitConfig, FlaxBeitForImageClassification

from experiments.foreign.shared import STEPS, halves_of, images_of, linen_modules, options, start_jax, tokens_of
from jax_backend import Recorder, apply_updates, clip_grad_norm, sharded_optimizer

given = options()
config = BeitConfig(
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
    drop_path_rate=0.0,
    layer_scale_init_value=0.1,
    use_relative_position_bias=True,
)
model = FlaxBeitForImageClassification(config)


def convert(arrays):
    """By hand, since timm has other names than transformers."""
    found = {"beit.embeddings.cls_token": arrays["cls_token"]}

    def linear(b, a):
        found[f"{b}.kernel"], found[f"{b}.bias"] = arrays[f"{a}.weight"].T, arrays[f"{a}.bias"]

    def norm(b, a):
        found[f"{b}.scale"], found[f"{b}.bias"] = arrays[f"{a}.weight"], arrays[f"{a}.bias"]

    found["beit.embeddings.patch_embeddings.projection.kernel"] = arrays["patch_embed.proj.weight"].transpose(
        2, 3, 1, 0
    )
    found["beit.embeddings.patch_embeddings.projection.bias"] = arrays["patch_embed.proj.bias"]
    for i in range(3):
        a, b = f"blocks.{i}", f"beit.encoder.layer.{i}"
        linear(f"{b}.attention.output.dense", f"{a}.attn.proj")
        linear(f"{b}.intermediate.dense", f"{a}.mlp.fc1")
        linear(f"{b}.output.dense", f"{a}.mlp.fc2")
        norm(f"{b}.layernorm_before", f"{a}.norm1")
        norm(f"{b}.layernorm_after", f"{a}.norm2")
        found[f"{b}.lambda_1"], found[f"{b}.lambda_2"] = arrays[f"{a}.gamma_1"], arrays[f"{a}.gamma_2"]
        table = "relative_position_bias_table"
        found[f"{b}.attention.attention.relative_position_bias.{table}"] = arrays[f"{a}.attn.{table}"]
        parts = np.split(arrays[f"{a}.attn.qkv.weight"], 3)
        for part, value in zip(("query", "key", "value"), parts, strict=True):
            found[f"{b}.attention.attention.{part}.kernel"] = value.T
        found[f"{b}.attention.attention.query.bias"] = arrays[f"{a}.attn.q_bias"]
        found[f"{b}.attention.attention.value.bias"] = arrays[f"{a}.attn.v_bias"]
    norm("beit.pooler.layernorm", "fc_norm")
    linear("classifier", "head")
    return found


@linen_modules
def loss_fn(params, batch):
    logits = model(batch["images"], params=params, train=True).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def depth_of(path):
    return int(path.split(".")[3]) + 1 if ".layer." in path else 4 * path.startswith(("beit.pooler.", "classifier."))


def scale_by_depth(updates, state, params=None):
    return {path: value * 0.65 ** (4 - depth_of(path)) for path, value in updates.items()}, state


def is_decayed(params):
    return {path: value.ndim > 1 for path, value in params.items()}


sharded = start_jax(given, model.params, convert)
rate = optax.cosine_decay_schedule(2e-3, STEPS)
optimizer = sharded_optimizer(
    optax.chain(
        optax.adamw(rate, b2=0.99, weight_decay=0.05, mask=is_decayed),
        optax.GradientTransformation(lambda params: optax.EmptyState(), scale_by_depth),
    )
)
opt_state, update = optimizer.init(sharded), jax.jit(optimizer.update)
with Recorder(
    given.record,
    sharded,
    name="Beit",
    samples=lambda batch: batch["images"],
    settings={"optimizer": "AdamW"},
) as recorder:
    value_and_grad = recorder.value_and_grad(loss_fn)
    for step in range(STEPS):
        batch = {"images": images_of(step, 8, 3, 16, 16), "labels": tokens_of(step, 8, vocabulary=7)}
        results = [value_and_grad(sharded, half) for half in halves_of(batch)]
        grads = jax.tree.map(lambda first, second: (first + second) / 2, *(result.grads for result in results))
        loss = sum(result.loss for result in results) / 2
        clipped, norm = clip_grad_norm(grads, 0.5)
        updates, opt_state = update(clipped, opt_state, sharded)
        sharded = apply_updates(sharded, updates)
        recorder.step(loss=loss, params=sharded, grads=grads, opt_state=opt_state, batch=batch, grad_norm=norm)
        print(f"step {step} loss {float(loss):.12f}")
