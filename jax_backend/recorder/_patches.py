"""Replaces the functions of JAX and optax that a training script calls, so that a `Session` sees what the script computes.

They are replaced before the script imports them, and report to the current `Collector`; without one, they are JAX's own.
"""

import dataclasses
import functools
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax._src import core
from jax.sharding import PartitionSpec

from jax_backend.other_rounding import other_rounding
from jax_backend.recorder._module_calls import module_call, reporting_modules
from jax_backend.recorder._optimizer_settings import noting_optimizers
from jax_backend.recorder._taps import (
    APPLY,
    GRADIENT,
    UPDATE,
    Collector,
    Detail,
    Packed,
    Tap,
    Value,
    at_level,
    collecting,
    current,
    innermost,
    of_scan,
    pack,
    traced,
    unpacked,
)
from jax_backend.tree import path_name

_jit, _value_and_grad, _scan, _fori_loop = jax.jit, jax.value_and_grad, jax.lax.scan, jax.lax.fori_loop
_shard_map, _pmap, _named_call = jax.shard_map, jax.pmap, jax.named_call
_apply_updates, _value_and_grad_from_state = optax.apply_updates, optax.value_and_grad_from_state
_inside_update: ContextVar[bool] = ContextVar("inside_update", default=False)
_DONATED = ("donate_argnums", "donate_argnames")
_STATIC = ("static_argnums", "static_argnames")


