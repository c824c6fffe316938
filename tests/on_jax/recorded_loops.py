"""Training loops of others, recorded: one device, FSDP by hand, and replicas, of the small model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from crossframe.recording import Recording
from jax_backend import Recorder
from tests.on_jax.small import small_batch, small_loss, small_params

STEPS = 5
SETTINGS = {"optimizer": "AdamW", "weight_decay": 0.01}


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


def record(
    folder, mesh=None, *, axis="fsdp", dtype="float64", fault=lambda grads: grads, told=True, jit=True, **options
):
    """A recording of the small model, trained with AdamW, on a mesh or on one device."""
    params = small_params(dtype)
    params = jax.tree.map(jnp.asarray, params) if mesh is None else placed(params, mesh, axis)
    tx = optax.adamw(1e-2, weight_decay=0.01)
    opt_state = tx.init(params)
    step = step_of(tx, fault, told)
    told = {"steps": STEPS, "dense": 1, "every": 2, "learning_rate": 1e-2, "settings": SETTINGS, "overwrite": True}
    with Recorder(folder, params, **(told | options)) as recorder:
        step = recorder.wrap(jax.jit(step) if jit else step)
        for i in range(STEPS):
            params, opt_state, *_ = step(params, opt_state, small_batch(8, dtype, seed=i))
    return Recording.open(folder) if not recorder.twin else None
