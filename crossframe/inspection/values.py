"""All recorded values of a step, in causal order."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from crossframe.recording import Recording
from crossframe.recording.element_ranges import ElementRange
from crossframe.recording.event_format import (
    BACKWARD,
    BUFFERS,
    FORWARD,
    INPUT,
    NORM,
    PARAMETERS,
    REDUCE,
    STATE,
    UNSHARDED,
    UPDATE,
)
from crossframe.recording.module_calls import called_module
from crossframe.verdict.measure.buffers import buffer_value
from crossframe.verdict.measure.values import Side, activation_values

LOSS = "loss"


@dataclass(frozen=True)
class Value:
    """A value that one rank recorded.

    Attributes:
        step, microbatch, rank, phase: where it was recorded.
        use: "input" or "output" of an activation, the name of an optimizer state entry, "loss", or "".
        module, parameter: the module, or the parameter or buffer, of the value; "" if it has none.
        numel: number of elements that this rank recorded.
        num_not_finite: number of these elements that are NaN or infinite.
        norm: norm of the finite elements.
    """

    step: int
    microbatch: int
    rank: int
    phase: str
    use: str
    module: str
    parameter: str
    numel: int
    num_not_finite: int
    norm: float

    @property
    def name(self) -> str:
        """The name of the value, unique within its step and rank.

        >>> Value(0, 0, 0, "state", "exp_avg", "", "h.0.w", 1, 0, 0.0).name
        "exp_avg of 'h.0.w'"
        """
        if self.phase == FORWARD:
            return LOSS if self.use == LOSS else f"{self.use} of module {self.module or 'the model'!r}"
        if self.phase == NORM:
            return "gradient norm"
        if self.phase == BUFFERS:
            return f"buffer {self.parameter!r}"
        return f"{self.use or _NAMES[self.phase]} of {self.parameter!r}"


_NAMES = {
    PARAMETERS: "initial value",
    UNSHARDED: "unsharded value",
    BACKWARD: "local gradient",
    REDUCE: "reduced gradient",
    STATE: "state",
    UPDATE: "updated value",
    BUFFERS: "buffer",
}


def values_of(recording: Recording, step: int) -> Iterator[Value]:
    """All recorded values of a step, causes first. Values of backward are in reverse order of the parameters."""
    manifest = recording.manifest
    ranks, names = range(manifest.world_size), list(manifest.params)
    losses, recorded = recording.losses_at(step), recording.is_recorded(step)
    if step == 0:
        yield from _of_parameters(recording, PARAMETERS, 0, names)
    if recorded:
        yield from _of_parameters(recording, UNSHARDED, step, names)
    for at in recording.activations(step):
        microbatch, module, use = at
        for rank in ranks:
            yield _value(activation_values(recording, step, rank, at), step, microbatch, rank, FORWARD, use, module, "")
    for rank in ranks:
        yield _value(Side(losses[rank : rank + 1]), step, 0, rank, FORWARD, LOSS, "", "")
    if recorded:
        yield from _of_parameters(recording, BACKWARD, step, names[::-1])
        yield from _of_parameters(recording, REDUCE, step, names[::-1])
    for rank in ranks:
        if (norm := recording.grad_norm(step, rank)) is not None:
            yield _value(Side(np.array([norm])), step, 0, rank, NORM, "", "", "")
    if recorded:
        for name in names:
            for slot in recording.state_slots(step, name):
                yield from _of_parameters(recording, STATE, step, [name], slot)
        yield from _of_parameters(recording, UPDATE, step, names)
        for name in recording.buffers(step):
            for rank in ranks:
                if recording.has_buffer(step, name):
                    yield _value(buffer_value(recording, step, rank, name), step, 0, rank, BUFFERS, "", "", name)


def finite_or_none(number: float) -> float | None:
    """A number for JSON, which cannot represent numbers that are not finite; None for these."""
    return number if math.isfinite(number) else None


def side_of(recording: Recording, step: int, name: str, part: ElementRange) -> Side:
    """The elements of a parameter that one rank recorded, or a sketch of them."""
    return (
        Side(None, recording.sketch_of(step, name, part))
        if part.sketch is not None
        else Side(recording.elements(step, part))
    )


def _of_parameters(recording: Recording, phase: str, step: int, names: list[str], slot: str = "") -> Iterator[Value]:
    for name in names:
        for part in recording.ranges(phase, step, name, slot):
            yield _value(side_of(recording, step, name, part), step, 0, part.rank, phase, slot, "", name)


def _value(
    side: Side, step: int, microbatch: int, rank: int, phase: str, use: str, module: str, parameter: str
) -> Value:
    if side.sketch is not None:
        numel = side.sketch.numel
    else:
        assert side.elements is not None
        numel = side.elements.size
    return Value(step, microbatch, rank, phase, use, module, parameter, numel, side.num_not_finite, side.norm)


@dataclass(frozen=True)
class Range:
    """The range of the elements of an array.

    Attributes:
        name: name of the array.
        low, high: smallest and largest finite element; None if only a sketch was recorded.
        root_mean_square: root mean square of the finite elements.
        num_not_finite: number of elements that are not finite.
    """

    name: str
    low: float | None
    high: float | None
    root_mean_square: float
    num_not_finite: int

    @classmethod
    def of(cls, name: str, side: Side) -> "Range":
        """The range of a recorded value."""
        if side.elements is None:
            assert side.sketch is not None
            size = side.norm / math.sqrt(max(side.sketch.numel, 1))
            return cls(name, None, None, size, side.num_not_finite)
        wide = np.asarray(side.elements, np.float64)
        wide = wide[np.isfinite(wide)]
        ends = (float(wide.min()), float(wide.max())) if wide.size else (None, None)
        return cls(name, *ends, side.norm / math.sqrt(max(wide.size, 1)), side.num_not_finite)

    def describe(self) -> str:
        """The range in a phrase.

        >>> Range("input", -2.0, 3.5, 1.0, 0).describe()
        'input from -2 to 3.5 (root mean square 1)'
        """
        if self.low is None or self.high is None:
            text = f"{self.name} with a root mean square of {self.root_mean_square:.4g}"
        else:
            text = f"{self.name} from {self.low:.4g} to {self.high:.4g} (root mean square {self.root_mean_square:.4g})"
        return f"{text}, {self.num_not_finite} elements not finite" if self.num_not_finite else text


def ranges_before(recording: Recording, value: Value) -> tuple[Range, ...]:
    """The ranges of the values that a value was computed from, if they were recorded on the same rank."""
    step, rank = value.step, value.rank
    if value.use == LOSS:
        return _activation_ranges(recording, step, rank, 0, "", "output")
    if value.phase == FORWARD:
        if value.use == INPUT:
            return ()  # which value it was computed from is not recorded
        found = _activation_ranges(recording, step, rank, value.microbatch, value.module, INPUT)
        module = called_module(value.module)
        weights = [name for name in recording.manifest.params if name.rpartition(".")[0] == module]
        return (*found, *_parameter_ranges(recording, UNSHARDED, step, rank, weights))
    if value.phase == BACKWARD:
        module = value.parameter.rpartition(".")[0]
        return _activation_ranges(recording, step, rank, value.microbatch, module, INPUT)
    sources = {REDUCE: (BACKWARD, step), STATE: (REDUCE, step), UPDATE: (REDUCE, step)}
    if value.phase not in sources:
        return ()
    return _parameter_ranges(recording, *sources[value.phase], rank, [value.parameter])


def _activation_ranges(
    recording: Recording, step: int, rank: int, microbatch: int, module: str, use: str
) -> tuple[Range, ...]:
    at = (microbatch, module, use)
    if at not in recording.activations(step):
        return ()
    return (Range.of(f"{use} of module {module or 'the model'!r}", activation_values(recording, step, rank, at)),)


def _parameter_ranges(recording: Recording, phase: str, step: int, rank: int, names: list[str]) -> tuple[Range, ...]:
    parts = [(name, part) for name in names for part in recording.ranges(phase, step, name) if part.rank == rank]
    return tuple(Range.of(f"{_NAMES[phase]} of {name!r}", side_of(recording, step, name, part)) for name, part in parts)
