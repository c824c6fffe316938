"""Replaces `jax.value_and_grad`, `jax.grad` and `jax.vjp`: a gradient has a tap.

[Note: jax.vjp] A `jax.vjp` takes a gradient if the value of the function is a scalar. That is known once the function has run. It
runs once, as in the script: a function that draws random numbers of numpy has other results when it is called again.
"""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossframe.replacing import setting
from jax_backend.engine import _remat
from jax_backend.engine._step import Step
from jax_backend.programs._trace import trace_of
from jax_backend.recorder._array_interior import may_be_batch
from jax_backend.recorder._module_calls import reporting_modules
from jax_backend.recorder._optimizer_settings import noted
from jax_backend.recorder._params_as_shards import recorded_collectives
from jax_backend.recorder._perturbed_rounding import rounded
from jax_backend.recorder._script_batch import arrays_named_in
from jax_backend.recorder._script_session import Root, inside_update, seen_updates
from jax_backend.recorder._taps import (
    ACTIVATION,
    GIVEN,
    GRADIENT,
    Detail,
    GradientDescription,
    RankStep,
    Tap,
    Value,
    at_level,
    collecting,
    innermost,
    not_collecting,
    pack,
    traced,
    unpacked,
    value_of_ranks,
)
from jax_backend.recorder._updates_by_hand import parameter_arguments
from jax_backend.shards._sharded_params import ShardedParams
from jax_backend.tree import path_name

_value_and_grad, _value_and_grad_of_ranks = jax.value_and_grad, _remat.value_and_grad
_vjp = jax.vjp
_NO_GRADIENT = object()
"""The gradient of a function whose value is not a scalar."""


