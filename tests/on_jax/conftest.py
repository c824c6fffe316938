"""Four CPU devices and float64, set before JAX is first used by any test of this process."""

import jax

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_enable_x64", True)
