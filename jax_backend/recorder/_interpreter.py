"""Evaluates a jaxpr one equation at a time, on all ranks in turn, and shows the values of each equation.

It enters calls (jit, remat, custom_jvp and custom_vjp), scan, while, cond and shard_map. Inside shard_map a value has one array
for each rank; JAX runs collectives over the devices of the mesh, and everything else runs on one device. If ranks take different
branches or numbers of iterations, the whole cond or while is one operator.
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
from crossframe.quoting import quote
from jax_backend.programs._jaxpr import (
    CALLS,
    CUSTOM_CALLS,
    Evaluation,
    bind,
    called,
    manual_axes,
    num_scan_operands,
    opened,
)
from jax_backend.tree import is_key

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
"""Primitives that make an array of one constant, which has that constant everywhere."""
_BACKWARD = re.compile(r"\btranspose\(")
USER_CODE = UserCode("jax", "jaxlib", "flax", "optax", "equinox")


@dataclass(frozen=True, eq=False)
class Evaluated:
    """The value of a variable of a jaxpr.

    Attributes:
        by_rank: one array for each rank inside shard_map, else one.
        constant: the constant that all elements have by the program; None: computed or an argument.
        late: whether it depends on results of backward.
        sharding: where the program puts it on a mesh; None: not known. It is on one device until the program's own code, outside
            all functions, gets it.
    """

    by_rank: tuple[Any, ...]
    constant: Any = None
    late: bool = False
    sharding: NamedSharding | None = None

    def like(self, by_rank: tuple[Any, ...], sharding: NamedSharding | None = None) -> "Evaluated":
        """Other arrays with the same attributes, but for their place."""
        return replace(self, by_rank=by_rank, sharding=sharding)


@dataclass(frozen=True)
class Ranks:
    """The ranks of a shard_map: all positions along its axes."""

    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def index(self, rank: int) -> int:
        """The index of a device of the whole mesh."""
        at = np.unravel_index(rank % self.mesh.size, self.mesh.devices.shape)
        own = [int(at[self.mesh.axis_names.index(axis)]) for axis in self.axes]
        return int(np.ravel_multi_index(own, [self.mesh.shape[axis] for axis in self.axes]))

    def piece(self, index: int, axes: Sequence[str]) -> tuple[int, int]:
        """(part, number of parts) of a dim that is sharded over some axes, at an index."""
        sizes = [self.mesh.shape[axis] for axis in self.axes]
        at = dict(zip(self.axes, np.unravel_index(index, sizes) if sizes else (), strict=True))
        cut = [self.mesh.shape[axis] for axis in axes]
        return int(np.ravel_multi_index([int(at[axis]) for axis in axes], cut)), math.prod(cut)


@dataclass(frozen=True)
class Place:
    """The place of an equation in the program.

    Attributes:
        scopes: names of scopes and transformations, outermost first, as JAX writes them.
        line: the line of the user's code.
        library: (file, name) of the library's function that runs; None for the user's. JAX may have traced it for another line,
            so that only lines inside the function are used.
        ranks: the ranks of the enclosing shard_map; None outside.
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
        source = getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None) or ""
        name, _, at = source.rpartition(" at ")
        file = at.rpartition(":")[0]
        is_library = bool(file) and not USER_CODE.has(file)
        return replace(self, library=(file, name.rpartition(".")[2]) if is_library else None)

    @property
    def is_backward(self) -> bool:
        """Whether the equation belongs to backward."""
        return _BACKWARD.search(self.scopes) is not None

    @property
    def num_ranks(self) -> int:
        """The number of arrays of a value here."""
        return self.ranks.size if self.ranks is not None else 1


@dataclass(frozen=True)
class Equation:
    """An equation as it was evaluated.

    Attributes:
        arguments: its parameters and constants as text.
        primitive, params: the primitive that maps one array for each input to one for each output; None if there is no single
            primitive, or for a collective.
    """

    name: str
    arguments: str
    place: Place
    inputs: tuple[Evaluated, ...]
    outputs: tuple[Evaluated, ...]
    primitive: Any = None
    params: dict[str, Any] | None = None


def frames_of(traceback: Any) -> Iterator[Frame]:
    """The frames of a traceback of JAX, innermost first."""
    for frame in traceback.frames if traceback is not None else ():
        yield frame.file_name, frame.line_num, frame.function_name


