"""Replaces the functions of JAX and optax that a training script calls, so that a `Session` sees what the script computes.

They are replaced before the script imports them, and report to the current `Collector`; without one, they are JAX's own.
"""

from contextlib import ExitStack, suppress
from importlib import import_module
from typing import Any

import jax

from crossframe.replacing import replacing
from jax_backend.engine import _remat, _value_and_grad
from jax_backend.engine._loss_function import LossFunction
from jax_backend.recorder._gradients import (
    grad,
    loss_of_rank,
    step_of_ranks,
    value_and_grad,
    value_and_grad_of_ranks,
    vjp,
)
from jax_backend.recorder._jitted import jit
from jax_backend.recorder._keras import follow_keras
from jax_backend.recorder._mapped import pmap
from jax_backend.recorder._optimizer_updates import follow_equinox, following_optimizers
from jax_backend.recorder._transformations import (
    device_put,
    fori_loop,
    lax_map,
    named_call,
    older_shard_map,
    reshard,
    scan,
    shard_map,
    with_sharding_constraint,
)
from jax_backend.recorder._updates_by_hand import pmean
from jax_backend.recorder._vmapped_models import vmap


class Patches:
    """The replaced functions, while a script runs.

    Args:
        forward_only: leave out those of training.
    """

    def __init__(self, *, forward_only: bool = False) -> None:
        self._stack = ExitStack()
        self._forward_only = self._knows_equinox = self._knows_keras = forward_only

    def __enter__(self) -> "Patches":
        replace = lambda *given: self._stack.enter_context(replacing(*given))  # noqa: E731
        for name, value in (("jit", jit), ("shard_map", shard_map), ("pmap", pmap), ("named_call", named_call)):
            replace(jax, name, value)
        replace(jax.lax, "scan", scan)
        replace(jax.lax, "fori_loop", fori_loop)
        replace(jax.lax, "map", lax_map)
        replace(jax.lax, "with_sharding_constraint", with_sharding_constraint)
        replace(jax, "device_put", device_put)
        for place in (jax, jax.sharding):
            replace(place, "reshard", reshard)
        for name, value in (("shard_map", older_shard_map), ("pjit", jit)):
            with suppress(ImportError):  # which newer versions may not have any more
                replace(import_module(f"jax.experimental.{name}"), name, value)
        if self._forward_only:
            return self
        replace(jax, "value_and_grad", value_and_grad)
        replace(jax, "grad", grad)
        replace(jax, "vjp", vjp)
        replace(_remat, "value_and_grad", value_and_grad_of_ranks)
        replace(_value_and_grad, "run_on_ranks", step_of_ranks(_value_and_grad.run_on_ranks))
        replace(LossFunction, "__call__", loss_of_rank(LossFunction.__call__))
        replace(jax, "vmap", vmap)
        replace(jax.lax, "pmean", pmean)
        self._stack.enter_context(following_optimizers())
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def libraries(self) -> None:
        """Follow the libraries that the script has imported meanwhile."""
        self._knows_equinox = self._knows_equinox or follow_equinox(self._stack)
        self._knows_keras = self._knows_keras or follow_keras(self._stack)
