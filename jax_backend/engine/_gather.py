"""The gather of a bucket: forward gathers its shards, backward reduces its gradient as the core's plan says (R26, R28, R33).

[Note: why the gather has a backward of its own] The derivative of all_gather is a sum over ranks, in the dtype and at the place
that JAX chooses. The reduction is part of the definition of sharded training: cast, divide, reduce-scatter, all-reduce, divide,
cast, with the steps and factors that the core lists. torch follows them too, so that both agree bit for bit where a sum has one
order (R32: two ranks).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, assert_never

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from crossframe.api import Api
from crossframe.errors import UsageError
from crossframe.mesh import MeshSpec
from crossframe.precision import Precision
from crossframe.reduction import ReductionStep, factors_of, reduction_steps
from crossframe.trace import ALL_GATHER
from jax_backend.mesh._shard_map import mapped_inside
from jax_backend.ranks._collectives import all_gather, all_reduce, reduce_scatter, scope_name
from jax_backend.shards._bucket import Bucket, Operand
from jax_backend.shards._param_tree import ParamTree


@dataclass(frozen=True)
class Reduction:
    """The reduction of gradients over ranks.

    Attributes:
        mesh: the grid of ranks.
        api: the API whose division and order are used.
        factor: the user's divide factor (R27); None: the number of ranks.
        now: False leaves each rank's gradient as it is, for a later microbatch (R15).
        by_xla: whether XLA places the collectives (`mesh/_vmap.py`); not under shard_map.
        model_axes: the model axes of the mesh.
    """

    mesh: MeshSpec
    api: Api = Api.FSDP1
    factor: float | None = None
    now: bool = True
    by_xla: bool = False
    model_axes: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise PlanError if the factor is invalid."""
        factors_of(self.mesh, self.api, "float32", self.factor)

    def __call__(self, operand: Operand, grad: jax.Array, precision: Precision) -> jax.Array:
        """This rank's part of the mean over ranks of full gradients: (gathered_numel,) to (padded_shard_numel,).

        Args:
            operand: the bucket's line, or one of its arrays.
            grad: this rank's gradient, of any floating dtype.
            precision: the bucket's dtypes; the result has dtype `precision.kept`.
        """
        return self.on_parts(lambda grad: self._reduced(operand, grad, precision), operand)(grad)

    def gathered(self, operand: Operand, shard: jax.Array, precision: Precision) -> jax.Array:
        """The shards of a shard group, in the dtype `precision.gathered`: (padded_shard_numel,) to (gathered_numel,)."""

        def gather(shard: jax.Array) -> jax.Array:
            return all_gather(shard.astype(precision.gathered), operand.label, self._placed(operand), dim=operand.dim)

        return self.on_parts(gather, operand)(shard)

    def on_parts(self, fn: Callable[[jax.Array], jax.Array], operand: Operand) -> Callable[[jax.Array], jax.Array]:
        """`fn` of an array, applied to the parts of it that devices of a rank have; see [Note: collectives run on parts]."""
        if self.by_xla or not self.model_axes:
            return fn
        return mapped_inside(fn, operand.partition, self.model_axes)

    def _placed(self, operand: Operand) -> P | None:
        return operand.partition if self.by_xla else None

    def _reduced(self, operand: Operand, grad: jax.Array, precision: Precision) -> jax.Array:
        factors = factors_of(self.mesh, self.api, precision.reduced, self.factor)
        for each in reduction_steps(self.mesh, self.api):
            match each:
                case ReductionStep.CAST_TO_REDUCED:
                    grad = grad.astype(precision.reduced)
                case ReductionStep.DIVIDE_BEFORE:
                    grad = divide(grad, factors.before)
                case ReductionStep.REDUCE_SCATTER:
                    grad = reduce_scatter(grad, operand.label, self._placed(operand), dim=operand.dim)
                case ReductionStep.DIVIDE_BETWEEN:
                    grad = divide(grad, factors.between)
                case ReductionStep.ALL_REDUCE:
                    grad = all_reduce(grad, operand.label, self._placed(operand))
                case ReductionStep.DIVIDE_AFTER:
                    grad = divide(grad, factors.after)
                case ReductionStep.CAST_TO_STORED:
                    grad = grad.astype(precision.stored).astype(precision.kept)
                case ReductionStep.ADD_PARTIAL | ReductionStep.ACCUMULATE:
                    pass  # there are no partial sums here (R15), and the gradient is returned
                case ReductionStep.KEEP_PARTIAL:
                    raise AssertionError("every reduction here goes on over the replicas")
                case _:
                    assert_never(each)
        return grad


class Source(NamedTuple):
    """What a bucket is gathered from.

    Attributes:
        shard: the rank's part of the bucket's arrays.
        probe: None, or zeros of shape (gathered_numel,), whose gradient is this rank's own, before any reduction.
        waiting: None, or this rank's own gradient of earlier microbatches, of the same shape, added before the reduction.
    """

    shard: Any
    probe: Any = None
    waiting: Any = None


