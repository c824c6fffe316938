"""value_and_grad over sharded parameters, by shard_map: every rank runs the same function on its own batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from crossframe.errors import UnsupportedError
from crossframe.plan import PlannedUnit, plan_units
from crossframe.strategy import Strategy
from jax_backend.collectives import rank_index
from jax_backend.contract import Contract
from jax_backend.gather import gather
from jax_backend.mesh import SHARD_AXIS, check_mesh, num_ranks
from jax_backend.remat import reshard_after_forward
from jax_backend.sharded import ShardedParams
from jax_backend.tree import ParamTree


class Result(NamedTuple):
    """What a step returns. N is the number of ranks.

    Attributes:
        loss: the mean of the ranks' losses, a scalar.
        losses: each rank's loss, of shape (N,).
        grads: the mean gradient, sharded as the parameters are, 0 in the padding.
        state: the new state, each leaf of shape (N, ...); None unless declared.
        aux: each leaf of shape (N, ...); None unless declared.
        local_grads: None, or by unit each rank's own gradient before any reduction, of shape (N, gathered_numel). Its
            rows are read by `grads.tree.views(unit, row)`.
    """

    loss: jax.Array
    losses: jax.Array
    grads: ShardedParams
    state: Any
    aux: Any
    local_grads: dict[str, jax.Array] | None


def value_and_grad(
    loss_fn: Callable,
    mesh: Mesh,
    *,
    strategy: Strategy = Strategy.FULL_SHARD,
    has_state: bool = False,
    has_rng: bool = False,
    has_aux: bool = False,
    local_grads: bool = False,
) -> Callable[..., Result]:
    """The step of `loss_fn(params, state, batch, rng) -> (loss, (state, aux))`, of which undeclared parts are left out.

    `loss_fn` sees full parameters, in the user's structure and axis order, and one rank's batch: batch statistics,
    dropout and means are one rank's. It returns the mean loss over that batch.

    Args:
        mesh: from `make_mesh`.
        strategy: FULL_SHARD gathers every unit but the root again in backward, SHARD_GRAD_OP keeps what forward
            gathered (R13, R14). A unit whose values backward does not need (biases alone, say) is not gathered again;
            one that the loss does not use gets zeros, without any reduction: JAX removes both, on all ranks alike (R29).
        has_state: it takes state, one rank's, without the rank axis, and returns state of the same shapes and dtypes:
            integers, rng keys, running statistics.
        has_rng: it takes a PRNG key, which is the step's folded with the rank: `jax.random.fold_in(rng, rank)`.
        has_aux: it returns aux, any pytree of arrays.
        local_grads: also return what each rank would reduce. Costs a full gradient on every rank.

    Returns:
        `step(sharded, batch, state=None, rng=None) -> Result`, to be called as it is or inside jit. The leaves of
        `batch` have a leading dim divisible by N, of which rank i takes the i-th part; those of `state` a leading rank
        axis (see `per_rank`). The step raises UsageError, before anything runs, for arguments or results of another
        form.
    """
    check_mesh(mesh)
    if strategy not in (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP):
        raise UnsupportedError(
            f"strategy: expected FULL_SHARD or SHARD_GRAD_OP, which shard over all ranks, got {strategy!r}"
        )
    ranks = num_ranks(mesh)
    contract = Contract(has_state, has_rng, has_aux)

    @jax.jit
    def run(sharded: ShardedParams, batch: Any, state: Any, rng: Any) -> Result:
        tree = sharded.tree

        def on_rank(shards, batch, state, rng):
            state = jax.tree.map(lambda leaf: leaf[0], state)
            rng = jax.random.fold_in(rng, rank_index()) if has_rng else None

            def rank_loss(params):
                return contract.call(loss_fn, params, state, batch, rng)

            probes = _probes(tree) if local_grads else {}
            differentiate = jax.value_and_grad(_over_shards(rank_loss, tree, strategy), argnums=(0, 1), has_aux=True)
            (loss, (new_state, aux)), (grads, own) = differentiate(shards, probes)
            return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], (loss, new_state, aux, own)), grads

        # check_vma=False: otherwise JAX sums the cotangent of whatever is equal on all ranks over the ranks by itself,
        # in a dtype and at a place of its own. Here the gather's backward does all reducing, and the plan says how.
        per_rank, grads = jax.shard_map(
            on_rank,
            mesh=mesh,
            in_specs=(P(SHARD_AXIS), P(SHARD_AXIS), P(SHARD_AXIS), P()),
            out_specs=(P(SHARD_AXIS), P(SHARD_AXIS)),
            check_vma=False,
        )(sharded.shards, batch, state, rng)
        losses, new_state, aux, own = per_rank
        # The mean is taken out here, so that no unit's trace holds a collective of a mere number.
        return Result(losses.mean(), losses, ShardedParams(grads, tree), new_state, aux, own if local_grads else None)

    def step(sharded: ShardedParams, batch: Any, state: Any = None, rng: Any = None) -> Result:
        contract.check_step(sharded, batch, state, rng, ranks)
        return run(sharded, batch, state, rng)

    return step


def _probes(tree: ParamTree) -> dict[str, jax.Array]:
    return {unit: jnp.zeros(layout.gathered_numel, layout.dtype) for unit, layout in tree.units}


def _over_shards(loss_of: Callable, tree: ParamTree, strategy: Strategy) -> Callable:
    """`loss_of(params)` as a function of one rank's shards and probes, gathered when the plan says."""
    planned = plan_units(tree.units, strategy)

    def gathered(units: list[PlannedUnit], shards: dict, probes: dict) -> dict[str, jax.Array]:
        return {u.name: gather(u.name, shards[u.name], tree.world_size, probes.get(u.name)) for u in units}

    kept = [unit for unit in planned if not unit.reshard_after_forward]
    freed = [unit for unit in planned if unit.reshard_after_forward]

    def loss_of_shards(shards, probes):
        # What is kept is gathered outside of the region that runs again.
        full = gathered(kept, shards, probes)

        def rest(full, shards, probes):
            return loss_of(tree.params(full | gathered(freed, shards, probes)))

        return (reshard_after_forward(rest) if freed else rest)(full, shards, probes)

    return loss_of_shards
