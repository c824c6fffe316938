"""Values inside of functions that JAX traces, and how they leave them.

[Note: how values leave a traced function] A function that JAX traces, such as one under jit, is traced together with a
`Collector`, and returns a `Packed` besides its own result. A value that is an argument or a result of the function leaves it by
its index only, which costs nothing; others become further results, if the `Detail` of the program includes them. So there are no
callbacks in the program, and no program depends on the step.

[Note: steps inside a scan] The taps of the body of a `jax.lax.scan` have values with a leading dim of iterations. What the scan
carries is known by reference for the first iteration alone, so other values leave the body as results even if they are its
arguments. If the body updates parameters, each iteration is a step: `unrolled` makes taps of each iteration.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core
from jax._src.interpreters.batching import BatchTrace, BatchTracer
from jax.sharding import SingleDeviceSharding

from crossframe.recording.module_calls import called_module, next_call
from crossframe.replacing import setting
from crossframe.trace import Event
from jax_backend.mesh._vmap import mapped_ranks
from jax_backend.tree import is_key


class Detail(IntEnum):
    """The values that a program returns besides its own results."""

    LOSSES = 0
    """Losses, and arguments and results of the program by reference."""
    VALUES = 1
    """All but the interior of the loss function."""
    INTERIOR = 2
    """Also inputs and outputs of modules."""


@dataclass(frozen=True)
class Value:
    """A value, which is a leaf of a pytree.

    Attributes:
        array: None if the program does not return it.
        by_rank: whether it has a leading dim of ranks, the devices of a shard_map.
        scans: number of the scans around its tap, from the outermost, for which it has leading dims of iterations, after that of
            ranks. It is the same in all iterations of the others; but a value of `BY_REFERENCE` is that of the first iteration.
    """

    array: Any
    by_rank: bool = False
    scans: int = 0

    @property
    def of_a_rank(self) -> Any:
        """The array, if all ranks have the same."""
        return self.array[0] if self.by_rank else self.array


@dataclass(frozen=True)
class Scan:
    """A scan around a tap.

    Attributes:
        length: number of iterations.
        num_taps: number of taps of its body.
    """

    length: int
    num_taps: int


@dataclass(frozen=True)
class Tap:
    """A point of interest in a program.

    Attributes:
        kind: its name.
        about: what is known of it without its values. Hashable.
        values: pytrees of `Value`, by name.
        scans: the scans around it, outermost first.
    """

    kind: str
    about: Any
    values: Mapping[str, Any]
    scans: tuple[Scan, ...] = ()


GRADIENT, UPDATE, APPLY, ACTIVATION, GIVEN = "gradient", "update", "apply", "activation", "given"
FORWARD = "forward"
"""The kinds of taps: of a differentiated function the loss, the arguments that it differentiates by, modules inside, and its
other arguments, which may be its batch; of an
optimizer's update the gradients and parameters that it gets, its state and the updates; of an application of updates the
parameters before and after; of a module its input or output; of a call of a model its parameters, batch and modules inside.
`_gradients.py`, `_optimizer_updates.py` and `_model_calls.py` make them."""
ALWAYS = frozenset({"loss", "mini_step", "batch"})
"""Names of values that every program returns."""
BY_REFERENCE = frozenset({"diff", "own_grads", "state_before", "before", "updates", "initial_state", "of_models"})
"""Names of values that no program returns: they are its arguments, or unknown; but a scan returns "before".
"of_models" are arguments of which each model gets its own element (`_vmapped_models.py`): they have no dim of samples."""


Reference = tuple[Any, ...]
"""Where a value is: ("in", index of the argument), ("out", index of the result), ("above", index of an argument of the calling
function), ("kept", index among further results, whether it has a dim of ranks, its number of scans), ("scalar", number), or
("missing",). Of arguments and results in `jax.pmap`, True follows the index where they have a dim of ranks."""


class GradientDescription(NamedTuple):
    """What is known of a gradient without its values.

    Attributes:
        names, shapes: of the arrays at which it is taken.
        modules: what is known of the modules inside of the loss function.
        rank_step: the step of `jax_backend.value_and_grad` that takes it.
        averaged: the indices of the arrays whose gradients `pmean` has averaged over all ranks.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    modules: tuple[Any, ...]
    rank_step: "RankStep | None"
    averaged: frozenset[int] = frozenset()