def gather(
    tree: ParamTree, bucket: Bucket, source: Source, precision: Precision, reduction: Reduction
) -> dict[str, jax.Array]:
    """All-gather a bucket, differentiable; see [Note: why the gather has a backward of its own].

    Returns:
        Its leaves by path, of `precision.gathered`. Their cotangents reach the shard as the mean over ranks, or as zeros if
        nothing is reduced now. Frozen buckets get none.
    """

    def whole(shard: Any) -> dict[str, jax.Array]:
        def unsharded(operand: Operand, array: jax.Array) -> jax.Array:
            return reduction.gathered(operand, array, precision)

        # One scope, so that `_late_gathers` cuts where it gathers.
        with jax.named_scope(scope_name(ALL_GATHER, bucket.label)):
            found = bucket.from_unsharded(jax.tree.map(unsharded, bucket.operands(), shard))
        return tree.leaves_of(bucket, found)

    if not bucket.trainable:
        return whole(jax.lax.stop_gradient(source.shard))

    @jax.custom_vjp
    def gathered(source: Source) -> dict[str, jax.Array]:
        return whole(source.shard)

    # Not by calling `gathered`: what saves no gathered parameter must find the primitive itself here.
    def forward(source: Source) -> tuple[dict[str, jax.Array], jax.Array | None]:
        return whole(_differentiated_once(source.shard, bucket.label)), source.waiting

    def backward(waiting: jax.Array | None, grads: dict[str, jax.Array]) -> tuple[Source]:
        def reduced(operand: Operand, grad: jax.Array) -> jax.Array:
            return reduction(operand, grad, precision)

        if source.probe is None and waiting is None and reduction.now:
            probe = None
            part = jax.tree.map(reduced, bucket.operands(), in_arrays(tree, bucket, grads))
        else:
            # What microbatches accumulate is a line, whatever the layout.
            own = in_line(tree, bucket, grads)
            if waiting is not None or not reduction.now:
                own = own.astype(precision.accumulated(reduction.api))
            if waiting is not None:
                own = own + waiting
            probe = None if source.probe is None else own.astype(source.probe.dtype)
            if reduction.now:
                part = bucket.from_line(reduced(Operand(bucket.label, 0), own))
            else:
                part = jax.tree.map(jnp.zeros_like, source.shard)
        # A cotangent has its primal's dtype: a gradient kept in low precision is widened again, without another rounding.
        part = jax.tree.map(lambda new, old: new.astype(old.dtype), part, source.shard)
        return (Source(part, probe, None if waiting is None else jnp.zeros_like(waiting)),)

    gathered.defvjp(forward, backward)
    return gathered(source)


def _differentiated_once(shard: Any, unit: str) -> Any:
    """The shards that a gather reads in the forward pass of a gradient, which has no derivative of its own: that of `all_gather`
    would be a sum over ranks where the reduction takes their mean."""

    @jax.custom_jvp
    def same(shard: Any) -> Any:
        return shard

    @same.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        raise UsageError(
            f"the gather of unit {unit!r} is differentiated twice, since the loss function takes a gradient through a scan over "
            "its layers, which are gathered again in backward; shard it with reshard_after_forward=False, or do not stack it"
        )

    return same(shard)


def in_arrays(tree: ParamTree, bucket: Bucket, grads: dict[str, jax.Array]) -> Any:
    """The gradients of a bucket's leaves in the form of its gathered arrays, with 0 in the padding."""
    return transposed(
        lambda arrays: tree.leaves_of(bucket, bucket.from_unsharded(arrays)), bucket.unsharded_shapes(), grads
    )


def in_line(tree: ParamTree, bucket: Bucket, grads: dict[str, jax.Array]) -> jax.Array:
    """The gradients of a bucket's leaves as one line, of shape (gathered_numel,), with 0 in the padding."""
    return transposed(lambda line: tree.cut(bucket, line), (bucket.layout.gathered_numel,), grads)


def transposed(leaves_of: Callable[[Any], dict[str, jax.Array]], shapes: Any, grads: dict[str, jax.Array]) -> Any:
    """The gradients of a bucket's leaves in the form that `leaves_of` cuts them out of, of these shapes."""
    dtype = next(iter(grads.values())).dtype
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    structs = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=is_shape)
    (found,) = jax.linear_transpose(leaves_of, structs)(grads)
    return found


def divide(array: jax.Array, factor: float) -> jax.Array:
    """`array / factor`, correctly rounded, in the array's dtype; below float32 divided in float32, as torch does.

    XLA turns a division by a scalar, constant or not, into a product with its rounded reciprocal, which differs unless the factor
    is a power of two. It does not change a division by an array, so other factors are made an array that XLA cannot simplify; the
    divisor of a NaN does not matter.
    """
    if factor == 1.0:
        return array
    wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    divisor = jnp.asarray(factor, wide.dtype)
    if math.frexp(factor)[0] != 0.5:
        divisor = jnp.where(jnp.isnan(wide), jnp.ones_like(wide), divisor)
    return (wide / divisor).astype(array.dtype)
