"""The operators of a part of a step, traced in a re-run. `crossframe.operators` says what a trace holds.

[Note: what runs while a step is traced] JAX hands every primitive that runs outside of jit to the current trace, and a jitted
function as one primitive that has its jaxpr. `OperatorTrace` puts itself there for one step, whatever the loop calls: a function
under jit, `jax.grad` outside of it, or single operators. Jaxprs are then evaluated one equation at a time. So rounding is that of
single operators, not of what XLA fuses; both sides are traced so.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import core as traces
from jax._src import source_info_util

from crossframe.operators import Operator, Request, Signature, Trace, signature_of
from crossframe.operators.request import TRACE_NAME
from crossframe.recording.lines import BACKWARD, FORWARD, PARAMETERS, STATE, UNSHARDED, UPDATE
from jax_backend.activations import module_in
from jax_backend.recorder._interpreter import Equation, Interpreter, Place, Value
from jax_backend.recorder._judging import judge

_MOST_OPERATORS = 20_000
_OPTIMIZER = "optimizer"


class OperatorTrace:
    """Notes the operators of the step that a request asks for.

    Args:
        request: which part is traced.
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
        """Whether the step is on."""
        return self._entered is not None

    def begin_step(self, step: int) -> None:
        """A step begins."""
        if step == self._request.step and not self.active:
            self._entered = traces.set_current_trace(_Listening(self._interpreter))
            self._entered.__enter__()

    def end(self) -> None:
        """Nothing is noted any more."""
        if self._entered is not None:
            entered, self._entered = self._entered, None
            entered.__exit__(None, None, None)

    def microbatch(self, losses: Any, inside: Iterable[Any]) -> None:
        """Values that the part is for.

        Args:
            losses, inside: of all ranks, in the leading dim.
        """
        for array in (*inside, losses):
            self.add_result(np.asarray(array)[self._request.rank])

    def finish(self, loss: Any) -> None:
        """The step is over: write the trace, and end the run.

        Args:
            loss: of the step, a scalar or each rank's; it counts if no microbatch told its own.

        Raises:
            SystemExit: in any case.
        """
        if not self._results:
            self.add_result(loss if np.ndim(loss) == 0 else np.asarray(loss)[self._request.rank])
        self.end()
        self.trace().write(Path(self._request.directory, TRACE_NAME))
        raise SystemExit(0)

    def add_result(self, array: Any) -> None:
        """A value that the part is for, such as the loss."""
        if self._request.phase in (PARAMETERS, UNSHARDED, FORWARD):
            self._results.append(self._signature(array))

    def trace(self) -> Trace:
        """What was noted."""
        return Trace(self._operators, self._results)

    def _note(self, equation: Equation) -> None:
        if len(self._operators) >= _MOST_OPERATORS:
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
        unit, asked = self._request.unit, self._request.phase
        if asked in (STATE, UPDATE):
            return phase == _OPTIMIZER or (phase == FORWARD and self._began_backward)
        if asked in (PARAMETERS, UNSHARDED, FORWARD) and phase != FORWARD:
            return False
        if asked == BACKWARD and phase == _OPTIMIZER:
            return False
        return not unit or module == unit or module.startswith(f"{unit}.")

    def _phase(self, equation: Equation) -> str:
        """The phase of an equation: what depends on backward comes after it. What follows backward in the program and depends on
        none of it, as the decay of a moment, counts as forward by name."""
        if equation.place.is_backward:
            self._began_backward = True
            return BACKWARD
        return _OPTIMIZER if any(each.late for each in equation.inputs) else FORWARD

    def _of(self, value: Value, at: int) -> Signature:
        return self._signature(_array(value, at))

    def _signature(self, array: Any) -> Signature:
        """The signature of an array, computed once for each."""
        known = self._signatures.get(id(array))
        if known is not None:
            return known[1]
        own = jax.random.key_data(array) if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key) else array
        made = np.asarray(own)
        wide = (np.abs(made) if np.iscomplexobj(made) else made).astype(np.float64)
        found = signature_of(wide, made.dtype.name, sketched=not self._request.in_bits)
        self._signatures[id(array)] = array, found
        return found


def _array(value: Value, at: int) -> Any:
    """What a rank has."""
    return value.by_rank[at if len(value.by_rank) > 1 else 0]


class _Listening(traces.EvalTrace):
    """JAX's own evaluation, but that primitives go through an interpreter. JAX has left this trace when it calls a method."""

    def __init__(self, interpreter: Interpreter) -> None:
        super().__init__()
        self._interpreter = interpreter

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        place = Place().at(source_info_util.current())
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