@dataclass(frozen=True)
class PackedTap:
    """A tap without its arrays.

    Attributes:
        kind, about, scans: of the tap.
        structure: of all values, by name.
        references: (name, reference) of each value.
    """

    kind: str
    about: Any
    structure: Any
    references: tuple[tuple[str, Reference], ...]
    scans: tuple[Scan, ...]

    @property
    def num_iterations(self) -> int:
        """How often its function runs it."""
        return math.prod(scan.length for scan in self.scans)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """Taps as a result of a traced function.

    Attributes:
        arrays: further results.
        taps: static.
        passed: (index of the argument, index of the result) of arguments that are returned as they are. Static.
    """

    arrays: list[Any]
    taps: tuple[PackedTap, ...] = field(metadata={"static": True})
    passed: tuple[tuple[int, int], ...] = field(default=(), metadata={"static": True})


@dataclass(eq=False)
class RankStep:
    """A step of `jax_backend.value_and_grad`, inside of which a gradient is taken.

    Attributes:
        reduces: whether it reduces gradients.
        collectives: those of rank 0, which are known once it has been traced.
    """

    reduces: bool
    collectives: Sequence[Event] = ()


@dataclass
class Described:
    """What is known of a step before it runs.

    Attributes:
        paths: of the arrays that the loss function is differentiated by.
        modules: class and options of the modules in the loss function, by raw name.
        mode, strategy: of a step of `jax_backend.value_and_grad`, if it is one.
        rank_step: that step, while its gradients are taken.
        rank_steps: those traced so far, by id and the shapes of arguments, with what keeps the id.
    """

    paths: Sequence[str] = ()
    modules: dict[str, str] = field(default_factory=dict)
    mode: str | None = None
    strategy: str | None = None
    rank_step: RankStep | None = None
    rank_steps: dict[Any, tuple[Any, RankStep]] = field(default_factory=dict)


@dataclass
class Collector:
    """The taps of a function that is being traced, or, for the outermost one, of the program that runs.

    Attributes:
        trace: JAX's trace of the function; None: JAX's evaluation.
        inputs: the function's arguments, as they are traced; of the body of a scan those that it carries.
        paths: paths of parameters by the id of their values, and of modules by their ids.
        modules: those modules, whose ids no other one gets as long as they are here.
        in_loss: whether the function is, or is in, a loss function that is being differentiated.
        above: the collector of the function that calls it.
        is_cached: whether JAX keeps the traced function for other calls, which may come from elsewhere.
        is_scan: whether the function is the body of a scan.
        described: what is known of the program's modules, which all collectors share.
        constrained: by the id of a result of `with_sharding_constraint` and the like, the result and its argument.
        calls: what is known of calls of modules, of its taps.
    """

    trace: Any
    detail: Detail
    inputs: Sequence[Any] = ()
    paths: dict[int, str] = field(default_factory=dict)
    modules: list[Any] = field(default_factory=list)
    in_loss: bool = False
    above: "Collector | None" = None
    is_cached: bool = False
    is_scan: bool = False
    taps: list[Tap] = field(default_factory=list)
    described: Described = field(default_factory=Described)
    constrained: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    calls: set[tuple[Any, ...]] = field(default_factory=set)

    def constrain(self, given: Any, results: Any) -> None:
        """Note that results have the same values as the given leaves, with another sharding."""
        for value, result in zip(jax.tree.leaves(given), jax.tree.leaves(results), strict=True):
            self.constrained[id(result)] = result, value
            if id(value) in self.paths:
                self.paths[id(result)] = self.paths[id(value)]

    def key(self, value: Any) -> int:
        """The same number for a value before and after constraints of its sharding."""
        while id(value) in self.constrained:
            value = self.constrained[id(value)][1]
        return id(value)

    def places(self, kind: str, leaves: Sequence[Any]) -> dict[int, tuple[str, int]]:
        """References to values, by their key."""
        return {self.key(leaf): (kind, i) for i, leaf in enumerate(leaves) if _is_array(leaf)}

    def add(self, taps: Iterable[Tap]) -> None:
        """Add taps in the order of the program. Further calls of a module get names of their own."""
        for tap in taps:
            if tap.kind == ACTIVATION:  # a function that is called again has the taps of its first call
                name, *of = tap.about
                call = next_call(called_module(name), lambda call, of=of: (call, *of) in self.calls)
                if call is None:
                    continue
                tap = replace(tap, about=(call, *of))
                self.calls.add(tap.about)
            self.taps.append(tap)

    def is_current(self) -> bool:
        """Whether values of JAX's current trace belong to this function."""
        current = core.trace_ctx.trace
        return isinstance(current, core.EvalTrace) if self.trace is None else current is self.trace


_collector: ContextVar[Collector | None] = ContextVar("collector", default=None)


def innermost() -> Collector | None:
    """The innermost collector, whether or not it is that of the current trace."""
    return _collector.get()


def current() -> Collector | None:
    """The collector of the current trace; None if there is none."""
    found = _collector.get()
    return found if found is not None and found.is_current() else None


