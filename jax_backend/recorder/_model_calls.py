"""Follows the calls of a model for a recording of forward alone: what a script calls of flax or equinox outside of other modules.

A call outside of jit is followed as it runs. One inside a jitted function is a `Tap` of it (`_taps.py`).
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np

from crossframe.replacing import replacing
from jax_backend.recorder._array_interior import first_floating, may_be_batch, mean_square
from jax_backend.recorder._module_calls import (
    is_inside_linen,
    module_reported,
    params_of,
    parts_of,
    reporting_modules,
)
from jax_backend.recorder._script_session import Root, root
from jax_backend.recorder._taps import FORWARD, Tap, Value, at_level, collecting, innermost, traced
from jax_backend.tree import is_floating, leaves_by_path

_LIBRARIES = ("flax.linen", "flax.nnx", "equinox")


@contextmanager
def following_models() -> Iterator[None]:
    """A context in which the calls of models have taps, also of classes that the script is yet to define."""
    for library in _LIBRARIES:
        if find_spec(library.split(".")[0]) is not None:
            import_module(library)
    with ExitStack() as stack:
        if (linen := sys.modules.get("flax.linen")) is not None:
            stack.enter_context(replacing(linen.Module, "apply", _applied(linen.Module.apply)))
        stack.enter_context(reporting_modules(_called))
        yield


def _applied(own: Callable) -> Callable:
    """`apply` of linen, whose modules have no parameters of their own. A module that another one applies is part of a model."""

    @functools.wraps(own)
    def apply(self: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
        if is_inside_linen():
            return own(self, variables, *args, **kwargs)
        params = leaves_by_path(variables["params"]) if isinstance(variables, Mapping) and "params" in variables else {}
        given = args, {name: value for name, value in kwargs.items() if name != "rngs"}
        return _call(params, lambda moved: own(self, moved(variables), *args, **kwargs), given)

    return apply


def _called(module: Any, run: Callable, args: Any, kwargs: Any) -> Any:
    """A call of a module of nnx or equinox."""
    params = params_of(module)

    def call(moved: Callable[[Any], Any]) -> Any:
        if moved is _same:
            return module_reported("", run, args, kwargs)
        nnx = sys.modules.get("flax.nnx")
        if nnx is not None and isinstance(module, nnx.Module):
            nnx.update(module, moved(nnx.state(module)))
            return module_reported("", run, args, kwargs)
        return type(module).__call__(moved(module), *args, **kwargs)

    return _call(params, call, (args, kwargs), {id(part): path for path, part in parts_of(vars(module))})


def _same(tree: Any) -> Any:
    return tree


def _call(
    params: Mapping[str, Any],
    call: Callable[[Callable[[Any], Any]], Any],
    given: Any,
    modules: Mapping[int, str] | None = None,
) -> Any:
    """Call a model, and add its tap.

    Args:
        params: the parameters by name.
        call: calls the model with its parameters as a function returns them.
        given: the arguments of the call.
        modules: paths of modules by id, if known.
    """
    collector, top = innermost(), root()
    if collector is None or top is None or collector.in_loss:
        return call(_same)
    params = {name: leaf for name, leaf in params.items() if is_floating(leaf)}
    if not params:
        return call(_same)
    if at_level(collector, ()) is None:
        top.session.hidden("a model")
        return call(_same)
    moved, detail = _same, collector.detail
    if isinstance(collector, Root):
        detail = top.session.begins_call(params)
        if top.session.perturbed_run:
            moved = top.session.replaced
            params = moved(params)
    paths = {id(leaf): name for name, leaf in params.items()} | dict(modules or {})
    inside = traced(collector, (), in_loss=True, detail=detail, paths=paths)
    with collecting(inside):
        output = call(moved)
    if (result := first_floating(output)) is None:
        return output
    own = {id(leaf) for leaf in params.values()}
    batch = [leaf for leaf in jax.tree.leaves(given) if may_be_batch(leaf) and id(leaf) not in own]
    values = {
        "loss": mean_square(result),
        "params": tuple(params.values()),
        "batch": tuple(batch),
        "inside": tuple(tap.values["array"].array for tap in inside.taps),
    }
    raised = jax.tree.map(lambda value: Value(at_level(collector, value)), values)
    about = (
        tuple(params),
        tuple(np.shape(leaf) for leaf in params.values()),
        tuple(tap.about[:2] for tap in inside.taps),
    )
    collector.add([Tap(FORWARD, about, raised)])
    return output
