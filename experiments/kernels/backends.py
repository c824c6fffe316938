"""Wrong backends of torch.compile: one operator of the graph computes something else. The expected answer is its line."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn


@dataclass(frozen=True)
class BackendFault:
    """A backend that changes operators of the graph.

    Attributes:
        name, description: for the table.
        expected: the line of `torch_matmul` that explain must name.
        changes: changes an operator of a graph, if it is the one.
    """

    name: str
    description: str
    expected: str
    changes: Callable[[fx.Node], None]


class _TanhBackward(torch.autograd.Function):
    """tanh, whose gradient is 1 % too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Of any shape."""
        ctx.save_for_backward(y := x.tanh())
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """With the factor."""
        (y,) = ctx.saved_tensors
        return 1.01 * grads[0] * (1 - y * y)


def _wrong_tanh(x: Tensor) -> Tensor:
    return _TanhBackward.apply(x)  # type: ignore[return-value]


def _gelu(node: fx.Node) -> None:
    if node.target is nn.functional.gelu:
        node.kwargs = {"approximate": "tanh"}


def _epsilon(node: fx.Node) -> None:
    if node.target is operator.add and node.args[1] == 1e-5 and any(user.target is torch.rsqrt for user in node.users):
        node.args = (node.args[0], 1e-6)


def _scale(node: fx.Node) -> None:
    if node.target is operator.truediv and isinstance(node.args[1], float) and "scores" in node.name:
        node.args = (node.args[0], 1.001 * node.args[1])


def _tanh(node: fx.Node) -> None:
    if node.target is torch.tanh:
        node.target = _wrong_tanh


BACKEND_FAULTS = (
    BackendFault("gelu_tanh", "GELU by tanh, not by erf", "hidden = nn.functional.gelu(x @ self.up.T)", _gelu),
    BackendFault("epsilon", "RMSNorm: an epsilon of 1e-6, not 1e-5", "scale = torch.rsqrt(squares + 1e-5)", _epsilon),
    BackendFault(
        "scale", "attention: a scale that is 0.1 % off", "scores = scores / math.sqrt(query.shape[-1])", _scale
    ),
    BackendFault("tanh_backward", "a gradient of tanh 1 % too large", "logits = 3.0 * torch.tanh(logits / 3.0)", _tanh),
)


def backend(name: str, inner: str) -> Callable:
    """A backend with a fault.

    Args:
        name: of the fault; "none": without one.
        inner: "eager", or "inductor", which compiles the changed graph.
    """
    changes = [fault.changes for fault in BACKEND_FAULTS if fault.name == name]

    def compiled(module: fx.GraphModule, inputs: list[Any]) -> Callable:
        for node in module.graph.nodes:
            for change in changes:
                change(node)
        module.recompile()
        if inner == "inductor":
            from torch._inductor.compile_fx import compile_fx

            return compile_fx(module, inputs)  # type: ignore[return-value]
        return module.forward

    return compiled
