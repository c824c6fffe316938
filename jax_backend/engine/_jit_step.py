"""A step whose collectives XLA places: under jit, over sharded arrays, with the ranks as an additional axis.

[Note: a rank under jit] A program under jit is written for the whole mesh: a mean over the batch would be over the samples of all
ranks, and batch norm another function. So the batch gets a leading axis of ranks, sharded over the mesh, and the loss function is
mapped over it: it sees one rank's values, as under shard_map. Full parameters get that axis too, with each rank's copy on its own
device, so that there is a gradient for each rank, reduced as the core lists it: cast, divide, sum over the shard group, divide,
sum over replicas, divide, cast. How XLA computes these sums is not under our control: see `NOT_HONOURED`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from crossframe.precision import Precision
from crossframe.reduction import factors_of
from crossframe.trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from jax_backend.engine._gather import Reduction, Source, divide, joined, with_backward
from jax_backend.engine._step import Step, StepInputs, kept, over_shards, params_of, probes_of, sources_of
from jax_backend.mesh._device_mesh import REPLICATE_AXIS, SHARD_AXIS, rank_partition
from jax_backend.programs._late_gathers import gather_late, merges_gathers
from jax_backend.ranks._collectives import scope_name
from jax_backend.shards._bucket import Bucket
from jax_backend.shards._local_grads import LocalGrads
from jax_backend.shards._param_tree import ParamTree
from jax_backend.shards._sharded_params import ShardedParams

NOT_HONOURED = (
    "the order of a sum over ranks: XLA may sum over the shard group and over replicas at once",
    "reduce_dtype: XLA may sum in a wider dtype, as its CPU backend does with 16 bits",
    "reduce-scatter: XLA may all-reduce a full gradient and keep a part, as its CPU backend does",
    "reshard_after_forward: XLA may keep gathered parameters, except inside jax_backend.scan",
    "the reduction of stacked units: the sum is in the stored dtype, over all ranks at once",
    "collectives in the loss function: it has no axis of ranks",
)
"""What mode="jit" cannot guarantee, or does differently from "shard_map"."""


def run_under_jit(step: Step, sharded: ShardedParams, given: StepInputs) -> tuple[Any, ...]:
    """One step of all ranks: (losses, weights or None, gradients, state, aux, local gradients or None)."""
    tree, mesh, num_ranks, reduction = sharded.tree, step.mesh, step.mesh.size, step.reduction

    def ranked(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        return _cut(leaf.reshape(num_ranks, leaf.shape[0] // num_ranks, *leaf.shape[1:]), mesh, mesh.axis_names)

    batch = jax.tree.map(ranked, given.batch)
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    keys = fold(given.rng, jnp.arange(num_ranks)) if step.loss_fn.has_rng else None
    lines = {name: tree.by_name[name].to_gathered(arrays) for name, arrays in sharded.buckets.items()}
    trained = {bucket.name: lines.pop(bucket.name) for bucket in tree.trainable}
    probes = {
        name: _cut(jnp.zeros((num_ranks, *probe.shape), probe.dtype), mesh, mesh.axis_names)
        for name, probe in probes_of(tree, step).items()
    }

    def spread(bucket: Bucket, source: Source) -> dict[str, jax.Array]:
        return _spread(tree, bucket, source, tree.policy.resolve(bucket.layout.dtype), reduction, mesh)

    def apply(full: dict[str, Any], stacked: dict[str, Source]) -> Any:
        def on_rank(here: Any, full: Any, stacked: Any, state: Any, batch: Any, key: Any) -> tuple[Any, ...]:
            def layer(bucket: Bucket, source: Source) -> dict[str, jax.Array]:
                precision = tree.policy.resolve(bucket.layout.dtype)
                return tree.cut(bucket, _layer(bucket, source, here, precision, reduction, mesh))

            params = params_of(tree, full, stacked, layer, step.frees(tree))
            return step.rank_loss(params, StepInputs(batch, state, key, given.seed), tree.policy)

        axes = (0, 0, {name: Source(None, 0, 0) for name in stacked}, 0, 0, 0)
        by_rank = jax.vmap(on_rank, in_axes=axes, spmd_axis_name=mesh.axis_names)
        losses, weights, *rest = by_rank(jnp.zeros((num_ranks, 0)), full, stacked, given.state, batch, keys)
        if weights is None:
            return losses.sum(), (losses, weights, *rest)
        weights = jax.lax.stop_gradient(weights)
        counts = weights * num_ranks / weights.sum()
        return (losses * counts.astype(losses.dtype)).sum(), (losses, weights, *rest)

    def loss_of(trained: dict[str, jax.Array], probes: dict[str, jax.Array]) -> Any:
        waiting = given.accumulated.lines if given.accumulated is not None else None
        return over_shards(tree, step, spread, apply)(sources_of({**lines, **trained}, probes, waiting))

    differentiate = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
    if merges_gathers(mesh):
        differentiate = gather_late(differentiate, (ALL_GATHER, REDUCE_SCATTER), lambda numbers: _cut(numbers, mesh))
    (_, rest), (grads, own) = differentiate(trained, probes)
    local = LocalGrads(own, tree) if step.probes else None
    reduced: Any = local
    if reduction.now:
        made = {}
        for bucket in tree.trainable:
            line = grads[bucket.name]
            if bucket in tree.stacked:
                factors = factors_of(reduction.mesh, reduction.api, str(line.dtype), reduction.factor)
                line = _cut(divide(divide(line, factors.between), factors.after), mesh, None, SHARD_AXIS)
            made[bucket.name] = bucket.constrained(bucket.from_gathered(kept(bucket, line, tree.policy)), mesh)
        reduced = ShardedParams(made, tree)
    losses, weights, new_state, aux = rest
    new_state, aux = jax.tree.map(
        lambda leaf: jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, rank_partition(mesh))), (new_state, aux)
    )
    return losses, weights, reduced, new_state, aux, local if step.local_grads else None


def _cut(array: jax.Array, mesh: Mesh, *partition: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P(*partition)))


def _gathered(line: jax.Array, bucket: Bucket, mesh: Mesh) -> jax.Array:
    """The full line on every device."""
    with jax.named_scope(scope_name(ALL_GATHER, bucket.label)):
        return _cut(_cut(line, mesh, SHARD_AXIS), mesh)


def _spread(
    tree: ParamTree, bucket: Bucket, source: Source, precision: Precision, reduction: Reduction, mesh: Mesh
) -> dict[str, jax.Array]:
    """A bucket's full leaves for each rank, by path: (gathered_numel,) to (num_ranks, ...). See `gather`."""

    def copies(line: jax.Array) -> dict[str, jax.Array]:
        line = line.astype(precision.gathered)
        with jax.named_scope(scope_name(ALL_GATHER, bucket.label)):
            found = tree.views(bucket.name, _gathered(line, bucket, mesh))
        # In the user's layout before they get the axis of ranks, after which XLA would copy them to transpose them.
        return {
            path: _cut(jnp.broadcast_to(leaf, (mesh.size, *leaf.shape)), mesh, mesh.axis_names)
            for path, leaf in tree.leaves_of(bucket, found).items()
        }

    if not bucket.trainable:
        return copies(jax.lax.stop_gradient(source.line))

    by_rank = jax.vmap(lambda own: joined(tree, bucket, own), spmd_axis_name=mesh.axis_names)
    return with_backward(
        source,
        copies,
        lambda grads: _cut(by_rank(grads), mesh, mesh.axis_names),
        lambda own: _reduced(own, bucket, precision, reduction, mesh),
        precision,
        reduction,
        scope=lambda: jax.named_scope(scope_name(REDUCE_SCATTER, bucket.label)),
    )


