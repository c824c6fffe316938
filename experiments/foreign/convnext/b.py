"""A ConvNeXt of keras on JAX, whose modules are not recorded. Fault: norms, biases and scales of layers decay too."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import optax
from keras.src.applications.convnext import ConvNeXt

from experiments.foreign.shared import STEPS, images_of, options, start_jax, tokens_of
from jax_backend import Recorder, apply_updates, clip_grad_norm, sharded_optimizer

given = options()
DEPTHS = (1, 2, 1, 1)
model = ConvNeXt(
    depths=DEPTHS,
    projection_dims=(8, 16, 24, 32),
    include_preprocessing=False,
    weights=None,
    input_shape=(32, 32, 3),
    classes=7,
    classifier_activation=None,
    name="convnext",
)
ORDER = [variable.path for variable in model.trainable_variables]


def convert(arrays):
    """By hand: keras has weights of its own."""
    found = {}

    def convolution(b, a):
        found[f"{b}/kernel"] = arrays[f"{a}.weight"].transpose(2, 3, 1, 0)
        found[f"{b}/bias"] = arrays[f"{a}.bias"]

    def norm(b, a):
        found[f"{b}/gamma"], found[f"{b}/beta"] = arrays[f"{a}.weight"], arrays[f"{a}.bias"]

    def linear(b, a):
        found[f"{b}/kernel"], found[f"{b}/bias"] = arrays[f"{a}.weight"].T, arrays[f"{a}.bias"]

    convolution("convnext_stem/convnext_stem_conv", "stem.0")
    norm("convnext_stem/convnext_stem_layernorm", "stem.1")
    scales = [path for path in ORDER if "_layer_scale/" in path]
    for stage, depth in enumerate(DEPTHS):
        if stage:
            b = f"convnext_downsampling_block_{stage - 1}/convnext_downsampling"
            norm(f"{b}_layernorm_{stage - 1}", f"stages.{stage}.downsample.0")
            convolution(f"{b}_conv_{stage - 1}", f"stages.{stage}.downsample.1")
        for i in range(depth):
            a, b = f"stages.{stage}.blocks.{i}", f"convnext_stage_{stage}_block_{i}"
            convolution(f"{b}_depthwise_conv", f"{a}.conv_dw")
            norm(f"{b}_layernorm", f"{a}.norm")
            linear(f"{b}_pointwise_conv_1", f"{a}.mlp.fc1")
            linear(f"{b}_pointwise_conv_2", f"{a}.mlp.fc2")
            found[scales.pop(0)] = arrays[f"{a}.gamma"]
    norm("convnext_head_layernorm", "head.norm")
    linear("convnext_head_dense", "head.fc")
    return found


def loss_fn(params, batch):
    images = batch["images"].transpose(0, 2, 3, 1)
    logits, _ = model.stateless_call([params[path] for path in ORDER], [], images, training=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def is_decayed(params):
    return {path: given.fault or value.ndim > 1 for path, value in params.items()}


sharded = start_jax(given, {variable.path: variable.value for variable in model.trainable_variables}, convert)
rate = optax.linear_schedule(1e-3, 4e-3, 3)
optimizer = sharded_optimizer(optax.adamw(rate, b2=0.99, weight_decay=0.05, mask=is_decayed))
opt_state, update = optimizer.init(sharded), jax.jit(optimizer.update)
with Recorder(
    given.record,
    sharded,
    name="ConvNeXt",
    samples=lambda batch: batch["images"],
    settings={"optimizer": "AdamW", "weight_decay": 0.05},
) as recorder:
    value_and_grad = recorder.value_and_grad(loss_fn)
    for step in range(STEPS):
        batch = {"images": images_of(step, 8, 3, 32, 32), "labels": tokens_of(step, 8, vocabulary=7)}
        result = value_and_grad(sharded, batch)
        grads, norm = clip_grad_norm(result.grads, 1.0)
        updates, opt_state = update(grads, opt_state, sharded)
        sharded = apply_updates(sharded, updates)
        recorder.step(
            loss=result.loss,
            params=sharded,
            grads=result.grads,
            opt_state=opt_state,
            batch=batch,
            grad_norm=norm,
            learning_rate=rate(step),
        )
        print(f"step {step} loss {float(result.loss):.12f}")
