"""Recording training loops in JAX, of anyone's: `Recorder`. A recording is what `crossframe compare` holds against another."""

from jax_backend.recorder._modules import module_paths
from jax_backend.recorder._recorder import Recorder

__all__ = ["Recorder", "module_paths"]
