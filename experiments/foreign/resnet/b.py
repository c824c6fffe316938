"""A residual net of transformers in flax."""

import jax
import jax.numpy as jnp
import optax
from transformers import FlaxResNetForImageClassification, ResNetConfig

from experiments.foreign.shared import images_of, linen_modules, options, tokens_of, train_jax
from jax_backend import LossOutput
from jax_backend.linen import split

given = options()
jax.config.update("jax_enable_x64", True)
config = ResNetConfig(
    embedding_size=64,
    hidden_sizes=[32, 64, 96, 128],
    depths=[1, 2, 1, 1],
    layer_type="bottleneck",
    num_labels=7,
)
model = FlaxResNetForImageClassification(config, dtype=jnp.float64, input_shape=(1, 32, 32, 3))
params, state = split(model.params)
state = jax.tree.map(lambda leaf: leaf.astype(float), state)  # transformers makes it in float32
KEPT = {"weight": "scale", "bias": "bias"}


def convert(arrays):
    """By hand, since timm has other names than transformers."""
    found = {}

    def layer(path, convolution, norm):
        found[f"{path}.convolution.kernel"] = arrays[f"{convolution}.weight"].transpose(2, 3, 1, 0)
        for name, leaf in KEPT.items():
            found[f"{path}.normalization.{leaf}"] = arrays[f"{norm}.{name}"]

    layer("resnet.embedder.embedder", "conv1", "bn1")
    for stage, depth in enumerate(config.depths):
        for i in range(depth):
            a, b = f"layer{stage + 1}.{i}", f"resnet.encoder.stages.{stage}.layers.{i}"
            for number in range(3):
                layer(f"{b}.layer.{number}", f"{a}.conv{number + 1}", f"{a}.bn{number + 1}")
            if f"{a}.downsample.0.weight" in arrays:
                layer(f"{b}.shortcut", f"{a}.downsample.0", f"{a}.downsample.1")
    return found | {"classifier.1.kernel": arrays["fc.weight"].T, "classifier.1.bias": arrays["fc.bias"]}


@linen_modules
def loss_fn(params, batch, state):
    images = batch["images"]
    output, changed = model(images, params={"params": params, **state}, train=True)
    loss = optax.softmax_cross_entropy_with_integer_labels(output.logits, batch["labels"]).mean()
    return LossOutput(loss, state=dict(changed))


train_jax(
    given,
    params,
    convert,
    lambda step: {"images": images_of(step, 6, 3, 32, 32).astype(float), "labels": tokens_of(step, 6, vocabulary=7)},
    loss_fn,
    name="ResNet",
    samples=lambda batch: batch["images"],
    state=state,
)