@contextmanager
def collecting(collector: Collector) -> Iterator[Collector]:
    """A context whose taps go to a collector."""
    with setting(_collector, collector):
        yield collector


def not_collecting() -> AbstractContextManager[None]:
    """A context without taps."""
    return setting(_collector, None)


def traced(above: Collector, inputs: Any = (), **options: Any) -> Collector:
    """The collector of a function inside another one, at the beginning of its trace.

    Args:
        inputs: a pytree of its arguments.
        options: of `Collector`, where they differ from those of `above`.
    """
    of_above = {} if "paths" in options else {"paths": above.paths, "modules": above.modules}
    given = {"in_loss": above.in_loss, "detail": above.detail, **of_above, **options}
    inside = Collector(core.trace_ctx.trace, inputs=jax.tree.leaves(inputs), above=above, **given)
    inside.described = above.described
    return inside


def at_level(collector: Collector, value: Any) -> Any:
    """A value of the current trace as a value of the collector's, with leading dims for the vmaps between them; None if there is
    anything else between them."""
    return _raised(collector, value, ())


def are_differentiated(collector: Collector, values: Iterable[Any]) -> bool | None:
    """Whether a loss function is differentiated by any of these values inside of it. False if all were traced outside of it, or
    not at all; None if it is not known, as inside of a jitted function that it calls."""
    while collector.above is not None and collector.above.in_loss:
        collector = collector.above
    if not collector.in_loss or collector.above is None or collector.trace is collector.above.trace:
        return None
    traces, outside, trace = [each._trace for each in values if isinstance(each, core.Tracer)], set(), collector.trace
    while (trace := getattr(trace, "parent_trace", None)) is not None:
        outside.add(id(trace))
    if any(each is collector.trace for each in traces):
        return True
    return False if all(id(each) in outside for each in traces) else None


def value_of_ranks(collector: Collector, array: Any) -> Value:
    """`at_level`. Axes of `jax_backend`'s vmaps over ranks have one leading dim together."""
    ranks = mapped_ranks()
    return Value(_raised(collector, array, ranks), bool(ranks))


def _raised(collector: Collector, value: Any, ranks: Collection[str]) -> Any:
    """`at_level`.

    Args:
        ranks: axes that have one leading dim together, also if the value is the same for all of them.
    """
    trace = core.trace_ctx.trace
    has_ranks = False
    while trace is not collector.trace and not (collector.trace is None and isinstance(trace, core.EvalTrace)):
        if not isinstance(trace, BatchTrace):
            return None
        axis, parent = trace.axis_data, trace.parent_trace
        with core.set_current_trace(parent):
            if isinstance(value, BatchTracer) and value._trace is trace:
                # The same array where nothing moves, so that it is known by reference.
                value = jnp.moveaxis(value.val, value.batch_dim, 0) if value.batch_dim else value.val
            elif axis.name in ranks:
                value = jnp.broadcast_to(value, (axis.size, *value.shape))
            if axis.name in ranks:
                value = value.reshape(-1, *value.shape[2:]) if has_ranks else value
                has_ranks = True
        trace = parent
    return value


def pack(taps: Sequence[Tap], outputs: Any, collector: Collector, lead: Callable[[Any], Any] | None = None) -> Packed:
    """Taps as a result of the function whose taps they are.

    Args:
        outputs: the function's own results, a pytree.
        lead: adds a dim of ranks to an array, in a shard_map.
    """
    arrays: list[Any] = []
    found: list[PackedTap] = []
    above = () if collector.above is None or collector.is_cached else collector.above.inputs
    inputs, results = collector.places("in", collector.inputs), collector.places("out", jax.tree.leaves(outputs))
    for tap in taps:
        references: list[tuple[str, Reference]] = []
        for name in sorted(tap.values):  # as JAX sorts dicts
            # In an outer scan it may be the result of another function.
            by_reference = name in BY_REFERENCE and not (collector.is_scan and collector.detail and name == "before")
            is_kept = name in ALWAYS or (collector.detail > Detail.LOSSES and not by_reference)
            # An argument that is returned as it is may be donated: then only the result remains.
            own = results | inputs if by_reference else {} if collector.is_scan else inputs | results
            places = collector.places("above", above) | own
            for value in jax.tree.leaves(tap.values[name]):
                reference: Reference = ("missing",)
                if not _is_array(value.array):
                    reference = ("scalar", value.array) if isinstance(value.array, int | float) else reference
                elif not value.by_rank and not value.scans and (key := collector.key(value.array)) in places:
                    reference = places[key]
                elif is_kept or value.scans:
                    reference = ("kept", len(arrays), value.by_rank or lead is not None, value.scans)
                    arrays.append(value.array if lead is None else lead(value.array))
                references.append((name, reference))
        structure = jax.tree.structure(dict(tap.values))
        found.append(PackedTap(tap.kind, tap.about, structure, tuple(references), tap.scans))
    passed = tuple((inputs[key][1], results[key][1]) for key in results if key in inputs)
    return Packed(arrays, tuple(found), passed)


