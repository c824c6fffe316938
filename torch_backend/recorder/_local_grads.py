"""A rank's own gradients in one step, and the collectives that our engine reports.

[Note: gradients that count] Tensor hooks fire wherever autograd delivers a gradient, once for each use, also for modules that
activation checkpointing runs again in backward. Gradients that `torch.autograd.grad` returns in backward, as for the adjoint of
an ODE, are delivered a second time, and those for which it keeps the graph, as for a weight between losses, may be of no use to
the optimizer: neither count.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from crossframe.trace import Event
from torch_backend.compat._dtypes import as_real
from torch_backend.observe import Observer, observers
from torch_backend.recorder._contexts import quietly
from torch_backend.recorder._model_view import ModelView

# Greater than 0 while gradients are computed that do not count.
_num_returning = 0


@contextmanager
def gradients_returned() -> Iterator[None]:
    """A context in which gradients do not count, since they are returned ([Note: gradients that count])."""
    global _num_returning
    _num_returning += 1
    try:
        yield
    finally:
        _num_returning -= 1


class LocalGrads(Observer):
    """Collects gradients and collectives.

    Args:
        view: the model.
        collects: whether to collect what our engine reports.

    Attributes:
        events: the collectives so far.
    """

    def __init__(self, view: ModelView, *, collects: bool) -> None:
        self._view, self._is_of_engine = view, view.engine.names is not None
        self.events: list[Event] = []
        self._grads: dict[str, Tensor] = {}
        # By name what our engine has reported of the last backward, which autograd would add up in the dtype of the gradient.
        self._arrived: dict[str, tuple[int, Tensor]] = {}
        # By id the parameters that have a hook, as forward read them.
        self._hooked: dict[int, Tensor] = {}
        self._handles: list[Any] = []
        # Ids of the parameters whose optimizers have stepped, and names of those that have had a gradient since.
        self._updated: set[int] = set()
        self._of_turn: set[str] = set()
        # Names of parameters whose gradients on this rank are also those of other ranks' batches.
        self._of_other_batches: set[str] = set()
        if collects:
            observers.append(self)

    @property
    def has_updates(self) -> bool:
        """Whether an optimizer has begun to step."""
        return bool(self._updated)

    def close(self) -> None:
        """Collect no more."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._hooked = [], {}
        if self in observers:
            observers.remove(self)

    def event(self, event: Event) -> None:
        self.events.append(event)

    def local_grads(self, unit: str, grads: Mapping[str, Tensor]) -> None:
        if self._is_of_engine:
            task = torch._C._current_graph_task_id()
            with quietly():
                for name, grad in grads.items():
                    before, arrived = self._arrived.get(name, (task, None))
                    if before != task and arrived is not None:
                        self._add(name, arrived)
                        arrived = None
                    self._arrived[name] = task, grad.clone() if arrived is None else arrived + grad

    def listen(self, entered: Iterator[tuple[str, str, Tensor]]) -> None:
        """Add hooks for the gradients of these parameters, as (unit, name, value), unless our engine reports them."""
        if self._is_of_engine:
            return
        ranks = self._view.engine.model_ranks
        for _, name, value in entered:
            if ranks is not None and isinstance(value, DTensor) and not ranks.has_all_of(value.device_mesh):
                self._of_other_batches.add(name)
            elif value.requires_grad and id(value) not in self._hooked:
                self._hooked[id(value)] = value
                self._handles.append(value.register_hook(self._adder(name, value)))

    def _adder(self, name: str, value: Tensor) -> Callable[[Tensor], None]:
        is_unsharded, is_alone = self._view.mesh.shard == 1, self._view.engine.model_ranks is None

        def add(grad: Tensor) -> None:
            if id(value) in self._updated or _num_returning:
                return
            # A gradient from before the last turn of another optimizer that was set to None since does not count. Within a turn,
            # optimizers that keep the sum of microbatches let scripts do so before each.
            if name not in self._of_turn and self._updated and is_unsharded and value.grad is None:
                self._grads.pop(name, None)
            self._of_turn.add(name)
            with quietly():
                # Of a parameter that each rank has in full, a DTensor has this rank's summand.
                self._add(name, grad._local_tensor if is_alone and isinstance(grad, DTensor) else grad)

        return add

    def _add(self, name: str, grad: Tensor) -> None:
        """Add a gradient to the sum of earlier ones, in float32 or wider."""
        grad = as_real(grad.detach().to_dense() if grad.is_sparse else grad.detach())
        if name not in self._grads:
            self._grads[name] = grad.clone()
            return
        wide = torch.promote_types(self._grads[name].dtype, torch.float32)
        self._grads[name] = self._grads[name].to(wide) + grad.to(wide)

    def updates(self, params: Sequence[Tensor]) -> None:
        """An optimizer is about to step. Later gradients of its parameters belong to the turn of another optimizer."""
        self._updated.update(map(id, params))
        self._of_turn.clear()

    def discard(self) -> None:
        """The script has set the gradients since the last update to None or zero."""
        if self._is_of_engine and not self._updated:
            self._grads.clear()
            self._arrived.clear()
        for name in self._of_turn:
            self._grads.pop(name, None)
        self._of_turn.clear()

    def by_unit(self) -> dict[str, dict[str, Tensor]]:
        """The gradients of this rank's batch by unit and parameter, summed over microbatches. In a unit with gradients, trained
        parameters without one have zeros."""
        for name, (_, arrived) in self._arrived.items():
            self._add(name, arrived)
        self._arrived.clear()
        grads = self._grads
        if self._view.engine.names is not None:
            names = self._view.engine.names()
            grads = {names[own]: grad for own, grad in grads.items() if own in names}
        found: dict[str, dict[str, Tensor]] = {}
        for unit, layout in self._view.units:
            own = {spec.name: grads[spec.name] for spec in layout.params if spec.name in grads}
            if own:
                like = next(iter(own.values()))
                found.setdefault(unit, {}).update(
                    {
                        spec.name: own[spec.name] if spec.name in own else like.new_zeros(spec.shape)
                        for spec in layout.params
                        if spec.name in own or (spec.requires_grad and spec.name not in self._of_other_batches)
                    }
                )
        return found
