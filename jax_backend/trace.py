"""What a step really does, as the core's events, read from its jaxpr.

The kind of an event is that of the jaxpr's primitive, its bytes are those of the primitive's operands; only the unit is
read from the scope that `jax_backend.collectives` put there. So the trace does not repeat what that file believes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from crossframe.trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Event
from jax_backend.collectives import scope_unit
from jax_backend.mesh import num_ranks

FOREIGN = "<loss_fn>"
"""The unit of a collective that is no unit's: the loss function issued it."""

_KINDS = {
    "all_gather": ALL_GATHER,
    "all_gather_invariant": ALL_GATHER,
    "reduce_scatter": REDUCE_SCATTER,
    "psum": ALL_REDUCE,
    "psum2": ALL_REDUCE,
    "psum_invariant": ALL_REDUCE,
}
_REMAT = ("checkpoint", "remat", "remat2")


def trace_of(step: Callable, *args: Any, mesh: Mesh) -> list[Event]:
    """The collectives of one call of a step on one rank, in the order of the jaxpr. Nothing is run.

    XLA may reorder or merge them: compare by `crossframe.trace.difference(..., ordered=False)`.

    Args:
        step: what `value_and_grad` returned, or any function that calls it.
        args: its arguments.
        mesh: the mesh that it runs on.

    Returns:
        Events; a collective inside a scan counts once an iteration, inside a while loop once, in a cond once a branch.
        A collective of the loss function's own has the unit "<loss_fn>".
    """
    group = tuple(range(num_ranks(mesh)))
    return list(_events(jax.make_jaxpr(step)(*args).jaxpr, group, "forward"))


def _events(jaxpr: Any, group: tuple[int, ...], phase: str) -> Iterator[Event]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _KINDS:
            yield from _event(equation, _KINDS[name], group, phase)
        # Backward stands in a remat of its own, under which forward's part runs again.
        again = name in _REMAT and equation.params["differentiated"]
        for inner in _inner_jaxprs(equation.params):
            found = list(_events(inner, group, "backward" if again else phase))
            yield from found * (equation.params["length"] if name == "scan" else 1)


def _event(equation: Any, kind: str, group: tuple[int, ...], phase: str) -> Iterator[Event]:
    scopes = str(equation.source_info.name_stack)
    unit = scope_unit(kind, scopes)
    # The unsharded side: what an all-gather fills, what the others take in.
    for var in equation.outvars if kind == ALL_GATHER else equation.invars:
        backward = phase == "backward" or "transpose(" in scopes
        dtype = np.dtype(var.aval.dtype)
        num_bytes = int(np.prod(var.aval.shape, dtype=int)) * dtype.itemsize
        yield Event(
            kind, FOREIGN if unit is None else unit, "backward" if backward else "forward", dtype.name, num_bytes, group
        )


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns"):
                yield item
            elif hasattr(item, "jaxpr") and hasattr(item.jaxpr, "eqns"):
                yield item.jaxpr
