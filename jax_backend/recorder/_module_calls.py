"""Reports inputs and outputs of the modules of flax and equinox, and of named calls, while a loss function is traced.

A module's raw name is the path of its parameters, in the tree that is differentiated or in the variables of flax's linen;
`canonical_module` makes it the name in the recording.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

from crossframe.recording.module_calls import renamed_call
from crossframe.replacing import replacing, setting, subclasses_of
from jax_backend.activations import INPUT, OUTPUT, module_scope
from jax_backend.recorder._taps import ACTIVATION, Detail, Tap, Value, are_differentiated, at_level, innermost
from jax_backend.tree import is_floating, leaves_by_path, path_name

_LINEN_PARAMS = "params"
_scopes: ContextVar[tuple[str, ...]] = ContextVar("scopes", default=())
_running: ContextVar[tuple[int, ...]] = ContextVar("running", default=())
"""Ids of the modules that run; a call of a base class's `__call__` is not another one."""
_inside_linen: ContextVar[bool] = ContextVar("inside_linen", default=False)
_applied: ContextVar[tuple[str, ...] | None] = ContextVar("applied", default=())
"""The path of the module that is applied, in the model; None: it is not part of the model."""
ConstantParams = tuple[tuple[str, tuple[int, ...]], ...]
"""Path and shape of each parameter of a model by which the loss function is not differentiated."""
_constants: ContextVar[ConstantParams | None] = ContextVar("constants", default=None)
"""Of the model that runs; () if the loss function is differentiated by its parameters; None if that is not known."""
_parts_of_constant: ContextVar[dict[int, str] | None] = ContextVar("parts_of_constant", default=None)
"""The paths of the modules inside such a model of nnx or equinox, by their ids."""


def canonical_module(raw: str, paths: Sequence[str], params: Iterable[str]) -> str:
    """The name in a recording of a module with a raw name.

    Args:
        paths: of the arrays that are differentiated.
        params: names of the parameters in the recording.

    >>> canonical_module("0.model.layers.1", ["0.model.layers.1.kernel"], ["layers.1.kernel"])
    'layers.1'
    >>> canonical_module("Dense_0", ["params.Dense_0.bias"], ["params.Dense_0.bias"])
    'params.Dense_0'
    >>> canonical_module("Dense_0 (call 2)", ["params.Dense_0.bias"], ["params.Dense_0.bias"])
    'params.Dense_0 (call 2)'
    """
    return renamed_call(raw, lambda module: _canonical(module, paths, set(params)))


def _canonical(raw: str, paths: Sequence[str], names: Set[str]) -> str:
    if any(name.startswith(f"{_LINEN_PARAMS}.{raw}.") for name in names):
        return f"{_LINEN_PARAMS}.{raw}"
    for path in paths:
        parts = path.split(".")
        lead = next((i for i in range(len(parts)) if ".".join(parts[i:]) in names), 0)
        prefix = ".".join(parts[:lead])
        if prefix and (raw == prefix or prefix.startswith(f"{raw}.")):
            return ""
        if prefix and raw.startswith(f"{prefix}."):
            return raw.removeprefix(f"{prefix}.")
    return raw


