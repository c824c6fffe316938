"""value_and_grad over sharded parameters: every rank runs the same function on its own batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from crossframe.api import Api
from crossframe.errors import UnsupportedError, UsageError
from crossframe.strategy import Strategy
from jax_backend.engine._gather import Reduction
from jax_backend.engine._loss_function import LossFunction
from jax_backend.engine._rank_step import run_on_ranks
from jax_backend.engine._step import Step, StepInputs
from jax_backend.mesh._device_mesh import check_mesh, mesh_spec, model_axes
from jax_backend.shards._local_grads import LocalGrads
from jax_backend.shards._sharded_params import ShardedParams

SHARD_MAP = "shard_map"
MODES = (SHARD_MAP, "jit")


class Result(NamedTuple):
    """What a step returns. N is the number of ranks.

    Attributes:
        loss: the mean of the ranks' losses, a scalar; weighted if the loss function returns weights.
        losses: each rank's loss, of shape (N,).
        grads: the mean gradient, sharded as the parameters are, 0 in the padding; with `reduces=False` LocalGrads.
        state: the new state, each leaf of shape (N, ...); None without one.
        aux: each leaf of shape (N, ...); None without one.
        local_grads: each rank's own gradient before any reduction; None unless requested.
    """

    loss: jax.Array
    losses: jax.Array
    grads: PyTree
    state: PyTree
    aux: PyTree
    local_grads: LocalGrads | None


def value_and_grad(
    loss_fn: Callable,
    mesh: Mesh,
    *,
    mode: str = "shard_map",
    strategy: Strategy | None = None,
    api: Api = Api.FSDP1,
    gradient_divide_factor: float | None = None,
    reduces: bool = True,
    local_grads: bool = False,
    late_gathers: bool = False,
) -> Callable[..., Result]:
    """The training step of a loss function: its value and its gradients, with respect to sharded parameters.

    `loss_fn(params, batch)` takes full parameters and one rank's batch, and returns the mean loss over that batch.
    A state and a PRNG key that the step is given reach it by name: `loss_fn(params, batch, state=state, rng=rng)`.
    To return more than the loss, it returns `LossOutput(loss, aux=..., state=..., weight=...)`.

    Args:
        loss_fn: see above. Parameters have the user's structure and axis order; batch statistics, dropout and means are one
            rank's.
        mesh: from `make_mesh`.
        mode: "shard_map": the program contains the collectives. "jit": XLA places them for the same program, whose ranks are
            mapped axes. docs/reference/jax.md lists what XLA does otherwise there.
        strategy: FULL_SHARD and HYBRID_SHARD gather every unit but the root again in backward, SHARD_GRAD_OP and
            HYBRID_SHARD_ZERO2 keep them (R13, R14). `shard(reshard_after_forward=...)` has precedence. None: FULL_SHARD,
            HYBRID_SHARD or NO_SHARD, as the mesh allows. JAX removes, on all ranks, the second gather of a unit whose values
            backward does not need (biases, for example), and the reduction of a unit that the loss does not use, which gets zeros
            (R29).
        api: the API whose division of gradients is used: FSDP1's around the sum, or FSDP2's mean (R26).
        gradient_divide_factor: divisor of gradients instead of the number of ranks (R27).
        reduces: False returns LocalGrads without any reduction (torch's no_sync, R15).
        local_grads: also return each rank's gradient before the reduction. Costs a full gradient on every rank.
        late_gathers: for CPU devices only. XLA's CPU compiler gathers all units at once, and up to JAX 0.11.0 merges the gathers
            of backward with those of forward, so that `memory_analysis` of a compiled step shows more memory than an accelerator
            needs. With True each gather is in a branch of a condition, where XLA leaves it, and the step is another program
            with the same results.

    Returns:
        `step(sharded, batch, state=None, rng=None, *, accumulated=None) -> Result`, to be called inside jit or outside. Leaves of
        `batch` have a leading dim divisible by N, whose i-th part goes to rank i. Leaves of `state`, which may be integers, keys
        and running statistics, have a leading rank axis (see `per_rank`), without which `loss_fn` takes and returns them. `rng`
        is folded with the rank by `jax.random.fold_in(rng, rank)`. `accumulated` are LocalGrads of earlier microbatches, which
        are added before the reduction; the loss function
        divides by their number. The step raises UsageError, before anything runs, for invalid arguments or results.

    Raises:
        UsageError: a mesh that `make_mesh` did not make, or an invalid option.
        UnsupportedError: a strategy that the mesh has no ranks for, or `late_gathers` on other devices than CPUs.
        PlanError: a divide factor that is not above 0.
    """
    return step_of(
        LossFunction(loss_fn), mesh, mode, strategy, api, gradient_divide_factor, reduces, local_grads, late_gathers
    )


def step_of(
    loss_fn: LossFunction,
    mesh: Mesh,
    mode: str = "shard_map",
    strategy: Strategy | None = None,
    api: Api = Api.FSDP1,
    gradient_divide_factor: float | None = None,
    reduces: bool = True,
    local_grads: bool = False,
    late_gathers: bool = False,
) -> Callable[..., Result]:
    """`value_and_grad` of a LossFunction. Its step also takes `seed`; see `StepInputs`."""
    check_mesh(mesh)
    if mode not in MODES:
        raise UsageError(f"mode: expected one of {MODES}, got {mode!r}")
    if not isinstance(api, Api):
        raise UsageError(f"api: expected a crossframe Api, got {api!r}")
    if late_gathers and (platform := mesh.devices.flat[0].platform) != "cpu":
        raise UnsupportedError(
            f"late_gathers: expected a mesh of CPU devices, got {platform!r}; leave it out, since it is to measure "
            "memory with XLA's CPU compiler"
        )
    reduction = Reduction(mesh_spec(mesh), api, gradient_divide_factor, reduces, mode == "jit", model_axes(mesh))
    reduction.check()
    settings = Step(loss_fn, mesh, _checked(strategy, mesh), reduction, local_grads, late_gathers)

    @jax.jit
    def run(sharded: ShardedParams, given: StepInputs) -> Result:
        losses, weights, grads, new_state, aux, own = run_on_ranks(settings, sharded, given)
        # Outside shard_map, so that no trace has a collective of a scalar.
        loss = losses.mean() if weights is None else (losses * weights).sum() / weights.sum()
        return Result(loss, losses, grads, new_state, aux, own)

    def step(
        sharded: ShardedParams,
        batch: PyTree[jax.Array],
        state: PyTree = None,
        rng: jax.Array | None = None,
        *,
        accumulated: LocalGrads | None = None,
        seed: Any = None,
    ) -> Result:
        loss_fn.check_step(sharded, batch, state, mesh, accumulated)
        return run(sharded, StepInputs(batch, state, rng, seed, accumulated))

    return step


def _checked(strategy: Strategy | None, mesh: Mesh) -> Strategy:
    spec = mesh_spec(mesh)
    if strategy is None:
        if spec.replicate == 1:
            return Strategy.FULL_SHARD
        return Strategy.NO_SHARD if spec.shard == 1 else Strategy.HYBRID_SHARD
    if not isinstance(strategy, Strategy):
        raise UsageError(f"strategy: expected a crossframe Strategy, got {strategy!r}")
    fits = {
        Strategy.FULL_SHARD: spec.replicate == 1,
        Strategy.SHARD_GRAD_OP: spec.replicate == 1,
        Strategy.NO_SHARD: spec.shard == 1,
        Strategy.HYBRID_SHARD: True,
        Strategy.HYBRID_SHARD_ZERO2: True,
    }[strategy]
    if not fits:
        size = "replicate=1" if strategy is not Strategy.NO_SHARD else "shard=1"
        raise UnsupportedError(
            f"strategy: {strategy.name} needs a mesh with {size}, got {spec.replicate} x {spec.shard} ranks; make the mesh by "
            f"make_mesh(Strategy.{strategy.name}.mesh({spec.world_size})), or leave the strategy to the mesh"
        )
    return strategy
