"""Traces the operators of a part of a step in a second run. crossframe.operators defines the trace."""

import sys
from contextlib import ExitStack
from pathlib import Path
from traceback import walk_stack
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from crossframe.alignment.module_names import is_in
from crossframe.operators import Operator, Request, Signature, SourceLine, Trace, signature_of
from crossframe.operators.request import TRACE_NAME
from crossframe.operators.source import UserCode
from crossframe.operators.trace import MOST_OPERATORS
from crossframe.quoting import quote
from crossframe.recording.event_format import BACKWARD, FORWARD, PARAMETERS, STATE, UNSHARDED, UPDATE
from torch_backend.compat._dtypes import dtype_name
from torch_backend.pieces._piece_tensor import PieceTensor
from torch_backend.recorder._compiled_graphs import CompiledGraphs, CompiledOperator
from torch_backend.recorder._contexts import in_backward, quietly
from torch_backend.recorder._decomposed_operators import interior_of
from torch_backend.recorder._float64_check import exact_of, packets, tensor_leaves
from torch_backend.recorder._module_hooks import Hook
from torch_backend.recorder._module_tree import named_modules

_SAME_VALUES = packets("""
    detach alias lift_fresh is_pinned _local_scalar_dense record_stream empty empty_like empty_strided new_empty new_empty_strided
""")
"""Operators that only pass values on, or return none."""
_USER_CODE = UserCode("torch")


class OperatorTrace(TorchDispatchMode):
    """A context in which the operators of one part of a step are noted.

    It is entered before the step.

    Args:
        model: whose modules give operators their places.
        request: which part is traced.

    Attributes:
        active: whether the step is on.
    """

    def __init__(self, model: nn.Module, request: Request) -> None:
        super().__init__()
        self.request = request
        places = list(named_modules(model))
        self._names = {place.module: place.name for place in places}
        # A hook inside of a compiled module would cut the graph in two.
        self._watched = [place.module for place in places if not place.compiled]
        self._graphs = CompiledGraphs(_USER_CODE, self._judges_graphs, self._add_compiled)
        self._inside: list[str] = []
        self._in_optimizer = False
        self._began_backward = False
        # By the number of autograd's node the module and line of a forward operator.
        self._forward: dict[int, tuple[str, SourceLine | None]] = {}
        self._operators: list[Operator] = []
        self._results: list[Signature] = []
        self._stack = ExitStack()
        self.active = False

    def begin_step(self, *, active: bool) -> None:
        """A step begins.

        Args:
            active: whether it is the one to trace.
        """
        self.active, self._began_backward = active, False

    def __enter__(self) -> Self:
        if self.request.compiled:
            self._stack.enter_context(self._graphs)
        for module in self._watched:
            # TorchScript modules refuse hooks by their own methods.
            before = nn.Module.register_forward_pre_hook(module, Hook(self._enters))
            after = nn.Module.register_forward_hook(module, Hook(self._leaves), always_call=True)
            self._stack.callback(before.remove)
            self._stack.callback(after.remove)
        for handle in (
            register_optimizer_step_pre_hook(lambda *_: self._set_in_optimizer(True)),
            register_optimizer_step_post_hook(lambda *_: self._set_in_optimizer(False)),
        ):
            self._stack.callback(handle.remove)
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._stack.close()

    def trace(self) -> Trace:
        """The trace so far."""
        return Trace(self._operators, self._results)

    def write(self) -> None:
        """Write the trace into the directory of the request."""
        self.trace().write(Path(self.request.directory, TRACE_NAME))

    # Where the run is

    def result(self, tensor: Tensor) -> None:
        """Add a result of the part, such as the loss."""
        if self.active and self.request.phase == FORWARD:
            with quietly():
                self._results.append(self._signature(tensor))

    def _enters(self, module: nn.Module, args: Any) -> None:
        self._inside.append(self._names.get(module, self._here))
        self._add_results(module, args)

    def _leaves(self, module: nn.Module, _: Any, output: Any) -> None:
        self._add_results(module, output)
        self._inside.pop()

    def _add_results(self, module: nn.Module, values: Any) -> None:
        if self.active and module in self._names and self._phase() == FORWARD and self._is_within(self._here):
            for each in tensor_leaves(values):
                self.result(each)

    def _set_in_optimizer(self, value: bool) -> None:
        self._in_optimizer = value

    def _phase(self) -> str:
        if in_backward():
            self._began_backward = True
            return BACKWARD
        if self._in_optimizer:
            return "optimizer"
        return "between" if self._began_backward and not self._inside else FORWARD

    def _is_within(self, module: str) -> bool:
        return is_in(module, self.request.unit)

    def _is_asked_for(self, phase: str, module: str) -> bool:
        asked = self.request.phase
        if asked in (PARAMETERS, UNSHARDED, FORWARD):
            return phase == FORWARD and self._is_within(module)
        if asked == BACKWARD:
            return phase in (FORWARD, BACKWARD) and self._is_within(module)
        if asked in (STATE, UPDATE):
            return phase == "optimizer"
        return phase in (BACKWARD, "between")  # a reduced gradient, or the norm

    # Operators

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """Whether torch compiles functions in this mode too. Their operators are then judged separately."""
        return self.request.compiled

    def _judges_graphs(self) -> bool:
        return self.active and not in_backward() and self._is_asked_for(FORWARD, self._here)

    def _add_compiled(self, found: CompiledOperator) -> None:
        """Add an operator inside a compiled graph, whose path begins at the module that calls the graph."""
        module = ".".join(part for part in (self._here, found.module) if part)
        inputs, outputs = (tuple(map(self._signature, each)) for each in (found.inputs, found.outputs))
        index = len(self._operators)
        self._operators.append(
            Operator(index, found.name, found.arguments, found.phase, module, found.line, inputs, outputs, found.judged)
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not self.active or len(self._operators) >= MOST_OPERATORS or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        phase = self._phase()
        module, line = self._place(phase)
        if func.overloadpacket in _SAME_VALUES or func.namespace == "profiler" or not self._is_asked_for(phase, module):
            return func(*args, **kwargs)
        with quietly():
            rows = _rows(func, args, kwargs)
            inputs = [[self._signature(each) for each in row] for row in rows]
            repeats = self.request.judged and len(rows) == 1 and _is_repeatable(func)
            exact = exact_of(func, args, kwargs) if repeats else None
            is_fused = not self.request.in_bits and len(rows) == 1
            interior = [self._signature(each) for each in (interior_of(func, args, kwargs) if is_fused else ())]
        result = func(*args, **kwargs)
        with quietly():
            if func.namespace == "c10d":
                for work in tree_leaves(result):
                    if isinstance(work, torch.ScriptObject):  # until then its output is not there
                        work.wait()  # type: ignore[attr-defined]
            name, arguments = str(func.overloadpacket).replace("aten::", "aten."), _arguments(func, args, kwargs)
            judged = exact.judge(result) if exact is not None else None
            for own, made in zip(inputs, _made(func, args, kwargs, result, len(rows)), strict=True):
                index, outputs = len(self._operators), tuple(map(self._signature, made))
                self._operators.append(
                    Operator(index, name, arguments, phase, module, line, tuple(own), outputs, judged, tuple(interior))
                )
        return result

    def _signature(self, tensor: Tensor) -> Signature:
        local = _local(tensor)
        if local.is_meta or local.layout != torch.strided:
            local = local.new_zeros(0, device="cpu", layout=torch.strided)
        # A copy: numpy would make the storage one that FSDP cannot free.
        wide = (local.abs() if local.is_complex() else local).to("cpu", torch.float64, copy=True)
        return signature_of(wide.numpy(), dtype_name(local.dtype), sketched=not self.request.in_bits)

    def _place(self, phase: str) -> tuple[str, SourceLine | None]:
        """The module and line that run now; in backward those of the forward operator, or of the user's own backward."""
        if phase == BACKWARD:
            node = torch._C._current_autograd_node()
            known = self._forward.get(node._sequence_nr()) if node is not None else None
            if known is None:
                return self._here, _user_line()
            return (known[0], _user_line()) if isinstance(node, torch.autograd.function.BackwardCFunction) else known
        place = (self._here, _user_line())
        # Autograd has made the node of this operator by now, and numbers nodes in order.
        self._forward.setdefault(_next_node_number() - 1, place)
        return place

    @property
    def _here(self) -> str:
        """The innermost module in which forward is; "" outside of all."""
        return self._inside[-1] if self._inside else ""


def _next_node_number() -> int:
    """The number that autograd gives to the next node that it makes."""
    return vars(torch._C)["_autograd"]._get_sequence_nr()


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, Tensor) for each in value)


