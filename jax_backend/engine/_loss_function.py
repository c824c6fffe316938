"""The user's loss function in one form, and checks of its results and of a step's arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from crossframe.api import Api
from crossframe.errors import UsageError
from crossframe.precision import PrecisionPolicy
from jax_backend.mesh._device_mesh import mesh_spec, num_ranks
from jax_backend.shards._local_grads import LocalGrads
from jax_backend.shards._sharded_params import ShardedParams
from jax_backend.tree import dtype_name, leaves_by_path


class Outcome(NamedTuple):
    """The results of a loss function on one rank; None if not declared."""

    loss: jax.Array
    weight: jax.Array | None
    state: Any
    aux: Any


@dataclass(frozen=True)
class LossFunction:
    """A user's `fn(params, state, batch, rng) -> (loss, (state, aux))`, which takes and returns only what is declared.

    Attributes:
        fn: the function; with `has_weight` it returns (loss, weight) instead of the loss.
    """

    fn: Callable
    has_state: bool = False
    has_rng: bool = False
    has_aux: bool = False
    has_weight: bool = False

    def __call__(self, params: Any, state: Any, batch: Any, rng: Any) -> Outcome:
        """Call it on one rank.

        Raises:
            UsageError: a result of another form, a loss that is not a floating scalar, or a state that differs in structure,
                shapes or dtypes from the one passed in.
        """
        args = [params, *([state] if self.has_state else []), batch, *([rng] if self.has_rng else [])]
        loss, weight, new_state, aux = self.fn(*args), None, None, None
        if self.has_state and self.has_aux:
            loss, rest = _pair(loss, "(loss, (state, aux))")
            new_state, aux = _pair(rest, "(loss, (state, aux))")
        elif self.has_state:
            loss, new_state = _pair(loss, "(loss, state)")
        elif self.has_aux:
            loss, aux = _pair(loss, "(loss, aux)")
        if self.has_weight:
            loss, weight = _pair(loss, "(loss, weight) instead of the loss")
            if np.shape(weight) != ():
                raise UsageError(f"loss_fn: expected a scalar weight, got shape {np.shape(weight)}; return its sum")
            weight = jnp.asarray(weight)
        _check_loss(loss)
        if self.has_state:
            _check_state_kept(state, new_state)
        return Outcome(loss, weight, new_state, aux)

    def check_step(
        self, sharded: Any, batch: Any, state: Any, rng: Any, mesh: Mesh, accumulated: LocalGrads | None
    ) -> None:
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
                    "drop the last samples, or pad them and weight the loss by has_weight=True"
                )
        for name, declared, value in (("state", self.has_state, state), ("rng", self.has_rng, rng)):
            if declared and value is None:
                raise UsageError(f"{name}: expected one, since has_{name}=True, got None; pass {name}=... to the step")
            if not declared and value is not None:
                raise UsageError(f"{name}: expected None, got one; pass has_{name}=True to value_and_grad")
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
            f"loss_fn: expected a scalar loss, got {type(loss).__name__}; if it also returns state or aux, "
            "declare them by has_state=True, has_aux=True"
        )
    if np.shape(loss) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise UsageError(
            f"loss_fn: expected a floating scalar as loss, got shape {np.shape(loss)} and dtype {loss.dtype}; "
            "return the mean over this rank's batch"
        )


def _pair(result: Any, expected: str) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise UsageError(f"loss_fn: expected to return {expected}, got {got}; see has_state and has_aux")
    return result


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
