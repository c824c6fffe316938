"""In which context of torch code runs, and contexts for the recorder's own computations."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes


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
