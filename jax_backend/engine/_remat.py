"""Resharding after forward: backward gathers parameters again instead of saving them (R14).

[Note: resharding is a rule about what is saved] JAX does not free a buffer at a given moment. A unit is resharded after forward
if and only if nothing of full size is saved for backward. So the step saves what forward computes, and backward recomputes
gathered parameters and views: from the shards, which are in memory anyway, and from what is saved.

This is decided by primitive, in the program that `jax.vjp` makes of forward. What a jax.checkpoint in the loss function
recomputes is not in that program, so that it has its usual effect. A view of an activation is recomputed too, which costs a copy,
and a result of parameters alone (`1 + scale`) is saved as an activation.

A jax.checkpoint around the loss, with a policy, would apply the policy to each jax.checkpoint and each loop inside, and round
what it saves by operations that XLA's CPU compiler does not remove.

XLA decides in the end. Up to JAX 0.11.0 its CPU compiler drops the barrier before backward and merges each second gather with the
first, which wastes its memory and changes no result: see `programs/_late_gathers.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jax_backend.programs._jaxpr import JITTED, called, inner_jaxprs, opened

LAYOUT_PRIMITIVES = frozenset(
    {
        "bitcast_convert_type",
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "copy_p",
        "custom_jvp_call",  # what is not differentiated: the shards of a gather, functions of the batch alone
        "dynamic_slice",
        "expand_dims",
        "name",
        "optimization_barrier",
        "pad",
        "reduce_precision",
        "reshape",
        "rev",
        "sharding_constraint",
        "slice",
        "split",
        "squeeze",
        "stack",
        "tile",
        "transpose",
        "unstack",
    }
)
"""Primitives that move or cast elements without computing: their output is a view of a parameter."""
_BACKWARD = "transpose(recompute)"
"""The scope of recomputation in backward; JAX's scopes of backward contain `transpose(` too."""


ELEMENTWISE = frozenset(
    (
        *(
            "abs",
            "add",
            "add_any",
            "cbrt",
            "ceil",
            "clamp",
            "cos",
            "div",
            "erf",
            "erf_inv",
            "exp",
            "exp2",
            "expm1",
            "floor",
        ),
        *(
            "integer_pow",
            "is_finite",
            "log",
            "log1p",
            "log2",
            "logistic",
            "max",
            "min",
            "mul",
            "neg",
            "one_minus_square",
            "pow",
            "rem",
            "round",
            "rsqrt",
        ),
        *("sign", "sin", "sqrt", "square", "sub", "tan", "tanh"),
        *("and", "eq", "ge", "gt", "le", "lt", "ne", "not", "or", "select_n", "xor"),
    )
)
"""Primitives of single elements, which XLA fuses into whatever reads their results."""


def gathers(equation: JaxprEqn) -> bool:
    """Whether an equation is an all-gather, or a shard_map that contains one."""
    return any(each.primitive.name == "all_gather" for each in _parts(equation))


def computes(equation: JaxprEqn) -> bool:
    """Whether an equation computes, and makes neither a gathered parameter nor a view."""
    return bool(_computed(equation))


def sums(equation: JaxprEqn) -> bool:
    """Whether an equation computes more than single elements, so that a loop over layers saves its results.

    XLA recomputes elementwise results of an unrolled program where backward reads them, instead of keeping them in memory. It
    cannot do so from one loop to another: all that is saved there is stored for each layer.
    """
    return not _computed(equation) <= ELEMENTWISE


def _computed(equation: JaxprEqn) -> set[str]:
    """The primitives that compute, in an equation."""
    return {each.primitive.name for each in _parts(equation)} - LAYOUT_PRIMITIVES - {"all_gather"}


def _parts(equation: JaxprEqn) -> list[JaxprEqn]:
    """An equation, or those inside of a shard_map, as around a gather next to model axes."""
    if equation.primitive.name != "shard_map":
        return [equation]
    return [part for jaxpr in inner_jaxprs(equation) for each in jaxpr.eqns for part in _parts(each)]


Saves = Callable[[JaxprEqn], bool]
"""Whether the results of an equation of forward are saved, instead of recomputed in backward."""


def value_and_grad(fun: Callable, saves: Saves) -> Callable:
    """`jax.value_and_grad(fun, has_aux=True)` for all arguments, whose backward recomputes some values.

    Args:
        fun: from arguments to (a scalar, aux).

    Returns:
        A function from the arguments to ((value, aux), gradients).
    """

    def vjp(*args: Any) -> tuple[Any, Callable]:
        value, pullback, aux = jax.vjp(fun, *args, has_aux=True)
        return (value, aux), pullback

    def run(*args: Any) -> Any:
        (value, aux), pullback = _forward(vjp, args, saves)
        return (value, aux), pullback(jnp.ones_like(value))

    return run


