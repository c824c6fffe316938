"""The options of one unit: strategy, precision, prefetch, offload and so on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from crossframe.api import Api
from crossframe.step import StepSettings
from torch_backend.ranks._comm_hook import CommHook


@dataclass
class UnitOptions:
    """The user's options for a unit, some of which may change between steps.

    Attributes:
        api: the API whose rules apply.
        step: the initial step settings; setters change those of the step machine.
        input_dtype, root_input_dtype: dtype to which floating-point inputs are cast, in general and if this unit is the root;
            None: not cast (R35).
        output_dtype: dtype to which floating-point outputs are cast; None: not cast.
        refuses_double_backward: whether a backward with create_graph=True raises; if not, it gives gradients without a graph.
        comm_hook: the user's reduction.
        settings: descriptions of the options, which must be equal on all ranks.
    """

    api: Api
    step: StepSettings
    input_dtype: torch.dtype | None = None
    root_input_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    refuses_double_backward: bool = False
    comm_hook: CommHook | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
