"""Faults in the rules: offsets, divisions, the order of ranks, replicas, precision. Only the faulty run's process has them."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from crossframe import precision, reduction
from crossframe.layout import Layout
from crossframe.layout.line import LineLayout
from crossframe.replacing import replacing
from experiments.faults.catalogue.fault import JAX, TELLABLE, TORCH, Answer, Family

CORE = Family("core", TORCH, JAX)
REDUCED = ("reduce", "reduce_scatter")
GATHERED = ("unsharded", "all_gather")
HYBRID: dict[str, Any] = {"mesh": "2x2", "world_size": 4, "strategy": "hybrid_shard"}


@CORE.fault(
    "gradients are summed over ranks, not averaged",
    Answer(*REDUCED, signature="constant_factor"),
    within=(JAX, TORCH),
)
def sum_gradients() -> Iterator[None]:
    with replacing(reduction, "divide_factors", lambda num_ranks: reduction.DivideFactors(1.0, 1.0)):
        yield


@CORE.fault(
    "gradients are divided by the square root of the number of ranks",
    Answer(*REDUCED, signature="constant_factor"),
    world_size=3,
)
def root_of_the_ranks() -> Iterator[None]:
    with replacing(reduction, "divide_factors", lambda num_ranks: reduction.DivideFactors(math.sqrt(num_ranks), 1.0)):
        yield


@CORE.fault(
    "gradients are divided by the number of shards, and the replicas are forgotten",
    Answer(*REDUCED, signature="constant_factor"),
    within=(JAX, TORCH),
    **HYBRID,
)
def replicas_not_counted() -> Iterator[None]:
    right = reduction.divide_factors
    with replacing(reduction, "divide_factors", lambda num_ranks: right(num_ranks // 2)):
        yield


@CORE.fault(
    "parameters are looked for in the gathered buffer as if nothing aligned them",
    Answer(*GATHERED, unit="", signature="padding_shift"),
    source="pytorch/pytorch#97667",
    within=(TORCH,),
    model="mlp",
)
def alignment_forgotten() -> Iterator[None]:
    from torch_backend.memory import _gather as gather

    def views_of(layout: Layout, full: Any) -> list[Any]:
        found, start = [], 0
        for spec in layout.params:
            found.append(full.data[start : start + spec.numel].view(spec.shape))
            start += spec.numel
        return found

    with replacing(gather, "views_of", views_of):
        yield


@CORE.fault(
    "the padding before a parameter's gradient is that of the next parameter",
    Answer(*REDUCED, signature="padding_shift"),
    source="deepspeedai/DeepSpeed#8277",
    within=(TORCH,),
    model="mlp",
)
def padding_of_the_next() -> Iterator[None]:
    right = LineLayout.spaces.func  # type: ignore[attr-defined]

    def spaces(layout: LineLayout) -> tuple[int, ...]:
        first, *between, last = right(layout)
        return (*between, first, last)

    with replacing(LineLayout, "spaces", property(spaces)):
        yield


@CORE.fault(
    "the shards of ranks are put together in the reverse order",
    Answer(*GATHERED, signature=None),
    within=(JAX,),
    world_size=3,
)
def ranks_reversed() -> Iterator[None]:
    from jax_backend.engine import _gather as gather

    right = gather.all_gather

    def all_gather(shard: Any, label: str, placed: Any, dim: int) -> Any:
        gathered = right(shard, label, placed, dim=dim)
        return gathered.reshape(-1, shard.shape[-1])[::-1].reshape(gathered.shape)

    with replacing(gather, "all_gather", all_gather):
        yield


@CORE.fault(
    "gradients travel and are summed in bfloat16 where the policy says in full",
    Answer(*REDUCED, signature="low_precision_reduction"),
    source="pytorch/pytorch#106395",
    within=(JAX, TORCH),
    dtypes=TELLABLE,
)
def reduced_in_bfloat16() -> Iterator[None]:
    right = precision.resolve_precision

    def resolve(*args: Any, **kwargs: Any) -> precision.Precision:
        return replace(right(*args, **kwargs), reduced="bfloat16")

    with replacing(precision, "resolve_precision", resolve):
        yield


@CORE.fault(
    "replicas never meet: each averages over its own shard group, and divides by all ranks",
    Answer(*REDUCED, signature="missing_rank"),
    within=(TORCH,),
    **HYBRID,
)
def replicas_never_meet() -> Iterator[None]:
    from torch_backend.memory import _grad_reduction as grads

    right = grads.reduction_steps

    def steps(*args: Any, **kwargs: Any) -> tuple[reduction.ReductionStep, ...]:
        return tuple(step for step in right(*args, **kwargs) if step is not reduction.ReductionStep.ALL_REDUCE)

    with replacing(grads, "reduction_steps", steps):
        yield


@CORE.fault(
    "the norm counts what replicas hold once a replica",
    Answer("norm", "grad_norm", signature="constant_factor"),
    within=(JAX,),
    clip=0.5,
    **HYBRID,
)
def norm_counts_replicas() -> Iterator[None]:
    from jax import numpy as jnp

    from jax_backend.engine import _clipping as clip

    class Doubled:
        """jax.numpy, whose sums are over two replicas."""

        def __getattr__(self, name: str) -> Any:
            return getattr(jnp, name)

        def sum(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * jnp.sum(*args, **kwargs)

    with replacing(clip, "jnp", Doubled()):
        yield


@CORE.fault(
    "clipping divides by the norm plus 0.01, and not plus 1e-6",
    Answer("state", "state", signature="constant_factor"),
    within=(JAX,),
    clip=0.5,
)
def clip_epsilon() -> Iterator[None]:
    from jax_backend.engine import _clipping as clip

    with replacing(clip, "EPSILON", 1e-2):
        yield