def _is_repeatable(func: Any) -> bool:
    """Whether an operator computes the same result each time, from its own tensors alone."""
    return not (
        torch.Tag.nondeterministic_seeded in func.tags or func.namespace == "c10d" or "_foreach" in func.__name__
    )


def _rows(func: Any, args: tuple, kwargs: dict) -> list[list[Tensor]]:
    """The tensors that an operator reads. A foreach operator counts as one operator for each element of its lists."""
    names = [each.name for each in func._schema.arguments]
    given = [value for name, value in [*zip(names, args, strict=False), *kwargs.items()] if not _is_buffer(func, name)]
    lists = [each for each in given if _is_list(each)]
    if not func.__name__.startswith(("_foreach", "_fused")) or len({len(each) for each in lists}) != 1:
        return [tensor_leaves(given)]
    others = [each for each in given if isinstance(each, Tensor)]
    return [[*row, *others] for row in zip(*lists, strict=True)]


def _is_buffer(func: Any, name: str) -> bool:
    """Whether an argument is the output buffer of a collective, whose old content does not matter."""
    return func.namespace == "c10d" and name.startswith("output")


def _made(func: Any, args: tuple, kwargs: dict, result: Any, num_rows: int) -> list[list[Tensor]]:
    """The tensors that an operator returned or wrote into, for each of the rows."""
    written = {each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write}
    named = [*zip((each.name for each in func._schema.arguments), args, strict=False), *kwargs.items()]
    found = [result, *(value for name, value in named if name in written)]
    if num_rows > 1:
        lists = [each for each in found if _is_list(each) and len(each) == num_rows]
        return [list(row) for row in zip(*lists, strict=True)] if lists else [[] for _ in range(num_rows)]
    return [list({id(each): each for each in tensor_leaves(found)}.values())]


def _local(tensor: Tensor) -> Tensor:
    local = tensor.local if isinstance(tensor, PieceTensor) else getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def _arguments(func: Any, args: tuple, kwargs: dict) -> str:
    """The arguments of an operator that are not tensors, as text."""
    names = [argument.name for argument in func._schema.arguments]
    texts = []
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        leaves = tree_leaves(value)
        if (
            value is None
            or not leaves
            or any(isinstance(each, Tensor | torch.device | torch.layout) for each in leaves)
        ):
            continue
        texts.append(f"{name}={quote(value)}")
    return ", ".join(texts)


def _user_line() -> SourceLine | None:
    """The innermost line of the user's code on the stack."""
    stack = walk_stack(sys._getframe())
    return _USER_CODE.innermost((frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in stack)
