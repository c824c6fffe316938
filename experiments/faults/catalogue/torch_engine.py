"""Faults in the torch engine: what is gathered, when, and how gradients get from one rank to all."""

from collections.abc import Iterator, Sequence
from typing import Any

from crossframe.replacing import replacing
from experiments.faults.catalogue.core import GATHERED, REDUCED
from experiments.faults.catalogue.fault import TELLABLE, TORCH, Answer, Family

TORCH_ENGINE = Family("torch engine", TORCH)
LOCAL = ("backward", "backward")


def _stale(unit: str, wanted: str) -> Iterator[None]:
    """In one phase a unit is gathered from what its shard held at the step before."""
    from torch_backend.memory._gather import GatherBuffer

    right, kept = GatherBuffer.start, {}

    def start(self: Any, shard: Any, communicator: Any, **kwargs: Any) -> None:
        sent = shard
        if kwargs["unit"] == unit and kwargs["phase"] == wanted:
            sent = kept.get(unit, shard)
            kept[unit] = shard.detach().clone()
        right(self, sent, communicator, **kwargs)

    with replacing(GatherBuffer, "start", start):
        yield


@TORCH_ENGINE.fault(
    "forward gathers the shards of the last unit as they were before the optimizer's step",
    Answer(*GATHERED, step=1, unit="blocks.1", signature="stale_copy"),
    source="pytorch/pytorch#149205",
)
def stale_gather() -> Iterator[None]:
    yield from _stale("blocks.1", "forward")


@TORCH_ENGINE.fault(
    "backward gathers the shards of the last unit as they were before the optimizer's step; forward is right",
    Answer(*LOCAL, step=1, unit="blocks.1", signature=None),
    source="Robbyant/lingbot-vla#50",
)
def stale_backward() -> Iterator[None]:
    yield from _stale("blocks.1", "backward")


@TORCH_ENGINE.fault(
    "each microbatch forgets the gradients that earlier ones left, so that the last one alone counts",
    Answer(*LOCAL, signature=None),
    source="ServiceNow/Fast-LLM#550",
    accumulate=2,
    strategy="shard_grad_op",
)
def last_microbatch_alone() -> Iterator[None]:
    from torch_backend.memory._full_grads import FullGrads

    with replacing(FullGrads, "keep", lambda self, dtypes: self._forget_arrived()):
        yield


@TORCH_ENGINE.fault(
    "the gradients of the last microbatch are lost in one unit",
    Answer(*LOCAL, unit="blocks.0", signature=None),
    source="NVIDIA/Megatron-LM#7186",
    accumulate=2,
)
def last_microbatch_lost() -> Iterator[None]:
    from torch_backend.engine._unit import Unit

    right = Unit.start_reduction

    def start_reduction(self: Any) -> None:
        if self.name == "blocks.0":
            self._grads._forget_arrived()
        right(self)

    with replacing(Unit, "start_reduction", start_reduction):
        yield


def before_sum(change: Any) -> Iterator[None]:
    """`change(rank, unit, full)` is done to a rank's gradients ahead of the reduce-scatter, behind what is told of them."""
    from torch_backend.ranks._collectives import Communicator

    right = Communicator.reduce_scatter

    def reduce_scatter(self: Any, shard: Any, full: Any, *, unit: str, phase: str) -> Any:
        change(self.rank, unit, full)
        return right(self, shard, full, unit=unit, phase=phase)

    with replacing(Communicator, "reduce_scatter", reduce_scatter):
        yield


@TORCH_ENGINE.fault(
    "the gradients of the last rank of three do not arrive",
    Answer(*REDUCED, signature="missing_rank"),
    world_size=3,
)
def rank_left_out() -> Iterator[None]:
    yield from before_sum(lambda rank, unit, full: full.zero_() if rank == 2 else None)


@TORCH_ENGINE.fault(
    "one rank's gradients of one unit are too large by 1e-4",
    Answer(*REDUCED, unit="blocks.1", signature=None),
    dtypes=TELLABLE,
)
def rank_slightly_off() -> Iterator[None]:
    yield from before_sum(lambda rank, unit, full: full.mul_(1.0001) if rank == 1 and unit == "blocks.1" else None)


@TORCH_ENGINE.fault(
    "gradients are rounded to bfloat16 on their way into the sum, which itself is in full",
    Answer(*REDUCED, signature="low_precision_reduction"),
    source="allenai/OLMo#280",
    dtypes=TELLABLE,
)
def rounded_before_sum() -> Iterator[None]:
    import torch

    yield from before_sum(lambda rank, unit, full: full.copy_(full.to(torch.bfloat16).to(full.dtype)))


def after_reduction(change: Any) -> Iterator[None]:
    """`change(rank, unit, shard)` is done to the reduced gradient of a rank."""
    from torch_backend.memory._grad_reduction import GradStore

    right_start, right_take, unit_of = GradStore.start, GradStore.take, {}

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        unit_of[id(self)] = kwargs["unit"]
        right_start(self, *args, **kwargs)

    def take(self: Any) -> Any:
        shard = right_take(self)
        change(self._mesh.shards.rank, unit_of[id(self)], shard)
        return shard

    with replacing(GradStore, "start", start), replacing(GradStore, "take", take):
        yield