def rematerialize(fun: Callable, saves: Saves) -> Callable:
    """`fun`, whose backward recomputes some values. Arrays that it closes over are differentiated too."""

    @wraps(fun)
    def call(*args: Any) -> Any:
        converted, closed_over = jax.closure_convert(fun, *args)

        def forward(*args: Any) -> tuple[Any, Callable]:
            return _forward(partial(jax.vjp, converted), args, saves)

        operation = jax.custom_vjp(converted)
        operation.defvjp(forward, lambda pullback, cotangents: pullback(cotangents))
        return operation(*args, *closed_over)

    return call


def _forward(vjp: Callable, args: tuple[Any, ...], saves: Saves) -> tuple[Any, Callable]:
    """The result of `vjp(*args)` and its pullback, a pytree of the saved values.

    Args:
        vjp: from arguments to (a result, a pullback that is a pytree).
    """
    of_pullback = []

    def flat(*args: Any) -> tuple[Any, list[Any]]:
        result, pullback = vjp(*args)
        leaves, structure = jax.tree.flatten(pullback)
        of_pullback.append(structure)
        return result, leaves

    closed, (shape, _) = jax.make_jaxpr(flat, return_shape=True)(*args)
    num_results = len(jax.tree.leaves(shape))
    results, residuals = closed.jaxpr.outvars[:num_results], closed.jaxpr.outvars[num_results:]
    recomputed = _Recomputation.of(closed.jaxpr, residuals, saves)
    found = eval_jaxpr(
        closed.jaxpr.replace(outvars=[*results, *recomputed.leaves]), closed.consts, *jax.tree.leaves(args)
    )

    def pullback(saved: list[Any], *cotangents: Any) -> Any:
        with jax.named_scope(_BACKWARD):
            # XLA should not merge what is recomputed with what forward computed.
            leaves = recomputed.values(jax.lax.optimization_barrier(saved))
        return jax.tree.unflatten(of_pullback[0], leaves)(*cotangents)

    result = jax.tree.unflatten(jax.tree.structure(shape), found[:num_results])
    return result, jax.tree_util.Partial(pullback, found[num_results:])


@dataclass(frozen=True)
class _Recomputation:
    """How some values of a program are recomputed from others.

    Attributes:
        jaxpr: the program.
        wanted: the values.
        leaves: the variables that they are computed from: given ones, and saved results.
        steps: the equations that compute them, in order; of a jitted function, the results in question, each with its own
            recomputation.
    """

    jaxpr: Jaxpr
    wanted: Sequence[Any]
    leaves: Sequence[Var]
    steps: Sequence[tuple[JaxprEqn, Mapping[Var, "_Recomputation"]]]

    @classmethod
    def of(cls, jaxpr: Jaxpr, wanted: Sequence[Any], saves: Saves) -> "_Recomputation":
        needed = dict.fromkeys(atom for atom in wanted if isinstance(atom, Var))
        leaves, steps = [], []
        for equation in reversed(jaxpr.eqns):
            results = [var for var in equation.outvars if var in needed]
            for var in results:
                del needed[var]
            inside, operands = {}, equation.invars
            if equation.primitive.name in JITTED:
                inside, operands = _inside(equation, results, saves)
                leaves += [var for var in results if var not in inside]
                results = [*inside]
            elif results and saves(equation):
                leaves += results
                results = []
            if results:
                steps.append((equation, inside))
                needed.update((atom, None) for atom in operands if isinstance(atom, Var))
        return cls(jaxpr, wanted, [*leaves, *needed], steps[::-1])

    def values(self, leaves: Sequence[Any]) -> list[Any]:
        """The values, from those of the leaves."""
        known = dict(zip(self.leaves, leaves, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else known[atom]

        for equation, inside in self.steps:
            if equation.primitive.name in JITTED:
                jaxpr, consts = opened(called(equation.params))
                outside = dict(zip(jaxpr.invars, equation.invars, strict=True))
                constants = dict(zip(jaxpr.constvars, consts, strict=True))
                for var, own in inside.items():
                    given = [read(outside[leaf]) if leaf in outside else constants[leaf] for leaf in own.leaves]
                    (known[var],) = own.values(given)
            else:
                given = {atom: read(atom) for atom in equation.invars if isinstance(atom, Var)}
                alone = self.jaxpr.replace(constvars=[], invars=list(given), outvars=equation.outvars, eqns=[equation])
                known.update(zip(equation.outvars, eval_jaxpr(alone, (), *given.values()), strict=True))
        return [read(atom) for atom in self.wanted]


def _inside(equation: JaxprEqn, results: Sequence[Var], saves: Saves) -> tuple[dict[Var, _Recomputation], list[Any]]:
    """The results of a jitted function that its operands suffice for, with their recomputation, and these operands."""
    jaxpr, _ = opened(called(equation.params))
    found = {var: _Recomputation.of(jaxpr, [jaxpr.outvars[equation.outvars.index(var)]], saves) for var in results}
    # What is saved inside has no value outside.
    found = {var: own for var, own in found.items() if {*own.leaves} <= {*jaxpr.constvars, *jaxpr.invars}}
    outside = dict(zip(jaxpr.invars, equation.invars, strict=True))
    return found, [outside[leaf] for own in found.values() for leaf in own.leaves if leaf in outside]