@dataclass(frozen=True)
class DifferentiatedFunction:
    """A function that the script differentiates.

    Args:
        fun, argnums, has_aux, options: of `jax.value_and_grad`.
        differentiate: called as `jax.value_and_grad` is.
        is_vjp: whether the value of the function may be other than a scalar, so that no gradient is taken ([Note: jax.vjp]).
    """

    fun: Callable
    argnums: int | Sequence[int]
    has_aux: bool
    options: dict[str, Any]
    differentiate: Callable = _value_and_grad
    is_vjp: bool = False

    def plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of JAX, and its tap without the interior; None: no gradient is taken."""
        own, collector = _repeatable(self.fun), innermost()
        assert collector is not None
        described, paths = collector.described, collector.described.paths

        def fun(*args: Any, **kwargs: Any) -> Any:
            above = innermost()
            assert above is not None
            paths = _paths(self.diff(args))
            with ExitStack() as stack:
                if not above.described.paths:  # once: functions that JAX has traced would not be known again
                    above.described.paths = tuple(paths.values())
                    stack.enter_context(reporting_modules())
                stack.enter_context(collecting(traced(above, in_loss=True, paths=paths)))  # nothing in here is a step
                return own(*args, **kwargs)

        differentiated = self.differentiate(rounded(fun), self.argnums, self.has_aux, **self.options)
        result = differentiated(*args, **kwargs)
        if result[1] is _NO_GRADIENT:
            described.paths = paths
            return result, None
        return result, self.tap(result, args, [])

    def with_interior(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same, with the interior."""

        own = _repeatable(self.fun)

        def fun(*args: Any, **kwargs: Any) -> Any:
            above = innermost()
            assert above is not None
            inside = traced(above, (), in_loss=True, detail=Detail.INTERIOR, paths=_paths(self.diff(args)))
            with collecting(inside), reporting_modules():
                if _rank_step() is None:  # `loss_of_rank` knows the others of a step
                    others = [arg for i, arg in enumerate(args) if i not in self.positions(args)]
                    _add_given(jax.tree.leaves((others, kwargs)) or arrays_named_in(self.fun))
                result = own(*args, **kwargs)
            loss, aux = result if self.has_aux else (result, None)
            return loss, (aux, pack(inside.taps, (), inside))

        differentiated = self.differentiate(rounded(fun), self.argnums, True, **self.options)
        (loss, (aux, packed)), grads = differentiated(*args, **kwargs)
        result = ((loss, aux) if self.has_aux else loss), grads
        if grads is _NO_GRADIENT:
            return result, None
        collector = innermost()
        assert collector is not None
        return result, self.tap(result, args, unpacked(packed, (), (), collector.inputs))

    def diff(self, args: tuple[Any, ...]) -> Any:
        """The arguments that are differentiated. Those of a step of `jax_backend.value_and_grad` are its shards; the others are
        probes, whose gradients are those of a rank before their reduction."""
        if _rank_step() is not None:
            return args[0]
        if isinstance(self.argnums, int):
            return args[self.argnums]
        return _alone_or_all(self.argnums, [args[i] for i in self.positions(args)])

    def positions(self, args: tuple[Any, ...]) -> Sequence[int]:
        """The positions of the arguments that are differentiated, and may be parameters."""
        if isinstance(self.argnums, int):
            return (self.argnums,)
        return self.argnums if _rank_step() is not None else parameter_arguments(args, self.argnums)

    def takes_gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the value of the function is a scalar. It is called for that."""
        with not_collecting():
            result = jax.eval_shape(self.fun, *args, **kwargs)
        return _is_scalar(result[0] if self.has_aux else result)

    def tap(self, result: Any, args: tuple[Any, ...], inside: list[Tap]) -> Tap:
        """The tap of a result, with those inside of it."""
        value, grads = result
        collector = innermost()
        assert collector is not None
        step, local = _rank_step(), {}
        if step is not None:
            grads, local = grads
        elif not isinstance(self.argnums, int):
            own = [grad for i, grad in zip(self.argnums, grads, strict=True) if i in self.positions(args)]
            grads = _alone_or_all(self.argnums, own)
        loss = value_of_ranks(collector, value[0] if self.has_aux else value)
        leaves = jax.tree_util.tree_flatten_with_path(self.diff(args))[0]
        names = tuple(path_name(path) for path, _ in leaves)
        shapes = tuple(tuple(leaf.shape) for leaf in jax.tree.leaves(grads))
        if step is None:  # of members of an ensemble, with their dim
            shapes = tuple(tuple(np.shape(at_level(collector, leaf))) for _, leaf in leaves)
        values: dict[str, Any] = {"loss": loss, "diff": tuple(Value(leaf) for _, leaf in leaves)}
        if not noted.has_optimizer and step is None:  # of an ensemble: the arrays that jax.vmap maps, if it is known
            raised = [at_level(collector, leaf) for _, leaf in leaves]
            pairs = zip(values["diff"], raised, strict=True)
            values["diff"] = tuple(own if leaf is None else Value(leaf) for own, leaf in pairs)
        values["own_grads"] = tuple(Value(leaf) for leaf in jax.tree.leaves(grads))
        # With an optimizer its update has them.
        by_hand = [] if noted.has_optimizer or step is not None else jax.tree.leaves(grads)
        values["grads"] = tuple(value_of_ranks(collector, leaf) for leaf in by_hand)
        is_reduced = step is not None and step.reduces
        local = local if is_reduced and collector.detail is Detail.INTERIOR else {}
        values["local_grads"] = {bucket: value_of_ranks(collector, array) for bucket, array in local.items()}
        modules = [tap for tap in inside if tap.kind == ACTIVATION]
        values["inside"] = tuple(value_of_ranks(collector, tap.values["array"].array) for tap in modules)
        given = next((tap.values["arrays"] for tap in inside if tap.kind == GIVEN), ())
        values["given"] = tuple(value_of_ranks(collector, value.array) for value in given)
        about = GradientDescription(names, shapes, tuple(tap.about for tap in modules), step)
        return Tap(GRADIENT, about, values)


def _alone_or_all(argnums: Sequence[int], values: Sequence[Any]) -> Any:
    """The only one of several arguments that may be parameters, or a tuple of them."""
    return values[0] if len(values) == 1 < len(argnums) else tuple(values)


def _is_scalar(value: Any) -> bool:
    return getattr(value, "shape", None) == () and jnp.issubdtype(value.dtype, jnp.floating)


def _rank_step() -> RankStep | None:
    collector = innermost()
    return None if collector is None else collector.described.rank_step


def _add_given(values: Any) -> None:
    """Add what may be the batch of a loss function that is about to be called."""
    collector = innermost()
    assert collector is not None
    leaves = (at_level(collector, leaf) for leaf in jax.tree.leaves(values) if may_be_batch(leaf))
    collector.add([Tap(GIVEN, (), {"arrays": tuple(Value(leaf) for leaf in leaves if leaf is not None)})])


def _repeatable(fun: Any) -> Any:
    """A function that can be called again: those of `nnx.value_and_grad` use up a queue."""
    if dataclasses.is_dataclass(fun) and isinstance(getattr(fun, "nondiff_states", None), deque):
        return dataclasses.replace(fun, nondiff_states=deque(fun.nondiff_states))  # type: ignore[arg-type]
    return fun


def _paths(tree: Any) -> dict[int, str]:
    return {id(leaf): path_name(path) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def value_and_grad(fun: Any, argnums: Any = 0, has_aux: bool = False, **options: Any) -> Any:
    """`jax.value_and_grad`."""
    real = _value_and_grad(fun, argnums, has_aux, **options)
    return _followed(real, DifferentiatedFunction(fun, argnums, has_aux, options))


def value_and_grad_of_ranks(fun: Any, saves: Any) -> Any:
    """That of `jax_backend.value_and_grad` where units are resharded."""
    step = DifferentiatedFunction(fun, (0, 1), True, {}, lambda fun, *_: _value_and_grad_of_ranks(fun, saves))
    return _followed(_value_and_grad_of_ranks(fun, saves), step)


def loss_of_rank(own: Callable) -> Callable:
    """`LossFunction.__call__`, whose modules are known by the paths of full parameters instead of those of shards."""

    @functools.wraps(own)
    def call(self: Any, params: Any, *args: Any) -> Any:
        if (collector := innermost()) is not None and collector.in_loss:
            collector.paths |= _paths(params)
            if collector.detail is Detail.INTERIOR:
                _add_given(jax.tree.leaves(args))
        return own(self, params, *args)

    return call


def step_of_ranks(own: Callable) -> Callable:
    """`run_on_ranks`, whose settings and collectives are noted, with each rank's own gradients where the interior is."""

    @functools.wraps(own)
    def call(step: Step, sharded: ShardedParams, *args: Any) -> Any:
        if (collector := innermost()) is None or collector.described.rank_step is not None:
            return own(step, sharded, *args)
        described = collector.described
        described.mode, described.strategy = step.mode, step.strategy.value
        leaves, structure = jax.tree.flatten((sharded, args))
        key = id(step), structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
        is_new = key not in described.rank_steps
        _, described.rank_step = described.rank_steps.setdefault(key, (step, RankStep(step.reduction.now)))
        is_observed = described.rank_step.reduces and collector.detail is Detail.INTERIOR
        given = replace(step, local_grads=True) if is_observed else step
        try:
            *found, local = own(given, sharded, *args)
            if is_new and not step.reduction.by_xla:  # of those that XLA places, none is known
                with not_collecting():  # not before: of functions that JAX has traced, modules would not be seen
                    events = trace_of(functools.partial(own, step), sharded, *args, mesh=step.mesh)
                described.rank_step.collectives = tuple(recorded_collectives(sharded.tree, events))
        finally:
            described.rank_step = None
        return (*found, local if step.local_grads else None)

    return call


