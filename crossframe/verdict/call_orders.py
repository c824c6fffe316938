"""Matches the calls of modules that two runs make in another order, by their values.

One script gives an encoder the anchor before the negative, another one the negative first, and both train alike. Calls that
are compared by their number differ then, and nothing follows from it. So `compare` first compares each call with one that has
the same input. If that shows a bug, a call may have the input of another one, and calls are compared by their number, which
locates it.
"""

from crossframe.alignment.modules import NEAR
from crossframe.dtypes import coarser, unit_roundoff
from crossframe.param_map import ParamMap
from crossframe.recording import Recording, common_steps
from crossframe.recording.event_format import INPUT, OUTPUT
from crossframe.recording.mapped_recording import mapped
from crossframe.recording.module_calls import called_module
from crossframe.verdict.measure.metrics import distance, norm
from crossframe.verdict.measure.quantities import finite
from crossframe.verdict.measure.values import Side, activation_values, match_values

_ROUNDINGS = 8
"""Inputs are the same if their relative distance is at most this many roundings, or `NEAR`. Nothing is judged by it."""


def in_order_of_calls(a: Recording, b: Recording) -> tuple[Recording, str] | None:
    """A view of b in which calls have the names that calls with the same inputs have in a, and a clause that says whose order
    differs; None if all have these names already, or no step has activations of both."""
    step = next((step for step in common_steps(a, b) if a.activations(step) and b.activations(step)), None)
    if step is None:
        return None
    near = max(NEAR, _ROUNDINGS * unit_roundoff(coarser(a.manifest.dtype, b.manifest.dtype)))
    ours, theirs = _calls(a, step), _calls(b, step)
    names = {call: call for calls in theirs.values() for call in calls}
    moved = []
    for module, calls in theirs.items():
        if len(calls) > 1 and len(ours.get(module, ())) > 1:
            found = _matched(ours[module], calls, near)
            names |= found
            moved += [module] if any(call != other for call, other in found.items()) else []
    if not moved:
        return None
    activations = {(name, use): ((call, use), None) for call, name in names.items() for use in (INPUT, OUTPUT)}
    modules = f"{moved[0]!r}" + (f" and {len(moved) - 1} more" if len(moved) > 1 else "")
    return mapped(b, ParamMap(()), b.manifest, activations), f"the runs call {modules} in another order"


def _calls(recording: Recording, step: int) -> dict[str, dict[str, Side]]:
    """The input of each call in the first microbatch of rank 0, or else its output, by module and name of the call."""
    found: dict[str, dict[str, Side]] = {}
    for microbatch, call, use in recording.activations(step):
        calls = found.setdefault(called_module(call), {})
        if microbatch == 0 and (use == INPUT or call not in calls):
            calls[call] = activation_values(recording, step, 0, (microbatch, call, use))
    return found


def _matched(ours: dict[str, Side], theirs: dict[str, Side], near: float) -> dict[str, str]:
    """For each call of the second run, the name of one of the first run with the same input: its own name if possible. Calls that
    are left are matched in their order, and those that are too many keep their names if these are free."""
    found: dict[str, str] = {}
    for call, given in theirs.items():
        alike = [name for name, other in ours.items() if name not in found.values() and _agree(other, given, near)]
        if alike:
            found[call] = call if call in alike else alike[0]
    left = [name for name in ours if name not in found.values()]
    return found | dict(zip((call for call in theirs if call not in found), left, strict=False))


def _agree(a: Side, b: Side, near: float) -> bool:
    """Whether two inputs are the same but for rounding, in the rows that both have: a run may divide its batch."""
    if a.elements is not None and b.elements is not None and a.elements.ndim and b.elements.ndim:
        rows = min(len(a.elements), len(b.elements))
        a, b = Side(a.elements[:rows]), Side(b.elements[:rows])
    x, y, _ = match_values(a, b, by_sketch=False)
    return x.shape == y.shape and distance(finite(x), finite(y)) <= near * norm(finite(x))
