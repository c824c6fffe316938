"""Evaluates a jaxpr one equation at a time, on all ranks side by side, and shows the values of each equation.

Calls (jit, remat, custom_jvp and custom_vjp), scan, while, cond and shard_map are followed inside. Inside of shard_map a value is
one array for each rank; collectives run as JAX runs them, over the devices of the mesh. Everything else runs on one device. Where
ranks take different branches, or as many loops as they like, the whole cond or while counts as one operator.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from crossframe.operators import SourceLine
from crossframe.operators.source import Frame, UserCode
from crossframe.shown import shown

_CALLS = frozenset(
    [
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "remat",
        "remat2",
        "checkpoint",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
    ]
)
_SAME_VALUES = frozenset(
    [
        "sharding_constraint",
        "optimization_barrier",
        "stop_gradient",
        "copy",
        "copy_p",
        "device_put",
        "name",
        "reshard",
        "mesh_cast",
        "pvary",
        "pcast",
        "pbroadcast",
        "preduced",
        "vary_unreduced_cast_p",
    ]
)
"""Primitives that only pass values on."""
_OF_CONSTANTS = frozenset(["broadcast_in_dim", "convert_element_type", "reshape", "squeeze"])
"""Primitives of which one constant makes an array that has this constant everywhere."""
_BACKWARD = re.compile(r"\btranspose\(")
USER_CODE = UserCode("jax", "jaxlib", "flax", "optax", "equinox")


@dataclass(frozen=True, eq=False)
class Value:
    """What a variable of a jaxpr holds.

    Attributes:
        by_rank: one array for each rank inside of shard_map, else one.
        constant: the number that all elements are, where the program says so; None: computed or given.
        late: whether it depends on what backward computed.
    """

    by_rank: tuple[Any, ...]
    constant: Any = None
    late: bool = False

    def like(self, by_rank: tuple[Any, ...]) -> "Value":
        """Other arrays, of which the same is known."""
        return replace(self, by_rank=by_rank)


@dataclass(frozen=True)
class Ranks:
    """The ranks of a shard_map: all places along its axes."""

    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def size(self) -> int:
        """How many there are."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def index(self, rank: int) -> int:
        """The place of a device of the whole mesh."""
        at = np.unravel_index(rank % self.mesh.size, self.mesh.devices.shape)
        own = [int(at[self.mesh.axis_names.index(axis)]) for axis in self.axes]
        return int(np.ravel_multi_index(own, [self.mesh.shape[axis] for axis in self.axes]))

    def piece(self, index: int, axes: Sequence[str]) -> tuple[int, int]:
        """Which part of a dim cut over some axes is at a place, and into how many parts it is cut."""
        sizes = [self.mesh.shape[axis] for axis in self.axes]
        at = dict(zip(self.axes, np.unravel_index(index, sizes) if sizes else (), strict=True))
        cut = [self.mesh.shape[axis] for axis in axes]
        return int(np.ravel_multi_index([int(at[axis]) for axis in axes], cut)), math.prod(cut)


@dataclass(frozen=True)
class Place:
    """Where in the program an equation stands.

    Attributes:
        scopes: names of scopes and transformations, outermost first, as JAX writes them.
        line: of the user's code.
        library: file and name of the library's function that runs, None where it is the user's. JAX may have made its jaxpr for
            another line, so lines outside of the function say nothing.
        ranks: of the shard_map around, None outside.
    """

    scopes: str = ""
    line: SourceLine | None = None
    library: tuple[str, str] | None = None
    ranks: Ranks | None = None

    def at(self, source_info: Any) -> "Place":
        """The place of an equation."""
        scopes = f"{self.scopes}/{source_info.name_stack}"
        frames = takewhile(self._is_inside, frames_of(source_info.traceback))
        return replace(self, scopes=scopes, line=USER_CODE.innermost(frames) or self.line)

    def _is_inside(self, frame: Frame) -> bool:
        return self.library is None or self.library != (frame[0], frame[2].rpartition(".")[2])

    def within(self, jaxpr: Any) -> "Place":
        """The place of a jaxpr that is called here."""
        said = getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None) or ""
        name, _, at = said.rpartition(" at ")
        file = at.rpartition(":")[0]
        is_library = bool(file) and not USER_CODE.has(file)
        return replace(self, library=(file, name.rpartition(".")[2]) if is_library else None)

    @property
    def is_backward(self) -> bool:
        """Whether the equation is one of backward."""
        return _BACKWARD.search(self.scopes) is not None

    @property
    def num_ranks(self) -> int:
        """How many arrays a value is here."""
        return self.ranks.size if self.ranks is not None else 1