def _layer(
    bucket: Bucket, source: Source, here: jax.Array, precision: Precision, reduction: Reduction, mesh: Mesh
) -> jax.Array:
    """One layer of a stacked bucket for one rank. The map over ranks sums the results of its backward.

    Args:
        here: an empty array of each rank's own, appended to the gathered line. Without it the map would take the line for a value
            common to all ranks, and sum its gradient too early.
    """

    def whole(line: jax.Array, here: jax.Array) -> jax.Array:
        full = _gathered(line.astype(precision.gathered), bucket, mesh)
        return jnp.concatenate([full, here.astype(full.dtype)])

    if not bucket.trainable:
        return whole(jax.lax.stop_gradient(source.line), here)
    factors = factors_of(reduction.mesh, reduction.api, str(source.line.dtype), reduction.factor)
    return with_backward(
        source,
        whole,
        lambda grad: grad,
        lambda own: divide(own.astype(precision.reduced), factors.before),
        precision,
        reduction,
        here,
    )


def _reduced(grads: jax.Array, bucket: Bucket, precision: Precision, reduction: Reduction, mesh: Mesh) -> jax.Array:
    """The mean over ranks of their gradients: (num_ranks, gathered_numel) to (gathered_numel,), sharded over the shard axis."""
    spec = reduction.mesh
    by_group = (REPLICATE_AXIS if spec.replicate > 1 else None,)

    def reduce_scatter(grads: jax.Array) -> jax.Array:
        with jax.named_scope(scope_name(REDUCE_SCATTER, bucket.label)):
            return _cut(_sum(grads.reshape(spec.replicate, spec.shard, -1), 1), mesh, *by_group, SHARD_AXIS)

    def all_reduce(grads: jax.Array) -> jax.Array:
        with jax.named_scope(scope_name(ALL_REDUCE, bucket.label)):
            return _cut(_sum(grads, 0), mesh, SHARD_AXIS)

    grads = grads.reshape(spec.replicate, -1) if spec.shard == 1 else grads
    return reduction.steps(grads, precision, reduce_scatter, all_reduce).reshape(-1)


def _sum(array: jax.Array, dim: int) -> jax.Array:
    """The sum over a dim, in the array's own dtype, which jnp.sum would widen."""
    return jax.lax.reduce(array, jnp.zeros((), array.dtype), jax.lax.add, (dim,))
