"""A step's program in which a unit is gathered when something first needs it, for XLA's CPU compiler.

[Note: a gather waits for what needs it] A gather depends on nothing but shards, so XLA runs those of all units at the start of
the step, and there all full parameters lie side by side. Its CPU compiler moreover drops the barrier that jax.checkpoint puts
before backward and merges the second gather of a unit with its first; and for the sake of a bias that is read late it keeps
the whole line beside the matrices that were cut out of it. So a unit is gathered and cut in one branch of a condition, whose
other branch is never taken. XLA can neither see that nor merge nor look inside, and the condition is on what the unit's first
user reads beside it: an activation in forward, a gradient in backward. Under jit reductions stand in such branches too, since
XLA would join those of all units into one at the end, until which all full gradients lie side by side. Other compilers honour
the barrier, and on other devices a condition would stop the queue: there the program stays as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import Mesh

from crossframe.trace import ALL_GATHER, ALL_REDUCE
from jax_backend.mesh._device_mesh import mesh_spec
from jax_backend.ranks._collectives import WEIGHTS, scope_label, scope_name


def merges_gathers(mesh: Mesh) -> bool:
    """Whether a mesh's compiler would gather all units at once, and keep them."""
    return mesh.devices.flat[0].platform == "cpu" and mesh_spec(mesh).shard > 1


def when_needed(
    fun: Callable,
    kinds: Sequence[str] = (ALL_GATHER,),
    common: Callable[[jax.Array], jax.Array] = lambda number: number,
) -> Callable:
    """The same function of pytrees of arrays, in which gathers wait for what needs them.

    Args:
        kinds: of the collectives that stand in branches of their own.
        common: makes a scalar one that all devices have, on which they branch.
    """

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        found = _Run(closed.jaxpr, kinds, common)(closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return run


class _Run:
    """A program that is run, equation by equation.

    Attributes:
        values: of variables.
        waiting: variables without a value yet, and the equations that make it.
        newest: the floating array that was read last.
    """

    def __init__(self, jaxpr: Jaxpr, kinds: Sequence[str], common: Callable[[jax.Array], jax.Array]) -> None:
        self._jaxpr, self._kinds, self._common = jaxpr, kinds, common
        self._regions: dict[tuple[str, str], list[JaxprEqn]] = {}
        self._region: dict[int, tuple[str, str]] = {}
        self._readers: dict[Var, list[JaxprEqn]] = {}
        self._returned = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
        for equation in jaxpr.eqns:
            for var in _variables([equation]):
                self._readers.setdefault(var, []).append(equation)
            if (region := _region_of(equation, kinds)) is not None:
                self._regions.setdefault(region, []).append(equation)
                self._region[id(equation)] = region
        self.values: dict[Var, Any] = {}
        self.waiting: dict[Var, Sequence[JaxprEqn]] = {}
        self.newest: Any = None

    def __call__(self, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        self.values.update(zip([*self._jaxpr.constvars, *self._jaxpr.invars], [*consts, *args], strict=True))
        for equation in self._jaxpr.eqns:
            region = self._region.get(id(equation))
            equations = [equation] if region is None else self._regions[region]
            gathers = region is not None and region[0] == ALL_GATHER
            if equation is not equations[-1]:
                continue
            inputs = _variables(equations)
            if gathers or (inputs and not equation.effects and all(var in self.waiting for var in inputs)):
                self.waiting.update((var, equations) for each in equations for var in each.outvars)
                continue
            known = (self.values[var] for var in inputs if var in self.values)
            self.newest = next((value for value in known if _is_float(value)), self.newest)
            self._evaluate(equations)
        return [self._value(atom) for atom in self._jaxpr.outvars]

    def _value(self, atom: Any) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self.values:
            self._evaluate(self.waiting[atom])
        return self.values[atom]

    def _evaluate(self, equations: Sequence[JaxprEqn]) -> None:
        inputs = _variables(equations)
        given = [self._value(var) for var in inputs]
        outputs = [var for each in equations for var in each.outvars]
        if _rounds_nothing(equations[0]):
            found = given
        elif id(equations[0]) in self._region:
            inside = {id(each) for each in equations}
            outputs = [var for var in outputs if self._is_used(var, inside)]
            found = self._in_a_branch(self._part(equations, inputs, outputs), given)
        else:
            found = eval_jaxpr(self._part([self._rewritten(equations[0])], inputs, outputs), given)
        self.values.update(zip(outputs, found, strict=True))

    def _is_used(self, var: Var, inside: set[int]) -> bool:
        """Whether a variable is returned, or read by any but these equations."""
        return var in self._returned or any(id(each) not in inside for each in self._readers.get(var, ()))

    def _part(self, equations: Sequence[JaxprEqn], inputs: list[Var], outputs: list[Var]) -> Jaxpr:
        return self._jaxpr.replace(constvars=inputs, invars=[], outvars=outputs, eqns=list(equations))

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

    def _rewritten(self, equation: JaxprEqn) -> JaxprEqn:
        """What runs again in backward, and backward itself, is a program inside an equation."""
        if not equation.params.get("differentiated"):
            return equation
        inner = _Run(equation.params["jaxpr"], self._kinds, self._common)
        made = jax.make_jaxpr(lambda *args: inner((), args))(*(self._value(atom) for atom in equation.invars))
        assert not made.consts
        return equation.replace(params={**equation.params, "jaxpr": made.jaxpr})


def _region_of(equation: JaxprEqn, kinds: Sequence[str]) -> tuple[str, str] | None:
    """The kind of the collective that an equation is a part of, and its bucket."""
    stack = str(equation.source_info.name_stack)
    found = ((kind, scope_label(kind, stack)) for kind in kinds)
    return next(((kind, label) for kind, label in found if label is not None), None)


def _rounds_nothing(equation: JaxprEqn) -> bool:
    """Whether this rounds to the precision that is there, as jax.checkpoint does with what it saves; XLA runs it as a copy."""
    if equation.primitive.name != "reduce_precision":
        return False
    dtype: Any = _aval(equation.outvars[0]).dtype
    if dtype.itemsize < 4:  # XLA may compute these in a wider one, and must round what is saved
        return False
    kept = jnp.finfo(dtype)
    return (equation.params["exponent_bits"], equation.params["mantissa_bits"]) == (kept.nexp, kept.nmant)


def _variables(equations: Sequence[JaxprEqn]) -> list[Var]:
    """What equations read that they do not make."""
    made = {var for each in equations for var in each.outvars}
    read = (atom for each in equations for atom in each.invars if isinstance(atom, Var))
    return list(dict.fromkeys(var for var in read if var not in made))


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating) and value.size > 0


def _aval(var: Any) -> ShapedArray:
    return var.aval
