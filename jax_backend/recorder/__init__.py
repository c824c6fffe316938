"""`Recorder`: records a training loop in JAX. crossframe.recording defines recordings, crossframe.verdict compares them."""

from jax_backend.recorder._manifest import program
from jax_backend.recorder._modules import module_paths
from jax_backend.recorder._recorder import Recorder

__all__ = ["Recorder", "module_paths", "program"]
