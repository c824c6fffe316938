"""In which context of torch code runs, and contexts for the recorder's own computations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

from crossframe.replacing import replacing

# Greater than 0 while reentrant activation checkpointing computes outputs for the first time, without autograd history.
_num_checkpoints = 0


@contextmanager
def quietly() -> Iterator[None]:
    """A context for the recorder's own computations: without autograd history, and without other rounding in perturbed runs."""
    with torch.no_grad(), _disable_current_modes():
        yield


def in_transform() -> bool:
    """Whether a transform of torch.func runs, such as `grad` or `vmap`, in which tensors have no values that can be read."""
    return peek_interpreter_stack() is not None


def in_backward() -> bool:
    """Whether autograd runs backward: a forward is then a recomputation."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def watching_checkpoints() -> Iterator[None]:
    """A context in which `is_differentiated` knows of reentrant checkpointing."""
    own = CheckpointFunction.apply

    def apply(*args: Any) -> Any:
        global _num_checkpoints
        is_kept = torch.is_grad_enabled()
        _num_checkpoints += is_kept
        try:
            return own(*args)
        finally:
            _num_checkpoints -= is_kept

    with replacing(CheckpointFunction, "apply", staticmethod(apply)):
        yield


def is_differentiated() -> bool:
    """Whether backward will reach what is computed now. That includes recomputation."""
    return torch.is_grad_enabled() or _num_checkpoints > 0
