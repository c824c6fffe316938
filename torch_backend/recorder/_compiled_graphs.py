"""Compares what torch.compile generated for a part of a model with that part in float64, operator by operator.

A backend is given a graph of the user's operators, each with its line. While a step is traced, every graph that runs is judged on
the inputs that it has, forward and backward, with random gradients of its outputs:

- as it was compiled: outputs and gradients of inputs against the graph in float64 (`torch_backend.recorder._float64_check`),
- operator by operator. The backend compiles the graph once more, with the value of each operator as a further output, and a zero
  added to each tensor that an operator reads. Gradients of these zeros are what the backward of that one operator gave. Each
  operator is then judged alone, on the values that the compiled code computed for its inputs, and its backward on the gradient
  that it was given there. So errors do not add up, and no value needs a partner.

What is fused, or recognised as a pattern, may change by that. So an operator that is outside counts only if it is so again where
it is compiled by itself. If the graph is outside of its bound and no operator is, the graph is cut: compiled up to one of its
operators, it returns what the rest would read. The first operator at which such a graph is outside, found by bisection, is named.
"""

import copy
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from crossframe.operators import Judged, SourceLine
from crossframe.operators.source import Frame, UserCode
from crossframe.operators.trace import COMPILED, WHOLE_GRAPH, worst
from crossframe.quoting import quote
from crossframe.recording.event_format import BACKWARD, FORWARD
from crossframe.replacing import replacing
from torch_backend.recorder._contexts import quietly
from torch_backend.recorder._float64_check import exact_of, tensor_leaves

