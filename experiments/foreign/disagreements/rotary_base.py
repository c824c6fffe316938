"""tunix 0.1.7: Qwen3 ignores `rope_theta` of its configuration, and always computes with 1,000,000: with 5,000,000, which its own
configuration of Qwen3-4B-Instruct-2507 states, its output is another than that of transformers.

Run it in the environment `nnx`. It prints whether two models of equal parameters and different bases have equal logits.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.foreign.shared import without_init

without_init("tunix")
from tunix.models.qwen3.model import ModelConfig, Qwen3  # noqa: E402


def logits_of(rope_theta: int) -> np.ndarray:
    """The logits of some tokens; parameters depend on the seed alone."""
    config = ModelConfig(
        num_layers=1,
        vocab_size=32,
        embed_dim=16,
        hidden_dim=16,
        num_heads=2,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=rope_theta,
        norm_eps=1e-6,
    )
    tokens, mask = jnp.arange(1, 9)[None], jnp.tril(jnp.ones((1, 8, 8), bool))
    return np.asarray(Qwen3(config, rngs=nnx.Rngs(0))(tokens, jnp.arange(8)[None], None, mask)[0])


print("rope_theta has no effect:", np.array_equal(logits_of(10_000), logits_of(5_000_000)))
