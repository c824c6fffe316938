"""FSDP for JAX over the layouts of crossframe: a step gathers sharded parameters and reduces gradients.

The helpers for flax and equinox are in `jax_backend.nnx`, `.linen` and `.equinox`, which alone import them.
"""

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ImportError("jax_backend needs JAX: pip install 'crossframe[jax]'") from None

from jax_backend.check_ranks import check_ranks
from jax_backend.checkpoint import load_checkpoint, save_checkpoint
from jax_backend.engine._clipping import clip_grad_norm
from jax_backend.engine._loss_function import LossOutput
from jax_backend.engine._scan import scan
from jax_backend.engine._value_and_grad import Result, value_and_grad
from jax_backend.mesh._device_mesh import make_mesh, per_rank
from jax_backend.optimizer._sharded_optimizer import apply_updates, sharded_optimizer
from jax_backend.programs._compiled_trace import compiled_trace
from jax_backend.programs._trace import trace_of
from jax_backend.recorder import Recorder
from jax_backend.shards._bucket import Bucket
from jax_backend.shards._deferred_init import init
from jax_backend.shards._exchange import from_torch, to_torch
from jax_backend.shards._local_grads import LocalGrads
from jax_backend.shards._param_tree import ParamTree
from jax_backend.shards._sharded_params import ShardedParams, pieces_of, shard, shards_of
from jax_backend.shards._summon import Holder, Summoned, summon_full_params
from jax_backend.shards._unshard import unshard, writeback

__all__ = [
    "Bucket",
    "Holder",
    "LocalGrads",
    "LossOutput",
    "ParamTree",
    "Recorder",
    "Result",
    "ShardedParams",
    "Summoned",
    "apply_updates",
    "check_ranks",
    "clip_grad_norm",
    "compiled_trace",
    "from_torch",
    "init",
    "load_checkpoint",
    "make_mesh",
    "per_rank",
    "pieces_of",
    "save_checkpoint",
    "scan",
    "shard",
    "sharded_optimizer",
    "shards_of",
    "summon_full_params",
    "to_torch",
    "trace_of",
    "unshard",
    "value_and_grad",
    "writeback",
]