class Interpreter:
    """Evaluates equations.

    Args:
        show: called with each equation that does not only pass values on.
    """

    def __init__(self, show: Callable[[Equation], None]) -> None:
        self._show = show
        self._device: Any = None
        self._meshes: list[Any] = []
        self._late: dict[int, Any] = {}

    def call(self, primitive: Any, params: dict[str, Any], args: Sequence[Any], place: Place) -> list[Any]:
        """A primitive's results for arrays, outside all functions."""
        self._meshes = [at.mesh for arg in args if (at := _sharding_of(arg)) is not None] + [jax.sharding.get_mesh()]
        with jax.set_mesh(None):  # JAX refuses arrays on one device inside a mesh that is set
            found = self.apply(primitive, params, [self._given(arg) for arg in args], place)
        # What is computed from arrays on a mesh is on the mesh: like an argument of its shape, else on all devices.
        on_mesh = {np.shape(arg): at for arg in args if (at := _sharding_of(arg)) is not None}
        replicated = next((NamedSharding(at.mesh, PartitionSpec()) for at in on_mesh.values()), None)
        arrays = [
            _placed(array, value.sharding or on_mesh.get(np.shape(array), replicated))
            for value in found
            for array in value.by_rank[:1]
        ]
        self._late |= {id(array): array for array, value in zip(arrays, found, strict=True) if value.late}
        return arrays

    def _given(self, array: Any) -> Evaluated:
        """The value of an array."""
        scalar = not isinstance(array, jax.Array) and np.ndim(array) == 0
        return Evaluated((self._here(array),), array if scalar else None, late=id(array) in self._late)

    def _here(self, array: Any) -> Any:
        """An array on the one device."""
        if not isinstance(array, jax.Array):
            return array
        devices = array.devices()
        if self._device is None:
            self._device = min(devices, key=lambda device: device.id)
        if devices == {self._device} and isinstance(array.sharding, SingleDeviceSharding):
            return array
        if is_key(array):
            return jax.device_put(array, self._device)
        return jax.device_put(np.asarray(array), self._device)  # without its mesh, which JAX does not mix with others

    def _closed(self, closed: Any, args: Sequence[Evaluated], place: Place) -> list[Evaluated]:
        """The results of a jaxpr with or without its constants."""
        jaxpr, consts = opened(closed)
        scalars = (each if not isinstance(each, jax.Array) and np.ndim(each) == 0 else None for each in consts)
        known = [
            Evaluated((self._here(each),) * place.num_ranks, scalar)
            for each, scalar in zip(consts, scalars, strict=True)
        ]
        return _Frame(jaxpr, self, place.within(jaxpr)).run(known, args)

    def apply(
        self, primitive: Any, params: dict[str, Any], operands: Sequence[Evaluated], place: Place
    ) -> list[Evaluated]:
        """A primitive's results for values."""
        name = primitive.name
        if name == "sharding_constraint" and place.ranks is None and isinstance(params["sharding"], NamedSharding):
            sharding = params["sharding"]
            if not isinstance(sharding.mesh, Mesh):
                sharding = NamedSharding(self._with_devices(sharding.mesh), sharding.spec)
            return [replace(each, sharding=sharding) for each in operands]
        if name in _SAME_VALUES:
            return list(operands)
        if name in CALLS | CUSTOM_CALLS and (inner := called(params)) is not None:
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

    def _leaf(
        self, primitive: Any, params: dict[str, Any], operands: Sequence[Evaluated], place: Place
    ) -> list[Evaluated]:
        bound = primitive.get_bind_params(dict(params))
        if bound.get("sharding") is not None:
            bound = {**bound, "sharding": None}

        def run(*arrays: Any) -> list[Any]:
            return bind(primitive, bound, arrays)

        is_collective = place.ranks is not None and bool(_named_axes(params) & set(place.ranks.axes))
        if place.ranks is not None and is_collective:
            by_rank = _collective(run, operands, place.ranks, self._here)
        else:
            by_rank = _on_each(run, operands, place.num_ranks)
        late = place.is_backward or any(each.late for each in operands)
        found = [Evaluated(tuple(row), late=late) for row in zip(*by_rank, strict=True)]
        if operands and all(each.constant is not None for each in operands):
            if primitive.name in _OF_CONSTANTS:
                return [replace(each, constant=operands[0].constant) for each in found]
            if all(np.ndim(each.by_rank[0]) == 0 for each in found):
                return [replace(each, constant=each.by_rank[0]) for each in found]
        own = (None, None) if is_collective else (primitive, bound)
        self._show(Equation(primitive.name, _arguments(params, operands), place, tuple(operands), tuple(found), *own))
        return found

    def _piece_of(self, name: str, arguments: str, whole: Evaluated, piece: Evaluated, place: Place) -> Evaluated:
        """Show the splitting or joining of a value as an operator."""
        if whole.constant is None:
            self._show(Equation(name, arguments, place, (whole,), (piece,)))
        return piece

    # Primitives that hold jaxprs

    def _shard_map(self, params: dict[str, Any], operands: Sequence[Evaluated], place: Place) -> list[Evaluated]:
        mesh = params["mesh"]
        if not isinstance(mesh, Mesh):
            mesh = self._with_devices(mesh)
        named = manual_axes(params)
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
            own = value.like((_joined(value.by_rank, spec, ranks),), NamedSharding(mesh, spec))
            joined.append(self._piece_of("shard_map", "", value, own, inside) if any(spec) else own)
        return joined

    def _with_devices(self, abstract: Any) -> Mesh:
        """The mesh that an abstract one stands for, on the devices of the arguments or of `jax.set_mesh`, in their order."""
        first = np.array(jax.devices()[: abstract.size])
        devices = next((mesh.devices for mesh in self._meshes if mesh.size == abstract.size), first)
        return Mesh(devices.reshape(tuple(abstract.shape.values())), abstract.axis_names)

    def _scan(self, params: dict[str, Any], operands: Sequence[Evaluated], place: Place) -> list[Evaluated]:
        (num_consts, num_carry), length = num_scan_operands(params), params["length"]
        consts, carry = list(operands[:num_consts]), list(operands[num_consts : num_consts + num_carry])
        stacked, collected = operands[num_consts + num_carry :], []
        for i in reversed(range(length)) if params["reverse"] else range(length):
            arguments, sliced = f"iteration={i}", []
            for each in stacked:
                piece = each.like(tuple(array[i] for array in each.by_rank))
                sliced.append(self._piece_of("scan", arguments, each, piece, place))
            found = self._closed(params["jaxpr"], [*consts, *carry, *sliced], place)
            carry = found[:num_carry]
            collected.append(found[num_carry:])
        if params["reverse"]:
            collected.reverse()
        if not length:
            shapes: list[Any] = [var.aval for var in opened(params["jaxpr"])[0].outvars[num_carry:]]
            return [*carry, *(Evaluated((jnp.zeros((0, *s.shape), s.dtype),) * place.num_ranks) for s in shapes)]
        stacks = []
        for rows in zip(*collected, strict=True):
            by_rank = tuple(jnp.stack(arrays) for arrays in zip(*(row.by_rank for row in rows), strict=True))
            stacks.append(stack := Evaluated(by_rank, late=any(row.late for row in rows)))
            self._show(Equation("scan", "stacked", place, tuple(rows), (stack,)))
        return [*carry, *stacks]

    def _while(self, params: dict[str, Any], operands: Sequence[Evaluated], place: Place) -> list[Evaluated] | None:
        """The results of a loop; None if ranks leave it after different numbers of iterations."""
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


