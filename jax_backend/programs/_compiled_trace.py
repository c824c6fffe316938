"""The collectives of a compiled step as the core's events, read from XLA's program.

Under jit there are no collectives before XLA places them, and under shard_map XLA may merge or split them. An event says what the
program does: a reduce-scatter that became an all-reduce is an all-reduce. The bucket is read from the scope of the operations
that XLA compiled.
"""

import re
from collections.abc import Callable, Iterator

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from crossframe.errors import UnsupportedError
from crossframe.trace import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Event
from jax_backend.mesh._device_mesh import devices_of
from jax_backend.programs._trace import FOREIGN, merged
from jax_backend.ranks._collectives import WEIGHTS, any_label, parts_of

_KINDS = {
    "all-gather": ALL_GATHER,
    "all-reduce": ALL_REDUCE,
    "reduce-scatter": REDUCE_SCATTER,
    "all-to-all": ALL_TO_ALL,
    "ragged-all-to-all": ALL_TO_ALL,
}
_LETTERS = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s"), ("complex", "c"), ("_", ""))


def _xla_name(name: str) -> str:
    """What XLA calls a dtype of numpy or ml_dtypes.

    >>> [_xla_name(name) for name in ("bool", "bfloat16", "float8_e4m3fn", "uint4")]
    ['pred', 'bf16', 'f8e4m3fn', 'u4']
    """
    for long, short in _LETTERS:
        name = name.replace(long, short)
    return "pred" if name == "bool" else name


_DTYPES = {
    _xla_name(dtype.name): dtype
    for dtype in (
        *map(np.dtype, "?bhilqBHILQefdFD"),
        *(
            np.dtype(each)
            for each in vars(ml_dtypes).values()
            if isinstance(each, type) and issubclass(each, np.generic)
        ),
    )
}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_OPERATION = re.compile(r"^(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z\-]+)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_NAME = re.compile(r'op_name="([^"]*)"')


def compiled_trace(step: Callable, *args: PyTree, mesh: Mesh, rank: int = 0, **kwargs: PyTree) -> list[Event]:
    """The collectives of one call of a step on one rank, as XLA compiled it, in the order of its schedule. Nothing is run.

    Args:
        step: a step of `value_and_grad`, or any function that calls one.
        args, kwargs: its arguments.
        mesh: the mesh that it runs on.
        rank: the rank whose groups the events name. On a mesh with model axes they are those of its first device, and name
            devices by their index in the mesh; they include XLA's collectives over these axes.

    Returns:
        Events. Those in a loop count once for each iteration, or once if XLA does not know their number; those in all branches of
        a condition count. Collectives of no unit, such as the mean of the losses, have the unit "<loss_fn>". A collective of
        several lines is one event for each; those of the arrays of a unit in the per-parameter layout are one event.
    """
    compiled = jax.jit(step).lower(*args, **kwargs).compile()
    program = compiled.as_text()
    assert program is not None
    return list(events_of(program, rank * len(devices_of(mesh, rank))))


def events_of(program: str, rank: int = 0) -> Iterator[Event]:
    """The events in the text of a compiled program."""
    computations, entry = _computations(program)
    return _events(computations, entry, rank)


def _computations(program: str) -> tuple[dict[str, list[str]], str]:
    found: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in program.splitlines():
        line = line.strip()
        if started := _COMPUTATION.match(line):
            current = started[2]
            found[current] = []
            entry = current if started[1] else entry
        elif current:
            found[current].append(line)
    return found, entry


def _events(computations: dict[str, list[str]], name: str, rank: int) -> Iterator[Event]:
    return merged(_operands(computations, name, rank))


def _operands(computations: dict[str, list[str]], name: str, rank: int) -> Iterator[tuple[Event, str]]:
    for line in computations[name]:
        operation = _OPERATION.match(line)
        if operation is None:
            continue
        result, kind = operation[1], operation[2].removesuffix("-start")
        if kind in _KINDS:
            yield from _collective(line, result, kind, rank)
        elif kind in ("while", "call", "conditional", "fusion", "async"):
            called = _CALLED.findall(line) + re.findall(r"%?([\w.\-]+)", "".join(_BRANCHES.findall(line)))
            inner = [event for each in called if each in computations for event in _events(computations, each, rank)]
            trips = _TRIPS.search(line)
            yield from ((event, "") for event in inner * (int(trips[1]) if trips else 1))


def _collective(line: str, result: str, kind: str, rank: int) -> Iterator[tuple[Event, str]]:
    scope = (_NAME.search(line) or ("", ""))[1]
    label = any_label(scope)
    if label == WEIGHTS:
        return
    unit, index, operand = parts_of(FOREIGN if label is None else label)
    group = group_of(line, rank)
    phase = "backward" if "transpose(" in scope else "forward"
    shapes = _SHAPE.findall(result)
    if f"{kind}-start(" in line and kind == "all-gather":  # the operands are listed first
        shapes = shapes[len(shapes) // 2 :]
    for i, (dtype, dims) in enumerate(shapes):
        numel = int(np.prod([int(size) for size in re.findall(r"\d+", dims)], dtype=int))
        if dtype not in _DTYPES:
            raise UnsupportedError(
                f"expected a collective of a dtype of numpy or ml_dtypes, found {dtype!r} of XLA in the line {line!r}; a newer "
                "ml_dtypes may have it (pip install --upgrade ml_dtypes)"
            )
        num_bytes = numel * _DTYPES[dtype].itemsize * (len(group) if kind == "reduce-scatter" else 1)
        # XLA may join collectives of a bucket's arrays under the name of the first.
        array = f"{operand}.{i}" if operand and i else operand
        yield Event(_KINDS[kind], unit, phase, _DTYPES[dtype].name, num_bytes, group, bucket=index), array


def group_of(line: str, rank: int) -> tuple[int, ...]:
    """The ranks of this rank's group in a collective, from any of XLA's notations.

    >>> group_of("replica_groups={{0,1},{2,3}}, dimensions={0}", 2)
    (2, 3)
    >>> group_of("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", 2)
    (0, 2)
    >>> group_of("replica_groups=mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'x'}, dimensions={0}", 2)
    (2, 3)
    >>> group_of("replica_groups=mesh['x'=2,'y'=2] {'y'}", 2)
    (2, 3)
    """
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*\)?)\))? \{([^}]*)\}", line):
        axes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        devices = _iota(mesh[2] or str(list(axes.values())).replace(" ", ""), int(np.prod(list(axes.values()))))
        chosen = re.findall(r"'([^']*)'", mesh[3])
        grid = devices.reshape(list(axes.values()))
        within = [i for i, name in enumerate(axes) if name in chosen]
        table = np.moveaxis(grid, within, range(-len(within), 0)).reshape(
            -1, int(np.prod([grid.shape[i] for i in within]))
        )
    elif iota := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", line):
        shape = [int(size) for size in iota[1].split(",")]
        table = _iota(iota[2], int(np.prod(shape))).reshape(shape)
    else:
        groups = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", line)
        table = [[int(r) for r in each.split(",")] for each in re.findall(r"\{([\d,]+)\}", groups[1])] if groups else []
    for each in table:
        if rank in each:
            return tuple(sorted(int(r) for r in each))
    return (rank,)


def _iota(text: str, numel: int) -> np.ndarray:
    """The numbers of `[2,2]T(1,0)`: those from 0 in that shape, transposed, flattened."""
    dims = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if dims is None:
        return np.arange(numel)
    grid = np.arange(numel).reshape([int(size) for size in dims[1].split(",")])
    return (grid.transpose([int(i) for i in dims[2].split(",")]) if dims[2] else grid).reshape(-1)