_FRAME = re.compile(r'^\s*File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
_ROOT_MODULE = re.compile(r"^L\[[^]]*\]\.?")
_CALLS = ("call_function", "call_method")
_IN_PLACE = frozenset(["iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "setitem", "delitem"])
_CASTS = frozenset({"half", "bfloat16", "float"})


@dataclass(frozen=True)
class CompiledOperator:
    """An operator of a compiled graph, forward or backward.

    Attributes:
        module: the path of the innermost module in which it stands, from where the graph was called.
        inputs, outputs: as the compiled code has them.
    """

    name: str
    arguments: str
    phase: str
    module: str
    line: SourceLine | None
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    judged: Judged | None


class CompiledGraphs:
    """A context in which graphs that are compiled are judged when they run.

    Args:
        user_code: tells which lines are the user's.
        judges: whether what runs now is to be judged.
        note: given each operator of a graph, the graph itself first.
    """

    def __init__(
        self, user_code: UserCode, judges: Callable[[], bool], note: Callable[[CompiledOperator], None]
    ) -> None:
        self._user_code, self._judges, self._note = user_code, judges, note
        self._stack = ExitStack()
        self._is_judging = False

    def __enter__(self) -> None:
        if "torch._dynamo" not in sys.modules:  # nothing has been compiled, and importing it takes long
            return
        from torch._dynamo.output_graph import OutputGraph

        torch.compiler.reset()  # what has been compiled before was not seen
        own = OutputGraph.call_user_compiler
        self._stack.enter_context(replacing(OutputGraph, "call_user_compiler", self._compiling(own)))

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _compiling(self, own: Any) -> Any:
        def call_user_compiler(graph: Any, module: fx.GraphModule, inputs: list[Any]) -> Any:
            backend = graph.compiler_fn
            if self._is_judging:
                return own(graph, module, inputs)
            as_given = copy.deepcopy(module)  # a backend may change the graph that it is given
            compiled = own(graph, module, inputs)

            def call(*args: Any) -> Any:
                if self._judges() and not self._is_judging:
                    self._judge(_Graph(as_given, backend, compiled), args)
                # What the compiled code calls is no operator of the user's.
                with _disable_current_modes():
                    return compiled(*args)

            return call

        return call_user_compiler

    def _judge(self, graph: "_Graph", args: Sequence[Any]) -> None:
        self._is_judging = True
        try:
            with quietly():
                for found in graph.judged(args, self._user_code):
                    self._note(found)
        finally:
            self._is_judging = False


class _Graph:
    """A graph, with its backend and what that made of it.

    Args:
        module: the graph, as the backend was given it.
    """

    def __init__(self, module: fx.GraphModule, backend: Callable, compiled: Callable) -> None:
        self._module, self._backend, self._compiled = module, backend, compiled

    def judged(self, args: Sequence[Any], user_code: UserCode) -> Iterator[CompiledOperator]:
        """The graph, forward and backward, then its operators: of forward in order, and of backward in reverse order."""
        given = [each.detach().clone() if isinstance(each, Tensor) else each for each in args]
        trains = [isinstance(each, Tensor) and each.requires_grad for each in args]
        whole = self._whole(given, trains)
        arguments = f"{len(_calls(self._module))} operators"
        for phase, found, results in whole:
            yield CompiledOperator(WHOLE_GRAPH, arguments, phase, self._name(), None, (), results, found)
        cotangents = _cotangents(tensor_leaves(_run(self._compiled, given, trains, None)[0]))
        operators: list[CompiledOperator] = []
        try:
            probed = _Probed(self._module, given)
            zeros = probed.zeros()
            inputs, trained = [*given, *zeros], [False] * len(given) + [True] * len(zeros)
            compiled = self._compile(probed.module, inputs, trained)
            found, grads = _run(compiled, inputs, trained, cotangents)
            for operator, node, args in probed.operators(found, grads, cotangents, user_code):
                outside = operator.judged is not None and not operator.judged.inside
                confirmed = not outside or self._is_outside_alone(node, args) is not None
                operators.append(operator if confirmed else replace(operator, judged=None))
        except Exception as error:
            reason = f"its operators could not be told apart: {type(error).__name__}: {error}".splitlines()[0]
            yield CompiledOperator(WHOLE_GRAPH, reason, FORWARD, self._name(), None, (), (), None)
        if any(map(_is_outside, whole)) and all(each.judged is None or each.judged.inside for each in operators):
            operators += self._first_cut(given, trains, user_code)
        yield from operators

    def _whole(self, given: Sequence[Any], trains: Sequence[bool]) -> list[tuple[str, Judged | None, Sequence[Tensor]]]:
        """(phase, the worst of its results, its results): outputs for forward, gradients for backward."""
        cotangents = _cotangents(tensor_leaves(_run(self._compiled, given, trains, None)[0]))
        outputs, grads = _run(self._compiled, given, trains, cotangents)

        def exact(args: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            return _run(_Wide(self._module).run, args, trains, cotangents)

        wide = exact_of(exact, (list(given), list(cotangents)), {}, several=True)
        values = tensor_leaves(outputs)
        judged = wide.judge_each([values, grads]) if wide is not None else [None] * (len(values) + len(grads))
        by_phase = [(FORWARD, judged[: len(values)], values), (BACKWARD, judged[len(values) :], grads)]
        return [(phase, worst(own), results) for phase, own, results in by_phase if results]

    def _first_cut(self, given: Sequence[Any], trains: Sequence[bool], user_code: UserCode) -> list[CompiledOperator]:
        """The first operator at which the graph, compiled up to there, is outside; none if it is not when cut."""
        calls = _calls(self._module)
        first, last, found = 0, len(calls) - 1, None
        while first <= last:
            middle = (first + last) // 2
            outside = self._is_outside_of(_cut(self._module, calls[middle].name), given, trains)
            if outside is None:
                first = middle + 1
            else:
                found, last = (calls[middle], outside), middle - 1
        if found is None:
            return []
        node, (phase, outside, results) = found
        return [_operator(node, phase, (), results, outside, user_code)]

    def _is_outside_alone(self, node: fx.Node, args: Any) -> tuple[str, Judged | None, Sequence[Tensor]] | None:
        """Which phase of an operator is outside, compiled by itself.

        Args:
            args: positional ones and by keyword.
        """
        nodes, values = _leaves(node)[0], _leaves_of(*args)[0]
        given = [value for leaf, value in zip(nodes, values, strict=False) if isinstance(leaf, fx.Node)]
        if len(nodes) != len(values):
            return None
        trains = [_has_grad(leaf) for leaf in nodes if isinstance(leaf, fx.Node)]
        return self._is_outside_of(_alone(self._module, node), given, trains)

    def _is_outside_of(
        self, module: fx.GraphModule, given: Sequence[Any], trains: Sequence[bool]
    ) -> tuple[str, Judged | None, Sequence[Tensor]] | None:
        try:
            compiled = self._compile(copy.deepcopy(module), given, trains)
            return next(filter(_is_outside, _Graph(module, self._backend, compiled)._whole(given, trains)), None)
        except Exception:  # a backend may refuse a graph, as one without results
            return None

    def _compile(self, module: fx.GraphModule, inputs: Sequence[Any], trains: Sequence[bool]) -> Callable:
        """Another graph, compiled by the backend with its backward."""
        with torch.enable_grad():
            return self._backend(module, _fresh(inputs, trains))

    def _name(self) -> str:
        """The module that holds all operators."""
        paths = [_module_of(each) for each in self._module.graph.nodes if each.op in _CALLS]
        parts = [path.split(".") if path else [] for path in paths]
        common = []
        for level in zip(*parts, strict=False):
            if len(set(level)) > 1:
                break
            common.append(level[0])
        return ".".join(common)


class _Probed:
    """A graph that also returns the value of each operator, and adds a further input to each tensor that an operator reads.

    Args:
        args: inputs of the graph.

    Attributes:
        module: this graph.
    """

    def __init__(self, module: fx.GraphModule, args: Sequence[Any]) -> None:
        self._original, self._args = module, args
        copied = copy.deepcopy(module)
        self._kept: list[str] = []
        # Of each further input the operator that reads it, the number of the leaf of its arguments, and what that was.
        self._edges: list[tuple[str, int, str]] = []
        graph = copied.graph
        last_input = [each for each in graph.nodes if each.op == "placeholder"][-1:]
        ends = next(each for each in graph.nodes if each.op == "output")
        for node in [each for each in graph.nodes if each.op in _CALLS]:
            if not _writes(node):
                leaves, put = _leaves(node)
                for number, leaf in enumerate(leaves):
                    if _has_grad(leaf):
                        with graph.inserting_after(*last_input):
                            last_input = [graph.placeholder(f"zero_{len(self._edges)}")]
                        with graph.inserting_before(node):
                            leaves[number] = graph.call_function(torch.add, (leaf, last_input[0]))
                        self._edges.append((node.name, number, leaf.name))
                node.args, node.kwargs = put(leaves)
            if isinstance(_example(node), Tensor):
                with graph.inserting_after(node):
                    value = graph.call_function(torch.clone, (node,))
                ends.args = ((*ends.args[0], value),)
                self._kept.append(node.name)
        self.module = fx.GraphModule(copied, graph)

    def zeros(self) -> list[Tensor]:
        """The further inputs."""
        shapes = {each.name: each for each in self._original.graph.nodes}
        return [_zeros_like(_example(shapes[source])) for _, _, source in self._edges]

    def operators(
        self, found: Any, grads: Sequence[Tensor], cotangents: Sequence[Tensor | None], user_code: UserCode
    ) -> Iterator[tuple[CompiledOperator, fx.Node, tuple]]:
        """The operators, judged, with their nodes and what these were given.

        Args:
            found: what the graph returned.
            grads: of the further inputs.
            cotangents: gradients of the outputs of the original graph.
        """
        found = list(found)
        values = dict(zip(self._kept, found[len(found) - len(self._kept) :], strict=True))
        env: dict[str, Any] = {}
        inputs = iter(self._args)
        evaluated: list[tuple[fx.Node, Callable, tuple, dict]] = []
        ends: list[Any] = []
        interpreter = fx.Interpreter(self._original)
        for node in self._original.graph.nodes:
            read = lambda each: env[each.name]  # noqa: E731
            own_args, own_kwargs = fx.map_arg(node.args, read), fx.map_arg(node.kwargs, read)
            if node.op == "placeholder":
                env[node.name] = next(inputs)
            elif node.op == "output":
                ends = _leaves(node)[0]
            elif node.op not in _CALLS:
                env[node.name] = getattr(interpreter, node.op)(node.target, own_args, own_kwargs)
            else:
                function = _function_of(node)
                evaluated.append((node, function, own_args, own_kwargs))
                if node.name in values:
                    env[node.name] = values[node.name].detach()
                else:
                    env[node.name] = function(*_copied(own_args), **_copied(own_kwargs))
        for node, function, own_args, own_kwargs in evaluated:
            if node.name in values and not _writes(node):
                exact = exact_of(function, own_args, own_kwargs, several=True)
                value = env[node.name]
                judged = exact.judge(value) if exact is not None else None
                judged_here = _operator(node, FORWARD, (own_args, own_kwargs), [value], judged, user_code)
                yield judged_here, node, (own_args, own_kwargs)
        contributions = self._contributions(grads, cotangents, [each for each in ends if isinstance(each, fx.Node)])
        for node, function, own_args, own_kwargs in reversed(evaluated):
            parts = contributions.get(node.name)
            own = {
                number: grad for (name, number, _), grad in zip(self._edges, grads, strict=True) if name == node.name
            }
            if parts and own:
                backward = _vjp(function, node, list(own))
                exact = exact_of(backward, (own_args, own_kwargs, parts), {}, several=True)
                judged = exact.judge(list(own.values())) if exact is not None else None
                judged_here = _operator(node, BACKWARD, (parts, own_args), list(own.values()), judged, user_code)
                yield judged_here, node, (own_args, own_kwargs)

    def _contributions(
        self, grads: Sequence[Tensor], cotangents: Sequence[Tensor | None], ends: Sequence[fx.Node]
    ) -> dict[str, list[Tensor]]:
        """The summands of the gradient of each operator's value, if all readers of the value state theirs."""
        parts: dict[str, list[Tensor]] = {}
        for (_, _, source), grad in zip(self._edges, grads, strict=True):
            parts.setdefault(source, []).append(grad)
        for node, cotangent in zip(ends, cotangents, strict=False):
            if cotangent is not None:
                parts.setdefault(node.name, []).append(cotangent)
        read = {(name, source) for name, _, source in self._edges}
        nodes = {each.name: each for each in self._original.graph.nodes}
        return {
            name: own
            for name, own in parts.items()
            if all(user.op == "output" or (user.name, name) in read for user in nodes[name].users)
        }


def _operator(
    node: fx.Node,
    phase: str,
    inputs: Any,
    outputs: Sequence[Tensor],
    judged: Judged | None,
    user_code: UserCode,
) -> CompiledOperator:
    leaves = tree_leaves((node.args[1:], dict(node.kwargs)))
    arguments = ", ".join(quote(each) for each in leaves if isinstance(each, int | float | str))
    line = user_code.innermost(_frames(node.meta.get("stack_trace") or ""))
    name = f"{COMPILED}{_target_name(node)}"
    return CompiledOperator(name, arguments, phase, _module_of(node), line, tensor_leaves(inputs), outputs, judged)


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    return [each for each in module.graph.nodes if each.op in _CALLS]


def _cut(module: fx.GraphModule, last: str) -> fx.GraphModule:
    """A graph up to one of its operators, which returns what the rest of it would read."""
    copied = copy.deepcopy(module)
    nodes = list(copied.graph.nodes)
    stop = [each.name for each in nodes].index(last) + 1
    kept, rest = nodes[:stop], set(nodes[stop:])
    read = [
        each for each in kept if each.op in _CALLS and set(each.users) & rest and isinstance(_example(each), Tensor)
    ]
    nodes[-1].args = (tuple(read),)
    for node in reversed(nodes[stop:-1]):
        copied.graph.erase_node(node)
    return fx.GraphModule(copied, copied.graph)


def _alone(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    """A graph of one operator, with an input for each value that it reads."""
    graph = fx.Graph()
    leaves, put = _leaves(node)
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, fx.Node):
            leaves[number] = graph.placeholder(f"input_{number}")
            leaves[number].meta = dict(leaf.meta)
    args, kwargs = put(leaves)
    made = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
    made.meta = dict(node.meta)
    graph.output((made,))
    return fx.GraphModule(module, graph)


def _is_outside(judged: tuple[str, Judged | None, Sequence[Tensor]]) -> bool:
    return judged[1] is not None and not judged[1].inside


class _Wide(fx.Interpreter):
    """Evaluates a graph in float64, whatever it casts to."""

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        return super().call_function(target, *_without_dtypes(args, kwargs))

    def call_method(self, target: Any, args: tuple, kwargs: dict) -> Any:
        return super().call_method("double" if target in _CASTS else target, *_without_dtypes(args, kwargs))


def _without_dtypes(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    def wide(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    return tree_map(wide, (args, kwargs))


def _run(
    function: Callable, args: Sequence[Any], trains: Sequence[bool], cotangents: Sequence[Tensor | None] | None
) -> tuple[Any, list[Tensor]]:
    """The outputs of a function, and the gradients of those arguments that are trained; none without gradients of the outputs."""
    with torch.enable_grad():
        own = _fresh(args, trains)
        leaves = [each for each, trained in zip(own, trains, strict=True) if trained]
        outputs = function(*own)
        pairs = [
            (each, g) for each, g in zip(tensor_leaves(outputs), cotangents or (), strict=False) if each.requires_grad
        ]
        pairs = [pair for pair in pairs if pair[1] is not None]
        if not pairs or not leaves:
            return outputs, []
        ends, given = zip(*pairs, strict=True)
        return outputs, list(torch.autograd.grad(ends, leaves, given, allow_unused=True, materialize_grads=True))


def _fresh(args: Sequence[Any], trains: Sequence[bool]) -> list[Any]:
    """Copies of tensors, without a history."""
    return [
        each.detach().clone().requires_grad_(trained) if isinstance(each, Tensor) else each
        for each, trained in zip(args, trains, strict=True)
    ]


def _vjp(function: Callable, node: fx.Node, numbers: Sequence[int]) -> Callable:
    """The backward of an operator: gradients of the leaves of its arguments that have these numbers."""

    def backward(args: tuple, kwargs: dict, parts: Sequence[Tensor]) -> Any:
        leaves, put = _leaves_of(args, kwargs)
        with torch.enable_grad():
            for number in numbers:
                leaves[number] = leaves[number].detach().clone().requires_grad_()
            own_args, own_kwargs = put(leaves)
            value = function(*own_args, **own_kwargs)
            wanted = [leaves[number] for number in numbers]
            return torch.autograd.grad(
                value, wanted, sum(parts[1:], parts[0]), allow_unused=True, materialize_grads=True
            )

    return backward


def _leaves(node: fx.Node) -> tuple[list[Any], Callable]:
    return _leaves_of(node.args, dict(node.kwargs))


def _leaves_of(args: Any, kwargs: Any) -> tuple[list[Any], Callable]:
    """All that is in the arguments, in order, and what puts others into their places."""
    leaves: list[Any] = []
    map_aggregate((args, kwargs), lambda each: leaves.append(each))

    def put(others: Sequence[Any]) -> Any:
        rest = iter(others)
        return map_aggregate((args, kwargs), lambda _: next(rest))

    return leaves, put


def _copied(value: Any) -> Any:
    return tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, value)


def _cotangents(outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Random gradients of the outputs that have a history."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(each.shape, generator=generator).to(each.device, each.dtype) if each.requires_grad else None
        for each in outputs
    ]


def _function_of(node: fx.Node) -> Callable:
    if node.op == "call_function":
        return node.target  # type: ignore[return-value]
    return lambda own, *args, **kwargs: getattr(own, str(node.target))(*args, **kwargs)


def _target_name(node: fx.Node) -> str:
    return str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target))


def _writes(node: fx.Node) -> bool:
    """Whether an operator may write into what it reads."""
    name = _target_name(node)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or "out" in node.kwargs or name in _IN_PLACE


def _module_of(node: fx.Node) -> str:
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return _ROOT_MODULE.sub("", paths[-1]) if paths else ""


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _has_grad(leaf: Any) -> bool:
    example = _example(leaf) if isinstance(leaf, fx.Node) else None
    return isinstance(example, Tensor) and example.is_floating_point() and example.requires_grad


def _zeros_like(example: Tensor) -> Tensor:
    shape = [int(size) for size in example.shape]
    return torch.zeros(shape, dtype=example.dtype, device=example.device)


def _frames(stack: str) -> list[Frame]:
    """The frames that a node of a graph has as text, from the innermost on."""
    return [(file, int(number), function) for file, number, function in _FRAME.findall(stack)][::-1]