class _Frame(Evaluation):
    """The evaluation of one jaxpr, at its place in the program."""

    def __init__(self, jaxpr: Any, interpreter: Interpreter, place: Place) -> None:
        super().__init__(jaxpr)
        self._interpreter, self._place = interpreter, place

    def literal(self, value: Any) -> Evaluated:
        array = np.asarray(value)  # without the mesh that JAX keeps with it
        return Evaluated((array,) * self._place.num_ranks, array if array.ndim == 0 else None)

    def evaluate(self, equation: core.JaxprEqn, operands: list[Any]) -> list[Evaluated]:
        # Inside shard_map the context is that of one device; here ranks run one by one.
        with nullcontext() if self._place.ranks is not None else equation.ctx.manager:
            place = self._place.at(equation.source_info)
            return self._interpreter.apply(equation.primitive, equation.params, operands, place)


def _sharding_of(array: Any) -> NamedSharding | None:
    """The place of an array on a mesh; None if it is not on one."""
    sharding = array.sharding if isinstance(array, jax.Array) else None
    return sharding if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) else None


def _placed(array: Any, sharding: NamedSharding | None) -> Any:
    """An array at its place on a mesh."""
    if sharding is None or not isinstance(sharding.mesh, Mesh) or is_key(array):
        return array
    return jax.device_put(array, sharding)


def _on_each(run: Callable[..., list[Any]], operands: Sequence[Evaluated], num_ranks: int) -> list[list[Any]]:
    """Each rank's results of an operator, which runs once if all ranks have the same arrays."""
    first = [each.by_rank[0] for each in operands]
    if all(array is own for each, own in zip(operands, first, strict=True) for array in each.by_rank):
        return [run(*first)] * num_ranks
    return [run(*(each.by_rank[rank] for each in operands)) for rank in range(num_ranks)]


def _collective(
    run: Callable[..., list[Any]], operands: Sequence[Evaluated], ranks: Ranks, here: Callable[[Any], Any]
) -> list[list[Any]]:
    """Each rank's results of a collective, which runs over the devices."""
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
    """The axes of the ranks over which each dim is sharded."""
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
    """The array of all ranks' parts; along dims that are not sharded, the first rank's."""

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


def _arguments(params: dict[str, Any], operands: Sequence[Evaluated]) -> str:
    """The arguments of an equation besides computed values: constants by position, then parameters."""
    names = ("x", "y") if len(operands) <= 2 else tuple(f"operand{i}" for i in range(len(operands)))
    words = [
        f"{name}={_number(each.constant)}"
        for name, each in zip(names, operands, strict=False)
        if each.constant is not None
    ]
    for name, value in params.items():
        if _is_stated(value):
            words.append(f"{name}={value.__name__ if isinstance(value, type) else quote(value)}")
    return ", ".join(words)


def _number(value: Any) -> str:
    return str(np.asarray(value).item()) if np.ndim(value) == 0 else quote(value)


def _is_stated(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_is_stated, value))
    return isinstance(value, bool | int | float | str | np.dtype) and value is not False and value != ""
