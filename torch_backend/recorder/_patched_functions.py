"""Observes the calls of a training loop outside the model: backward, clipping, optimizer steps.

Functions are replaced where torch looks them up, so that a loop may import them under any name.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.utils.clip_grad
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from crossframe.replacing import replacing, subclasses_of
from torch_backend.recorder._contexts import in_backward, watching_checkpoints
from torch_backend.recorder._local_grads import gradients_returned
from torch_backend.recorder._module_hooks import hooks_left_out
from torch_backend.recorder._open_step import stepped_params

_UNSCALED, _SCALER = "_crossframe_unscaled", "_crossframe_scaler"
# The function that torch.nn.utils.clip_grad_norm_ calls after computing the norm, and its public name.
_CLIPS = ((torch.nn.utils.clip_grad, "_clip_grads_with_norm_"), (torch.nn.utils, "clip_grads_with_norm_"))


class Listener:
    """Callbacks, which do nothing by default."""

    def backward(self, loss: Tensor, stands_for: Tensor | None, *, keeps_graph: bool) -> None:
        """Backward begins from a scalar, before loss scaling.

        Args:
            stands_for: the tensor from which its hooks go on, if the graph of the loss ends there (`_stand_in`).
            keeps_graph: whether another backward may follow through the same graph.
        """

    def backward_ended(self, losses: Sequence[Tensor]) -> None:
        """Backward from these tensors has ended."""

    def grad(self, loss: Tensor, inputs: Sequence[Tensor]) -> None:
        """Gradients of a scalar are about to be returned, as by `torch.autograd.grad`, and its graph to be freed."""

    def graph_freed(self, inputs: Sequence[Tensor]) -> None:
        """The same of any tensors, after `grad` if they are a scalar."""

    def grad_ended(self, inputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """These gradients are about to be returned."""

    def scaled(self, scaler: Any) -> None:
        """A GradScaler scaled the loss of the next backward."""

    def clips(self, params: Sequence[Tensor] | None) -> None:
        """Gradients are about to be clipped.

        Args:
            params: the parameters whose gradients are clipped; None: all of the model.
        """

    def norm(self, params: Sequence[Tensor] | None, norm: Tensor) -> None:
        """The gradient norm before clipping is known."""

    def steps(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
        """An optimizer is about to update these of its parameters."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""


@contextmanager
def overheard(listener: Listener, model: nn.Module) -> Iterator[None]:
    """A context in which the listener is called.

    Args:
        model: a model, possibly with a `clip_grad_norm_` method.
    """
    handles = [
        register_optimizer_step_pre_hook(
            lambda optimizer, args, kwargs: listener.steps(optimizer, stepped_params(optimizer, args, kwargs))
        ),
        register_optimizer_step_post_hook(lambda optimizer, *_: listener.stepped(optimizer)),
    ]
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        stack.enter_context(hooks_left_out())
        stack.enter_context(watching_checkpoints())
        stack.enter_context(replacing(torch.autograd, "backward", _backward(torch.autograd.backward, listener)))
        run = torch.autograd._engine_run_backward  # pyright: ignore[reportPrivateImportUsage]
        stack.enter_context(replacing(torch.autograd, "_engine_run_backward", _run_backward(run, listener)))
        for cls in subclasses_of(torch.amp.GradScaler):
            if "scale" in cls.__dict__:
                stack.enter_context(replacing(cls, "scale", _scale(vars(cls)["scale"])))
        for module, name in _CLIPS:
            stack.enter_context(replacing(module, name, _clip_with_norm(getattr(module, name), listener)))
        if callable(own := getattr(model, "clip_grad_norm_", None)):
            model.__dict__["clip_grad_norm_"] = _clip_of_model(own, listener)
            stack.callback(model.__dict__.pop, "clip_grad_norm_")
        yield


def _backward(own: Any, listener: Listener) -> Any:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        is_outer = not in_backward()
        if is_outer:
            # Arguments without names are the gradients of the tensors, retain_graph, create_graph, and others.
            keeps_graph = any(map(bool, (*args[1:3], kwargs.get("retain_graph"), kwargs.get("create_graph"))))
            for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
                if isinstance(tensor, Tensor) and tensor.numel() == 1:
                    loss = getattr(tensor, _UNSCALED, tensor)
                    listener.backward(loss.detach(), _stand_in(loss), keeps_graph=keeps_graph)
                    if (scaler := getattr(tensor, _SCALER, None)) is not None:
                        listener.scaled(scaler)
        result = own(tensors, *args, **kwargs)
        if is_outer:
            listener.backward_ended([tensors] if isinstance(tensors, Tensor) else tensors)
        return result

    return backward


def _run_backward(own: Any, listener: Listener) -> Any:
    """`torch.autograd.grad` calls it, under whatever name the script has imported that."""

    def run(
        tensors: Any, grads: Any, keep_graph: Any, create_graph: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # With the graph kept, gradients may be watched only, or those of an inner loop or a penalty.
        frees = kwargs.get("accumulate_grad") is False and not (keep_graph or create_graph or in_backward())
        returns = frees and len(tensors) == 1 and tensors[0].numel() == 1
        if returns:
            listener.grad(tensors[0].detach(), inputs)
        if frees:
            listener.graph_freed(inputs)
        accumulates = kwargs.get("accumulate_grad") is not False
        with nullcontext() if accumulates or returns else gradients_returned():
            found = own(tensors, grads, keep_graph, create_graph, inputs, *args, **kwargs)
        if returns:
            listener.grad_ended(inputs, found)
        return found

    return run


def _stand_in(loss: Tensor) -> Tensor | None:
    """A scalar with hooks from which alone a loss is computed, as `loss / 2`; None if it depends on anything else.

    Losses with a cache of gradients are such: they call backward on the loss of their outputs, and give the trainer a copy of the
    loss, whose hook calls backward of the model.
    """
    leaf, node = loss, loss.grad_fn
    while node is not None:
        following = [each for each, _ in node.next_functions if each is not None]
        if len(following) > 1:
            return None
        leaf, node = getattr(node, "variable", leaf), following[0] if following else None
    return leaf if leaf.is_leaf and leaf.numel() == 1 and leaf._backward_hooks else None


def _scale(own: Any) -> Any:
    def scale(scaler: Any, outputs: Any) -> Any:
        scaled = own(scaler, outputs)
        if isinstance(outputs, Tensor) and scaled is not outputs:
            setattr(scaled, _UNSCALED, outputs.detach())
            setattr(scaled, _SCALER, scaler)
        return scaled

    return scale


def _clip_with_norm(own: Any, listener: Listener) -> Any:
    def clip(parameters: Any, max_norm: Any, total_norm: Tensor, *args: Any, **kwargs: Any) -> Any:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        listener.clips(params)
        listener.norm(params, total_norm)
        return own(params, max_norm, total_norm, *args, **kwargs)

    return clip


def _clip_of_model(own: Any, listener: Listener) -> Any:
    def clip_grad_norm(*args: Any, **kwargs: Any) -> Any:
        listener.clips(None)
        norm = own(*args, **kwargs)
        listener.norm(None, norm)
        return norm

    return clip_grad_norm
