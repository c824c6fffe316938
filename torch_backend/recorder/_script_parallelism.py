"""Finds the pipeline schedule and the context parallelism of a running script, by the functions of torch that it calls."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import parent_process
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crossframe.replacing import replacing
from torch_backend.recorder._context import HEAD_TAIL, RANK

_POSITIONS = 1
Sequences = tuple[dist.ProcessGroup, str]
"""The ranks that have parts of the same sequences, and the order of the parts."""


@contextmanager
def pipelines(begins: Callable[[Any], None], add_losses: Callable[[Sequence[Tensor]], None]) -> Iterator[None]:
    """A context in which training steps of pipeline schedules are observed.

    Args:
        begins: is called with a schedule of `torch.distributed.pipelining` before each of its steps.
        add_losses: is called after it with the losses of the microbatches; none if this rank does not have the last stage.
    """
    if not _has_ranks():
        yield
        return
    from torch.distributed.pipelining import schedules

    def make(own: Any) -> Any:
        def step(schedule: Any, *args: Any, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or not schedule._has_backward:
                return own(schedule, *args, losses=losses, **kwargs)
            begins(schedule)
            found = [] if losses is None else losses
            result = own(schedule, *args, losses=found, **kwargs)
            add_losses(found)
            return result

        return step

    with ExitStack() as stack:
        for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
            stack.enter_context(replacing(kind, "step", make(kind.step)))
        yield


def stages_of(schedule: Any) -> list[Any]:
    """The stages of this rank, in order."""
    found = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    return sorted(found, key=lambda stage: stage.stage_index)


@contextmanager
def sequences(begins: Callable[[Sequences], None]) -> Iterator[None]:
    """A context in which `begins` is called when the script enters `context_parallel` with buffers of (samples, positions)."""
    if not _has_ranks():
        yield
        return
    from torch.distributed.tensor import experimental
    from torch.distributed.tensor.experimental._context_parallel import _attention

    def make(own: Any) -> Any:
        def context_parallel(mesh: Any, *args: Any, **kwargs: Any) -> Any:
            if _POSITIONS in (kwargs.get("buffer_seq_dims") or ()):
                balanced = _attention._cp_options.enable_load_balance
                begins((mesh.get_group(), HEAD_TAIL if balanced else RANK))
            return own(mesh, *args, **kwargs)

        return context_parallel

    with ExitStack() as stack:
        for module in (experimental, _attention):
            stack.enter_context(replacing(module, "context_parallel", make(module.context_parallel)))
        yield


def _has_ranks() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or parent_process() is not None
