"""The operators of a part of a step, traced in a re-run. `crossframe.operators` defines traces.

[Note: what runs while a step is traced] JAX passes every primitive that runs outside jit to the current trace, and a jitted
function as one primitive with a jaxpr. `OperatorTrace` replaces that trace for one step, whatever the loop calls: a function
under jit, `jax.grad` outside it, or single operators. Jaxprs are evaluated one equation at a time. So rounding is that of single
operators, not that of XLA's fusions, on both sides.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import core as traces
from jax._src import source_info_util

from crossframe.alignment.module_names import is_in
from crossframe.operators import Operator, Request, Signature, Trace, signature_of
from crossframe.operators.request import TRACE_NAME
from crossframe.operators.trace import MOST_OPERATORS
from crossframe.recording.event_format import BACKWARD, FORWARD, PARAMETERS, STATE, UNSHARDED, UPDATE
from jax_backend.activations import module_in
from jax_backend.recorder._float64_check import judge
from jax_backend.recorder._interpreter import Equation, Evaluated, Interpreter, Place
from jax_backend.tree import is_key

_OPTIMIZER = "optimizer"


class OperatorTrace:
    """Records the operators of the requested step.

    Args:
        request: the part to trace.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._interpreter = Interpreter(self._note)
        self._signatures: dict[int, tuple[Any, Signature]] = {}
        self._operators: list[Operator] = []
        self._results: list[Signature] = []
        self._began_backward = False
        self._entered: Any = None

    @property
    def active(self) -> bool:
        """Whether the requested step is running."""
        return self._entered is not None

    def begin_step(self, step: int) -> None:
        """A step begins."""
        if step == self._request.step and not self.active:
            self._entered = traces.set_current_trace(_Listening(self._interpreter))
            self._entered.__enter__()

    def end(self) -> None:
        """Stop recording."""
        if self._entered is not None:
            entered, self._entered = self._entered, None
            entered.__exit__(None, None, None)

    def microbatch(self, losses: Any, inside: Iterable[Any]) -> None:
        """Add the results of a microbatch.

        Args:
            losses, inside: the losses and the activations, with a leading dim of ranks.
        """
        for array in (*inside, losses):
            self.add_result(np.asarray(array)[self._request.rank])

    def finish(self, loss: Any) -> None:
        """Write the trace and end the run after the step.

        Args:
            loss: the loss of the step, a scalar or one for each rank; used if no microbatch added results.

        Raises:
            SystemExit: always.
        """
        if not self._results:
            self.add_result(loss if np.ndim(loss) == 0 else np.asarray(loss)[self._request.rank])
        self.end()
        self.trace().write(Path(self._request.directory, TRACE_NAME))
        raise SystemExit(0)

    def add_result(self, array: Any) -> None:
        """Add a result of the part, such as the loss."""
        if self._request.phase in (PARAMETERS, UNSHARDED, FORWARD):
            self._results.append(self._signature(array))

    def trace(self) -> Trace:
        """The recorded trace."""
        return Trace(self._operators, self._results)

    def _note(self, equation: Equation) -> None:
        if len(self._operators) >= MOST_OPERATORS:
            return
        place = equation.place
        phase, module = self._phase(equation), module_in(place.scopes)
        if not self._is_asked_for(phase, module):
            return
        at = place.ranks.index(self._request.rank) if place.ranks is not None else 0
        inputs = [self._of(each, at) for each in equation.inputs if each.constant is None]
        outputs = [self._of(each, at) for each in equation.outputs]
        judged = None
        if self._request.judged and equation.primitive is not None:
            of_rank = [[_array(each, at) for each in values] for values in (equation.inputs, equation.outputs)]
            judged = judge(equation.primitive, equation.params or {}, *of_rank)
        index = len(self._operators)
        self._operators.append(
            Operator(
                index,
                f"jax.{equation.name}",
                equation.arguments,
                phase,
                module,
                place.line,
                tuple(inputs),
                tuple(outputs),
                judged,
            )
        )

    def _is_asked_for(self, phase: str, module: str) -> bool:
        asked = self._request.phase
        if asked in (STATE, UPDATE):
            return phase == _OPTIMIZER or (phase == FORWARD and self._began_backward)
        if asked in (PARAMETERS, UNSHARDED, FORWARD) and phase != FORWARD:
            return False
        if asked == BACKWARD and phase == _OPTIMIZER:
            return False
        return is_in(module, self._request.unit)

    def _phase(self, equation: Equation) -> str:
        """The phase of an equation. Those that depend on backward belong to the optimizer. Those after backward in the program
        that do not depend on it, such as the decay of a moment, count as forward."""
        if equation.place.is_backward:
            self._began_backward = True
            return BACKWARD
        return _OPTIMIZER if any(each.late for each in equation.inputs) else FORWARD

    def _of(self, value: Evaluated, at: int) -> Signature:
        return self._signature(_array(value, at))

    def _signature(self, array: Any) -> Signature:
        """The signature of an array, computed once."""
        known = self._signatures.get(id(array))
        if known is not None:
            return known[1]
        own = jax.random.key_data(array) if is_key(array) else array
        made = np.asarray(own)
        wide = (np.abs(made) if np.iscomplexobj(made) else made).astype(np.float64)
        found = signature_of(wide, made.dtype.name, sketched=not self._request.in_bits)
        self._signatures[id(array)] = array, found
        return found


def _array(value: Evaluated, at: int) -> Any:
    """A rank's array."""
    return value.by_rank[at if len(value.by_rank) > 1 else 0]


class _Listening(traces.EvalTrace):
    """JAX's own evaluation, with primitives passed to an interpreter.

    JAX has left this trace when it calls a method: 0.10 for its own evaluation, later releases for none.
    """

    def __init__(self, interpreter: Interpreter) -> None:
        super().__init__()
        self._interpreter = interpreter

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        place = Place().at(source_info_util.current())
        with traces.set_current_trace(traces.eval_trace):
            found = self._interpreter.call(primitive, params, args, place)
        return found if primitive.multiple_results else found[0]

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **_: Any) -> Any:
        with traces.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_custom_vjp_call(self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **_: Any) -> Any:
        with traces.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_shard_map(self, primitive: Any, fun: Any, args: Any, /, **params: Any) -> Any:
        with traces.set_current_trace(self):
            return jax.jit(lambda *arrays: primitive.bind(*arrays, subfuns=(fun,), **params))(*args)