class Session(Protocol):
    """What the replaced functions call outside of all traces."""

    perturbed_run: int
    forward_only: bool

    def begins_call(self, params: Mapping[str, Any]) -> Detail:
        """A model with these parameters is called outside of jit; returns what is wanted of it."""
        ...

    def call(self, jitted: "Jitted", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a jitted function."""

    def gradient(self, step: "Gradient", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a differentiated function."""

    def replaced(self, tree: Any) -> Any:
        """The arguments of a call, with other initial parameters in a perturbed run."""

    def follows(self, jitted: "Jitted", args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a jitted function takes gradients or updates parameters."""
        ...

    def compiled(self) -> None:
        """Such a function is called that was compiled ahead of time, with static arguments or options of the compiler."""

    def mapped(self) -> None:
        """A function of `jax.pmap` has been called."""

    def hidden(self, what: str) -> None:
        """A function of an optimizer was traced where its values cannot leave."""

    def tapped(self, taps: list[Tap]) -> None:
        """Taps of the program that runs."""


class Root(Collector):
    """The collector of the program that runs."""

    def __init__(self, session: Session) -> None:
        super().__init__(None, Detail.LOSSES)
        self.session = session

    def add(self, taps: Any) -> None:
        """Pass taps on at once."""
        self.session.tapped(list(taps))


def root() -> Root | None:
    """The collector of the program that runs; None if none is recorded."""
    found: Collector | None = innermost()
    while found is not None and not isinstance(found, Root):
        found = found.above
    return found


def _following() -> Collector | None:
    """The collector of the current trace, if functions that are called in it may have taps."""
    collector = current()
    if collector is None or isinstance(collector, Root):
        return None
    return None if collector.in_loss and collector.detail is not Detail.INTERIOR else collector


class Jitted:
    """A jitted function, with a program for each `Detail`.

    Args:
        fun: the user's function.
        options: of `jax.jit`.

    Attributes:
        plans: what a session knows of it.
        donates: whether it may donate arguments.
    """

    def __init__(self, fun: Callable, options: dict[str, Any]) -> None:
        self._fun, self._options = fun, options
        self._plain: Any = _jit(fun, **options)
        self._programs: dict[Detail, Any] = {}
        self._paths: list[str | None] = []
        self.plans: dict[Any, Any] = {}
        self.donates = any(options.get(name) not in (None, ()) for name in _DONATED)
        functools.update_wrapper(self, fun, updated=())

    def program(self, detail: Detail) -> Any:
        """A jitted function that returns the user's results and a `Packed`. Only that of the least detail, which the script uses,
        donates arguments."""
        if detail not in self._programs:

            @functools.wraps(self._fun)
            def run(*args: Any, **kwargs: Any) -> tuple[Any, Packed]:
                above = innermost()
                assert above is not None

                def own(*args: Any, **kwargs: Any) -> tuple[Any, Packed]:
                    inputs = jax.tree.leaves((args, kwargs))
                    named = zip(inputs, self._paths, strict=len(self._paths) == len(inputs))
                    paths = {id(leaf): path for leaf, path in named if path is not None}
                    collector = traced(above, inputs, paths=paths, detail=detail, is_cached=True)
                    with collecting(collector):
                        result = self._fun(*args, **kwargs)
                    return result, pack(collector.taps, result, collector)

                # Where gradients are taken, the loss function alone is rounded otherwise.
                if isinstance(above, Root) and above.session.forward_only:
                    own = _rounded(own)
                return own(*args, **kwargs)

            options = {name: value for name, value in self._options.items() if not detail or name not in _DONATED}
            if "out_shardings" in options:
                options["out_shardings"] = (options["out_shardings"], None)
            self._programs[detail] = _jit(run, **options)
        return self._programs[detail]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(collector := current(), Root):
            return collector.session.call(self, args, kwargs)
        if (collector := _following()) is None:
            return self._plain(*args, **kwargs)
        self._paths = [collector.paths.get(id(leaf)) for leaf in jax.tree.leaves((args, kwargs))]
        result, packed = self.program(collector.detail)(*args, **kwargs)
        collector.add(unpacked(packed, (args, kwargs), result))
        return result

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """See `jax.jit`."""
        lowered = self._plain.lower(*args, **kwargs)
        if isinstance(collector := current(), Root) and collector.session.follows(self, args, kwargs):
            is_same = not any(self._options.get(name) not in (None, ()) for name in _STATIC)
            return _AheadOfTime(lowered, collector.session, self if is_same else None)
        return lowered

    def __get__(self, owner: Any, _: Any = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


class _AheadOfTime:
    """A lowered or compiled function. The jitted function is called instead, unless it takes other arguments or options.

    Args:
        jitted: the jitted function; None: it takes others.
    """

    def __init__(self, stage: Any, session: Session, jitted: Jitted | None) -> None:
        self._stage, self._session, self._jitted = stage, session, jitted

    def compile(self, *args: Any, **kwargs: Any) -> "_AheadOfTime":
        """See `jax.stages.Lowered`."""
        jitted = None if any(map(bool, (*args, *kwargs.values()))) else self._jitted
        return _AheadOfTime(self._stage.compile(*args, **kwargs), self._session, jitted)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._jitted is not None:
            return self._jitted(*args, **kwargs)
        self._session.compiled()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


def jit(fun: Any = None, /, **options: Any) -> Any:
    """`jax.jit`."""
    if fun is None:
        return functools.partial(jit, **options)
    return Jitted(fun, options) if callable(fun) else _jit(fun, **options)


@dataclass(frozen=True)
class Gradient:
    """A call of a differentiated function.

    Args:
        fun, argnums, has_aux, options: of `jax.value_and_grad`.
    """

    fun: Callable
    argnums: int | Sequence[int]
    has_aux: bool
    options: dict[str, Any]

    def plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What JAX returns, and its tap without the interior."""
        own = _repeatable(self.fun)

        def fun(*args: Any, **kwargs: Any) -> Any:
            above = innermost()
            assert above is not None
            with collecting(traced(above, in_loss=True)):  # nothing in here is a step
                return own(*args, **kwargs)

        differentiated = _value_and_grad(_rounded(fun), self.argnums, self.has_aux, **self.options)
        result = differentiated(*args, **kwargs)
        return result, self.tap(result, args, [])

    def with_interior(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same, with the interior."""

        own = _repeatable(self.fun)

        def fun(*args: Any, **kwargs: Any) -> Any:
            above = innermost()
            assert above is not None
            inside = traced(above, (), in_loss=True, detail=Detail.INTERIOR, paths=_paths(self.diff(args)))
            with collecting(inside), reporting_modules():
                result = own(*args, **kwargs)
            loss, aux = result if self.has_aux else (result, None)
            return loss, (aux, pack(inside.taps, (), inside))

        differentiated = _value_and_grad(_rounded(fun), self.argnums, True, **self.options)
        (loss, (aux, packed)), grads = differentiated(*args, **kwargs)
        result = ((loss, aux) if self.has_aux else loss), grads
        collector = innermost()
        assert collector is not None
        return result, self.tap(result, args, unpacked(packed, (), (), collector.inputs))

    def diff(self, args: tuple[Any, ...]) -> Any:
        """The arguments that are differentiated."""
        return args[self.argnums] if isinstance(self.argnums, int) else tuple(args[i] for i in self.argnums)

    def tap(self, result: Any, args: tuple[Any, ...], inside: list[Tap]) -> Tap:
        """The tap of a result, with those inside of it."""
        value, grads = result
        collector = innermost()
        assert collector is not None
        loss = at_level(collector, value[0] if self.has_aux else value)
        leaves = jax.tree_util.tree_flatten_with_path(self.diff(args))[0]
        names = tuple(path_name(path) for path, _ in leaves)
        shapes = tuple(tuple(leaf.shape) for leaf in jax.tree.leaves(grads))
        values: dict[str, Any] = {"loss": Value(loss), "diff": tuple(Value(leaf) for _, leaf in leaves)}
        values["own_grads"] = tuple(Value(leaf) for leaf in jax.tree.leaves(grads))
        values["inside"] = tuple(Value(at_level(collector, tap.values["array"].array)) for tap in inside)
        return Tap(GRADIENT, (names, shapes, tuple(tap.about for tap in inside)), values)


def _repeatable(fun: Any) -> Any:
    """A function that can be called again: those of `nnx.value_and_grad` use up a queue."""
    if dataclasses.is_dataclass(fun) and isinstance(getattr(fun, "nondiff_states", None), deque):
        return dataclasses.replace(fun, nondiff_states=deque(fun.nondiff_states))  # type: ignore[arg-type]
    return fun


def _rounded(fun: Callable) -> Callable:
    """A loss function, with other rounding in a perturbed run."""
    found = root()
    if found is None or not (perturbed_run := found.session.perturbed_run):
        return fun

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype") or isinstance(leaf, float)]

        def of_arrays(*arrays: Any) -> Any:
            filled = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
            given, named = jax.tree.unflatten(structure, [filled[i] for i in range(len(leaves))])
            return fun(*given, **named)

        return other_rounding(of_arrays, perturbed_run)(*(leaves[i] for i in places))

    return run


def _paths(tree: Any) -> dict[int, str]:
    return {id(leaf): path_name(path) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def value_and_grad(fun: Any, argnums: Any = 0, has_aux: bool = False, **options: Any) -> Any:
    """`jax.value_and_grad`."""
    real = _value_and_grad(fun, argnums, has_aux, **options)
    step = Gradient(fun, argnums, has_aux, options)

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        collector = innermost()
        if collector is None or collector.in_loss or _inside_update.get():
            return real(*args, **kwargs)
        if isinstance(collector, Root) and collector.is_current():
            return collector.session.gradient(step, args, kwargs)
        if isinstance(collector, Root) or at_level(collector, ()) is None:
            return real(*args, **kwargs)
        if collector.detail is Detail.INTERIOR:
            result, tap = step.with_interior(args, kwargs)
        else:
            result, tap = step.plain(args, kwargs)
        collector.add([tap])
        return result

    return call


def grad(fun: Any, argnums: Any = 0, has_aux: bool = False, **options: Any) -> Any:
    """`jax.grad`."""
    both = value_and_grad(fun, argnums, has_aux, **options)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return call


def value_and_grad_from_state(fun: Any) -> Any:
    """`optax.value_and_grad_from_state`, whose gradient is that of a condition: modules inside of it are not seen."""
    real, step = _value_and_grad_from_state(fun), Gradient(fun, 0, False, {})

    @functools.wraps(real)
    def call(params: Any, *args: Any, **kwargs: Any) -> Any:
        collector = current()
        if collector is None or collector.in_loss or _inside_update.get():
            return real(params, *args, **kwargs)
        if isinstance(collector, Root):
            params = collector.session.replaced(params)
        result = real(params, *args, **kwargs)
        collector.add([step.tap(result, (params,), [])])
        return result

    return call


def scan(f: Any, init: Any, xs: Any = None, length: int | None = None, *args: Any, **options: Any) -> Any:
    """`jax.lax.scan`."""
    if isinstance(top := current(), Root):
        jitted = _jitted_scan(f, length, *args, **options)
        follows = top.session.follows(jitted, (init, xs), {})
        return jitted(init, xs) if follows else _scan(f, init, xs, length, *args, **options)
    if (collector := _following()) is None:
        return _scan(f, init, xs, length, *args, **options)

    def body(carry: Any, x: Any) -> Any:
        inner = traced(collector, carry, is_scan=True)
        with collecting(inner):
            carry, y = f(carry, x)
        return carry, (y, pack(inner.taps, (), inner))

    carry, (ys, packed) = _scan(body, init, xs, length, *args, **options)
    if options.get("reverse", args[0] if args else False):
        packed = dataclasses.replace(packed, arrays=[jnp.flip(each, 0) for each in packed.arrays])
    leaves = jax.tree.leaves(xs)
    collector.add(of_scan(packed, leaves[0].shape[0] if leaves else length or 0, init, collector.inputs))
    return carry, ys


def _jitted_scan(f: Any, *args: Any, **options: Any) -> Jitted:
    """A scan outside of jit, which JAX compiles too, as a jitted function."""
    try:
        return _kept_scan(f, args, tuple(options.items()))
    except TypeError:  # not hashable
        return _kept_scan.__wrapped__(f, args, tuple(options.items()))


@functools.lru_cache(maxsize=64)
def _kept_scan(f: Any, args: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> Jitted:
    return Jitted(lambda init, xs: scan(f, init, xs, *args, **dict(options)), {})


@functools.lru_cache(maxsize=64)
def _loop_body(body_fun: Callable) -> Callable:
    def body(carry: Any, _: Any) -> Any:
        i, value = carry
        return (i + 1, body_fun(i, value)), None

    return body


def fori_loop(lower: Any, upper: Any, body_fun: Callable, init_val: Any, **options: Any) -> Any:
    """`jax.lax.fori_loop`, which is a scan if the number of iterations is known."""
    if current() is None or not (core.is_concrete(lower) and core.is_concrete(upper)):
        return _fori_loop(lower, upper, body_fun, init_val, **options)

    first, length = int(lower), max(int(upper) - int(lower), 0)
    return scan(_loop_body(body_fun), (first, init_val), None, length, unroll=options.get("unroll") or False)[0][1]


@functools.wraps(_shard_map)  # haliax reads its signature, for the name of an option that has changed
def shard_map(f: Any = None, /, **options: Any) -> Any:
    if f is None:
        return functools.partial(shard_map, **options)

    @functools.wraps(f)
    def call(*args: Any) -> Any:
        if (collector := _following()) is None:
            return _shard_map(f, **options)(*args)

        def body(*args: Any) -> Any:
            inner = traced(collector, args)
            with collecting(inner):
                result = f(*args)
            return result, pack(inner.taps, result, inner, lead=lambda array: jnp.asarray(array)[None])

        axes = options.get("axis_names") or getattr(options.get("mesh"), "axis_names", None)
        if axes is None:  # the mesh of the context
            axes = jax.sharding.get_abstract_mesh().axis_names
        given: dict[str, Any] = options | {"out_specs": (options["out_specs"], PartitionSpec(tuple(axes)))}
        result, packed = _shard_map(body, **given)(*args)
        collector.add(unpacked(packed, args, result, collector.inputs))
        return result

    return call


def pmap(fun: Any = None, *args: Any, **options: Any) -> Any:
    """`jax.pmap`, in which nothing is followed."""
    if fun is None:
        return functools.partial(pmap, *args, **options)
    real = _pmap(fun, *args, **options)

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if isinstance(collector := current(), Root):
            collector.session.mapped()
        return result

    return call


def named_call(fun: Any, *, name: str | None = None) -> Any:
    """`jax.named_call`."""
    return functools.wraps(fun)(module_call(_named_call(fun, name=name), name or fun.__name__))


def apply_updates(params: Any, updates: Any) -> Any:
    """`optax.apply_updates`."""
    return _applied(_apply_updates, params, updates)


def _applied(own: Callable, params: Any, updates: Any) -> Any:
    collector = _of_step("apply_updates")
    if collector is None:
        return own(params, updates)
    if isinstance(collector, Root):
        params = collector.session.replaced(params)
    result = own(params, updates)
    names = _floating(updates)
    before, after = (
        {name: leaf for name, leaf in _floating(each).items() if name in names} for each in (params, result)
    )
    values = {
        what: tuple(Value(leaf) for leaf in each.values()) for what, each in (("before", before), ("after", after))
    }
    collector.add([Tap(APPLY, (tuple(before),), values)])
    return result


def _floating(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        path_name(path): leaf
        for path, leaf in leaves
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    }


def _of_step(what: str) -> Collector | None:
    """The collector of an optimizer's function, unless another function of the optimizer, or a loss function, calls it."""
    collector = innermost()
    if collector is None or collector.in_loss or _inside_update.get():
        return None
    if collector.is_current():
        return collector
    if (found := root()) is not None:
        found.session.hidden(what)
    return None


_multi_steps: ContextVar[Any] = ContextVar("multi_steps", default=None)


def _update(own: Callable, grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    """The update of a gradient transformation."""
    collector = _of_step("update")
    if collector is None:
        return own(grads, state, params, **extra)
    if isinstance(collector, Root):
        params = collector.session.replaced(params)
    token, multi = _inside_update.set(True), _multi_steps.set(None)
    try:
        updates, after = own(grads, state, params, **extra)
        accumulates = _multi_steps.get()
    finally:
        _inside_update.reset(token)
        _multi_steps.reset(multi)
    reduced = grads
    values: dict[str, Any] = {}
    if accumulates is not None and isinstance(state, optax.MultiStepsState):
        values["mini_step"] = Value(after.mini_step)
        if (
            isinstance(collector, Root) or collector.detail
        ):  # what its optimizer gets, if this is the last of the small steps
            reduced = jax.tree.map(
                lambda grad, acc: accumulates._acc_update(grad, acc, n_acc=state.mini_step), grads, state.acc_grads
            )
    named = _floating(reduced)
    values |= {
        "grads": tuple(Value(leaf) for leaf in named.values()),
        "state": jax.tree.map(Value, after),
        "state_before": tuple(Value(leaf) for leaf in jax.tree.leaves((state, params))),
    }
    about = tuple(named), tuple(tuple(leaf.shape) for leaf in named.values())
    collector.add([Tap(UPDATE, about, values)])
    return updates, after


def _multi_steps_update(own: Callable) -> Callable:
    @functools.wraps(own)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        def call(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            _multi_steps.set(self)
            return own(self, grads, state, params, **extra)

        return call(*args, **kwargs) if _inside_update.get() else _update(call, *args, **kwargs)

    return update


def _patch_equinox(stack: ExitStack) -> bool:
    """Follow `equinox.apply_updates` too, once the script has imported it."""
    if (equinox := sys.modules.get("equinox")) is None or not hasattr(equinox, "apply_updates"):
        return False
    own = equinox.apply_updates
    stack.enter_context(replacing(equinox, "apply_updates", lambda model, updates: _applied(own, model, updates)))
    return True


@contextmanager
def replacing(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A context with another attribute of a module or a class."""
    own = inspect.getattr_static(owner, name)
    type.__setattr__(owner, name, value) if isinstance(owner, type) else setattr(owner, name, value)
    try:
        yield
    finally:
        type.__setattr__(owner, name, own) if isinstance(owner, type) else setattr(owner, name, own)


class Patches:
    """The replaced functions, while a script runs.

    Args:
        forward_only: leave out those of training.
    """

    def __init__(self, *, forward_only: bool = False) -> None:
        self._stack = ExitStack()
        self._forward_only = self._knows_equinox = forward_only

    def __enter__(self) -> "Patches":
        replace = lambda *given: self._stack.enter_context(replacing(*given))  # noqa: E731
        for name, value in (("jit", jit), ("shard_map", shard_map), ("pmap", pmap), ("named_call", named_call)):
            replace(jax, name, value)
        replace(jax.lax, "scan", scan)
        replace(jax.lax, "fori_loop", fori_loop)
        if self._forward_only:
            return self
        replace(jax, "value_and_grad", value_and_grad)
        replace(jax, "grad", grad)
        replace(optax, "value_and_grad_from_state", value_and_grad_from_state)
        replace(optax, "apply_updates", apply_updates)
        own = inspect.getattr_static(optax.GradientTransformation, "update")
        tapped = property(lambda self: functools.partial(_update, own.__get__(self)))
        replace(optax.GradientTransformation, "update", tapped)
        replace(optax.MultiSteps, "update", _multi_steps_update(optax.MultiSteps.update))
        self._stack.enter_context(noting_optimizers())
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def libraries(self) -> None:
        """Follow the libraries that the script has imported meanwhile."""
        self._knows_equinox = self._knows_equinox or _patch_equinox(self._stack)
