"""Bytes that a training step copies around its collectives, counted op by op.

One rank of torch's fake process group and an empty batch, as for memory: activations have no bytes then, but parameters and
gradients have all of theirs. A TorchDispatchMode sees every op of this thread, which on a CPU runs backward and its hooks too.

[Note: attribution] An op counts the bytes that it writes, whatever it reads or needs in between. What it is follows from where
the data goes, not from who calls it:

- all-gather copy-in: copies into memory that an all-gather then takes, or into what is copied there.
- all-gather copy-out: copies out of memory that an all-gather filled.
- reduce-scatter copy-in: copies into memory that a reduce-scatter then takes, or into what is copied there. A concatenation that
  also changes the dtype is this, since it is one pass over the bytes.
- cast: a copy that changes the dtype and not the order, on the way to an all-gather (of parameters), or on the way to a
  reduce-scatter and from one (of gradients).
- zero-fill: memory set to zero, or to any one value.
- division: of gradients; a process group that averages leaves none.
- other: every other op that writes and that the bare model does not run; and copies that go nowhere of these, for instance sums
  of gradients that accumulate.

An op of several outputs counts them all. An op of the bare model computes, and is not counted, unless it is one of COPIES, FILLS
or DIVISIONS.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.bench.contestants import BARE, LAYOUTS, Dtypes, counterpart, ours, theirs
from experiments.bench.figure import TIMES, Figure, Grid, Section
from experiments.bench.ranks import FAKE, on_ranks
from experiments.bench.sizes import Sizes
from experiments.bench.training import definition_of, losses
from experiments.models.gpt import GPTConfig

WORLD_SIZE = 8
IN, OUT, BACK = "all-gather copy-in", "all-gather copy-out", "reduce-scatter copy-in"
CAST_PARAMS, CAST_GRADS = "cast of parameters", "cast of gradients"
ZEROS, DIVISION, OTHER = "zero-fill", "division", "other"
COLUMNS = (IN, CAST_PARAMS, OUT, BACK, CAST_GRADS, ZEROS, DIVISION, OTHER)
# What the all-gathers take: not a copy, but what casts of parameters are measured by.
TAKEN = "taken by all-gathers"
PRECISIONS: dict[str, Dtypes | None] = {"float32": None, "bfloat16": Dtypes(torch.bfloat16, torch.float32)}

CASTS = {"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_", "aten::clone"}
CONCATENATIONS = {"aten::cat", "aten::_chunk_cat", "aten::split_with_sizes_copy", "aten::constant_pad_nd"}
COPY_IN = "fsdp::all_gather_copy_in"
COPIES = CASTS | CONCATENATIONS | {COPY_IN, "fsdp::split_with_sizes_copy", "fsdp::chunk_cat"}
FILLS = {
    "aten::zeros",
    "aten::zeros_like",
    "aten::new_zeros",
    "aten::zero_",
    "aten::fill_",
    "aten::full",
    "aten::_foreach_zero_",
}
DIVISIONS = {"aten::div", "aten::div_", "aten::mul", "aten::mul_", "aten::_foreach_div_", "aten::_foreach_mul_"}
SUMS = {"aten::add", "aten::add_", "aten::_foreach_add_"}
ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
# The output comes first, then the input.
ALL_GATHER, REDUCE_SCATTER = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"


@dataclass
class Written:
    """An op that wrote memory: what it is, as far as is known, what it read, and whether it changed the dtype alone."""

    what: str | None
    num_bytes: int
    sources: tuple[StorageWeakRef, ...]
    casts: bool


class CopyCounter(TorchDispatchMode):
    """Counts what is written while it is entered, by [Note: attribution]."""

    def __init__(self, computing: Iterable[str] = ()) -> None:
        """
        Args:
            computing: names of the ops that the bare model runs.
        """
        super().__init__()
        self.names: set[str] = set()
        self._computing = set(computing)
        self._ops: list[Written] = []
        self._taken = 0
        # By memory; a weak reference keeps its identity, but neither its bytes nor another's reuse of them. What was written
        # and has not yet gone into a collective, and what collectives filled.
        self._writers: defaultdict[StorageWeakRef, list[Written]] = defaultdict(list)
        self._gathered: set[StorageWeakRef] = set()
        self._reduced: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if name in (ALL_GATHER, REDUCE_SCATTER):
            filled, given = args[0], args[1]
            self._collective(name, _memory(filled), given)
        elif not func.is_view and name not in ALLOCATIONS:
            self._op(name, args, kwargs or {}, result)
        return result

    def totals(self) -> dict[str, int]:
        """Bytes of each of the COLUMNS, and those TAKEN."""
        totals = Counter({TAKEN: self._taken, **dict.fromkeys(COLUMNS, 0)})
        for op in self._ops:
            totals[op.what or OTHER] += op.num_bytes
        return dict(totals)

    def _op(self, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        written = tensors_of(kwargs["out"] if "out" in kwargs else args[0] if name.endswith("_") else result)
        if name == COPY_IN:  # of its two outputs the first is the part that it wrote
            written = written[:1]
        num_bytes = sum(tensor.nbytes for tensor in written)
        if not num_bytes:
            return
        self.names.add(name)
        kind = self._kind(name)
        if kind == "computes":
            return
        memory = {_memory(tensor) for tensor in written}
        read = [tensor for tensor in tensors_of([args, kwargs]) if not any(tensor is one for one in written)]
        sources = tuple({_memory(tensor) for tensor in read} - memory)
        casts = name in CASTS and any(tensor.dtype != written[0].dtype for tensor in read)
        if kind is None and not self._gathered.isdisjoint(sources):
            kind = OUT
        elif kind is None and casts and not self._reduced.isdisjoint(sources):
            kind = CAST_GRADS
        op = Written(kind, num_bytes, sources, casts)
        self._ops.append(op)
        for one in memory:
            self._writers[one].append(op)

    def _kind(self, name: str) -> str | None:
        """What an op is by its name alone; None for a copy, which depends on where its data goes."""
        if name in COPIES:
            return None
        if name in FILLS:
            return ZEROS
        if name in DIVISIONS:
            return DIVISION
        return "computes" if name in self._computing and name not in SUMS else OTHER

    def _collective(self, name: str, filled: StorageWeakRef, given: Tensor) -> None:
        gathers = name == ALL_GATHER
        copy, cast = (IN, CAST_PARAMS) if gathers else (BACK, CAST_GRADS)
        memory = [_memory(given)]
        while memory:
            for op in self._writers.pop(memory.pop(), ()):
                if op.what is None:
                    op.what = cast if op.casts else copy
                memory += op.sources
        (self._gathered if gathers else self._reduced).add(filled)
        if gathers:
            self._taken += given.nbytes


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts.

    >>> len(tensors_of([torch.ones(1), (torch.ones(2), 3), {"out": torch.ones(3)}]))
    3
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for one in value for tensor in tensors_of(one)] if isinstance(value, list | tuple) else []


def _memory(tensor: Tensor) -> StorageWeakRef:
    # Of a tensor that wraps others, an op inside it would go by unseen.
    assert not isinstance(tensor, DTensor), "a step works on DTensors' own memory"
    return StorageWeakRef(tensor.untyped_storage())


def copies_section(sizes: Sizes) -> Section:
    """Count for each layout of our `fully_shard` and for torch's, in both precisions."""
    names = [*ours(LAYOUTS), *theirs(LAYOUTS)]
    [counts] = on_ranks(WORLD_SIZE, FAKE, _counts, names, sizes.gpt)
    numel = definition_of(sizes.gpt).numel
    how = (
        f"GPT of {numel / 1e6:.1f} million parameters, a unit a block, FULL_SHARD, rank 0 of {WORLD_SIZE}: bytes written by "
        "each op of a forward and backward around the collectives, on an empty batch and without optimizer; in float32, and "
        "computed in bfloat16 and reduced in float32. In the table also as multiples of the model's bytes in float32. Most "
        f"parameters are gathered twice a step, a gradient is reduced once; a rank's shard is 1/{WORLD_SIZE} of the model. The "
        "fake process group averages, as NCCL does, and so spares torch a division."
    )
    return Section("Bytes copied", how, copies_figures(counts), grid=copies_grid(counts, 4 * numel))


