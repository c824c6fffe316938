"""A loss function that also returns its interior: the parameters that each rank's forward saw, and what its modules computed."""

from dataclasses import dataclass
from typing import Any

import jax

from jax_backend.activations import Activations, listening
from jax_backend.engine._loss_function import LossFunction, LossOutput
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
