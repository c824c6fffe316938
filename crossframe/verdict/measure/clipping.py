"""Detects gradients that were recorded before clipping on one side and after clipping on the other.

A recorder intercepts `clip_grad_norm_` and records the gradients before it. It cannot see clipping that a loop implements itself,
so it then records the clipped gradients. In this case the gradients of one recording are those of the other times one factor c <
1, and the optimizer states agree. If the optimizers had received gradients that differ by c, their momenta would differ by (1 -
c) times the gradient's weight in the momentum. Agreement to better than half of this distinguishes the two cases.
Entries of an optimizer that is not known show only that the gradients differed: in the first step, where they have nothing else.
If no state shows what an optimizer received, the recording without the factor may state the norm to which it clips, and the
gradients of the other one have this norm.
"""

from dataclasses import dataclass

import numpy as np

from crossframe.recording import Recording
from crossframe.recording.event_format import REDUCE, STATE, UPDATE, before_step
from crossframe.verdict.measure.metrics import distance, norm, weighted_median
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.values import assemble

# torch's names of the optimizer state entries that are linear in the gradient.
_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
_BETAS = (0.9, 0.999)
# Smaller relative differences are never attributed to clipping, even in coarse dtypes.
_LEAST = 0.01
# Two terms fit the update of any parameter with fewer elements, or nearly so.
_LEAST_ELEMENTS = 4


@dataclass(frozen=True)
class Multiplied:
    """Gradients of one recording are those of the other one times a factor.

    Attributes:
        side: the recording with the factor, 0 for a and 1 for b.
    """

    side: int
    factor: float

    @property
    def undone(self) -> tuple[float, float]:
        """What to multiply values of a and of b by."""
        return (1.0, 1 / self.factor) if self.side else (1 / self.factor, 1.0)


class Clipped(Multiplied):
    """One recording has a step's gradients after clipping, the other before it. The factor is between 0 and 1."""

    def describe(self, names: tuple[str, str], step: int) -> str:
        return (
            f"from step {step} on, gradients were recorded after clipping by {self.factor:.4g} in {names[self.side]} and "
            f"before it in {names[1 - self.side]}; they are compared before clipping"
        )


def clipped_on_one_side(pair: Pair, step: int) -> Clipped | None:
    """The recording that alone has a step's gradients after clipping; None if both recorded them at the same point."""
    return pair.remember((clipped_on_one_side, step), lambda: _clipped_at(pair, step))


def _clipped_at(pair: Pair, step: int) -> Clipped | None:
    typical = [sizes.typical[step] for sizes in pair.sizes]
    if not all(0 < size < np.inf for size in typical):
        return None
    small = int(typical[1] < typical[0])
    if typical[small] > (1 - min(pair.bounds.parameter, _LEAST)) * typical[1 - small]:
        return None
    if _before_clipping((pair.a, pair.b)[small], step, typical[small]):
        return None
    found = _common_factor(pair, step, small)
    if found is None:
        return None
    factor, names = found
    given_alike = {_given_alike(pair, step, name, small, factor) for name in names}
    is_known = True in given_alike or _is_as_stated(pair, step, small, typical[small])
    return Clipped(small, factor) if is_known and False not in given_alike else None


def _is_as_stated(pair: Pair, step: int, small: int, typical: float) -> bool:
    """Whether the gradients have the norm to which the other recording alone states that it clips."""
    sides = pair.a, pair.b
    own, stated = (sides[side].manifest.settings.get("clip") for side in (small, 1 - small))
    if own is not None or stated is None:
        return False
    return abs(_norm(sides[small], step, typical) - stated) <= _LEAST * stated


def _norm(recording: Recording, step: int, typical: float) -> float:
    """The norm of all gradients of a step."""
    trained = [spec.numel for name, spec in recording.manifest.params.items() if recording.has(REDUCE, step, name)]
    return typical * float(np.sqrt(sum(trained)))