def unpacked(packed: Packed, inputs: Any, outputs: Any, above: Sequence[Any] = ()) -> list[Tap]:
    """The taps of a function that has been called.

    Args:
        inputs, outputs: its arguments and results, pytrees.
        above: the arguments of the function that called it.
    """
    places = {"in": jax.tree.leaves(inputs), "out": jax.tree.leaves(outputs), "above": above}

    def value_of(reference: Reference) -> Value:
        kind, *at = reference
        if kind == "kept":
            return Value(packed.arrays[at[0]], *at[1:])
        if kind == "missing":
            return Value(None)
        return Value(at[0]) if kind == "scalar" else Value(places[kind][at[0]], *at[1:])

    return [
        Tap(
            tap.kind,
            tap.about,
            jax.tree.unflatten(tap.structure, [value_of(each) for _, each in tap.references]),
            tap.scans,
        )
        for tap in packed.taps
    ]


def of_scan(packed: Packed, length: int, carried: Any, above: Sequence[Any]) -> list[Tap]:
    """The taps of the body of a scan. Activations of a scan inside a loss function, such as one over layers, are left out.

    Args:
        carried: the initial values that the scan carries, a pytree.
    """
    arrays = list(packed.arrays)
    found = []
    for tap in packed.taps:
        references = []
        for name, reference in tap.references:
            if reference[0] == "kept":
                _, index, is_by_rank, scans = reference
                if is_by_rank:  # the dim of ranks comes first
                    arrays[index] = jnp.moveaxis(arrays[index], 1, 0)
                reference = ("kept", index, is_by_rank, scans + 1)
            references.append((name, reference))
        found.append(replace(tap, references=tuple(references)))
    taps = [tap for tap in unpacked(Packed(arrays, tuple(found)), carried, (), above) if tap.kind != ACTIVATION]
    return [replace(tap, scans=(Scan(length, len(taps)), *tap.scans)) for tap in taps]


def unrolled(taps: Sequence[Tap], kinds: Collection[str]) -> Iterator[tuple[tuple[tuple[int, int], ...], Tap]]:
    """The taps of each iteration of the scans whose bodies have taps of these kinds, in the order of the program, each with its
    (iteration, number of iterations) in these scans, outermost first."""
    rest = list(taps)
    while rest:
        tap = rest[0]
        if not tap.scans:
            yield (), rest.pop(0)
            continue
        outermost = tap.scans[0]
        body, rest = rest[: outermost.num_taps], rest[outermost.num_taps :]
        if not any(each.kind in kinds for each in body):
            yield from (((), each) for each in body)
            continue
        hosted = [_hosted(each) for each in body]
        for i in range(outermost.length):
            for inner, each in unrolled([_iteration(each, i) for each in hosted], kinds):
                yield ((i, outermost.length), *inner), each


def _hosted(tap: Tap) -> Tap:
    """A tap with values in the host's memory, where slices cost nothing, if they are on one device."""

    def host(value: Value) -> Value:
        array = value.array
        is_alone = isinstance(array, jax.Array) and isinstance(array.sharding, SingleDeviceSharding)
        if not value.scans or not is_alone or is_key(array):
            return value
        return replace(value, array=np.asarray(array))

    return replace(tap, values=jax.tree.map(host, dict(tap.values)))


def _iteration(tap: Tap, i: int) -> Tap:
    """A tap in an iteration of its outermost scan."""

    def sliced(name: str, value: Value) -> Value:
        if value.scans and value.array is not None:
            array = value.array[:, i] if value.by_rank else value.array[i]
            return Value(array, value.by_rank, value.scans - 1)
        return Value(None) if i and name in BY_REFERENCE else value

    values = {name: jax.tree.map(partial(sliced, name), values) for name, values in tap.values.items()}
    return replace(tap, values=values, scans=tap.scans[1:])


def merged(taps: Sequence[Tap], more: Sequence[Tap]) -> list[Tap]:
    """The taps of a program, with the values that it does not return, or of the first iteration of a scan alone, from one with
    more detail."""
    found = []
    for tap, other in zip(taps, more, strict=True):
        values = dict(other.values)
        for name, each in tap.values.items():
            if jax.tree.structure(each) != jax.tree.structure(values[name]):  # the interior, which only one has
                continue
            values[name] = jax.tree.map(
                lambda a, b: b if a.array is None or b.scans > a.scans else a, each, values[name]
            )
        found.append(replace(other, values=values))
    return found


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")
