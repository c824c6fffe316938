"""The reduction of gradients over ranks (R26-R28): divide factors, and the steps of a reduction in order.

The order of operations affects the result (R32), so it is defined as data: `reduction_steps` lists the operations, and the
reductions in numpy, torch and JAX execute that list.
"""

import math
from dataclasses import dataclass, field
from enum import Enum

from crossframe.api import Api
from crossframe.dtypes import itemsize
from crossframe.errors import PlanError
from crossframe.mesh import MeshSpec, check_world_size
from crossframe.quoting import quote


class ReductionStep(Enum):
    """One operation on a rank's gradients of a unit, from full gradients to their sharded mean."""

    CAST_TO_REDUCED = "cast to the reduction's dtype"
    DIVIDE_BEFORE = "divide by the factor before"
    REDUCE_SCATTER = "sum over the shard group, keeping the own shard"
    DIVIDE_BETWEEN = "divide by the factor between"
    ADD_PARTIAL = "add what earlier microbatches left here"
    KEEP_PARTIAL = "leave it here for a later microbatch"
    ALL_REDUCE = "sum over the replicas"
    DIVIDE_AFTER = "divide by the factor after"
    CAST_TO_STORED = "cast to the dtype of storage"
    ACCUMULATE = "add it to the sharded gradient that is there, and round to that gradient's dtype"


def reduction_steps(mesh: MeshSpec, api: Api = Api.FSDP1, *, all_reduce: bool = True) -> tuple[ReductionStep, ...]:
    """The steps of one reduction, in order (R28).

    Args:
        all_reduce: False stops before the sum over replicas (FSDP2's `set_requires_all_reduce(False)`); the partial sum waits for
            the microbatch that all-reduces. Not supported by FSDP1.

    Raises:
        PlanError: `all_reduce=False` on a mesh with one replica, or under FSDP1.

    >>> [step.name for step in reduction_steps(MeshSpec(shard=2, replicate=2))]  # doctest: +NORMALIZE_WHITESPACE
    ['CAST_TO_REDUCED', 'DIVIDE_BEFORE', 'REDUCE_SCATTER', 'DIVIDE_BETWEEN', 'ALL_REDUCE', 'DIVIDE_AFTER', 'CAST_TO_STORED',
     'ACCUMULATE']
    """
    _check(mesh, api)
    step = ReductionStep
    steps = [step.CAST_TO_REDUCED, step.DIVIDE_BEFORE]
    if mesh.shard > 1:
        steps += [step.REDUCE_SCATTER]
    steps += [step.DIVIDE_BETWEEN]
    if mesh.replicate > 1:
        if api is Api.FSDP2:
            steps += [step.ADD_PARTIAL]
        if not all_reduce:
            if api is Api.FSDP1:
                raise PlanError(
                    "FSDP1 cannot postpone the sum over replicas: use no_sync, or FSDP2's set_requires_all_reduce"
                )
            return (*steps, step.KEEP_PARTIAL)
        steps += [step.ALL_REDUCE]
    elif not all_reduce:
        raise PlanError(f"there is no sum over replicas to postpone: the mesh has one replica of {mesh.shard} shards")
    return (*steps, step.DIVIDE_AFTER, step.CAST_TO_STORED, step.ACCUMULATE)


def _check(mesh: MeshSpec, api: Api) -> None:
    if not isinstance(mesh, MeshSpec) or not isinstance(api, Api):
        raise PlanError(f"expected a MeshSpec and an Api, got {quote(mesh)} and {quote(api)}")


@dataclass(frozen=True)
class DivideFactors:
    """The factors to divide by: `before` the sums, `between` the sum over shards and that over replicas, and `after` both.

    Their product is the number of ranks, or the user's own factor (R27).

    Attributes:
        averaged: whether the collectives themselves divide by `between` and `after`.
    """

    before: float
    after: float
    between: float = 1.0
    averaged: bool = field(default=False, repr=False)