def _followed(real: Any, step: DifferentiatedFunction) -> Any:
    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        collector = innermost()
        if seen_updates.get() is not None:  # those inside of a loss function are no steps
            with setting(seen_updates, []):
                return real(*args, **kwargs)
        if collector is None or collector.in_loss or inside_update.get():
            return real(*args, **kwargs)
        if isinstance(collector, Root) and collector.is_current():
            return collector.session.gradient(step, args, kwargs)
        if isinstance(collector, Root) or at_level(collector, ()) is None:
            return real(*args, **kwargs)
        if collector.detail is Detail.INTERIOR:
            result, tap = step.with_interior(args, kwargs)
        else:
            result, tap = step.plain(args, kwargs)
        if tap is not None:
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


def vjp(fun: Any, *primals: Any, has_aux: bool = False, **options: Any) -> Any:
    """`jax.vjp`, which takes a gradient where the result is a scalar and no optimizer of optax is used."""
    collector = innermost()
    is_followed = (
        collector is not None and not collector.in_loss and not inside_update.get() and not noted.has_optimizer
    )
    floating = tuple(i for i, primal in enumerate(primals) if _are_floating(primal))
    if not is_followed or not floating:
        return _vjp(fun, *primals, has_aux=has_aux, **options)
    found: list[tuple[Any, ...]] = []

    def differentiate(fun: Any, argnums: Any, has_aux: bool) -> Any:
        def call(*args: Any) -> Any:
            found.append(_vjp(fun, *args, has_aux=has_aux, **options))
            value, backward, *aux = found[-1]
            result = (value, *aux) if has_aux else value
            if not _is_scalar(value):
                return result, _NO_GRADIENT
            grads = backward(jnp.ones_like(value))
            return result, (grads[argnums] if isinstance(argnums, int) else tuple(grads[i] for i in argnums))

        return call

    argnums = floating[0] if len(floating) == 1 else floating
    step = DifferentiatedFunction(fun, argnums, has_aux, {}, differentiate, is_vjp=True)
    result, _ = _followed(differentiate(fun, argnums, has_aux), step)(*primals)
    backward = found[0][1]
    return (result[0], backward, result[1]) if has_aux else (result, backward)


def _are_floating(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree)
    return bool(leaves) and all(jnp.issubdtype(jnp.result_type(leaf), jnp.floating) for leaf in leaves)
