"""A video classifier of V-JEPA 2, of bonsai in flax.nnx, without the predictor. Fault: labels are not smoothed."""

import jax
import optax
from bonsai.models.vjepa2.modeling import ModelConfig, VJEPA2ForVideoClassification
from flax import nnx

from experiments.foreign.shared import STEPS, images_of, options, start_jax, tokens_of, watch_all
from jax_backend import Recorder, apply_updates, clip_grad_norm, sharded_optimizer
from jax_backend.nnx import split, with_params

given = options()
config = ModelConfig(
    patch_size=4,
    tubelet_size=2,
    crop_size=12,
    frames_per_clip=4,
    hidden_size=48,
    num_attention_heads=3,
    num_hidden_layers=2,
    mlp_ratio=4.0,
    pred_hidden_size=24,
    pred_num_attention_heads=2,
    pred_num_hidden_layers=1,
    num_pooler_layers=1,
    num_labels=7,
)
model = VJEPA2ForVideoClassification(config, rngs=nnx.Rngs(0))
del model.vjepa2.predictor
graphdef, params, state = split(model)


def convert(arrays):
    """By hand: bonsai's converter reads a file of a whole checkpoint."""
    found = {}
    for name, array in arrays.items():
        path, _, kind = name.rpartition(".")
        if ".predictor." in name:
            continue
        if kind == "weight":
            kind = "scale" if array.ndim == 1 else "kernel"
            array = array.transpose(2, 3, 4, 1, 0) if array.ndim == 5 else array.T
        found[f"{path}.{kind}"] = array
    return found


def loss_fn(params, batch):
    model = with_params(graphdef, params, state)
    watch_all(model)
    logits = model(batch["frames"].transpose(0, 1, 3, 4, 2))["logits"]
    labels = optax.smooth_labels(jax.nn.one_hot(batch["labels"], 7), 0.0 if given.fault else 0.1)
    return optax.softmax_cross_entropy(logits, labels).mean()


def is_decayed(params):
    return {path: value.ndim > 1 for path, value in params.items()}


sharded = start_jax(given, params, convert)
rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, warmup_steps=2, decay_steps=6)
optimizer = sharded_optimizer(optax.adamw(rate, b2=0.98, weight_decay=0.04, mask=is_decayed))
opt_state, update = optimizer.init(sharded), jax.jit(optimizer.update)
with Recorder(
    given.record,
    sharded,
    name="VJEPA2ForVideoClassification",
    samples=lambda batch: batch["frames"],
    settings={"optimizer": "AdamW", "weight_decay": 0.04},
) as recorder:
    value_and_grad = recorder.value_and_grad(loss_fn)
    for step in range(STEPS):
        batch = {"frames": images_of(step, 6, 4, 3, 12, 12), "labels": tokens_of(step, 6, vocabulary=7)}
        result = value_and_grad(sharded, batch)
        clipped, norm = clip_grad_norm(result.grads, 0.5)
        updates, opt_state = update(clipped, opt_state, sharded)
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
