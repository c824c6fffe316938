"""BART of transformers in flax. Fault: the gradients of each microbatch are clipped instead of their mean."""

import jax
import jax.numpy as jnp
import optax
from transformers import BartConfig, FlaxBartForConditionalGeneration
from transformers.modeling_flax_pytorch_utils import convert_pytorch_state_dict_to_flax

from experiments.foreign.shared import STEPS, flat, halves_of, linen_modules, options, start_jax, tokens_of
from jax_backend import Recorder, apply_updates, clip_grad_norm, sharded_optimizer

given = options()
jax.config.update("jax_enable_x64", True)
config = BartConfig(
    vocab_size=48,
    d_model=24,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=3,
    decoder_attention_heads=3,
    encoder_ffn_dim=40,
    decoder_ffn_dim=40,
    max_position_embeddings=16,
    pad_token_id=0,
    dropout=0.0,
    use_cache=False,
)
model = FlaxBartForConditionalGeneration(config, dtype=jnp.float64, input_shape=(1, 14))


def convert(arrays):
    return flat(convert_pytorch_state_dict_to_flax(dict(arrays), model))


@linen_modules
def loss_fn(params, batch):
    target = batch["target"]
    logits = model(batch["source"], decoder_input_ids=target[:, :-1], params=params, train=True).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, target[:, 1:]).mean()


def is_decayed(params):
    return {path: value.ndim > 1 for path, value in params.items()}


def rate(step):
    """That of LinearLR. A schedule of optax would compute it in float32."""
    return 3e-3 * (1 - 0.25 * step)


sharded = start_jax(given, model.params, convert)
optimizer = sharded_optimizer(optax.adamw(rate, weight_decay=0.01, mask=is_decayed))
opt_state, update = optimizer.init(sharded), jax.jit(optimizer.update)
with Recorder(
    given.record,
    sharded,
    name="BartForConditionalGeneration",
    samples=lambda batch: [batch["source"], batch["target"][:, :-1]],
    settings={"optimizer": "AdamW", "weight_decay": 0.01},
) as recorder:
    value_and_grad = recorder.value_and_grad(loss_fn)
    for step in range(STEPS):
        batch = {
            "source": tokens_of(step, 8, 14, vocabulary=48),
            "target": tokens_of(100 + step, 8, 11, vocabulary=48),
        }
        losses, grads = [], []
        for half in halves_of(batch):
            result = value_and_grad(sharded, half)
            losses.append(result.loss)
            grads.append(clip_grad_norm(result.grads, 1.0)[0] if given.fault else result.grads)
        mean = jax.tree.map(lambda first, second: (first + second) / 2, *grads)
        clipped = mean if given.fault else clip_grad_norm(mean, 1.0)[0]
        updates, opt_state = update(clipped, opt_state, sharded)
        sharded = apply_updates(sharded, updates)
        recorder.step(
            loss=sum(losses) / 2,
            params=sharded,
            grads=mean,
            opt_state=opt_state,
            batch=batch,
            learning_rate=rate(step),
        )
        print(f"step {step} loss {float(sum(losses) / 2):.12f}")
