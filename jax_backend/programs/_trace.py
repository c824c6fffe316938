"""The collectives of a step as the core's events, read from its jaxpr.

The kind, bytes and group of an event come from the primitive, its operands and its mesh axis. Only the bucket is read from the
scope that `ranks/_collectives.py` put there, so that the trace is a check of that file.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from crossframe.trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Event
from jax_backend.mesh._device_mesh import REPLICATE_AXIS, SHARD_AXIS, mesh_spec
from jax_backend.programs._jaxpr import inner_jaxprs
from jax_backend.ranks._collectives import WEIGHTS, parts_of, scope_label

FOREIGN = "<loss_fn>"
"""The unit of a collective that the loss function issued itself."""

_KINDS = {
    "all_gather": ALL_GATHER,
    "all_gather_invariant": ALL_GATHER,
    "reduce_scatter": REDUCE_SCATTER,
    "psum": ALL_REDUCE,
    "psum2": ALL_REDUCE,
    "psum_invariant": ALL_REDUCE,
}


def trace_of(step: Callable, *args: PyTree, mesh: Mesh, rank: int = 0, **kwargs: PyTree) -> list[Event]:
    """The collectives of one call of a step on one rank, in the order of the jaxpr. Nothing is run.

    XLA may reorder or merge them, and a jaxpr does not say when memory is freed: compare by
    `crossframe.trace.difference(..., ordered=False, kinds=COLLECTIVES)`.

    Args:
        step: a step of `value_and_grad`, or any function that calls one.
        args, kwargs: its arguments.
        mesh: the mesh that it runs on.
        rank: the rank whose groups the events name.

    Returns:
        Events; a collective counts once for each iteration of a scan, once in a while loop, once for each branch of a cond. A
        collective that the loss function issues has the unit "<loss_fn>".
    """
    spec = mesh_spec(mesh)
    groups = {
        SHARD_AXIS: tuple(spec.shard_group(rank)),
        REPLICATE_AXIS: tuple(spec.replicate_group(rank)),
    }
    return list(_events(jax.make_jaxpr(step)(*args, **kwargs).jaxpr, groups, "forward"))


def merged(events: Iterable[tuple[Event, str]]) -> Iterator[Event]:
    """Events, of which those of the arrays of one bucket are one: a unit's collective moves all of them.

    Args:
        events: each with the index of its array in the bucket, or "" if it moves the bucket by itself.
    """
    found: list[Event] = []
    open_at: dict[tuple[object, ...], tuple[int, set[str]]] = {}
    for event, operand in events:
        key = event.kind, event.unit, event.bucket, event.phase, tuple(event.group)
        at, seen = open_at.get(key, (0, {operand}))
        if operand and operand not in seen:
            seen.add(operand)
            found[at] = replace(found[at], num_bytes=found[at].num_bytes + event.num_bytes)
        else:
            open_at[key] = len(found), {operand}
            found.append(event)
    yield from found


def _events(jaxpr: Any, groups: Mapping[str, tuple[int, ...]], phase: str) -> Iterator[Event]:
    return merged(_operands(jaxpr, groups, phase))


def _operands(jaxpr: Any, groups: Mapping[str, tuple[int, ...]], phase: str) -> Iterator[tuple[Event, str]]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _KINDS:
            yield from _event(equation, _KINDS[name], groups, phase)
        # The outermost equation says that all inside is backward: a loop, or what jax.checkpoint runs again.
        backward = "transpose(" in str(equation.source_info.name_stack)
        for inner in inner_jaxprs(equation):
            where = "backward" if backward else phase
            if name == "shard_map":  # one for each array; see [Note: collectives run on parts]
                yield from _operands(inner, groups, where)
                continue
            found = list(_events(inner, groups, where))
            yield from ((event, "") for event in found * (equation.params["length"] if name == "scan" else 1))


def _event(equation: Any, kind: str, groups: Mapping[str, tuple[int, ...]], phase: str) -> Iterator[tuple[Event, str]]:
    scopes = str(equation.source_info.name_stack)
    label = scope_label(kind, scopes)
    if label == WEIGHTS:
        return
    unit, index, operand = parts_of(FOREIGN if label is None else label)
    # The unsharded side: the result of an all-gather, the operand of the others.
    for var in equation.outvars if kind == ALL_GATHER else equation.invars:
        backward = phase == "backward" or "transpose(" in scopes
        dtype = np.dtype(var.aval.dtype)
        num_bytes = int(np.prod(var.aval.shape, dtype=int)) * dtype.itemsize
        group = _group(equation.params, groups)
        where = "backward" if backward else "forward"
        yield Event(kind, unit, where, dtype.name, num_bytes, group, bucket=index), operand


def _group(params: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The ranks of a collective: those along its mesh axis, or all ranks."""
    named = params.get("axis_name", params.get("axes"))
    axes = [axis for axis in (named if isinstance(named, tuple | list) else (named,)) if axis in groups]
    if len(axes) == 1:
        return groups[axes[0]]
    return tuple(sorted({s + r - groups[SHARD_AXIS][0] for s in groups[SHARD_AXIS] for r in groups[REPLICATE_AXIS]}))
