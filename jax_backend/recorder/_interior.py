"""A loss function that also gives what is inside of it: the parameters that each rank's forward saw, and what its modules did."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jax_backend.activations import Activations, listening
from jax_backend.tree import leaves_by_path


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inner:
    """What is inside of one microbatch, all with a leading dim of ranks.

    Attributes:
        params: full parameters as the loss function saw them, by path of the leaf; not of stacked units, of which only one layer
            is there at a time.
        activations: what modules told.
    """

    params: dict[str, Any]
    activations: Activations


def with_inner(loss_fn: Callable, *, has_state: bool = False, has_aux: bool = False) -> Callable:
    """The same loss function of `value_and_grad`, which also returns what is inside: its aux is (aux or None, Inner), so that it
    has aux in any case.

    Args:
        has_state, has_aux: whether the function that is given takes state and returns aux.
    """

    @functools.wraps(loss_fn)
    def run(params: Any, *rest: Any) -> Any:
        with listening() as told:
            result = loss_fn(params, *rest)
        loss, state, aux = result, None, None
        if has_state or has_aux:
            if not _is_pair(result) or (has_state and has_aux and not _is_pair(result[1])):
                return result  # the step says what it expected
            loss, also = result
            state, aux = also if has_state and has_aux else (also, None) if has_state else (None, also)
        full = {path: leaf for path, leaf in leaves_by_path(params).items() if isinstance(leaf, jax.Array)}
        own = aux, Inner(full, Activations(tuple(told.values()), tuple(told)))
        return loss, (state, own) if has_state else own

    return run


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2
