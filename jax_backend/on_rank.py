"""A step in which collectives are explicit: by shard_map, each rank computes on its own batch, gathers and reduces."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from crossframe.plan import plan_units
from crossframe.strategy import Strategy
from jax_backend.collectives import rank_index, sum_over_ranks
from jax_backend.contract import Contract
from jax_backend.gather import Reduction, gather
from jax_backend.local_grads import LocalGrads
from jax_backend.mesh import rank_partition
from jax_backend.remat import reshard_after_forward
from jax_backend.scan import Stack, StackedLeaf
from jax_backend.sharded import ShardedParams
from jax_backend.tree import Bucket, ParamTree


@dataclass(frozen=True)
class Step:
    """What `value_and_grad` was given.

    Attributes:
        loss_fn, mesh: as there.
        contract: which parts the loss function has.
        strategy: as the mesh has it.
        reduction: of gradients.
        local_grads: whether they are returned too.
    """

    loss_fn: Callable
    mesh: Mesh
    contract: Contract
    strategy: Strategy
    reduction: Reduction
    local_grads: bool

    def rank_loss(self, params: Any, state: Any, batch: Any, rng: Any, policy: Any) -> tuple[jax.Array, Any]:
        """The user's function on one rank: (what is differentiated, (loss, weight or None, state, aux))."""
        batch = self.contract.cast_batch(batch, policy, self.reduction.face)
        loss, weight, state, aux = self.contract.call(self.loss_fn, params, state, batch, rng)
        return loss, (loss, weight, state, aux)


def run_on_ranks(
    step: Step, sharded: ShardedParams, batch: Any, state: Any, rng: Any, accumulated: LocalGrads | None
) -> tuple[Any, ...]:
    """One step: (losses, weights or None, gradients, state, aux, local gradients or None), all ranks' side by side."""
    tree, axes, contract = sharded.tree, step.mesh.axis_names, step.contract
    probed = step.local_grads or not step.reduction.now

    def on_rank(shards: Any, frozen: Any, batch: Any, state: Any, rng: Any, waiting: Any) -> Any:
        state, waiting = (jax.tree.map(lambda leaf: leaf[0], each) for each in (state, waiting))
        rng = jax.random.fold_in(rng, rank_index(axes)) if contract.has_rng else None
        lines = {name: tree.by_name[name].to_line(each) for name, each in {**shards, **frozen}.items()}
        trained = {bucket.name: lines.pop(bucket.name) for bucket in tree.trainable}
        probes = _probes(tree, step.reduction) if probed else {}

        def loss_of(trained: dict[str, jax.Array], probes: dict[str, jax.Array]) -> Any:
            def of_params(params: Any) -> Any:
                loss, rest = step.rank_loss(params, state, batch, rng, tree.policy)
                if rest[1] is None:
                    return loss, rest
                # What a rank's mean counts for in the mean over ranks.
                total = sum_over_ranks(jax.lax.stop_gradient(rest[1]), axes)
                return loss * (jax.lax.stop_gradient(rest[1]) * step.mesh.size / total).astype(loss.dtype), rest

            return _over_shards(of_params, tree, step)({**lines, **trained}, probes, waiting or {})

        (_, rest), (grads, own) = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(trained, probes)
        if step.reduction.now:
            kept = {name: tree.by_name[name].from_line(_kept(tree, name, line)) for name, line in grads.items()}
        else:
            kept = {}
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], (*rest, own)), kept

    by_rank, shards_at = rank_partition(step.mesh), tree.partitions
    # check_vma=False: otherwise JAX sums the cotangent of whatever is equal on all ranks over the ranks by itself,
    # in a dtype and at a place of its own. Here the gather's backward does all reducing, and the plan says how.
    (losses, weights, new_state, aux, own), grads = jax.shard_map(
        on_rank,
        mesh=step.mesh,
        in_specs=(shards_at(sharded.shards), shards_at(sharded.frozen), by_rank, by_rank, P(), by_rank),
        out_specs=(by_rank, shards_at(sharded.shards) if step.reduction.now else {}),
        check_vma=False,
    )(sharded.shards, sharded.frozen, batch, state, rng, accumulated.lines if accumulated is not None else None)
    local = LocalGrads(own, tree) if probed else None
    reduced = ShardedParams(grads, tree) if step.reduction.now else local
    return losses, weights, reduced, new_state, aux, local if step.local_grads else None


def _kept(tree: ParamTree, bucket: str, line: jax.Array) -> jax.Array:
    return line.astype(tree.policy.resolve(tree.by_name[bucket].layout.dtype).kept)


def _probes(tree: ParamTree, reduction: Reduction) -> dict[str, jax.Array]:
    found = {}
    for bucket in tree.trainable:
        precision = tree.policy.resolve(bucket.layout.dtype)
        stack = () if bucket.num_layers is None else (bucket.num_layers,)
        dtype = precision.gathered if reduction.now else precision.accumulated(reduction.face)
        found[bucket.name] = jnp.zeros((*stack, bucket.layout.gathered_numel), dtype)
    return found


def _over_shards(loss_of: Callable, tree: ParamTree, step: Step) -> Callable:
    """`loss_of(params)` as a function of one rank's lines, probes and waiting gradients, gathered when the plan says."""
    planned = plan_units(
        tree.units,
        step.strategy,
        face=step.reduction.face,
        reshard_after_forward=tree.reshard_after_forward,
        policy=tree.policy,
    )
    sharded = step.reduction.mesh.shard > 1
    frees = {unit.name: bool(unit.reshard_after_forward) and sharded for unit in planned}

    def gathered(bucket: Bucket, each: tuple[Any, Any, Any]) -> jax.Array:
        line, probe, waiting = each
        precision = tree.policy.resolve(bucket.layout.dtype)
        return gather(bucket, line, precision, step.reduction, probe, waiting)

    def full(frees_them: bool, sources: dict[str, tuple[Any, Any, Any]]) -> dict[str, Any]:
        return {
            bucket.name: gathered(bucket, sources[bucket.name])
            for bucket in tree.buckets
            if bucket.num_layers is None and frees[bucket.unit] is frees_them
        }

    def stacks(sources: dict[str, tuple[Any, Any, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for unit in {bucket.unit: None for bucket in tree.buckets if bucket.num_layers is not None}:
            members = tuple(bucket for bucket in tree.buckets if bucket.unit == unit)
            stack = Stack(tree, members, {b.name: sources[b.name] for b in members}, gathered)
            for bucket in members:
                names = (spec.name for spec in bucket.layout.params)
                found[bucket.name] = {name: StackedLeaf(stack, tree.param_map.by_name[name].path) for name in names}
        return found

    def loss_of_shards(lines: dict[str, jax.Array], probes: dict[str, jax.Array], waiting: dict[str, jax.Array]) -> Any:
        # What is kept is gathered outside of the region that runs again.
        kept = full(False, {name: (line, probes.get(name), waiting.get(name)) for name, line in lines.items()})

        def rest(kept, lines, probes, waiting):
            sources = {name: (line, probes.get(name), waiting.get(name)) for name, line in lines.items()}
            return loss_of(tree.params(kept | full(True, sources) | stacks(sources)))

        return (reshard_after_forward(rest) if any(frees.values()) else rest)(kept, lines, probes, waiting)

    return loss_of_shards