def divide_factors(num_ranks: int) -> DivideFactors:
    """Split the division by the number of ranks into one before and one after the sum, against overflow and underflow (R26).

    The factor before the sum is the smallest power of two f that does not divide N, or for which f >= N / f:
    `f = 1; while N % f == 0 and N / f > f: f *= 2`, as in torch's FSDP1 for every dtype.

    >>> divide_factors(8), divide_factors(6)
    (DivideFactors(before=4.0, after=2.0, between=1.0), DivideFactors(before=4.0, after=1.5, between=1.0))
    """
    check_world_size(num_ranks)
    return _split(num_ranks)


def _split(factor: float) -> DivideFactors:
    before = 1
    while factor % before == 0 and factor / before > before:
        before *= 2
    return DivideFactors(float(before), factor / before)


def mean_factors(num_ranks: int, dtype: str, *, replicate: int = 1) -> DivideFactors:
    """The factors of FSDP2 (R26). In float32 and bfloat16 each collective averages: it divides by its own number of ranks after
    its sum. For other dtypes the division is split as in FSDP1.

    Args:
        num_ranks: number of ranks that are summed over, including replicas.
        replicate: number of replicas.

    >>> mean_factors(3, "float32"), mean_factors(3, "float64")
    (DivideFactors(before=1.0, after=3.0, between=1.0), DivideFactors(before=2.0, after=1.5, between=1.0))
    >>> mean_factors(6, "float32", replicate=2)
    DivideFactors(before=1.0, after=2.0, between=3.0)
    """
    check_world_size(num_ranks)
    check_world_size(replicate)
    if num_ranks % replicate:
        raise PlanError(f"expected a number of replicas that divides the {num_ranks} ranks, got {replicate}")
    itemsize(dtype)
    if dtype not in ("float32", "bfloat16"):
        return divide_factors(num_ranks)
    if replicate == 1:
        return DivideFactors(1.0, float(num_ranks), averaged=True)
    return DivideFactors(1.0, float(replicate), float(num_ranks // replicate), averaged=True)


def custom_factors(factor: float, dtype: str = "float32", *, sum_only: bool = False) -> DivideFactors:
    """The factors for a user's own divide factor, instead of the number of ranks (R27).

    In float32 and bfloat16 it is applied once, before the sum. In other dtypes, which may overflow, it is split around the sum.

    Args:
        sum_only: apply it after the sum in float32 and bfloat16, as for FSDP2's `set_force_sum_reduction_for_comms`.

    >>> custom_factors(3.0), custom_factors(8.0, "float16")
    (DivideFactors(before=3.0, after=1.0, between=1.0), DivideFactors(before=4.0, after=2.0, between=1.0))
    """
    itemsize(dtype)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise PlanError(f"expected a finite gradient divide factor above 0, got {quote(factor)}")
    if dtype in ("float32", "bfloat16"):
        return DivideFactors(1.0, float(factor)) if sum_only else DivideFactors(float(factor), 1.0)
    return _split(float(factor))


def factors_of(
    mesh: MeshSpec, api: Api, dtype: str, custom: float | None = None, *, sum_only: bool = False
) -> DivideFactors:
    """The factors of a reduction in `dtype` on a mesh: those of the API (R26), or of the user's own factor (R27).

    Args:
        api: the API.
        custom: the user's own divide factor; None: the number of ranks.
        sum_only: under FSDP2, collectives only sum, and the division follows the last of them.

    >>> factors_of(MeshSpec(shard=4, replicate=2), Api.FSDP1, "float32")
    DivideFactors(before=4.0, after=2.0, between=1.0)
    """
    _check(mesh, api)
    if custom is not None:
        return custom_factors(custom, dtype, sum_only=sum_only)
    if api is Api.FSDP1:
        return divide_factors(mesh.world_size)
    if sum_only:
        return custom_factors(mesh.world_size, dtype, sum_only=True)
    return mean_factors(mesh.world_size, dtype, replicate=mesh.replicate)


class Missing(Enum):
    """The gradient of a parameter that no rank's backward reached, as the optimizer gets it (R29)."""

    ZEROS = "zeros"
    NONE = "none"


def missing_grad(api: Api, *, unit_used: bool) -> Missing:
    """The gradient of an unused parameter (R29).

    With zeros, AdamW decays the parameter and its moments; with none, it changes neither.

    Args:
        unit_used: whether another parameter of its unit was used.
    """
    return Missing.ZEROS if api is Api.FSDP1 and unit_used else Missing.NONE