@dataclass(frozen=True)
class Equation:
    """An equation as it was evaluated.

    Attributes:
        arguments: its parameters and constants in words.
        primitive, params: of which one array for each input gives one for each output; None where that is no single primitive,
            or a collective.
    """

    name: str
    arguments: str
    place: Place
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    primitive: Any = None
    params: dict[str, Any] | None = None


def frames_of(traceback: Any) -> Iterator[Frame]:
    """The frames of a traceback of JAX, from the innermost on."""
    for frame in traceback.frames if traceback is not None else ():
        yield frame.file_name, frame.line_num, frame.function_name


class Interpreter:
    """Evaluates equations.

    Args:
        show: called with each of them, but with those that only pass values on.
    """

    def __init__(self, show: Callable[[Equation], None]) -> None:
        self._show = show
        self._device: Any = None
        self._late: dict[int, Any] = {}

    def call(self, primitive: Any, params: dict[str, Any], args: Sequence[Any], place: Place) -> list[Any]:
        """A primitive's results for arrays, as one outside of all functions."""
        found = self._apply(primitive, params, [self._given(arg) for arg in args], place)
        self._late |= {id(value.by_rank[0]): value.by_rank[0] for value in found if value.late}
        return [value.by_rank[0] for value in found]

    def _given(self, array: Any) -> Value:
        """The value that an array is."""
        scalar = not isinstance(array, jax.Array) and np.ndim(array) == 0
        return Value((self._here(array),), array if scalar else None, late=id(array) in self._late)

    def _here(self, array: Any) -> Any:
        """An array on the one device."""
        if not isinstance(array, jax.Array):
            return array
        devices = array.devices()
        if self._device is None:
            self._device = min(devices, key=lambda device: device.id)
        if devices == {self._device} and isinstance(array.sharding, SingleDeviceSharding):
            return array
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            return jax.device_put(array, self._device)
        return jax.device_put(np.asarray(array), self._device)  # JAX would remember the mesh, and refuse to mix

    def _run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value], place: Place) -> list[Value]:
        values: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            scalar = const if not isinstance(const, jax.Array) and np.ndim(const) == 0 else None
            values[var] = Value((self._here(const),) * place.num_ranks, scalar)

        def read(atom: Any) -> Value:
            if isinstance(atom, core.Literal):
                literal = np.asarray(atom.val)  # without the mesh that JAX keeps with it
                return Value((literal,) * place.num_ranks, literal if literal.ndim == 0 else None)
            return values[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            # Inside of shard_map the context is that of one device; here ranks run one by one.
            with nullcontext() if place.ranks is not None else equation.ctx.manager:
                found = self._apply(equation.primitive, equation.params, operands, place.at(equation.source_info))
            values.update(zip(equation.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _closed(self, closed: Any, args: Sequence[Value], place: Place) -> list[Value]:
        """The results of a jaxpr with or without its constants."""
        jaxpr, consts = (closed.jaxpr, closed.consts) if hasattr(closed, "consts") else (closed, ())
        return self._run(jaxpr, consts, args, place.within(jaxpr))

    def _apply(self, primitive: Any, params: dict[str, Any], operands: Sequence[Value], place: Place) -> list[Value]:
        name = primitive.name
        if name in _SAME_VALUES:
            return list(operands)
        if name in _CALLS:
            inner = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
            if inner is not None:
                return self._closed(inner, operands, place)
        if name == "shard_map" and place.ranks is None and "jaxpr" in params:
            return self._shard_map(params, operands, place)
        if name == "scan":
            return self._scan(params, operands, place)
        if name == "cond":
            choices = {int(each) for each in operands[0].by_rank}
            if len(choices) == 1:
                branches = params["branches"]
                return self._closed(branches[min(max(*choices, 0), len(branches) - 1)], operands[1:], place)
        if name == "while" and (found := self._while(params, operands, place)) is not None:
            return found
        return self._leaf(primitive, params, operands, place)

    # Operators

    def _leaf(self, primitive: Any, params: dict[str, Any], operands: Sequence[Value], place: Place) -> list[Value]:
        bound = primitive.get_bind_params(dict(params))
        if bound.get("sharding") is not None:
            bound = {**bound, "sharding": None}

        def run(*arrays: Any) -> list[Any]:
            result = primitive.bind(*arrays, **bound)
            return list(result) if primitive.multiple_results else [result]

        is_collective = place.ranks is not None and bool(_named_axes(params) & set(place.ranks.axes))
        if place.ranks is not None and is_collective:
            by_rank = _collective(run, operands, place.ranks, self._here)
        else:
            by_rank = _on_each(run, operands, place.num_ranks)
        late = place.is_backward or any(each.late for each in operands)
        found = [Value(tuple(row), late=late) for row in zip(*by_rank, strict=True)]
        if operands and all(each.constant is not None for each in operands):
            if primitive.name in _OF_CONSTANTS:
                return [replace(each, constant=operands[0].constant) for each in found]
            if all(np.ndim(each.by_rank[0]) == 0 for each in found):
                return [replace(each, constant=each.by_rank[0]) for each in found]
        own = (None, None) if is_collective else (primitive, bound)
        self._show(Equation(primitive.name, _arguments(params, operands), place, tuple(operands), tuple(found), *own))
        return found

    def _piece_of(self, name: str, arguments: str, whole: Value, piece: Value, place: Place) -> Value:
        """A value cut from another or joined from others, as an operator."""
        if whole.constant is None:
            self._show(Equation(name, arguments, place, (whole,), (piece,)))
        return piece

    # What holds jaxprs

    def _shard_map(self, params: dict[str, Any], operands: Sequence[Value], place: Place) -> list[Value]:
        mesh = params["mesh"]
        if not isinstance(mesh, Mesh):
            devices = np.array(jax.devices()[: mesh.size]).reshape(tuple(mesh.shape.values()))
            mesh = Mesh(devices, mesh.axis_names)
        named = next((params[key] for key in ("newly_manual_axes", "manual_axes") if key in params), ())
        ranks = Ranks(mesh, tuple(axis for axis in mesh.axis_names if axis in named or not named))
        inside = replace(place, ranks=ranks)
        args = []
        for value, spec in zip(operands, params["in_specs"], strict=True):
            pieces = tuple(_cut(value.by_rank[0], spec, ranks, index) for index in range(ranks.size))
            own = value.like(pieces)
            args.append(self._piece_of("shard_map", "", value, own, inside) if any(spec) else own)
        found = self._closed(params["jaxpr"], args, inside)
        joined = []
        for value, spec in zip(found, params["out_specs"], strict=True):
            own = value.like((_joined(value.by_rank, spec, ranks),))
            joined.append(self._piece_of("shard_map", "", value, own, inside) if any(spec) else own)
        return joined

    def _scan(self, params: dict[str, Any], operands: Sequence[Value], place: Place) -> list[Value]:
        num_consts, num_carry, length = params["num_consts"], params["num_carry"], params["length"]
        consts, carry = list(operands[:num_consts]), list(operands[num_consts : num_consts + num_carry])
        stacked, collected = operands[num_consts + num_carry :], []
        for i in reversed(range(length)) if params["reverse"] else range(length):
            said, sliced = f"iteration={i}", []
            for each in stacked:
                piece = each.like(tuple(array[i] for array in each.by_rank))
                sliced.append(self._piece_of("scan", said, each, piece, place))
            found = self._closed(params["jaxpr"], [*consts, *carry, *sliced], place)
            carry = found[:num_carry]
            collected.append(found[num_carry:])
        if params["reverse"]:
            collected.reverse()
        if not length:
            shapes = [var.aval for var in params["jaxpr"].jaxpr.outvars[num_carry:]]
            return [*carry, *(Value((jnp.zeros((0, *s.shape), s.dtype),) * place.num_ranks) for s in shapes)]
        stacks = []
        for rows in zip(*collected, strict=True):
            by_rank = tuple(jnp.stack(arrays) for arrays in zip(*(row.by_rank for row in rows), strict=True))
            stacks.append(stack := Value(by_rank, late=any(row.late for row in rows)))
            self._show(Equation("scan", "stacked", place, tuple(rows), (stack,)))
        return [*carry, *stacks]

    def _while(self, params: dict[str, Any], operands: Sequence[Value], place: Place) -> list[Value] | None:
        """The results of a loop; None if ranks leave it at different times."""
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body = operands[:num_cond], operands[num_cond : num_cond + num_body]
        carry = list(operands[num_cond + num_body :])
        while True:
            (goes_on,) = self._closed(params["cond_jaxpr"], [*of_cond, *carry], place)
            choices = {bool(each) for each in goes_on.by_rank}
            if len(choices) > 1:
                return None
            if not choices.pop():
                return carry
            carry = self._closed(params["body_jaxpr"], [*of_body, *carry], place)


def _on_each(run: Callable[..., list[Any]], operands: Sequence[Value], num_ranks: int) -> list[list[Any]]:
    """By rank the results of what ranks compute each for itself; once, where all are given the same arrays."""
    first = [each.by_rank[0] for each in operands]
    if all(array is own for each, own in zip(operands, first, strict=True) for array in each.by_rank):
        return [run(*first)] * num_ranks
    return [run(*(each.by_rank[rank] for each in operands)) for rank in range(num_ranks)]


def _collective(
    run: Callable[..., list[Any]], operands: Sequence[Value], ranks: Ranks, here: Callable[[Any], Any]
) -> list[list[Any]]:
    """By rank the results of a collective, which runs over the devices."""
    at = PartitionSpec(ranks.axes)
    given = [
        jax.device_put(jnp.stack([jnp.asarray(array) for array in each.by_rank]), NamedSharding(ranks.mesh, at))
        for each in operands
    ]

    def on_rank(*arrays: Any) -> list[Any]:
        return [jnp.asarray(each)[None] for each in run(*(array[0] for array in arrays))]

    mapped = jax.shard_map(
        on_rank, mesh=ranks.mesh, in_specs=(at,) * len(given), out_specs=at, axis_names=set(ranks.axes), check_vma=False
    )
    found = [here(each) for each in jax.jit(mapped)(*given)]
    return [[each[rank] for each in found] for rank in range(ranks.size)]


def _named_axes(params: dict[str, Any]) -> set[Any]:
    """The mesh axes that an equation names."""
    named = params.get("axis_name", params.get("axes", ()))
    return {
        axis
        for axis in (named if isinstance(named, tuple | list | frozenset | set) else (named,))
        if isinstance(axis, str)
    }


def _axes_of(spec: Any, ranks: Ranks) -> list[tuple[str, ...]]:
    """By dim, over which axes of the ranks it is cut."""
    by_dim = [(each,) if isinstance(each, str) else tuple(each or ()) for each in spec]
    return [tuple(axis for axis in axes if axis in ranks.axes) for axes in by_dim]


def _cut(array: Any, spec: Any, ranks: Ranks, index: int) -> Any:
    """A rank's part of an array."""
    at = []
    for size, axes in zip(np.shape(array), _axes_of(spec, ranks), strict=False):
        part, parts = ranks.piece(index, axes)
        at.append(slice(part * (size // parts), (part + 1) * (size // parts)))
    return (
        array[tuple(at)]
        if any(each != slice(0, size) for each, size in zip(at, np.shape(array), strict=False))
        else array
    )


def _joined(by_rank: Sequence[Any], spec: Any, ranks: Ranks) -> Any:
    """The array of all ranks' parts; of a dim that is not cut what the first of them has."""

    def join(axes_by_dim: list[tuple[int, tuple[str, ...]]], chosen: dict[str, int]) -> Any:
        if not axes_by_dim:
            sizes = [ranks.mesh.shape[axis] for axis in ranks.axes]
            return by_rank[int(np.ravel_multi_index([chosen.get(axis, 0) for axis in ranks.axes], sizes))]
        (dim, axes), *rest = axes_by_dim
        sizes = [ranks.mesh.shape[axis] for axis in axes]
        places = (np.unravel_index(i, sizes) for i in range(math.prod(sizes)))
        parts = [join(rest, chosen | dict(zip(axes, map(int, at), strict=True))) for at in places]
        return jnp.concatenate(parts, axis=dim)

    return join([(dim, axes) for dim, axes in enumerate(_axes_of(spec, ranks)) if axes], {})


def _arguments(params: dict[str, Any], operands: Sequence[Value]) -> str:
    """What an equation was given besides values that were computed: constants by their place, then parameters."""
    names = ("x", "y") if len(operands) <= 2 else tuple(f"operand{i}" for i in range(len(operands)))
    said = [
        f"{name}={_number(each.constant)}"
        for name, each in zip(names, operands, strict=False)
        if each.constant is not None
    ]
    for name, value in params.items():
        if _is_told(value):
            said.append(f"{name}={value.__name__ if isinstance(value, type) else shown(value)}")
    return ", ".join(said)


def _number(value: Any) -> str:
    return str(np.asarray(value).item()) if np.ndim(value) == 0 else shown(value)


def _is_told(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_is_told, value))
    return isinstance(value, bool | int | float | str | np.dtype) and value is not False and value != ""