def copies_figures(counts: dict[str, dict[str, dict[str, int]]]) -> tuple[Figure, ...]:
    """What has limits, then all that is copied beside torch's.

    Args:
        counts: by precision, contestant and column.
    """
    figures = []
    for precision, by_name in counts.items():
        for name in ours(LAYOUTS):
            figures.append(Figure(f"{precision}: {name}: {IN}", by_name[name][IN] / 1e6, "MB", 0.0))
        if PRECISIONS[precision] is not None:
            for name in ours(LAYOUTS):
                times = by_name[name][CAST_PARAMS] / by_name[name][TAKEN]
                figures.append(Figure(f"{precision}: {name}: {CAST_PARAMS} to what is {TAKEN}", times, TIMES, 1.0))
        for name in ours(LAYOUTS[1:]):
            figures.append(Figure(f"{precision}: {name}: {OUT}", by_name[name][OUT] / 1e6, "MB", 0.0))
        for name in ours(LAYOUTS):
            all_of = [sum(by_name[one][column] for column in COLUMNS) for one in (name, counterpart(name))]
            figures.append(Figure(f"{precision}: all of {name} to {counterpart(name)}", all_of[0] / all_of[1], TIMES))
    return tuple(figures)


def copies_grid(counts: dict[str, dict[str, dict[str, int]]], model_bytes: int) -> Grid:
    """All that was counted, with its sum."""
    rows = {
        f"{precision}: {name}": tuple(by_column[column] for column in COLUMNS)
        for precision, by_name in counts.items()
        for name, by_column in by_name.items()
    }
    return Grid((*COLUMNS, "all"), {name: (*row, sum(row)) for name, row in rows.items()}, model_bytes)


def _counts(_rank: int, names: Sequence[str], config: GPTConfig) -> dict[str, dict[str, dict[str, int]]]:
    bare = CopyCounter()
    count(*losses(BARE, config, 0, 1, "cpu"), bare)
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for precision, dtypes in PRECISIONS.items():
        counts[precision] = {}
        for name in names:
            counter = CopyCounter(bare.names)
            count(*losses(name, config, 0, 1, "cpu", dtypes), counter)
            counts[precision][name] = counter.totals()
    return counts


def count(model: nn.Module, loss: Any, counter: CopyCounter) -> None:
    """Count a step, the second: the first prepares."""
    loss().backward()
    model.zero_grad()
    with counter:
        loss().backward()
