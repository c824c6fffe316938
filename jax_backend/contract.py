"""What a loss function and a step may be given: checked before anything runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossframe.errors import UsageError
from jax_backend.sharded import ShardedParams
from jax_backend.tree import dtype_name, leaves_by_path


@dataclass(frozen=True)
class Contract:
    """Which of `loss_fn(params, state, batch, rng) -> (loss, (state, aux))` the user's function takes and returns."""

    has_state: bool
    has_rng: bool
    has_aux: bool

    def call(
        self, loss_fn: Callable, params: Any, state: Any, batch: Any, rng: Any
    ) -> tuple[jax.Array, tuple[Any, Any]]:
        """Call it on one rank; always (loss, (state, aux)), with None for what is not declared.

        Raises:
            UsageError: a result of another form, a loss that is no floating scalar, or another state than came in.
        """
        args = [params, *([state] if self.has_state else []), batch, *([rng] if self.has_rng else [])]
        result = loss_fn(*args)
        if not (self.has_state or self.has_aux):
            loss, new_state, aux = result, None, None
        else:
            loss, rest = _pair(result, f"({self._returns})")
            if self.has_state and self.has_aux:
                new_state, aux = _pair(rest, f"({self._returns})")
            else:
                new_state, aux = (rest, None) if self.has_state else (None, rest)
        self._check_loss(loss)
        if self.has_state:
            _check_state_kept(state, new_state)
        return loss, (new_state, aux)

    @property
    def _returns(self) -> str:
        if self.has_state and self.has_aux:
            return "loss, (state, aux)"
        return "loss, state" if self.has_state else "loss, aux"

    def _check_loss(self, loss: Any) -> None:
        if isinstance(loss, tuple | list | dict) or not hasattr(loss, "dtype"):
            raise UsageError(
                f"loss_fn: expected a scalar loss, got {type(loss).__name__}; if it also returns state or aux, "
                "declare them by has_state=True, has_aux=True"
            )
        if np.shape(loss) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise UsageError(
                f"loss_fn: expected a floating scalar as loss, got shape {np.shape(loss)} and dtype {loss.dtype}; "
                "return the mean over this rank's batch"
            )

    def check_step(self, sharded: Any, batch: Any, state: Any, rng: Any, ranks: int) -> None:
        """Raise UsageError unless a step can run on these arguments."""
        _check_sharded(sharded, ranks)
        for path, leaf in leaves_by_path(batch).items():
            shape = np.shape(leaf)
            if not shape or shape[0] % ranks:
                raise UsageError(
                    f"batch leaf {path!r}: expected a leading dim divisible by {ranks} ranks, got shape {shape}; "
                    "drop or pad the last samples"
                )
        for name, declared, value in (("state", self.has_state, state), ("rng", self.has_rng, rng)):
            if declared and value is None:
                raise UsageError(f"{name}: expected one, since has_{name}=True, got None; pass {name}=... to the step")
            if not declared and value is not None:
                raise UsageError(f"{name}: expected None, got one; pass has_{name}=True to value_and_grad")
        for path, leaf in leaves_by_path(state).items():
            shape = np.shape(leaf)
            if not shape or shape[0] != ranks:
                raise UsageError(
                    f"state leaf {path!r}: expected a leading rank axis of size {ranks}, got shape {shape}; "
                    "make it with jax_backend.per_rank"
                )


def _pair(result: Any, expected: str) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise UsageError(f"loss_fn: expected to return {expected}, got {got}; see has_state and has_aux")
    return result


def _check_state_kept(before: Any, after: Any) -> None:
    old, new = leaves_by_path(before), leaves_by_path(after)
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise UsageError(
            f"loss_fn: expected the state to keep its structure, with leaves {list(old)}, got {list(new)}; "
            "return every leaf that came in"
        )
    for path, leaf in old.items():
        expected, got = ((np.shape(x), dtype_name(x)) for x in (leaf, new[path]))
        if expected != got:
            raise UsageError(
                f"loss_fn: state leaf {path!r}: expected shape and dtype {expected} as it came in, got {got}; "
                "cast or reshape it back"
            )


def _check_sharded(sharded: Any, ranks: int) -> None:
    if not isinstance(sharded, ShardedParams):
        raise UsageError(f"expected ShardedParams, got {type(sharded).__name__}; make them with jax_backend.shard")
    if sharded.tree.world_size != ranks:
        raise UsageError(
            f"expected parameters sharded over the mesh's {ranks} ranks, got {sharded.tree.world_size}; "
            "shard them on the mesh that value_and_grad was given"
        )
    expected = {unit: (layout.gathered_numel,) for unit, layout in sharded.tree.units}
    got = {unit: np.shape(array) for unit, array in sharded.shards.items()}
    if expected != got:
        raise UsageError(
            f"expected arrays of shapes {expected} by unit, got {got}; do not reshape the leaves of shards"
        )
