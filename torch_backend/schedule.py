"""When what happens: the hooks around forward and backward, the root, and prefetch.

The course of a step for one unit:

- before its forward: gather (unless prefetched), expose;
- after it: conceal and free where it reshards after forward, and hook the outputs;
- when the first gradient of an output arrives: gather, and prefetch the unit that ran before it (R16);
- when the last of its leaves has its gradient: free, and reduce. The reduction before it is finished first, so that at most one
  is under way while the next unit computes;
- at the end of backward: reduce what is left (units with unused parameters, R29), finish, forget the order.

[Note: streams] Collectives are issued asynchronously. On CUDA, NCCL runs them on a stream of its own that first waits for the
stream that issued them, and `Work.wait()` makes that stream wait in turn, not the host. All full memory is allocated and freed on
the compute stream, after such a wait: the caching allocator may reuse it at once. On CPU, gloo runs them in threads of its
own. Both overlap with compute by the same code.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from crossframe.errors import UsageError
from crossframe.lifecycle import Activity, Move
from torch_backend.agreement import check_agreement
from torch_backend.unit import Unit


class Schedule:
    """The units under one root, in order, and what of a step is under way.

    Attributes:
        units: in module pre-order; the root's comes first.
    """

    def __init__(self, named_units: Sequence[tuple[str, Unit]], *, backward_prefetch: bool, face: str) -> None:
        """Take charge of the units of a module tree, whose root is about to be used for the first time.

        Args:
            named_units: every unit with the path of its module, the root "" first.
            face: the interface in use, for the agreement between ranks.

        Raises:
            UsageError: a unit that ran under another root before.
            AgreementError: other ranks have other units.
        """
        for name, unit in named_units:
            if unit.schedule is not None:
                raise UsageError(
                    f"unit {name!r} has already run on its own, as a root; run the forward of the outermost sharded "
                    "module first, so that its units are scheduled together"
                )
            unit.place(name)
        self.units = [unit for _, unit in named_units]
        self.root = self.units[0]
        check_agreement(self.units, face)
        for unit in self.units:
            unit.schedule = self
        self._backward_prefetch = backward_prefetch
        self._forward_order: list[Unit] = []
        self._position: dict[Unit, int] = {}
        self._reducing: Unit | None = None
        self._final_callback_queued = False

    def begin_forward(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Unshard and expose a unit that is about to compute. Returns its inputs, the root's on the unit's device."""
        if unit is self.root and not self._recomputing:
            self._begin_step()
            args, kwargs = _moved((args, kwargs), unit.device)
        if unit.state.activity == Activity.IDLE:
            unit.move(Move.BEGIN_FORWARD)
        unit.unshard("forward" if unit.state.activity == Activity.FORWARD else "backward")
        unit.expose()
        return args, kwargs

    def _begin_step(self) -> None:
        if any(unit.state.activity != Activity.IDLE for unit in self.units):
            self.reset()
        self._forget_order()
        for unit in self.units:
            unit.notice_edits()

    @property
    def _recomputing(self) -> bool:
        """Whether a forward runs inside a backward, as activation checkpointing makes it."""
        return torch._C._current_graph_task_id() != -1

    def end_forward(self, unit: Unit, output: Any) -> Any:
        """Reshard a unit that has computed, and watch for the gradient of its output. Returns the output to pass on."""
        if unit.state.activity != Activity.FORWARD:  # recomputed within its backward: that will reshard it
            return output
        unit.move(Move.END_FORWARD)
        if unit not in self._position:
            self._position[unit] = len(self._forward_order)
            self._forward_order.append(unit)
        if unit.reshard_after_forward:
            unit.reshard("forward")
        elif all(bucket.exposure.conceals_after_forward for bucket in unit.buckets):
            unit.conceal()
        return self._watch(unit, output)

    def abandon_forward(self, unit: Unit) -> None:
        """The module raised in its forward. Outermost, everything is brought back; inside, just this unit, since a module
        around it may catch the exception and go on (R17)."""
        if unit is self.root and not self._recomputing:
            self.reset()
        elif unit.state.activity == Activity.FORWARD:
            unit.move(Move.END_FORWARD)
            unit.reshard("forward")

    def _watch(self, unit: Unit, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output

        def hook(grad: Tensor) -> None:
            self._begin_backward(unit)

        if isinstance(output, Tensor):
            if output.requires_grad:
                output.register_hook(hook)
            return output
        leaves, tree = tree_flatten(output)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(hook)
        return tree_unflatten(leaves, tree)

    def _begin_backward(self, unit: Unit) -> None:
        """A gradient of the unit's output has arrived."""
        self._queue_final_callback()
        if unit.state.activity != Activity.BACKWARD:
            unit.move(Move.BEGIN_BACKWARD)
        unit.unshard("backward")
        if self._backward_prefetch:
            position = self._position.get(unit, 0)
            if position > 0:
                self._forward_order[position - 1].gather("backward")

    def _queue_final_callback(self) -> None:
        if not self._final_callback_queued:
            self._final_callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    def grads_ready(self, unit: Unit) -> None:
        """Every leaf of the unit that takes a gradient has it: free and reduce."""
        self._queue_final_callback()
        self._end_unit(unit)

    def _end_unit(self, unit: Unit) -> None:
        if unit.reduces or not unit.keeps_full_unreduced:
            unit.reshard("backward")
        if unit.reduces:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        if not any(leaf.grad is not None for leaf in unit.leaves):
            return
        if self._reducing is not None:
            self._reducing.finish_reduction()
            self._reducing = None
        unit.start_reduction()
        self._reducing = unit

    def _end_backward(self) -> None:
        """The last thing in a backward."""
        self._final_callback_queued = False
        for unit in reversed(self.units):
            if unit.state.activity == Activity.BACKWARD or unit.is_full:
                self._end_unit(unit)
            if unit.state.activity == Activity.BACKWARD:
                unit.move(Move.END_BACKWARD)
            unit.reset_ready()
        if self._reducing is not None:
            self._reducing.finish_reduction()
            self._reducing = None
        self._forget_order()

    def _forget_order(self) -> None:
        self._forward_order.clear()
        self._position.clear()

    def reset(self) -> None:
        """Bring every unit back to its shard after an exception in forward or backward (R17)."""
        self._reducing = None
        self._final_callback_queued = False
        self._forget_order()
        for unit in self.units:
            unit.reset()

    def reset_if_abandoned(self) -> None:
        """Reset if a forward or backward was begun, never ended, and is not under way now."""
        if not self._recomputing and any(unit.state.activity == Activity.BACKWARD for unit in self.units):
            self.reset()


def _moved(inputs: Any, device: torch.device | None) -> Any:
    """Inputs with every tensor on an accelerator's device. On CPU, and for a unit without parameters, as they are."""
    if device is None or device.type == "cpu":
        return inputs
    leaves, tree = tree_flatten(inputs)
    return tree_unflatten([leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree)
