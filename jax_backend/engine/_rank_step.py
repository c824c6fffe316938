"""The step of one rank, which computes on its own batch, gathers and reduces: mapped over ranks by shard_map or by vmap."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_backend.engine import _remat
from jax_backend.engine._gather import Source, gather
from jax_backend.engine._step import Step, StepInputs, kept, params_of, probes_of, sources_of
from jax_backend.mesh._device_mesh import data_axes, num_ranks, rank_partition
from jax_backend.mesh._shard_map import mapped
from jax_backend.mesh._vmap import vmap_over_mesh
from jax_backend.programs._late_gathers import gather_late
from jax_backend.ranks._collectives import rank_index, sum_over_ranks
from jax_backend.shards._bucket import Bucket
from jax_backend.shards._local_grads import LocalGrads
from jax_backend.shards._sharded_params import ShardedParams


def run_on_ranks(step: Step, sharded: ShardedParams, given: StepInputs) -> tuple[Any, ...]:
    """One step of all ranks: (losses, weights or None, gradients, state, aux, local gradients or None)."""
    tree, axes = sharded.tree, data_axes(step.mesh)

    def gathered(bucket: Bucket, source: Source) -> dict[str, jax.Array]:
        return gather(tree, bucket, source, tree.policy.resolve(bucket.layout.dtype), step.reduction)

    def on_rank(shards: Any, frozen: Any, batch: Any, state: Any, rng: Any, seed: Any, waiting: Any) -> Any:
        state, waiting = (jax.tree.map(lambda leaf: leaf[0], each) for each in (state, waiting))
        rng = None if rng is None else jax.random.fold_in(rng, rank_index(axes))
        own = StepInputs(batch, state, rng, seed)

        def apply(full: dict[str, Any], stacked: dict[str, Source]) -> Any:
            params = params_of(tree, full, stacked, gathered, step.frees(tree))
            loss, aux, state, weight = step.rank_loss(params, own, tree.policy)
            if weight is None:
                return loss, (loss, weight, state, aux)
            # The weight of a rank's mean in the mean over ranks.
            weight = jax.lax.stop_gradient(weight)
            counts = weight * num_ranks(step.mesh) / sum_over_ranks(weight, axes)
            return loss * counts.astype(loss.dtype), (loss, weight, state, aux)

        def loss_of(shards: dict[str, Any], probes: dict[str, jax.Array]) -> Any:
            sources = sources_of({**frozen, **shards}, probes, waiting)
            full = {bucket.name: gathered(bucket, sources[bucket.name]) for bucket in tree.plain}
            return apply(full, {bucket.name: sources[bucket.name] for bucket in tree.stacked})

        if any(step.frees(tree).values()):
            differentiate = _remat.value_and_grad(loss_of, step.saves(tree))
        else:
            differentiate = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
        if step.late_gathers:
            differentiate = gather_late(differentiate, axes if step.reduction.by_xla else None)
        (_, rest), (grads, local) = differentiate(shards, probes_of(tree, step))
        reduced = {}
        if step.reduction.now:
            reduced = {bucket.name: kept(bucket, grads[bucket.name], tree.policy) for bucket in tree.trainable}
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], (*rest, local)), reduced

    by_rank, shards_at = rank_partition(step.mesh), tree.rank_partitions
    # With check_vma=True JAX would sum cotangents of values that are equal on all ranks by itself, in its own dtype and place.
    # Here the gather's backward does all reductions.
    run = (vmap_over_mesh if step.reduction.by_xla else partial(mapped, axes=axes))(
        on_rank,
        step.mesh,
        (shards_at(sharded.shards), shards_at(sharded.frozen), by_rank, by_rank, P(), P(), by_rank),
        (by_rank, shards_at(sharded.shards) if step.reduction.now else {}),
    )
    waiting = given.accumulated.lines if given.accumulated is not None else None
    (losses, weights, new_state, aux, own), grads = run(sharded.shards, sharded.frozen, *given[:4], waiting)
    local = LocalGrads(own, tree) if step.probes else None
    reduced = ShardedParams(grads, tree) if step.reduction.now else local
    return losses, weights, reduced, new_state, aux, local if step.local_grads else None
