"""Names of the models of a script, by the variables that hold their parameters."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from traceback import walk_stack
from types import FrameType
from typing import Any

import jax

from crossframe.scripts import held_in

_LIBRARIES = ("jax", "jax_backend", "crossframe", "flax", "equinox", "optax", "contextlib", "functools", "runpy")


def names_in_script(params: Sequence[Mapping[int, Any]]) -> list[str]:
    """A name for each model: the variable of the script that holds its parameters, or an attribute or element of one, and no
    parameters of others. Of several in the outermost function it is the one with the most of them, a variable rather than a part
    of one, and the one with the least besides. If there is none, the name has the model's number.

    Args:
        params: of each model the ids of its arrays.
    """
    found: dict[int, str] = {}
    for frame in _frames():
        of_frame: dict[int, tuple[int, bool, int, str]] = {}
        for variable, value in list(frame.f_locals.items()):
            for name, held in _held_by(variable, value):
                leaves = _ids_of_leaves(held)
                owners = [i for i, own in enumerate(params) if not leaves.isdisjoint(own)]
                if len(owners) == 1:
                    [i] = owners
                    rank = len(leaves & params[i].keys()), held is value, -len(leaves)
                    if i not in of_frame or rank > of_frame[i][:3]:
                        of_frame[i] = *rank, name
        found |= {i: name for i, (*_, name) in of_frame.items()}  # of the outermost frame, which is the script's
    names: list[str] = []
    for i in range(len(params)):
        name = found.get(i, f"model_{i}")
        while name in names:
            name += "_"
        names.append(name)
    return names


def _ids_of_leaves(held: Any) -> set[int]:
    try:
        return {id(leaf) for leaf in jax.tree.leaves(held)}
    except Exception:  # no pytree: a dict whose keys have no order, or whatever a class of the script raises
        return set()


def _frames() -> Iterator[FrameType]:
    """The frames of the script, the outermost last."""
    for frame, _ in walk_stack(sys._getframe()):
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES:
            yield frame


def _held_by(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A variable and what it holds, with names. Models are callable."""
    yield name, value
    if not callable(value):
        yield from held_in(name, value)
