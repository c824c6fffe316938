"""Four CPU devices, and float64 unless `--jax-defaults` is given, set before JAX is first used by any test of this process."""

import os

import jax

from tests.conftest import JAX_DEFAULTS

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_enable_x64", JAX_DEFAULTS not in os.environ)
