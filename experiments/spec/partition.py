"""The layouts beside the rules spelled out element by element, and beside the numpy reference; no framework is needed."""

from collections.abc import Sequence

import numpy as np

from crossframe.dtypes import itemsize, numpy_dtype
from crossframe.errors import LayoutError
from crossframe.layout import FlatLayout, Layout, views
from crossframe.reference import ReferenceUnit
from crossframe.writeback import writeback_copies
from experiments.spec.cases import (
    FIRST_VALUE,
    FlatCase,
    expected_shard,
    first_values,
    flat_cases,
    single_cases,
)
from experiments.spec.checks import Scope
from experiments.spec.tally import Tallies, Tally

MODEL = "the model"


def _line(case: FlatCase) -> list[tuple[object, int]]:
    """The unsharded flat parameter of a case, an element at a time: (parameter, index in it), or (kind of padding, 0)."""
    line: list[tuple[object, int]] = []
    for i, shape in enumerate(case.shapes):
        while case.keep_original and len(line) * itemsize(case.computed) % 16:
            line.append(("alignment", 0))
        line += [(i, at) for at in range(int(np.prod(shape)))]
    while case.keep_original and len(line) % case.world_size:
        line.append(("divisibility", 0))
    return line


def _told(layout: FlatLayout, rank: int) -> list[tuple[object, int] | None]:
    """The same for a rank's buffer, from the layout's pieces and paddings; None where it says nothing."""
    found: list[tuple[object, int] | None] = [None] * layout.padded_shard_numel
    for copy in writeback_copies(layout, rank):
        found[copy.shard_start : copy.shard_stop] = [
            (copy.index, at) for at in range(copy.param_start, copy.param_stop)
        ]
    for run in layout.padding(rank):
        found[run.start : run.stop] = [(run.kind, 0)] * (run.stop - run.start)
    return found


def _compare_found(tally: Tally, case: object, layout: Layout) -> None:
    """What `find` yields for each parameter, whole and without its ends, beside where the ranks say that its elements are."""
    places: dict[tuple[int, int], tuple[int, int]] = {}
    for rank in range(layout.world_size):
        for copy in writeback_copies(layout, rank):
            for i in range(copy.param_stop - copy.param_start):
                places[copy.index, copy.param_start + i] = (rank, copy.shard_start + i)
    for index, spec in enumerate(layout.params):
        for start, stop in {(0, spec.numel), (min(1, spec.numel), max(1, spec.numel - 1))}:
            if start > stop or stop > spec.numel:
                continue
            found = [
                (piece.rank, piece.shard_start + i)
                for piece in layout.find(index, start, stop)
                for i in range(piece.numel)
            ]
            here = (case, spec.name, f"elements {start} to {stop}")
            tally.compare(found, [places.get((index, at)) for at in range(start, stop)], here, MODEL)


def flat_elements(tallies: Tallies, scope: Scope) -> None:
    """Every element of every shard of `flat_cases`."""
    for case in scope.take(flat_cases(), num_quick=1500):
        layout, line = case.layout(), _line(case)
        starts = [next((at for at, (i, _) in enumerate(line) if i == index), None) for index in range(len(case.shapes))]
        offsets = [o if spec.numel else None for o, spec in zip(layout.offsets, layout.params, strict=True)]
        tallies["R02"].compare(offsets, starts, case, MODEL)
        tallies["R03"].compare(layout.flat_numel, len(line), case, MODEL)
        _compare_found(tallies["R06"], case, layout)
        size = -(-len(line) // case.world_size)
        for rank in range(case.world_size):
            chunk: list[tuple[object, int] | None] = [*line[rank * size : (rank + 1) * size]]
            tallies["R04"].compare(
                layout.shard_range(rank)[1] - layout.shard_range(rank)[0], len(chunk), (case, f"rank {rank}"), MODEL
            )
            chunk += [("shard", 0)] * (size - len(chunk))
            tallies["R06"].compare(_told(layout, rank), chunk, (case, f"rank {rank}"), MODEL)


def per_param_elements(tallies: Tallies, scope: Scope) -> None:
    """Every element of every shard of `single_cases`: chunks of ceil(size / world size), the rest padding."""
    for case in scope.take(single_cases(), num_quick=1500):
        dim = case.dim % len(case.shape)
        size = case.shape[dim]
        chunk = -(-size // case.world_size)
        try:
            layout = case.layout()
        except LayoutError as error:
            refused = dim > 0 and size % case.world_size > 0 and "'p0'" in str(error)
            tallies["R07"].compare(refused, True, case, MODEL)
            continue
        tallies["R07"].compare(True, dim == 0 or size % case.world_size == 0, case, MODEL)
        _compare_found(tallies["R07"], case, layout)
        full = np.arange(FIRST_VALUE, FIRST_VALUE + np.prod(case.shape, dtype=int), dtype=float).reshape(case.shape)
        width = full.size // size * chunk if size else 0
        for rank in range(case.world_size):
            part = np.take(full, range(min(rank * chunk, size), min((rank + 1) * chunk, size)), case.dim)
            expected = [*part.flat, *[0.0] * (width - part.size)]
            ours = (layout.shard_shape(0, rank), expected_shard(layout, rank))
            tallies["R07"].compare(ours, (part.shape, expected), (case, f"rank {rank}"), MODEL)


def shards_and_gather(tallies: Tallies, scope: Scope) -> None:
    """The shards that the reference makes, value by value, and the parameters that it gathers from them."""
    layouts: Sequence[tuple[str, object]] = [("R04", case) for case in flat_cases() if case.stored == "float32"]
    layouts = [*layouts, *(("R07", case) for case in single_cases() if case.dim == 0)]
    for rule, case in scope.take(layouts, num_quick=1000):
        layout = case.layout()  # type: ignore[attr-defined]
        dtype = numpy_dtype(layout.dtype)
        first = first_values(tuple(spec.shape for spec in layout.params))
        full = {
            spec.name: np.arange(start, start + spec.numel, dtype=dtype).reshape(spec.shape)
            for start, spec in zip(first, layout.params, strict=True)
        }
        unit = ReferenceUnit(layout, full)
        for rank, shard in enumerate(unit.shards):
            tallies["R05"].compare(
                expected_shard(layout, rank), shard.tolist(), (case, f"rank {rank}"), "the reference"
            )
        gathered = views(layout, unit.gather()[0])
        same = all(np.array_equal(gathered[name], value) for name, value in full.items())
        tallies[rule].compare(same, True, case, "the reference")
