"""What the user chose for a unit."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from crossframe.faces import Face
from crossframe.strategy import Prefetch
from torch_backend.comm_hook import CommHook


@dataclass
class Choices:
    """What the user chose for a unit; some of it may be chosen anew between steps.

    Attributes:
        face: whose particulars hold.
        reshard_after_forward: whether full memory is freed between forward and backward (R13, R14).
        keeps_full_unreduced: whether a backward without reduction leaves the full parameters in memory (R15).
        backward_prefetch: when the unit that comes next in backward is gathered (R16); None: when it is needed.
        forward_prefetch: whether this unit's forward gathers the unit that came next in the step before.
        input_dtype: what floating inputs are cast to, and root_input_dtype if this unit turns out to be the root; None:
            left as they are (R35).
        comm_hook: the user's own reduction.
        settings: all of it in words, for the agreement between ranks.
    """

    face: Face
    reshard_after_forward: bool = True
    keeps_full_unreduced: bool = False
    backward_prefetch: Prefetch | None = Prefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    input_dtype: torch.dtype | None = None
    root_input_dtype: torch.dtype | None = None
    comm_hook: CommHook | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
