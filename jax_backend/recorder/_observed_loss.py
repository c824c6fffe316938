"""A loss function that also returns its interior: the parameters that each rank's forward saw, and what its modules computed."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jax_backend.activations import Activations, listening
from jax_backend.engine._loss_function import LossFunction, LossOutput
from jax_backend.engine._value_and_grad import Result, step_of
from jax_backend.tree import leaves_by_path


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Interior:
    """The interior of one microbatch. All arrays have a leading dim of ranks.

    Attributes:
        params: full parameters as the loss function saw them, by path of the leaf, without those of stacked units, which are
            gathered one layer at a time.
        activations: inputs and outputs of modules.
    """

    params: dict[str, Any]
    activations: Activations


@dataclass(frozen=True)
class ObservedLoss(LossFunction):
    """A loss function whose aux is (aux or None, Interior)."""

    def __call__(self, params: Any, state: Any, batch: Any, rng: Any) -> LossOutput:
        with listening() as reported:
            outcome = super().__call__(params, state, batch, rng)
        full = {path: leaf for path, leaf in leaves_by_path(params).items() if isinstance(leaf, jax.Array)}
        return outcome._replace(
            aux=(outcome.aux, Interior(full, Activations(tuple(reported.values()), tuple(reported))))
        )


def programs_of(
    loss_fn: Callable, mesh: Mesh, options: Mapping[str, Any]
) -> tuple[Callable[..., Result], Callable[..., Result]]:
    """The steps of a loss function that record nothing and its interior."""
    key = loss_fn, mesh, tuple(options.items())
    try:
        hash(key)
    except TypeError:  # a module of equinox, for example
        return _compiled.__wrapped__(*key)
    return _compiled(*key)


# Recorders that follow each other, as those of perturbed runs, share the programs of a loss function.
@functools.lru_cache(maxsize=8)
def _compiled(loss_fn: Callable, mesh: Mesh, options: tuple) -> tuple[Callable, Callable]:
    given = dict(options)
    plain = step_of(LossFunction(loss_fn), mesh, **given)
    given["local_grads"] = given.get("reduces", True)
    return plain, step_of(ObservedLoss(loss_fn), mesh, **given)
