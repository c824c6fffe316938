"""A step's program in which a unit is gathered when it is first needed, to measure memory with XLA's CPU compiler.

[Note: a gather waits for what needs it] A gather depends on shards alone, so XLA runs the gathers of all units at the start of
the step, and all full parameters are in memory at once. Up to JAX 0.11.0 its CPU compiler also drops the barrier before
backward and merges the second gather of a unit with its first; and for a bias that is read late it
keeps the whole line in addition to the matrices that were cut out of it. So a unit is gathered and cut in one branch of a
condition, whose other branch is never taken. XLA does not know that, and neither merges nor looks inside. The condition depends
on the other operand of the unit's first user: an activation in forward, a gradient in backward. Where XLA places the
collectives, reductions are in such branches too, since it would otherwise join those of all units at the end of the step, and
keep all full gradients until then. Other compilers respect the barrier, and on accelerators a condition would stop the queue.
So this is an option, `value_and_grad(late_gathers=True)`, and without it every platform runs the same program.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from crossframe.trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from jax_backend.programs._jaxpr import Evaluation, transformed
from jax_backend.ranks._collectives import WEIGHTS, bucket_label, scope_label, scope_name


def gather_late(fun: Callable, mapped_axes: tuple[str, ...] | None = None) -> Callable:
    """A function of pytrees of arrays with the same results, whose gathers wait until they are needed.

    Args:
        mapped_axes: the axes of ranks if vmap maps the function over them, and XLA places its collectives: then all ranks take
            the same branch, and reductions wait too. None: under shard_map.
    """
    if mapped_axes is None:
        return transformed(fun, lambda jaxpr: _LateGathers(jaxpr, (ALL_GATHER,), lambda number: number))
    kinds, common = (ALL_GATHER, REDUCE_SCATTER), lambda number: jax.lax.pmax(number, mapped_axes)
    return transformed(fun, lambda jaxpr: _LateGathers(jaxpr, kinds, common))


class _LateGathers(Evaluation):
    """A program in which regions wait.

    Attributes:
        waiting: variables without a value yet, and the equations that compute it.
        newest: the floating array that was read last.
    """

    def __init__(self, jaxpr: Jaxpr, kinds: Sequence[str], common: Callable[[jax.Array], jax.Array]) -> None:
        super().__init__(jaxpr)
        self._kinds, self._common = kinds, common
        self._regions: dict[tuple[str, str, bool], list[JaxprEqn]] = {}
        self._region: dict[int, tuple[str, str, bool]] = {}
        self._readers: dict[Var, list[JaxprEqn]] = {}
        self._returned = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
        for equation in jaxpr.eqns:
            for var in _variables([equation]):
                self._readers.setdefault(var, []).append(equation)
            if (region := _region_of(equation, kinds)) is not None:
                self._regions.setdefault(region, []).append(equation)
                self._region[id(equation)] = region
        self.waiting: dict[Var, Sequence[JaxprEqn]] = {}
        self.newest: Any = None

    def visit(self, equation: JaxprEqn) -> None:
        region = self._region.get(id(equation))
        equations = [equation] if region is None else self._regions[region]
        if equation is not equations[-1]:
            return
        inputs = _variables(equations)
        gathers = region is not None and region[0] == ALL_GATHER
        if gathers or (inputs and not equation.effects and all(var in self.waiting for var in inputs)):
            self.waiting.update((var, equations) for each in equations for var in each.outvars)
            return
        known = (self.values[var] for var in inputs if var in self.values)
        self.newest = next((value for value in known if _is_float(value)), self.newest)
        self._evaluate(equations)

    def read(self, atom: Any) -> Any:
        if not isinstance(atom, Literal) and atom not in self.values:
            self._evaluate(self.waiting[atom])
        return super().read(atom)

    def evaluate(self, equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        variables = _variables([equation])
        part = self._part([equation], variables, list(equation.outvars))
        return eval_jaxpr(part, [self.read(var) for var in variables])

    def _evaluate(self, equations: Sequence[JaxprEqn]) -> None:
        first = equations[0]
        if id(first) not in self._region:
            super().visit(first)
            return
        inside = {id(each) for each in equations}
        inputs = _variables(equations)
        outputs = [var for each in equations for var in each.outvars if self._is_used(var, inside)]
        found = self._in_a_branch(self._part(equations, inputs, outputs), [self.read(var) for var in inputs])
        self.values.update(zip(outputs, found, strict=True))

    def _is_used(self, var: Var, inside: set[int]) -> bool:
        """Whether a variable is returned, or read by other equations than these."""
        return var in self._returned or any(id(each) not in inside for each in self._readers.get(var, ()))

    def _part(self, equations: Sequence[JaxprEqn], inputs: list[Var], outputs: list[Var]) -> Jaxpr:
        return self.jaxpr.replace(constvars=inputs, invars=[], outvars=outputs, eqns=list(equations))

    def _in_a_branch(self, part: Jaxpr, inputs: list[Any]) -> Sequence[Any]:
        newest = inputs[0] if self.newest is None else self.newest
        with jax.named_scope(scope_name(ALL_REDUCE, WEIGHTS)):
            first = self._common(jax.lax.slice(newest, (0,) * newest.ndim, (1,) * newest.ndim).reshape(()))
            never = (first != first) & (first > 0)
        return jax.lax.cond(
            never,
            lambda *_: [jnp.zeros(_aval(var).shape, _aval(var).dtype) for var in part.outvars],
            lambda *inputs: eval_jaxpr(part, inputs),
            *inputs,
        )


def _region_of(equation: JaxprEqn, kinds: Sequence[str]) -> tuple[str, str, bool] | None:
    """The kind and the label of the collective that an equation belongs to, and whether it runs in backward.

    Arrays of a bucket are gathered together, under the bucket's label, and each is reduced by itself.
    """
    stack = str(equation.source_info.name_stack)
    for kind in kinds:
        if (label := scope_label(kind, stack)) is not None:
            return kind, bucket_label(label) if kind == ALL_GATHER else label, "transpose(" in stack
    return None


def _variables(equations: Sequence[JaxprEqn]) -> list[Var]:
    """The variables that equations read and do not define."""
    made = {var for each in equations for var in each.outvars}
    read = (atom for each in equations for atom in each.invars if isinstance(atom, Var))
    return list(dict.fromkeys(var for var in read if var not in made))


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating) and value.size > 0


def _aval(var: Any) -> ShapedArray:
    return var.aval