def module_call(fun: Callable, name: str) -> Callable:
    """A function as a module of this name, inside of the named calls that enclose it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        scopes = (*_scopes.get(), name)
        with setting(_scopes, scopes):
            return module_reported(".".join(scopes), fun, args, kwargs)

    return call


def module_reported(name: str, fun: Callable, args: Any, kwargs: Any, module: Any = None) -> Any:
    """Call a module, and report its input and output if the interior of a loss function or a model is wanted.

    Args:
        module: is described; None: a named call.
    """
    collector = innermost()
    if collector is not None and module is not None:
        collector.described.modules.setdefault(name, description(module))
    if collector is None or not collector.in_loss or collector.detail is not Detail.INTERIOR:
        return fun(*args, **kwargs)
    _report(name, INPUT, (args, tuple(kwargs.values())))
    with module_scope(name):
        output = fun(*args, **kwargs)
    _report(name, OUTPUT, output)
    return output


def _report(name: str, use: str, values: Any) -> None:
    """Report the first floating array of a call of a module that is no parameter."""
    collector = innermost()
    assert collector is not None
    for leaf in jax.tree.leaves(values):
        # jnp.float32 has a dtype too, but no shape.
        if id(leaf) not in collector.paths and hasattr(leaf, "shape") and is_floating(leaf):
            # Inside a scan or a checkpoint of the model it cannot leave.
            if (array := at_level(collector, leaf)) is not None:
                collector.add([Tap(ACTIVATION, (name, use, _constants.get()), {"array": Value(array)})])
            return


def calling_model(params: Mapping[str, Any]) -> AbstractContextManager[None]:
    """A context in which an outermost module is called.

    Args:
        params: its parameters by path.
    """
    return setting(_constants, _constant_params(params))


def _constant_params(params: Mapping[str, Any]) -> ConstantParams | None:
    collector = innermost()
    arrays = {path: leaf for path, leaf in params.items() if is_floating(leaf)}
    if not arrays or collector is None or not collector.in_loss:
        return None
    match are_differentiated(collector, arrays.values()):
        case True:
            return ()
        case False:
            return tuple((path, tuple(leaf.shape)) for path, leaf in arrays.items())
    return None


def description(module: Any) -> str:
    """The class of a module and its options: attributes that are numbers, texts, dtypes and functions.

    >>> import jax.numpy as jnp
    >>> class Norm:
    ...     def __init__(self):
    ...         self.epsilon, self.axes, self.scale = 1e-6, (0, -1), jnp.ones(3)
    >>> description(Norm())
    'Norm(axes=(0, -1), epsilon=1e-06)'
    """
    options = {name: _option(value) for name, value in vars(module).items() if name not in _OF_LINEN and name[0] != "_"}
    stated = ", ".join(f"{name}={text}" for name, text in sorted(options.items()) if text is not None)
    return f"{type(module).__name__}({stated})"


_OF_LINEN = ("name", "parent", "scope")
"""Attributes of modules of linen that state where they are, not what they compute."""


def _option(value: Any) -> str | None:
    """A value of an option as text; None if it is no option, such as an array or a module."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple | list):
        parts = [_option(each) for each in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if isinstance(value, np.dtype | type):
        return str(getattr(value, "__name__", value))
    if isinstance(value, functools.partial):
        given = [_option(each) for each in (value.func, *value.args)] + [
            f"{k}={_option(v)}" for k, v in value.keywords.items()
        ]
        return f"partial({', '.join(map(str, given))})"
    if inspect.isroutine(value) or (callable(value) and hasattr(value, "__wrapped__")):
        return getattr(value, "__name__", None)
    return None


Outermost = Callable[[Any, Callable, Any, Any], Any]
"""Calls a module outside of all others: of the module, its bound method, and the arguments and keyword arguments of the call."""


@contextmanager
def reporting_modules(outermost: Outermost | None = None) -> Iterator[None]:
    """A context in which modules of the libraries that the script has imported report.

    Args:
        outermost: called instead of a module of nnx or equinox, also of classes to come, that is called outside of a loss
            function.
    """
    with ExitStack() as stack:
        stack.enter_context(reporting_linen(module_reported))
        if (nnx := sys.modules.get("flax.nnx")) is not None:
            _replace_calls(stack, nnx.Module, _leaves_of_nnx, outermost)
        if (equinox := sys.modules.get("equinox")) is not None:
            _replace_calls(stack, equinox.Module, _leaves_of_tree, outermost)
        yield


@contextmanager
def reporting_linen(report: Callable[[str, Callable, Any, Any, Any], Any]) -> Iterator[None]:
    """A context in which modules of flax's linen report, if the script has imported it.

    A module that another one applies by itself, as a head does that is tied to an embedding (`self.head.apply({"params":
    {"kernel": kernel}}, x)`), has its path in the model. One that is made for it, or initialized, is not reported.

    Args:
        report: calls a module: of its path in the model, its bound method, the arguments and keyword arguments of the call, and
            the module.
    """
    linen = sys.modules.get("flax.linen")
    if linen is None:
        yield
        return

    def intercept(own: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        outer = _applied.get()
        with ExitStack() as stack:
            if not is_inside_linen() and context.module.scope is not None:
                variables = context.module.scope.root.variables()
                stack.enter_context(calling_model(leaves_by_path(variables.get(_LINEN_PARAMS, {}))))
            stack.enter_context(setting(_inside_linen, True))
            if context.method_name != "__call__" or context.module.scope is None or outer is None:
                return own(*args, **kwargs)
            return report(".".join((*outer, *context.module.path)), own, args, kwargs, context.module)

    with (
        linen.intercept_methods(intercept),
        replacing(linen.Module, "apply", _at_its_path(linen.Module.apply)),
        replacing(linen.Module, "init_with_output", _not_in_the_model(linen.Module.init_with_output)),
    ):
        yield


def is_inside_linen() -> bool:
    """Whether a module of linen runs."""
    return _inside_linen.get()


def _at_its_path(own: Callable) -> Callable:
    @functools.wraps(own)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_inside_linen():
            return own(self, *args, **kwargs)
        outer = _applied.get()
        with setting(_applied, None if outer is None or self.scope is None else (*outer, *self.path)):
            return own(self, *args, **kwargs)

    return apply


def _not_in_the_model(own: Callable) -> Callable:
    @functools.wraps(own)
    def init_with_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        with setting(_applied, None):
            return own(self, *args, **kwargs)

    return init_with_output


def _replace_calls(stack: ExitStack, base: type, leaves_of: Callable, outermost: Outermost | None) -> None:
    def replace(cls: type) -> None:
        if "__call__" in vars(cls):
            stack.enter_context(replacing(cls, "__call__", _reporting(vars(cls)["__call__"], leaves_of, outermost)))

    for cls in subclasses_of(base) - {base}:
        replace(cls)
    if outermost is not None:
        init_subclass = inspect.getattr_static(base, "__init_subclass__")

        def replaced(cls: type, **options: Any) -> None:
            init_subclass.__get__(None, cls)(**options)
            replace(cls)

        stack.enter_context(replacing(base, "__init_subclass__", classmethod(replaced)))


def _reporting(own: Any, leaves_of: Callable, outermost: Outermost | None) -> Callable:
    @functools.wraps(own)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = own.__get__(self, type(self))
        if id(self) in _running.get():
            return run(*args, **kwargs)
        if outermost is not None and (collector := innermost()) is not None and not collector.in_loss:
            return outermost(self, run, args, kwargs)
        name = _path_of(self, leaves_of)
        with ExitStack() as stack:
            stack.enter_context(setting(_running, (*_running.get(), id(self))))
            if name is not None and _constants.get() is None:
                stack.enter_context(setting(_constants, ()))
            elif name is None and (constants := _constant_params(dict(leaves_of(self)))):
                name = ""
                stack.enter_context(setting(_constants, constants))
                stack.enter_context(setting(_parts_of_constant, _paths_of_parts(self, name)))
            return run(*args, **kwargs) if name is None else module_reported(name, run, args, kwargs, self)

    return call


def _path_of(module: Any, leaves_of: Callable) -> str | None:
    """The path of a module in the tree that is differentiated, by one of its parameters or by a module that contains it; None if
    it is not known. Notes the paths of the modules inside it."""
    collector = innermost()
    if collector is None or not collector.in_loss:
        return None
    if (parts := _parts_of_constant.get()) is not None:
        if (found := parts.get(id(module))) is not None:
            parts |= _paths_of_parts(module, found)
        return found
    found = collector.paths.get(id(module))
    if found is None:
        for own, leaf in leaves_of(module):
            path = collector.paths.get(id(leaf))
            if path is not None and (path == own or path.endswith(f".{own}")):
                found = path.removesuffix(own).rstrip(".")
                break
    if found is not None:
        collector.modules.append(module)
        for key, path in _paths_of_parts(module, found).items():
            collector.paths.setdefault(key, path)
    return found


def _paths_of_parts(module: Any, path: str) -> dict[int, str]:
    """The paths of the modules inside a module, by their ids."""
    return {id(part): ".".join(filter(None, (path, own))) for own, part in parts_of(vars(module))}


def parts_of(values: Any) -> Iterator[tuple[str, Any]]:
    """Modules inside of a module's attributes, in lists and dicts too, without those in other modules."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        if isinstance(value, dict | list | tuple):
            for own, part in parts_of(value):
                yield f"{key}.{own}", part
        elif callable(value) and hasattr(value, "__dict__") and not isinstance(value, type):
            yield str(key), value


def params_of(module: Any) -> dict[str, Any]:
    """The parameters of a module of nnx or equinox by name."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(module, nnx.Module):
        return dict(_leaves_of_nnx(module, nnx.Param))
    return {name: leaf for name, leaf in _leaves_of_tree(module) if hasattr(leaf, "dtype")}


def _leaves_of_tree(module: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(module)[0]:
        yield path_name(path), leaf


def _leaves_of_nnx(module: Any, *kinds: Any) -> Iterator[tuple[str, Any]]:
    nnx = sys.modules["flax.nnx"]
    for path, variable in nnx.to_flat_state(nnx.state(module, *kinds)):
        yield ".".join(map(str, path)), variable.get_raw_value() if hasattr(variable, "get_raw_value") else variable
