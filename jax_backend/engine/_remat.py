"""Resharding after forward: backward gathers parameters again instead of saving them (R14).

[Note: resharding is a rule about what is saved] JAX does not free a buffer at a given moment. A unit is resharded after forward
if and only if nothing of full size is saved for backward. A policy of jax.checkpoint decides that: activations are saved,
gathered parameters and views of them are not, so backward gathers again from the shards, which are in memory anyway.

The policy depends on the primitive. A policy by name (`checkpoint_name`) does not work: the name is an operation after the
all-gather, and the output of the all-gather itself would be saved instead. A policy does not see where values come from: a view
of an activation is computed again too, which costs a copy, and a result of parameters alone (`1 + scale`) is saved as an
activation.

JAX applies the policy also inside of a jax.checkpoint in the loss function, whose own policy then has no effect: all activations
are saved. `remat` hides the recomputation from it in a custom_vjp, and a loop over layers its residuals (`keeping_residuals`).

XLA decides in the end. Up to JAX 0.11.0 its CPU compiler drops the barrier that jax.checkpoint puts before backward and merges
each second gather with the first, which wastes its memory and changes no result: see `programs/_late_gathers.py`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax

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


def keeps_activations(primitive: Any, *_: Any, **__: Any) -> bool:
    """The checkpoint policy: save computed values, not gathered parameters or views."""
    return primitive.name != "all_gather" and primitive.name not in LAYOUT_PRIMITIVES


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


def keeps_sums(primitive: Any, *_: Any, **__: Any) -> bool:
    """The checkpoint policy inside of a loop over layers: of activations, save what `ELEMENTWISE` does not compute.

    Of an unrolled program XLA computes elementwise results again where backward reads them, instead of keeping them in memory. It
    cannot do so from one loop to another: all that is saved there is stored for each layer.
    """
    return keeps_activations(primitive) and primitive.name not in ELEMENTWISE


def reshard_after_forward(fun: Callable) -> Callable:
    """`fun` with gathers that run again in backward."""
    # prevent_cse is on by default: XLA should not merge the second gather with the first.
    return jax.checkpoint(fun, policy=keeps_activations)


def remat(fun: Callable, *, policy: Callable[..., bool] | None = None) -> Callable:
    """`jax.checkpoint` for use in a loss function: backward computes `fun` again instead of saving its activations.

    Use it instead of `jax.checkpoint`, which has no effect where units are resharded after forward: all activations are saved
    there.

    Args:
        fun: a function of pytrees of arrays. Arrays that it closes over are differentiated too.
        policy: which results are saved nevertheless, as in jax.checkpoint
            (`jax.checkpoint_policies.save_only_these_names("scores")`); None: none. A loop over layers saves no elementwise ones.

    Returns:
        `fun`, for reverse-mode differentiation.
    """
    return _differentiated(fun, lambda converted: _vjp_of(jax.checkpoint(converted, policy=policy)))


def keeping_residuals(fun: Callable) -> Callable:
    """`fun`, whose residuals a jax.checkpoint around it saves as they are.

    [Note: a policy reaches into loops] The policy is applied to the operations inside of a loop, not to what the loop stacks for
    backward. JAX saves a stack of each result that the policy names, and before backward runs a loop that makes the residuals out
    of them: copies of the same activations, and the carries. So forward is one operation here, with its residuals as results.
    """

    def forward_of(converted: Callable) -> Callable:
        def forward(*given: Any) -> Any:
            structures = []

            def flat(*given: Any) -> list[Any]:
                leaves, structure = jax.tree.flatten(jax.vjp(converted, *given))
                structures.append(structure)
                return leaves

            # Flat, since the structure contains jaxprs, which differ between traces of one function.
            leaves = _one_operation(flat, _vjp_of(flat))(*given)
            return jax.tree.unflatten(structures[0], leaves)

        return forward

    return _differentiated(fun, forward_of)


def _differentiated(fun: Callable, forward_of: Callable[[Callable], Callable]) -> Callable:
    """`fun` with the forward pass that `forward_of` makes of it. Arrays that it closes over are differentiated too."""

    @wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        converted, closed_over = jax.closure_convert(lambda *given: fun(*given, **kwargs), *args)
        return _one_operation(converted, forward_of(converted))(*args, *closed_over)

    return call


def _vjp_of(fun: Callable) -> Callable:
    """From arguments to the result of `fun` and its pullback, a function that is a pytree."""
    return lambda *given: jax.vjp(fun, *given)


def _one_operation(fun: Callable, forward: Callable) -> Callable:
    """`fun` as one operation to the policy of a jax.checkpoint.

    Args:
        forward: from arguments to the result and a pullback.
    """
    call = jax.custom_vjp(fun)
    call.defvjp(forward, lambda pullback, cotangents: pullback(cotangents))
    return call