def _before_clipping(recording: Recording, step: int, typical: float) -> bool:
    """Whether the norm that the loop computed before clipping is that of the recorded gradients."""
    norm_before = recording.grad_norm(step, 0)
    return norm_before is not None and abs(norm_before - _norm(recording, step, typical)) <= 0.01 * norm_before


def _common_factor(pair: Pair, step: int, small: int) -> tuple[float, list[str]] | None:
    """The weighted median factor between gradients, and the parameters with this factor; None unless these are the majority."""
    factors, weights, names = [], [], []
    for name in pair.names():
        if not pair.has(REDUCE, step, name):
            continue
        x, y, size = _of_sides(pair, step, name, small)
        if size:
            factors.append(float((x / size) @ y) / size)
            weights.append(size * size)
            names.append(name)
    if not names:
        return None
    factor = weighted_median(factors, weights)
    if not 0 < factor < 1:
        return None
    agree = []
    for name in names:
        x, y, size = _of_sides(pair, step, name, small)
        if distance(y, factor * x) <= (1 - factor) * size / 2:
            agree.append(name)
    return (factor, agree) if 2 * len(agree) > len(names) else None


def _of_sides(pair: Pair, step: int, name: str, small: int) -> tuple[np.ndarray, np.ndarray, float]:
    """The flattened gradients before and after clipping, and the norm of the former; 0 if it is not finite."""
    sides = pair.assemble(REDUCE, step, name, (0, 0))[:2]
    x, y = (np.asarray(sides[i], np.float64).reshape(-1) for i in (1 - small, small))
    size = norm(x)
    return x, y, size if np.isfinite(size) and np.isfinite(norm(y)) else 0.0


def _given_alike(pair: Pair, step: int, name: str, small: int, factor: float) -> bool | None:
    """Whether the optimizer states or updates show that both optimizers received the same gradient of a parameter; None if they
    do not show it, as with an optimizer that keeps only squares of gradients."""
    x, _, size = _of_sides(pair, step, name, small)
    for slot in _FIRST_MOMENTS:
        if pair.has(STATE, step, name, slot):
            moments = pair.assemble(STATE, step, name, (0, 0), slot)[:2]
            betas = pair.a.manifest.settings.get("betas") or _BETAS
            share = 1 - float(betas[0]) if slot == "exp_avg" else 1.0
            return distance(*moments) <= share * (1 - factor) * size / 2
    slots = [slot for slot in pair.a.state_slots(step, name) if pair.has(STATE, step, name, slot)]
    if any(_are_apart(pair, step, name, slot, factor) for slot in slots):
        return False
    # Without momentum an update is a linear combination of the gradient and the parameter (decay).
    moved, before = zip(*(_moved(recording, step, name, pair.sketched) for recording in (pair.a, pair.b)), strict=True)
    if moved[0] is None or moved[1] is None:
        return None
    terms = np.stack([x, before[0]], axis=1)
    if len(x) < _LEAST_ELEMENTS:
        return None
    solution = np.linalg.lstsq(terms, moved[0], rcond=None)[0]
    most = (1 - factor) * abs(float(solution[0])) * size / 2
    return None if distance(moved[0], terms @ solution) > most else distance(moved[0], moved[1]) <= most


def _are_apart(pair: Pair, step: int, name: str, slot: str, factor: float) -> bool:
    """Whether an optimizer state entry differs between the sides as if it were gradients of this step alone."""
    values = pair.assemble(STATE, step, name, (0, 0), slot)[:2]
    return distance(*values) > (1 - factor) * max(map(norm, values)) / 2


def _moved(recording: Recording, step: int, name: str, sketched: bool) -> tuple[np.ndarray | None, np.ndarray]:
    """The update of a parameter and its value before; (None, empty) if either was sketched or not recorded."""
    ends = before_step(step), (UPDATE, step)
    if not sketched and all(recording.has(*at, name) for at in ends):
        before, after = (assemble(recording, *at, name).elements for at in ends)
        if before is not None and after is not None:
            start = np.asarray(before, np.float64).reshape(-1)
            return np.asarray(after, np.float64).reshape(-1) - start, start
    return None, np.zeros(0)
