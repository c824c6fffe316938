"""The settings of a step: what it reduces and reshards, and what backward recomputes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from crossframe.plan import plan_units
from crossframe.precision import PrecisionPolicy
from crossframe.strategy import Strategy
from crossframe.trace import ALL_GATHER
from jax_backend.engine._gather import Reduction, Source
from jax_backend.engine._loss_function import LossFunction, LossOutput, cast_batch
from jax_backend.engine._remat import computes, gathers
from jax_backend.engine._scan import Stack, StackedLeaf
from jax_backend.other_rounding import other_rounding
from jax_backend.ranks._collectives import parts_of, scope_label
from jax_backend.shards._bucket import Bucket
from jax_backend.shards._local_grads import LocalGrads
from jax_backend.shards._param_tree import ParamTree


class StepInputs(NamedTuple):
    """The arguments of a step besides parameters, of all ranks or of one.

    Attributes:
        batch: the batch.
        state: the state, or None; of all ranks, with a leading rank axis.
        rng: a key, or None.
        seed: selects another rounding of the loss (`jax_backend.other_rounding`); None: the loss as it is.
        accumulated: gradients of earlier microbatches, or None.
    """

    batch: Any
    state: Any = None
    rng: Any = None
    seed: Any = None
    accumulated: LocalGrads | None = None


@dataclass(frozen=True)
class Step:
    """The settings of a step.

    Attributes:
        loss_fn: the loss of one rank.
        mesh: the ranks.
        strategy: a strategy that fits the mesh.
        reduction: the reduction of gradients.
        local_grads: whether each rank's own gradients are returned too.
        late_gathers: whether gathers wait in branches of conditions (`programs/_late_gathers.py`).
    """

    loss_fn: LossFunction
    mesh: Mesh
    strategy: Strategy
    reduction: Reduction
    local_grads: bool
    late_gathers: bool

    @property
    def mode(self) -> str:
        """The mode that `value_and_grad` was given."""
        return "jit" if self.reduction.by_xla else "shard_map"

    @property
    def probes(self) -> bool:
        """Whether each rank's own gradients are needed."""
        return self.local_grads or not self.reduction.now

    def rank_loss(self, params: Any, given: StepInputs, policy: PrecisionPolicy) -> LossOutput:
        """The user's function on one rank, with this rank's batch, state and rng."""
        loss_fn = self.loss_fn if given.seed is None else other_rounding(self.loss_fn, given.seed)
        return loss_fn(params, given.state, cast_batch(given.batch, policy, self.reduction.api), given.rng)

    def frees(self, tree: ParamTree) -> dict[str, bool]:
        """For each unit, whether backward gathers it again (R13, R14)."""
        planned = plan_units(
            tree.units,
            self.strategy,
            api=self.reduction.api,
            reshard_after_forward=tree.reshard_after_forward,
            policy=tree.policy,
        )
        return {unit.name: bool(unit.reshard_after_forward) and self.reduction.mesh.shard > 1 for unit in planned}

    def saves(self, tree: ParamTree) -> Callable[[Any], bool]:
        """Whether the results of an equation of forward are saved for backward, which recomputes the others."""
        frees = self.frees(tree)

        def decide(equation: Any) -> bool:
            if computes(equation) or not gathers(equation):
                return computes(equation)
            label = scope_label(ALL_GATHER, str(equation.source_info.name_stack))
            return label is None or not frees.get(parts_of(label)[0], False)

        return decide


def sources_of(
    shards: Mapping[str, Any], probes: Mapping[str, Any], waiting: Mapping[str, Any] | None
) -> dict[str, Source]:
    """The Source of each bucket, from shards, probes and waiting gradients by bucket."""
    return {name: Source(shard, probes.get(name), (waiting or {}).get(name)) for name, shard in shards.items()}


def params_of(
    tree: ParamTree,
    full: Mapping[str, Any],
    stacked: Mapping[str, Source],
    gather_layer: Callable[[Bucket, Source], dict[str, jax.Array]],
    frees: Mapping[str, bool],
) -> Any:
    """The user's pytree on one rank: full parameters, with a StackedLeaf for each leaf of a stacked unit.

    Args:
        frees: for each unit, whether backward gathers it again.
    """
    shown = dict(full)
    for unit in {tree.by_name[name].unit: None for name in stacked}:
        members = tuple(bucket for bucket in tree.buckets if bucket.unit == unit)
        stack = Stack(
            tree, members, {bucket.name: stacked[bucket.name] for bucket in members}, gather_layer, frees[unit]
        )
        for bucket in members:
            shown[bucket.name] = {path: StackedLeaf(stack, path) for path in tree.paths_of(bucket)}
    return tree.params(shown)


def probes_of(tree: ParamTree, step: Step) -> dict[str, jax.Array]:
    """Zeros of the shape of a rank's own gradient, by bucket; empty unless these gradients are needed."""
    found = {}
    for bucket in tree.trainable if step.probes else ():
        precision = tree.policy.resolve(bucket.layout.dtype)
        dtype = precision.gathered if step.reduction.now else precision.accumulated(step.reduction.api)
        found[bucket.name] = jnp.zeros((*bucket.lead, bucket.layout.gathered_numel), dtype)
    return found


def kept(bucket: Bucket, grads: Any, policy: PrecisionPolicy) -> Any:
    """Reduced gradients of a bucket in the dtype that the policy keeps them in."""
    return jax.tree.map(lambda grad: grad.astype(policy.resolve(bucket.layout.dtype).kept), grads)