@TORCH_ENGINE.fault(
    "a copy of one rank's shard stops 16 elements early: their gradients are zero",
    Answer(*REDUCED, unit="blocks.1", rank=0, signature=None),
)
def end_of_shard_lost() -> Iterator[None]:
    yield from after_reduction(
        lambda rank, unit, shard: shard[-16:].zero_() if rank == 0 and unit == "blocks.1" else None
    )


@TORCH_ENGINE.fault(
    "from step 2 on one unit keeps the gradient of the step before",
    Answer(*REDUCED, step=2, unit="blocks.0", signature="stale_copy"),
)
def stale_gradient() -> Iterator[None]:
    kept: list[Any] = []

    def change(rank: int, unit: str, shard: Any) -> None:
        if unit == "blocks.0":
            kept.append(shard.clone())
            if len(kept) > 2:
                shard.copy_(kept[-2])

    yield from after_reduction(change)


@TORCH_ENGINE.fault(
    "at step 2 one rank computes before the other rank's slice of a unit has arrived",
    Answer(*GATHERED, step=2, unit="blocks.0", rank=0, signature="missing_rank"),
)
def slice_not_waited_for() -> Iterator[None]:
    import torch.distributed as dist

    from torch_backend.memory._gather import GatherBuffer

    right_start, right_finish, forwards, late = GatherBuffer.start, GatherBuffer.finish, [0], set()

    def start(self: Any, shard: Any, communicator: Any, **kwargs: Any) -> None:
        if kwargs["unit"] == "blocks.0" and kwargs["phase"] == "forward":
            if forwards[0] == 2 and dist.get_rank() == 0:
                late.add(id(self))
            forwards[0] += 1
        right_start(self, shard, communicator, **kwargs)

    def finish(self: Any) -> None:
        right_finish(self)
        if id(self) in late:
            late.discard(id(self))
            self.full[self.full.numel() // 2 :] = 0

    with replacing(GatherBuffer, "start", start), replacing(GatherBuffer, "finish", finish):
        yield


@TORCH_ENGINE.fault(
    "the gradients of two parameters of one shape change places on their way",
    Answer(*REDUCED, unit="blocks.1", signature="mixed_parameters"),
    source="pytorch/pytorch#174862",
)
def gradients_mixed() -> Iterator[None]:
    from torch_backend.memory._grad_reduction import GradStore

    right = GradStore._collect

    def collect(self: Any, grads: Sequence[Any], layout: Any, *, cast: bool) -> Any:
        names, mixed = [spec.name for spec in layout.params], list(grads)
        if "blocks.1.attention.query.weight" in names:
            i, j = (names.index(f"blocks.1.attention.{part}.weight") for part in ("query", "key"))
            mixed[i], mixed[j] = mixed[j], mixed[i]
        return right(self, mixed, layout, cast=cast)

    with replacing(GradStore, "_collect", collect):
        yield


@TORCH_ENGINE.fault(
    "clipping goes by the norm of a rank's own shard",
    Answer("norm", "grad_norm", signature="missing_rank"),
    source="pytorch/torchtitan#766",
    clip=0.5,
)
def norm_of_the_shard() -> Iterator[None]:
    from torch_backend.ranks._collectives import Communicator

    with replacing(Communicator, "sum_all", lambda self, tensor: None):
        yield


@TORCH_ENGINE.fault(
    "gradients are never set to zero, so that those of the step before are in them",
    Answer(*REDUCED, step=1, signature="stale_copy"),
    source="wenet-e2e/wekws#72",
)
def zero_grad_forgotten() -> Iterator[None]:
    from torch.optim import Optimizer

    with replacing(Optimizer, "zero_grad", lambda self, set_to_none=True: None):
        yield


@TORCH_ENGINE.fault(
    "the second rank starts from other values, and nothing makes them one",
    Answer("parameters", "all_gather", rank=1, signature=None),
    source="pytorch/pytorch#75870",
)
def ranks_start_apart() -> Iterator[None]:
    import torch.distributed as dist

    from experiments.models import load_torch

    right = load_torch.load_initial

    def load_initial(module: Any, params: Any) -> None:
        if dist.get_rank() == 1:
            params = {name: value[..., ::-1].copy() for name, value in params.items()}
        right(module, params)

    with replacing(load_torch, "load_initial", load_initial):
        yield


@TORCH_ENGINE.fault(
    "the weights were loaded from a file in bfloat16",
    Answer("parameters", "all_gather", signature=None),
)
def loaded_in_bfloat16() -> Iterator[None]:
    import ml_dtypes

    from experiments.models import load_torch

    right = load_torch.load_initial

    def load_initial(module: Any, params: Any) -> None:
        right(module, {name: value.astype(ml_dtypes.bfloat16).astype(value.dtype) for name, value in params.items()})

    with replacing(load_torch, "load_initial", load_initial):
        yield
