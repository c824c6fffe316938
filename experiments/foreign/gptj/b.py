"""GPT-J of transformers in flax."""

import jax
import optax
from transformers import FlaxGPTJForCausalLM, GPTJConfig
from transformers.modeling_flax_pytorch_utils import convert_pytorch_state_dict_to_flax

from experiments.foreign.shared import STEPS, flat, linen_modules, options, start_jax, tokens_of
from jax_backend import Recorder, apply_updates, clip_grad_norm, sharded_optimizer

given = options()
config = GPTJConfig(
    vocab_size=48,
    n_positions=16,
    n_embd=32,
    n_layer=2,
    n_head=4,
    rotary_dim=4,
    n_inner=64,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
model = FlaxGPTJForCausalLM(config, input_shape=(1, 12))


def convert(arrays):
    return flat(convert_pytorch_state_dict_to_flax(dict(arrays), model))


@linen_modules
def loss_fn(params, batch):
    logits = model(batch["tokens"][:, :-1], params=params, train=True).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def is_decayed(params):
    return {path: value.ndim > 1 for path, value in params.items()}


sharded = start_jax(given, model.params, convert)
rate = optax.cosine_decay_schedule(1e-3, STEPS, alpha=0.1)
optimizer = sharded_optimizer(optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=is_decayed))
opt_state, update = optimizer.init(sharded), jax.jit(optimizer.update)
with Recorder(
    given.record,
    sharded,
    name="GPTJForCausalLM",
    samples=lambda batch: batch["tokens"][:, :-1],
    settings={"optimizer": "AdamW", "weight_decay": 0.1},
) as recorder:
    value_and_grad = recorder.value_and_grad(loss_fn)
    for step in range(STEPS):
        batch = {"tokens": tokens_of(step, 6, 13, vocabulary=48)}
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
