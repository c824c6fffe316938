"""A DenseNet of bonsai in flax.nnx. Fault: weights decay after the momentum instead of before it."""

import jax
import optax
from bonsai.models.densenet121.modeling import DenseNet, ModelConfig
from flax import nnx

from crossframe import MeshSpec
from experiments.foreign.shared import STEPS, images_of, options, start_jax, tokens_of, watch_all
from jax_backend import LossOutput, Recorder, apply_updates, make_mesh, per_rank, sharded_optimizer
from jax_backend.nnx import split, state_of, with_params

given = options()
DEPTHS = (2, 2, 2)
model = DenseNet(ModelConfig(num_classes=7, dense_block_layers=list(DEPTHS), growth_rate=4), rngs=nnx.Rngs(0))
model.train()
graphdef, params, state = split(model)


def convert(arrays):
    """By hand: bonsai converts checkpoints of keras."""
    found = {"linear.kernel": arrays["classifier.weight"].T, "linear.bias": arrays["classifier.bias"]}

    def convolution(b, a):
        found[f"{b}.kernel"] = arrays[f"{a}.weight"].transpose(2, 3, 1, 0)

    def norm(b, a):
        found[f"{b}.scale"], found[f"{b}.bias"] = arrays[f"{a}.weight"], arrays[f"{a}.bias"]

    convolution("init_conv", "features.conv0")
    norm("init_bn", "features.norm0")
    norm("final_bn", "features.norm5")
    for block, depth in enumerate(DEPTHS):
        b = f"blocks.layers.{2 * block}"
        for i in range(2 * depth):
            a = f"features.denseblock{block + 1}.denselayer{i // 2 + 1}"
            convolution(f"{b}.conv_layers.{i}", f"{a}.conv{i % 2 + 1}")
            norm(f"{b}.bn_layers.{i}", f"{a}.norm{i % 2 + 1}")
        if block < len(DEPTHS) - 1:
            convolution(f"blocks.layers.{2 * block + 1}.conv", f"features.transition{block + 1}.conv")
            norm(f"blocks.layers.{2 * block + 1}.bn", f"features.transition{block + 1}.norm")
    return found


def loss_fn(params, batch, state):
    model = with_params(graphdef, params, state)
    watch_all(model)
    logits = model(batch["images"].transpose(0, 2, 3, 1))
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
    return LossOutput(loss, state=state_of(model))


sharded, state = start_jax(given, params, convert), per_rank(state, make_mesh(MeshSpec(shard=1)))
rate = optax.piecewise_constant_schedule(0.05, {2: 0.1})
chain = [optax.add_decayed_weights(5e-3), optax.trace(0.9)]
if given.fault:
    chain.reverse()
optimizer = sharded_optimizer(optax.chain(*chain, optax.scale_by_learning_rate(rate)))
opt_state, update = optimizer.init(sharded), jax.jit(optimizer.update)
with Recorder(
    given.record,
    sharded,
    name="DenseNet",
    samples=lambda batch: batch["images"],
    settings={"optimizer": "SGD", "momentum": 0.9, "weight_decay": 5e-3},
) as recorder:
    value_and_grad = recorder.value_and_grad(loss_fn)
    for step in range(STEPS):
        batch = {"images": images_of(step, 8, 3, 33, 33), "labels": tokens_of(step, 8, vocabulary=7)}
        result = value_and_grad(sharded, batch, state)
        updates, opt_state = update(result.grads, opt_state, sharded)
        sharded, state = apply_updates(sharded, updates), result.state
        recorder.step(
            loss=result.loss,
            params=sharded,
            grads=result.grads,
            opt_state=opt_state,
            batch=batch,
            learning_rate=rate(step),
        )
        print(f"step {step} loss {float(result.loss):.12f}")
