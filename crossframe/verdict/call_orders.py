"""Matches the calls of modules that two runs make in another order, by their inputs.

One script gives an encoder the anchor before the negative, another one the negative first, and both train alike. Calls that
are compared by their number differ then, and nothing follows from it. So `compare` first compares each call with one that has
the same input. If that shows a bug in forward, a call may have the input of another one, and calls are compared by their number,
which locates it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from crossframe.alignment.modules import NEAR
from crossframe.dtypes import coarser, unit_roundoff
from crossframe.param_map import ParamMap
from crossframe.recording import Recording, common_steps
from crossframe.recording.event_format import INPUT
from crossframe.recording.mapped_recording import Activations, mapped
from crossframe.recording.module_calls import called_module
from crossframe.verdict.measure.metrics import distance, norm
from crossframe.verdict.measure.quantities import finite
from crossframe.verdict.measure.values import Side, activation_values, match_values

_ROUNDINGS = 8
"""Inputs are the same if their relative distance is at most this many roundings, or `NEAR`. Nothing is judged by it."""


@dataclass(frozen=True)
class MatchedCalls:
    """The calls of one recording under the names of those of another one with the same inputs.

    Attributes:
        modules: those that the recordings call in another order.
    """

    activations: Activations
    modules: Sequence[str]

    def view(self, recording: Recording) -> Recording:
        """The recording, or a repetition of it, with these names."""
        return mapped(recording, ParamMap(()), recording.manifest, self.activations)

    @property
    def text(self) -> str:
        """A clause that names the modules."""
        first, *others = self.modules
        more = f" and {len(others)} more" if others else ""
        return f"the runs call {first!r}{more} in another order"


def match_calls(a: Recording, b: Recording) -> MatchedCalls | None:
    """The calls of b under the names of those of a; None if all have these names already, or no step has activations of both."""
    step = next((step for step in common_steps(a, b) if a.activations(step) and b.activations(step)), None)
    if step is None:
        return None
    near = max(NEAR, _ROUNDINGS * unit_roundoff(coarser(a.manifest.dtype, b.manifest.dtype)))
    names: dict[str, str] = {}
    moved = []
    several = _called_again(a, step) & _called_again(b, step)
    ours, theirs = _calls(a, step, several), _calls(b, step, several)
    for module, calls in theirs.items():
        found = _matched(ours[module], calls, near)
        names |= found
        moved += [module] if any(call != other for call, other in found.items()) else []
    if not moved:
        return None
    taken = set(names.values())
    steps = range(b.num_steps)
    every = dict.fromkeys((module, use) for at in steps for _, module, use in b.activations(at))
    kept = [(call, use) for call, use in every if call in names or call not in taken]
    return MatchedCalls({(names.get(call, call), use): ((call, use), None) for call, use in kept}, moved)


def _called_again(recording: Recording, step: int) -> set[str]:
    """The modules that the first microbatch calls several times."""
    found = ((call, called_module(call)) for at, call, _ in recording.activations(step) if at == 0)
    return {module for call, module in found if call != module}


def _calls(recording: Recording, step: int, modules: Collection[str]) -> dict[str, dict[str, Side]]:
    """The input of each call in the first microbatch of rank 0, or else its output, by module and name of the call."""
    found: dict[str, dict[str, Side]] = {}
    for at in recording.activations(step):
        microbatch, call, use = at
        if microbatch == 0 and (module := called_module(call)) in modules:
            calls = found.setdefault(module, {})
            if use == INPUT or call not in calls:
                calls[call] = activation_values(recording, step, 0, at)
    return found


def _matched(ours: dict[str, Side], theirs: dict[str, Side], near: float) -> dict[str, str]:
    """For each call of the second run, the name of one of the first run with the same input: its own name if possible. The other
    calls are matched in their order, as far as there are names."""
    found: dict[str, str] = {}
    for call, given in theirs.items():
        free = [name for name in ours if name not in found.values()]
        own_first = sorted(free, key=lambda name, call=call: name != call)
        name = next((name for name in own_first if _agree(ours[name], given, near)), None)
        if name is not None:
            found[call] = name
    left = [name for name in ours if name not in found.values()]
    return found | dict(zip((call for call in theirs if call not in found), left, strict=False))


def _agree(a: Side, b: Side, near: float) -> bool:
    """Whether two inputs are the same but for rounding, in the rows that both have: runs may have batches of other sizes."""
    if a.elements is not None and b.elements is not None and a.elements.ndim and b.elements.ndim:
        rows = min(len(a.elements), len(b.elements))
        a, b = Side(a.elements[:rows]), Side(b.elements[:rows])
    x, y, _ = match_values(a, b, by_sketch=False)
    return x.shape == y.shape and distance(finite(x), finite(y)) <= near * norm(finite(x))
