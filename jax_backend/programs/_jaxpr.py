"""The base of all code that evaluates a jaxpr equation by equation, and what such code knows of JAX's primitives."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

JITTED = frozenset(["jit", "pjit"])
"""The primitives of functions in jax.jit."""
CALLS = JITTED | {"closed_call", "core_call", "checkpoint", "remat", "remat2"}
"""Primitives that run one jaxpr on their operands."""
CUSTOM_CALLS = frozenset(["custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"])
"""The same for functions with their own derivatives."""


class Evaluation(ABC):
    """The evaluation of one jaxpr. A value is whatever a subclass makes of arrays.

    Attributes:
        jaxpr: the jaxpr.
        values: by variable, the values that are known.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr = jaxpr
        self.values: dict[Any, Any] = {}

    def run(self, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The values of the results.

        Args:
            consts: values of the constants.
            args: values of the arguments.
        """
        self.values.update(zip((*self.jaxpr.constvars, *self.jaxpr.invars), (*consts, *args), strict=True))
        for equation in self.jaxpr.eqns:
            self.visit(equation)
        return [self.read(atom) for atom in self.jaxpr.outvars]

    def visit(self, equation: JaxprEqn) -> None:
        """Evaluate an equation in its turn."""
        found = self.evaluate(equation, [self.read(atom) for atom in equation.invars])
        self.values.update(zip(equation.outvars, found, strict=True))

    def read(self, atom: Any) -> Any:
        """The value of a variable or a literal."""
        return self.literal(atom.val) if isinstance(atom, Literal) else self.values[atom]

    def literal(self, value: Any) -> Any:
        """The value of a literal."""
        return value

    @abstractmethod
    def evaluate(self, equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        """The values of an equation's results."""


def transformed(fun: Callable, evaluation: Callable[[Jaxpr], Evaluation]) -> Callable:
    """A function of pytrees of arrays, whose jaxpr is evaluated by `evaluation` instead of by JAX.

    Leaves without a dtype, such as Python's numbers, are the same to the function as without this: no tracers.
    """

    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]

        def of_arrays(*arrays: Any) -> Any:
            given = dict(zip(places, arrays, strict=True))
            return fun(*jax.tree.unflatten(structure, [given.get(i, leaf) for i, leaf in enumerate(leaves)]))

        arrays = [leaves[i] for i in places]
        closed, shape = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        found = evaluation(closed.jaxpr).run(closed.consts, arrays)
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return run


def bind(primitive: Any, params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    """The results of a primitive, as a list."""
    result = primitive.bind(*operands, **params)
    return list(result) if primitive.multiple_results else [result]


def opened(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """A jaxpr, closed or not, and its constants."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


def called(params: Mapping[str, Any]) -> Any:
    """The jaxpr that a call runs, closed or not; None if it has none."""
    return next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)


def inner_jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """All jaxprs inside an equation."""
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if hasattr(each, "eqns") or (hasattr(each, "jaxpr") and hasattr(each.jaxpr, "eqns")):
                yield opened(each)[0]


def num_scan_operands(params: Mapping[str, Any]) -> tuple[int, int]:
    """The number of constants and of carried values of a scan, its first operands. JAX 0.11 stores them as two pytrees."""
    if "ft_in" in params:
        constants, carry, _ = params["ft_in"].unpack()
        return len(constants), len(carry)
    return params["num_consts"], params["num_carry"]


def manual_axes(params: Mapping[str, Any]) -> Any:
    """The mesh axes of a shard_map; an empty set stands for all. The name of the parameter depends on JAX's version."""
    return next((params[name] for name in ("newly_manual_axes", "manual_axes") if name in params), frozenset())
