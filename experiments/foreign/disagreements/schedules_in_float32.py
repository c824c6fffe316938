"""optax 0.2.8: schedules compute in float32 in JAX's float64 mode, so that a learning rate is off by up to 6e-8 of itself.

Run it in the environment `flax`. It prints the dtype of the rate, and how far it is from the rate of torch's `LinearLR`.
"""

import jax
import jax.numpy as jnp
import optax

jax.config.update("jax_enable_x64", True)
rate = optax.linear_schedule(3e-3, 0.75e-3, 3)(jnp.int32(1))
print(f"{rate.dtype}, relative difference {abs(float(rate) / 2.25e-3 - 1):.1e}")
