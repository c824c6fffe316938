"""What the user chose for a unit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from crossframe.faces import Face
from crossframe.strategy import Prefetch
from torch_backend.ranks._comm_hook import CommHook

if TYPE_CHECKING:
    from torch_backend.engine._unit import Unit


@dataclass
class Choices:
    """What the user chose for a unit; some of it may be chosen anew between steps.

    Attributes:
        face: whose particulars hold.
        reshard_after_forward: whether full memory is freed between forward and backward (R13, R14).
        keeps_root: whether the unit keeps full memory between forward and backward if it turns out to be the root (R13).
        reshard_after_backward: whether full memory is freed after backward (FSDP2's `set_reshard_after_backward`).
        unshards_in_backward: whether a backward needs the parameters at all.
        keeps_full_unreduced: whether a backward without reduction leaves the full parameters in memory (R15).
        backward_prefetch: when the unit that comes next in backward is gathered (R16); None: when it is needed.
        forward_prefetch: whether this unit's forward gathers the unit that came next in the step before.
        forward_prefetch_units, backward_prefetch_units: what this unit's forward and backward gather instead, if not empty.
        input_dtype: what floating inputs are cast to, and root_input_dtype if this unit turns out to be the root; None:
            left as they are (R35).
        output_dtype: what floating outputs are cast to; None: left as they are.
        reduces_unused: whether parameters that a backward did not reach count as zeros, on every rank (R29).
        refuses_double_backward: whether a backward with create_graph=True raises; else it gives gradients without a graph.
        comm_hook: the user's own reduction.
        settings: all of it in words, for the agreement between ranks.
    """

    face: Face
    reshard_after_forward: bool = True
    keeps_root: bool = False
    reshard_after_backward: bool = True
    unshards_in_backward: bool = True
    keeps_full_unreduced: bool = False
    backward_prefetch: Prefetch | None = Prefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    forward_prefetch_units: Sequence["Unit"] = ()
    backward_prefetch_units: Sequence["Unit"] = ()
    input_dtype: torch.dtype | None = None
    root_input_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    reduces_unused: bool = False
    refuses_double_backward: bool = False
    comm_hook: CommHook | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
