"""`PipelineStage`: torch's stage of a pipeline, for modules that this package's `fully_shard` has sharded.

torch's stage reduces gradients once a step if its module is torch's own FSDPModule. It treats a module of this package as a plain
one, so the gradients of each microbatch are reduced. This stage reduces those of the whole step in its last backward.
"""

from typing import Any

from torch.distributed import pipelining

from torch_backend.fsdp2._fsdp_module import FSDPModule


class PipelineStage(pipelining.PipelineStage):
    """`torch.distributed.pipelining.PipelineStage`, which reduces the gradients of an `FSDPModule` once a step.

    Arguments are those of torch, and so are the schedules. Where a schedule computes the gradients of weights after those of
    inputs (zero bubble, ZBV, DualPipeV), an `FSDPModule` computes both with those of inputs, since torch would take the gradients
    of weights by torch.autograd.grad, which runs no hook of a parameter. Results have the same bits, but the bubbles stay.
    """

    _num_backwards = 0
    """In this step. Each microbatch has one that computes: a whole one, or that of inputs."""

    def clear_runtime_states(self) -> None:
        """Begin a step."""
        super().clear_runtime_states()
        self._num_backwards = 0

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a backward.

        Args:
            backward_type: "full", "input" or "weight".
            last_backward: whether it is the last one of the step. Read for other modules alone: where backwards are cut in two,
                schedules say it of that of weights.
        """
        if not isinstance(self.submod, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type == "weight":
            return (), None
        self._num_backwards += 1
        is_last = self._num_backwards == self.chunks
        self.submod.set_is_last_backward(is_last)
        self.submod.set_requires_gradient_sync(is_last)
        if backward_type == "input" and bwd_kwargs["output_grads"] is None:
            (loss,) = bwd_kwargs["stage_output"]  # which the last stage wraps for a backward of inputs
            bwd_kwargs = bwd_kwargs | {"stage_output": loss}
        return super().backward_maybe_with_nosync("full", bwd_kwargs, is_last)
