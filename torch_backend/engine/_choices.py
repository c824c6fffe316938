"""The options of one unit: strategy, precision, prefetch, offload and so on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from crossframe.faces import Face
from crossframe.step import StepSettings
from torch_backend.ranks._comm_hook import CommHook


@dataclass
class Choices:
    """What the user chose for a unit; some of it may be chosen anew between steps.

    Attributes:
        face: whose particulars hold.
        step: the step settings that its step machine begins with; setters change those of the machine.
        input_dtype: what floating inputs are cast to, and root_input_dtype if this unit turns out to be the root; None:
            left as they are (R35).
        output_dtype: what floating outputs are cast to; None: left as they are.
        refuses_double_backward: whether a backward with create_graph=True raises; else it gives gradients without a graph.
        comm_hook: the user's own reduction.
        settings: all of it in words, for the agreement between ranks.
    """

    face: Face
    step: StepSettings
    input_dtype: torch.dtype | None = None
    root_input_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    refuses_double_backward: bool = False
    comm_hook: CommHook | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
