"""FSDP for JAX over the layouts of crossframe: a step gathers sharded parameters and reduces gradients.

The helpers for flax and equinox are in `jax_backend.nnx`, `.linen` and `.equinox`, which alone import them.
"""

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ImportError("jax_backend needs JAX: pip install 'crossframe[jax]'") from None

from jax_backend.checkpoint import load_checkpoint, save_checkpoint
from jax_backend.clip import clip_grad_norm
from jax_backend.compiled import compiled_trace
from jax_backend.exchange import from_torch, to_torch
from jax_backend.init import init
from jax_backend.local_grads import LocalGrads
from jax_backend.mesh import make_mesh, per_rank
from jax_backend.optim import apply_updates, sharded_optimizer
from jax_backend.recorder import Recorder
from jax_backend.scan import scan
from jax_backend.sharded import ShardedParams, pieces_of, shard, shards_of
from jax_backend.summon import Holder, Summoned, summon_full_params
from jax_backend.trace import trace_of
from jax_backend.transform import Result, value_and_grad
from jax_backend.tree import Bucket, ParamTree
from jax_backend.under_jit import NOT_HONOURED
from jax_backend.unshard import unshard, writeback

__all__ = [
    "NOT_HONOURED",
    "Bucket",
    "Holder",
    "LocalGrads",
    "ParamTree",
    "Recorder",
    "Result",
    "ShardedParams",
    "Summoned",
    "apply_updates",
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
