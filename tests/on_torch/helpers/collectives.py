"""The collectives that ranks issue, as torch's dispatcher sees them."""

from collections import Counter

import torch
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from crossframe.precision import PrecisionPolicy
from crossframe.trace import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COMPARED, REDUCE_SCATTER

WORLD_SIZE = 4
LOW = PrecisionPolicy(param_dtype="bfloat16", reduce_dtype="float32")


class Collectives(TorchDispatchMode):
    """Counts every collective that passes the dispatcher: (kind, dtype, bytes of the unsharded side, ranks)."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and ("gather" in name or "reduce" in name):
            tensors = [a for a in tree_leaves(args) if isinstance(a, torch.Tensor)]
            kind = ALL_GATHER if "gather" in name else REDUCE_SCATTER if "scatter" in name else ALL_REDUCE
            num_bytes = sum(t.nbytes for t in tensors) - (0 if kind == ALL_REDUCE else min(t.nbytes for t in tensors))
            group = next(a for a in args if isinstance(a, torch.ScriptObject))
            ranks = torch.distributed.get_process_group_ranks(torch.distributed.ProcessGroup.unbox(group))
            dtype = str(tensors[0].dtype).removeprefix("torch.")
            self.seen[kind, dtype, num_bytes, tuple(ranks)] += 1
        return func(*args, **(kwargs or {}))


class FunctionalCollectives(TorchDispatchMode):
    """Counts the collectives of DTensors and of functional collectives: (kind, bytes of the unsharded side, ranks)."""

    KINDS = {  # noqa: RUF012 - a constant
        "all_reduce": ALL_REDUCE,
        "all_gather_into_tensor": ALL_GATHER,
        "reduce_scatter_tensor": REDUCE_SCATTER,
        "all_to_all_single": ALL_TO_ALL,
    }

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # so that this mode sees what the DTensor dispatches
        if func.namespace == "_c10d_functional" and (kind := self.KINDS.get(func.overloadpacket.__name__)):
            ranks = torch.distributed.get_process_group_ranks(_resolve_process_group(args[-1]))
            num_bytes = args[0].nbytes * (len(ranks) if kind == ALL_GATHER else 1)
            self.seen[kind, num_bytes, tuple(ranks)] += 1
        return func(*args, **(kwargs or {}))


def by_group(events):
    """The events of each group in order: between groups there is none."""
    groups = {}
    for event in (event for event in events if event.kind in COMPARED):
        groups.setdefault(tuple(event.group), []).append(event)
    return groups


def num_bytes(counts):
    return sum(key[2] * n for key, n in counts.items())
