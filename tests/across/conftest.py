"""Several CPU devices and 64-bit numbers in JAX, as the tests of that backend set them."""

from tests.on_jax import conftest  # noqa: F401
