"""Greedy decoding of a linen decoder with a cache of keys and values: a jitted prefill, then one token a call."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

VOCAB, WIDTH, LENGTH = 23, 16, 16


class Block(nn.Module):
    epsilon: float

    @nn.compact
    def __call__(self, x, decode):
        y = nn.LayerNorm(epsilon=self.epsilon, name="norm1")(x)
        mask = None if decode else nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, decode=decode, name="attention")(y, mask=mask)
        y = nn.LayerNorm(epsilon=self.epsilon, name="norm2")(x)
        return x + nn.Dense(WIDTH, name="down")(nn.silu(nn.Dense(2 * WIDTH, name="up")(y)))


class Decoder(nn.Module):
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, tokens, positions, decode=False):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens) + nn.Embed(LENGTH, WIDTH, name="position")(positions)
        for i in range(2):
            x = Block(self.epsilon, name=f"block_{i}")(x, decode)
        return nn.Dense(VOCAB, name="head")(nn.LayerNorm(epsilon=self.epsilon, name="norm")(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epsilon", type=float, default=1e-6)
    parser.add_argument("--no-cache", action="store_true")
    args = parser.parse_args()
    model = Decoder(args.epsilon)
    whole = jnp.zeros((2, LENGTH), jnp.int32)
    variables = model.init(jax.random.key(0), whole, jnp.arange(LENGTH)[None], decode=True)
    params, cache = variables["params"], variables["cache"]

    @jax.jit
    def decode_step(params, cache, token, position):
        positions = jnp.full((1, 1), position)
        logits, updated = model.apply(
            {"params": params, "cache": cache}, token[:, None], positions, decode=True, mutable=["cache"]
        )
        return logits[:, -1], updated["cache"]

    @jax.jit
    def score(params, tokens):
        return model.apply({"params": params}, tokens, jnp.arange(tokens.shape[1])[None])

    prompt = np.random.default_rng(0).integers(VOCAB, size=(2, 4))
    tokens = [jnp.asarray(prompt[:, i]) for i in range(4)]
    for position in range(9):
        if args.no_cache:
            logits = score(params, jnp.stack(tokens[: position + 1], axis=1))[:, -1]
        else:
            logits, cache = decode_step(params, cache, tokens[position], position)
        if position >= 3:
            tokens.append(logits.argmax(-1))
            print("token", np.asarray(tokens[-1]).tolist(), "logit", float(logits.max()))
    print("perplexity", float(jnp.exp(-jax.nn.log_softmax(score(params, jnp.stack(tokens, axis=1))).mean())))


if __name__ == "__main__":
    main()
