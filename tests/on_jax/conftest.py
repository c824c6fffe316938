"""Four CPU devices, and float64 unless CROSSFRAME_TESTS_OF_JAX_DEFAULTS is set, before any test first uses JAX."""

import os

import jax

from tests.conftest import JAX_DEFAULTS

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_enable_x64", JAX_DEFAULTS not in os.environ)
