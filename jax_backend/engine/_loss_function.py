"""The user's loss function in one form, and checks of its results and of a step's arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import PyTree

from crossframe.api import Api
from crossframe.errors import UsageError
from crossframe.precision import PrecisionPolicy
from jax_backend.mesh._device_mesh import mesh_spec, model_axes, num_ranks
from jax_backend.shards._local_grads import LocalGrads
from jax_backend.shards._sharded_params import ShardedParams
from jax_backend.tree import dtype_name, leaves_by_path


class LossOutput(NamedTuple):
    """What a loss function returns on one rank, if more than the loss.

    Attributes:
        loss: the mean loss over the rank's batch, a floating scalar.
        aux: any pytree of arrays.
        state: the new state, with the structure, shapes and dtypes of the one passed in; None if none was.
        weight: a scalar, the rank's weight in the mean over ranks; None: all count alike. With the number of samples, the mean is
            over all samples even if ranks have different numbers. If all weights are 0 it is NaN.
    """

    loss: jax.Array
    aux: PyTree = None
    state: PyTree = None
    weight: jax.Array | None = None


@dataclass(frozen=True)
class LossFunction:
    """A user's loss function, which `value_and_grad` documents.

    Attributes:
        fn: the function.
    """

    fn: Callable[..., Any]

    def __call__(self, params: Any, state: Any, batch: Any, rng: Any) -> LossOutput:
        """Call it on one rank; a state or key of None is not passed.

        Raises:
            UsageError: a result of another form, a loss that is not a floating scalar, or a state that differs in structure,
                shapes or dtypes from the one passed in.
        """
        given = {name: value for name, value in (("state", state), ("rng", rng)) if value is not None}
        output = self.fn(params, batch, **given)
        if not isinstance(output, LossOutput):
            output = LossOutput(output, state=state if not jax.tree.leaves(state) else None)
        _check_loss(output.loss)
        if output.weight is not None:
            if np.shape(output.weight) != ():
                raise UsageError(
                    f"loss_fn: expected a scalar weight, got shape {np.shape(output.weight)}; return its sum"
                )
            output = output._replace(weight=jnp.asarray(output.weight))
        if (state is None) != (output.state is None):
            raise UsageError(
                "loss_fn: it takes a state and returned none; return LossOutput(loss, state=...)"
                if output.state is None
                else "loss_fn: it returned a state and takes none; pass state=... to the step"
            )
        if state is not None:
            _check_state_kept(state, output.state)
        return output

    def check_step(self, sharded: Any, batch: Any, state: Any, mesh: Mesh, accumulated: LocalGrads | None) -> None:
        """Raise UsageError unless a step can run on these arguments."""
        ranks = num_ranks(mesh)
        _check_sharded(sharded, mesh)
        if accumulated is not None and (
            not isinstance(accumulated, LocalGrads) or accumulated.tree != sharded.tree or not accumulated.lines
        ):
            raise UsageError(
                f"accumulated: expected None or LocalGrads of the same parameters, got {type(accumulated).__name__}; a step "
                "with reduces=False returns them as grads"
            )
        for path, leaf in leaves_by_path(batch).items():
            shape = np.shape(leaf)
            if not shape or shape[0] % ranks:
                raise UsageError(
                    f"batch leaf {path!r}: expected a leading dim divisible by {ranks} ranks, got shape {shape}; "
                    "drop the last samples, or pad them and return LossOutput(loss, weight=...)"
                )
        for path, leaf in leaves_by_path(state).items():
            shape = np.shape(leaf)
            if not shape or shape[0] != ranks:
                raise UsageError(
                    f"state leaf {path!r}: expected a leading rank axis of size {ranks}, got shape {shape}; "
                    "make it with jax_backend.per_rank"
                )


def cast_batch(batch: Any, policy: PrecisionPolicy, api: Api) -> Any:
    """One rank's batch in the compute dtype, if the policy says so (R35). Integers are not cast."""

    def cast(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf.astype(policy.input_dtype(str(leaf.dtype), api, is_root=True))

    return jax.tree.map(cast, batch)


def _check_loss(loss: Any) -> None:
    if isinstance(loss, tuple | list | dict) or not hasattr(loss, "dtype"):
        raise UsageError(
            f"loss_fn: expected a scalar loss, got {type(loss).__name__}; to return more than the loss, return "
            "jax_backend.LossOutput(loss, aux=..., state=..., weight=...)"
        )
    if np.shape(loss) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise UsageError(
            f"loss_fn: expected a floating scalar as loss, got shape {np.shape(loss)} and dtype {loss.dtype}; "
            "return the mean over this rank's batch"
        )


def _check_state_kept(before: Any, after: Any) -> None:
    old, new = leaves_by_path(before), leaves_by_path(after)
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise UsageError(
            f"loss_fn: expected the state to keep its structure, with leaves {list(old)}, got {list(new)}; "
            "return every leaf that came in"
        )
    for path, leaf in old.items():
        expected, got = ((np.shape(x), dtype_name(x)) for x in (leaf, new[path]))
        if expected != got:
            raise UsageError(
                f"loss_fn: state leaf {path!r}: expected shape and dtype {expected} as it came in, got {got}; "
                "cast or reshape it back"
            )


def _check_sharded(sharded: Any, mesh: Mesh) -> None:
    if not isinstance(sharded, ShardedParams):
        raise UsageError(f"expected ShardedParams, got {type(sharded).__name__}; make them with jax_backend.shard")
    ranks = mesh_spec(mesh).shard
    if sharded.tree.world_size != ranks:
        raise UsageError(
            f"expected parameters sharded over the mesh's {ranks} ranks, got {sharded.tree.world_size}; "
            "shard them on the mesh that value_and_grad was given"
        )
    if missing := sorted(sharded.tree.model_axes - set(model_axes(mesh))):
        raise UsageError(
            f"expected a mesh with the model axes {missing}, over which the parameters are divided, got one with "
            f"{list(model_axes(mesh))}; shard them on the mesh that value_and_grad was given"
        )
    for leaf in jax.tree.leaves(sharded):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise UsageError("the shards were donated to an earlier step: use those that it returned instead")
    expected = {bucket.name: bucket.shapes() for bucket in sharded.tree.buckets}
    got = {name: jax.tree.map(np.shape, arrays) for name, arrays in sharded.buckets.items()}
    if missing := sorted(bucket.name for bucket in sharded.tree.buckets if bucket.name not in got):
        raise UsageError(
            f"the frozen buckets {missing} are missing: pass all parameters, params.with_trainable(trained), not only trainable "
            "ones"
        )
    if expected != got:
        wrong = {name: (shape, got[name]) for name, shape in expected.items() if got[name] != shape}
        raise UsageError(
            f"expected and actual shapes of arrays differ, by bucket: {wrong}; do not reshape the leaves of shards"
        )
