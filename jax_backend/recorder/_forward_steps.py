"""Makes recorded steps of the calls of a model: each call is a step of a recording of forward alone."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from crossframe.errors import UsageError
from jax_backend.activations import Activations
from jax_backend.recorder._array_interior import ArrayInterior, by_rank, compute_dtype
from jax_backend.recorder._module_calls import canonical_module
from jax_backend.recorder._recorder import Recorder
from jax_backend.recorder._script_turns import listed
from jax_backend.recorder._taps import FORWARD, PackedTap, Tap, unrolled

USE_FORWARD = """record from inside the script:

    from jax_backend import Recorder

    with Recorder("runs/mine", params, forward_only=True) as recorder:
        model = recorder.forward(model)      # model(params, *inputs) -> output, as before
        ..."""


class ForwardSteps:
    """The steps of a script that calls a model. The model is the first one that is called; calls of others are left out.

    The loss of a call is the root mean square of the first floating array that the model returns, as in torch.

    Args:
        begin: makes the recorder, from the parameters and the half precision in which modules compute, at the first call; None:
            nothing is recorded.
        finished: called at the end of each step with its loss.
    """

    def __init__(self, begin: Callable[[Any, str | None], Recorder] | None, finished: Callable[[Any], None]) -> None:
        self._begin, self._finished = begin, finished
        self.recorder: Recorder | None = None
        self.number = 0
        self._model: Any = None

    def _is_of_model(self, tap: Tap | PackedTap) -> bool:
        """Whether a tap is a call of the model; the first one decides which model that is."""
        if tap.kind != FORWARD:
            return False
        self._model = self._model or tap.about[:2]
        return tap.about[:2] == self._model

    def number_in(self, taps: Iterable[PackedTap]) -> int:
        """The number of steps that a function with these taps makes."""
        return sum(tap.num_iterations for tap in taps if self._is_of_model(tap))

    def add(self, taps: Sequence[Tap], *_: Any) -> None:
        """Add taps in the order of the program. They have the batch."""
        for _, tap in unrolled(taps, (FORWARD,)):
            if self._is_of_model(tap):
                self._add(tap)

    def _add(self, tap: Tap) -> None:
        loss = jnp.sqrt(jnp.mean(jnp.asarray(tap.values["loss"].array)))
        if self._begin is not None:
            self._record(loss, tap)
        self.number += 1
        self._finished(loss)

    def _record(self, loss: Any, tap: Tap) -> None:
        names, _, modules = tap.about
        params, inside = OrderedDict(zip(names, tap.values["params"], strict=True)), tap.values["inside"]
        full = OrderedDict((name, value.array) for name, value in params.items())
        if self.recorder is None:
            assert self._begin is not None
            if missing := [name for name, value in params.items() if value.array is None or value.by_rank]:
                raise UsageError(
                    f"the values of {listed(missing)} are no arguments of the jitted function that calls the model, so that they "
                    f"are not known; pass them, or {USE_FORWARD}"
                )
            self.recorder = self._begin(full, compute_dtype(inside))
        grid = self.recorder.grid
        batch = [
            value.array.reshape(-1, *value.array.shape[2:]) if value.by_rank else value.array
            for value in tap.values["batch"]
        ]
        if self.recorder.is_dense() and all(array is not None for array in full.values()):
            activations: dict[tuple[str, str], Any] = {}
            for (raw, use), value in zip(modules, inside, strict=True):
                if value.array is not None:
                    activations.setdefault((canonical_module(raw, list(full), full), use), by_rank(value, batch, grid))
            self.recorder.add_interior(
                ArrayInterior(full, Activations(tuple(activations.values()), tuple(activations)))
            )
        self.recorder.end_call(loss, [*grid.batches([batch]).values()])
