"""The gather of a bucket: forward gathers its shards, backward reduces its gradient as the core's plan says (R26, R28, R33).

[Note: why the gather has a backward of its own] Differentiating all_gather gives a plain sum over ranks, in the dtype
and at the place that JAX chooses. The reduction is part of what sharded training means: cast, divide, reduce-scatter, all-reduce,
divide, cast, with steps and factors that the core lists and that torch follows too, so that both agree bit for bit where a sum
has one order (R32: two ranks).
"""

import math
from dataclasses import dataclass
from typing import assert_never

import jax
import jax.numpy as jnp

from crossframe.faces import Face
from crossframe.mesh import MeshSpec
from crossframe.precision import Precision
from crossframe.reduction import ReductionStep, factors_of, reduction_steps
from crossframe.trace import ALL_GATHER
from jax_backend.ranks._collectives import all_gather, all_reduce, reduce_scatter, scope_name
from jax_backend.shards._bucket import Bucket
from jax_backend.shards._param_tree import ParamTree


@dataclass(frozen=True)
class Reduction:
    """What becomes of all ranks' gradients.

    Attributes:
        mesh: the grid of ranks.
        face: whose division and order.
        factor: the user's own divide factor (R27); None: the number of ranks.
        now: False leaves every rank's gradient as it is, for a later microbatch (R15).
    """

    mesh: MeshSpec
    face: Face = Face.FSDP1
    factor: float | None = None
    now: bool = True

    def check(self) -> None:
        """Raise PlanError unless the factor is one to divide by."""
        factors_of(self.mesh, self.face, "float32", self.factor)

    def __call__(self, label: str, grad: jax.Array, precision: Precision) -> jax.Array:
        """The mean over ranks of full gradients, this rank's part of it: (gathered_numel,) to (padded_shard_numel,).

        Args:
            label: the bucket's.
            grad: of any floating dtype.
            precision: the bucket's dtypes; the result is of `precision.kept`.
        """
        factors = factors_of(self.mesh, self.face, precision.reduced, self.factor)
        for each in reduction_steps(self.mesh, self.face):
            match each:
                case ReductionStep.CAST_TO_REDUCED:
                    grad = grad.astype(precision.reduced)
                case ReductionStep.DIVIDE_BEFORE:
                    grad = divide(grad, factors.before)
                case ReductionStep.REDUCE_SCATTER:
                    grad = reduce_scatter(grad, label)
                case ReductionStep.DIVIDE_BETWEEN:
                    grad = divide(grad, factors.between)
                case ReductionStep.ALL_REDUCE:
                    grad = all_reduce(grad, label)
                case ReductionStep.DIVIDE_AFTER:
                    grad = divide(grad, factors.after)
                case ReductionStep.CAST_TO_KEPT:
                    grad = grad.astype(precision.kept)
                case ReductionStep.ADD_PARTIAL | ReductionStep.ACCUMULATE:
                    pass  # there are no partial sums here (R15), and the gradient is returned
                case ReductionStep.KEEP_PARTIAL:
                    raise AssertionError("every reduction here goes on over the replicas")
                case _:
                    assert_never(each)
        return grad


def gather(
    tree: ParamTree,
    bucket: Bucket,
    shard: jax.Array,
    precision: Precision,
    reduction: Reduction,
    probe: jax.Array | None = None,
    waiting: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """The leaves in all shards of a bucket, differentiable.

    Args:
        tree: where they lie.
        shard: this rank's, of shape (padded_shard_numel,).
        precision: the bucket's dtypes.
        reduction: of its gradient.
        probe: None, or zeros of shape (gathered_numel,) whose gradient is then this rank's own, before any reduction.
        waiting: None, or this rank's own gradient of earlier microbatches, of that shape, which is added first.

    Returns:
        By path, of `precision.gathered`. Their cotangents reach the shard as the mean over ranks, of shape
        (padded_shard_numel,); as zeros, if nothing is reduced now. Frozen buckets get none.
    """

    def whole(shard: jax.Array) -> dict[str, jax.Array]:
        line = shard.astype(precision.gathered)
        # In one scope, so that `when_needed` cuts where it gathers.
        with jax.named_scope(scope_name(ALL_GATHER, bucket.label)):
            found = tree.views(bucket.name, all_gather(line, bucket.label))
        return tree.leaves_of(bucket, found)

    if not bucket.trainable:
        return whole(jax.lax.stop_gradient(shard))

    @jax.custom_vjp
    def gathered(shard, probe, waiting):
        return forward(shard, probe, waiting)[0]

    # Not by calling `gathered`: the policy that saves no gathered parameter must find the primitive itself here.
    def forward(shard, probe, waiting):
        del probe
        return whole(shard), waiting

    def backward(waiting, grads):
        grad = joined(tree, bucket, grads)
        own = grad.astype(precision.accumulated(reduction.face)) if waiting is not None or not reduction.now else grad
        if waiting is not None:
            own = own + waiting
        reduced = reduction(bucket.label, own, precision) if reduction.now else jnp.zeros(shard.shape, shard.dtype)
        # A cotangent has its primal's dtype: what is kept in low precision is widened again, without another rounding.
        return (
            reduced.astype(shard.dtype),
            None if probe is None else own.astype(probe.dtype),
            None if waiting is None else jnp.zeros_like(waiting),
        )

    gathered.defvjp(forward, backward)
    return gathered(shard, probe, waiting)


def joined(tree: ParamTree, bucket: Bucket, grads: dict[str, jax.Array]) -> jax.Array:
    """Gradients of a bucket's leaves in one line, shape (gathered_numel,), with 0 in the padding."""
    dtype = next(iter(grads.values())).dtype
    line = jax.ShapeDtypeStruct((bucket.layout.gathered_numel,), dtype)
    (found,) = jax.linear_transpose(lambda line: tree.cut(bucket, line), line)(grads)
    return found


def divide(array: jax.Array, factor: float) -> jax.Array:
    """`array / factor`, correctly rounded, in the array's dtype; below float32 divided in float32, as torch does.

    XLA turns a division by any scalar, constant or not, into a product with its rounded reciprocal: another number,
    unless the factor is a power of two. It leaves a division by an array alone, so other factors are given as an array
    that XLA cannot see through: what a NaN is divided by does not matter.
    """
    if factor == 1.0:
        return array
    wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    divisor = jnp.asarray(factor, wide.dtype)
    if math.frexp(factor)[0] != 0.5:
        divisor = jnp.where(jnp.isnan(wide), jnp.ones_like(wide), divisor)
    return (wide / divisor).astype(array.dtype)
