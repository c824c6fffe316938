"""The autoencoder of Stable Diffusion, of bonsai in flax.nnx."""

import jax
import jax.numpy as jnp
import optax
from bonsai.models.vae.modeling import VAE, ModelConfig
from flax import nnx

from experiments.foreign.shared import STEPS, images_of, options, start_jax, watch_all
from jax_backend import Recorder, apply_updates, clip_grad_norm, sharded_optimizer
from jax_backend.nnx import split, with_params

given = options()
model = VAE(ModelConfig(block_out_channels=(8, 16), latent_channels=2, norm_num_groups=4), rngs=nnx.Rngs(0))
graphdef, params, state = split(model)


def convert(arrays):
    """By hand: bonsai's converter has the names of an older diffusers."""
    found = {}
    for name, array in arrays.items():
        path = name.replace(".downsamplers.0.conv.", ".downsamplers.").replace(".upsamplers.0.", ".upsamplers.")
        path, _, kind = path.replace(".to_out.0.", ".to_out.").rpartition(".")
        if kind == "weight":
            kind = "scale" if array.ndim == 1 else "kernel"
            array = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
        found[f"{path}.{kind}"] = array
    return found


def loss_fn(params, batch):
    model = with_params(graphdef, params, state)
    watch_all(model)
    images = batch["images"].transpose(0, 2, 3, 1)
    error = model(images) - images
    return jnp.abs(error).mean() + jnp.square(error).mean()


sharded = start_jax(given, params, convert)
rate = optax.linear_schedule(5e-4, 2e-3, 3)
optimizer = sharded_optimizer(optax.adamw(rate, b1=0.5, b2=0.9, weight_decay=0.01))
opt_state, update = optimizer.init(sharded), jax.jit(optimizer.update)
with Recorder(
    given.record,
    sharded,
    name="AutoencoderKL",
    samples=lambda batch: batch["images"],
    settings={"optimizer": "AdamW", "weight_decay": 0.01},
) as recorder:
    value_and_grad = recorder.value_and_grad(loss_fn)
    for step in range(STEPS):
        batch = {"images": images_of(step, 4, 3, 16, 16)}
        result = value_and_grad(sharded, batch)
        clipped, norm = clip_grad_norm(result.grads, 1.0)
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
