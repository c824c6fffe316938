"""`PipelineStage`: torch's stage of a pipeline, for modules that this package's `fully_shard` has sharded.

torch's stage reduces gradients once a step if its module is torch's own FSDPModule. It treats a module of this package as a plain
one, so the gradients of each microbatch are reduced. This stage reduces those of the whole step in its last backward.
"""

from typing import Any

from torch.distributed import pipelining

from crossframe.errors import UnsupportedError
from torch_backend.fsdp2._fsdp_module import FSDPModule


class PipelineStage(pipelining.PipelineStage):
    """`torch.distributed.pipelining.PipelineStage`, which reduces the gradients of an `FSDPModule` once a step.

    Arguments are those of torch. Schedules are those that run a backward as a whole: GPipe, 1F1B, Interleaved1F1B, LoopedBFS.

    Raises:
        UnsupportedError: a schedule computes gradients of inputs and of weights apart (zero bubble, ZBV, DualPipeV). It calls
            torch.autograd.grad, which runs no hook of a parameter, so nothing would reduce the gradients.
    """

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        """Run a backward.

        Args:
            backward_type: "full"; of plain modules also "input" or "weight".
            last_backward: whether it is the last one of the step.
        """
        if isinstance(self.submod, FSDPModule):
            if backward_type != "full":
                raise UnsupportedError(
                    f"stage {self.stage_index}: the schedule computes gradients of inputs and of weights apart, which "
                    "fully_shard does not see; use one with whole backwards, such as Schedule1F1B or ScheduleInterleaved1F1B"
                )
            self.submod.set_is_last_backward(last_backward)
            self.submod.set_requires_gradient_sync(last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
