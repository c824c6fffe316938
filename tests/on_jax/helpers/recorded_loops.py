"""Training loops of others, recorded: one device, FSDP by hand, and replicas, of the small model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from crossframe.mesh import MeshSpec
from crossframe.recording import Recording
from jax_backend import Recorder, apply_updates, make_mesh, shard, sharded_optimizer
from tests.on_jax.helpers.small import UNITS, small_batch, small_loss, small_map, small_params

STEPS = 5
TOLD: dict[str, Any] = {
    "steps": STEPS,
    "dense": 1,
    "every": 2,
    "learning_rate": 1e-2,
    "settings": {"optimizer": "AdamW", "weight_decay": 0.01},
}


def mesh_of(**axes):
    """A mesh of the first CPU devices, with these axes."""
    shape = tuple(axes.values())
    return Mesh(np.array(jax.devices("cpu")[: int(np.prod(shape))]).reshape(shape), tuple(axes))


def placed(params, mesh, axis="fsdp"):
    """Each parameter cut along its first dim that the axis divides, whole where there is none, as in FSDP by hand."""

    def place(leaf):
        size = mesh.shape.get(axis, 0)
        dim = next((i for i, n in enumerate(leaf.shape) if size and n % size == 0), None)
        spec = P() if dim is None else P(*(None,) * dim, axis)
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(place, params)


def step_of(tx, fault=lambda grads: grads, told=True):
    """A step under jit that leaves parameters where they were."""

    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(small_loss)(params, batch)
        grads = fault(grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        more = (
            ({"grads": grads, "grad_norm": jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))},)
            if told
            else ()
        )
        return optax.apply_updates(params, updates), opt_state, loss, *more

    return step


def run(folder, mesh=None, *, axis="fsdp", dtype=None, fault=lambda grads: grads, told=True, **options):
    """Record the small model, trained with AdamW, on a mesh or on one device."""
    params = small_params(dtype)
    params = jax.tree.map(jnp.asarray, params) if mesh is None else placed(params, mesh, axis)
    tx = optax.adamw(1e-2, weight_decay=0.01)
    opt_state = tx.init(params)
    with Recorder(folder, params, **(TOLD | options)) as recorder:
        step = recorder.wrap(jax.jit(step_of(tx, fault, told)))
        for i in range(STEPS):
            params, opt_state, *_ = step(params, opt_state, small_batch(8, dtype, seed=i))


def record(folder, mesh=None, **options):
    """The same, opened."""
    run(folder, mesh, **options)
    return Recording.open(folder)


def sharded_small(num_ranks=2, replicate=1, dtype=None, **options):
    """The small model as ShardedParams."""
    mesh = make_mesh(MeshSpec(num_ranks, replicate), jax.devices("cpu"))
    return shard(small_params(dtype), mesh, units=UNITS, param_map=small_map(), **options)


def train(recorder, sharded, loss, steps=STEPS, microbatches=1, **options):
    """AdamW, through the recorder's own transformation; each microbatch is all ranks' part of the batch."""
    optimizer = sharded_optimizer(optax.adamw(1e-2, weight_decay=0.01))
    opt_state = optimizer.init(sharded)
    update = jax.jit(optimizer.update)
    waits = recorder.value_and_grad(loss, reduces=False, **options)
    reduces = recorder.value_and_grad(loss, **options)
    for i in range(steps):
        batch, waiting = small_batch(8, sharded.tree.buckets[0].layout.dtype, seed=i), None
        for _ in range(microbatches - 1):
            result = waits(sharded, batch)
            waiting = result.grads if waiting is None else waiting + result.grads
        result = reduces(sharded, batch, accumulated=waiting)
        updates, opt_state = update(result.grads, opt_state, sharded)
        sharded = apply_updates(sharded, updates)
        recorder.step(params=sharded, grads=result.grads, loss=result.losses, opt_state=opt_state, batch=batch)
    return sharded, opt_state, result
