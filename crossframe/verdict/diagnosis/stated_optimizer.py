"""The optimizer that a manifest states, and the known rule that recorded values follow."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from itertools import permutations
from typing import Any, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

import numpy as np

from crossframe.recording import Manifest, Recording
from crossframe.recording.event_format import PARAMETERS, REDUCE, STATE, UPDATE
from crossframe.recording.known_settings import EPS_HAT, GROUPS
from crossframe.verdict.diagnosis.fit import factor_between, roundoff_of
from crossframe.verdict.diagnosis.optimizer_rules import SGD, AdamW
from crossframe.verdict.diagnosis.update_deviations import Rule, Update, read_off
from crossframe.verdict.measure.metrics import distance, norm
from crossframe.verdict.measure.values import assemble

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def _once(find: Callable[[Recording, *Ts], T]) -> Callable[[Recording, *Ts], T]:
    """Keeps what is found in a recording for as long as it is in use."""
    known: WeakKeyDictionary[Recording, dict[Any, T]] = WeakKeyDictionary()

    @wraps(find)
    def found(recording: Recording, *key: *Ts) -> T:
        own = known.setdefault(recording, {})
        if key not in own:
            own[key] = find(recording, *key)
        return own[key]

    return found


ADAM, ADAMW, SGD_ = "Adam", "AdamW", "SGD"
MOMENTS = {ADAM: ("exp_avg", "exp_avg_sq"), ADAMW: ("exp_avg", "exp_avg_sq"), SGD_: ("momentum_buffer",)}
"""The optimizer state entries that each optimizer's update reads, as torch names them."""

BETAS = (0.9, 0.999)
"""The default of torch and optax."""


@dataclass(frozen=True)
class Stated:
    """The optimizer that a manifest states.

    Attributes:
        kind: one of MOMENTS.
        rule: the rule of the update.
        coupled: the factor of the parameter that is added to its gradient.
        clip: the maximum gradient norm; inf without clipping.
        states_decay: whether the manifest states a decay; if not, the rule has a default.
    """

    kind: str
    rule: Rule
    coupled: float
    clip: float
    states_decay: bool = True


def stated_rule(
    manifest: Manifest, kind: str, count: float, name: str = "", betas: tuple[float, float] = BETAS
) -> Stated | None:
    """The stated rule of a parameter at step `count` of the optimizer. Missing constants have the defaults of torch and optax.

    Returns None if a constant is stated as None or negative.

    Args:
        betas: those of an optimizer whose betas are not stated.
    """
    settings = {**manifest.settings, **_own_settings(manifest, name)}
    rate = settings.get("lr", manifest.learning_rate) or 1.0
    numbers = [
        settings.get("weight_decay", 0.01 if kind == ADAMW else 0.0),
        settings.get("momentum", 0.0),
        settings.get("eps", 1e-8),
        settings.get("clip", math.inf),
        *(settings.get("betas", betas) or (None, None)),
    ]
    if any(number is None or number < 0 for number in numbers):
        return None
    decay, momentum, epsilon, clip, beta1, beta2 = map(float, numbers)
    if kind == SGD_:
        return Stated(kind, SGD(rate, momentum, decay), decay, clip)
    if (hat := settings.get(EPS_HAT)) is not None:
        epsilon = hat / math.sqrt(1 - beta2**count)
    own = decay if kind == ADAMW else 0.0
    rule = AdamW(rate, beta1, beta2, epsilon, own, count, count)
    return Stated(kind, rule, decay - own, clip, states_decay="weight_decay" in settings)


def rule_at(recording: Recording, kind: str, step: int, name: str, other: Recording | None = None) -> Stated | None:
    """The rule of a parameter at a step of a recording.

    Betas that are not stated are read off its moments, unless this recording or the other one has the default ones.
    """
    count = recording.count(step, name) or step + 1
    found = [betas_of(each) or BETAS for each in (recording, other) if each is not None]
    return stated_rule(recording.manifest, kind, count, name, BETAS if BETAS in found else found[0])


@_once
def betas_of(recording: Recording) -> tuple[float, float] | None:
    """The betas of running averages of gradients and of their squares, from two consecutive steps; None if this is not what the
    optimizer state holds.

    What scaled the gradients, such as clipping, is unknown: m = beta m' + gain g has two unknowns.
    """
    steps, slots = recording.recorded_steps(), slots_of(recording, ADAM)
    later = next((step for step in steps if step - 1 in steps), None)
    if later is None or len(slots) != 2:
        return None
    for name, spec in recording.manifest.params.items():
        keys = [(STATE, step, slot) for slot in slots for step in (later - 1, later)]
        if spec.numel <= 2 or not all(recording.has(phase, at, name, use=slot) for phase, at, slot in keys):
            continue
        if not recording.has(REDUCE, later, name):
            continue
        sides = [assemble(recording, phase, at, name, slot).elements for phase, at, slot in keys]
        sides.append(assemble(recording, REDUCE, later, name).elements)
        if any(side is None for side in sides):
            continue
        roundoff = max(roundoff_of(side) for side in sides if side is not None)
        m0, m1, v0, v1, gradient = (np.asarray(side, np.float64).reshape(-1) for side in sides)
        first = _kept(m0, gradient, m1, roundoff)
        second = _kept(v0, np.square(gradient), v1, roundoff)
        if first is not None and second is not None:
            return first, second
    return None


def _kept(old: np.ndarray, given: np.ndarray, new: np.ndarray, roundoff: float) -> float | None:
    """The beta of new = beta old + gain given, rounded to the decimals that are known; None if this does not hold."""
    terms = np.stack([old, given], axis=1)
    (beta, gain), _, _, singular = np.linalg.lstsq(terms, new, rcond=None)
    tolerance = 8 * roundoff * (norm(beta * old) + norm(gain * given))
    if distance(new, beta * old + gain * given) > tolerance or not singular.min() > 0 or not 0 <= beta < 1:
        return None
    known = math.floor(-math.log10(2 * tolerance / float(singular.min()))) if tolerance else 12
    return round(float(beta), max(known, 0)) if known >= 3 else None


def _own_settings(manifest: Manifest, name: str) -> dict[str, Any]:
    """The settings of the parameter's group."""
    return next((group for group in manifest.settings.get(GROUPS) or () if name in group["params"]), {})


OTHERS = frozenset(
    [
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adamax",
        "ASGD",
        "LAMB",
        "LBFGS",
        "Lion",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
    ]
)
"""Optimizers with other rules, which are not matched against known rules."""
_TRIED = 4
"""The number of parameters that must follow a rule for an optimizer of another name to be recognised."""


@_once
def rule_of(recording: Recording) -> str | None:
    """The rule that a recording's optimizer follows; None if unknown.

    An optimizer whose name is not in MOMENTS or OTHERS, such as a subclass, follows the first rule that explains its updates.
    """
    name = recording.manifest.settings.get("optimizer")
    if name in MOMENTS or name in OTHERS:
        return name if name in MOMENTS else None
    return next((kind for kind in (ADAMW, ADAM, SGD_) if _follows(recording, kind)), None)


@_once
def slots_of(recording: Recording, kind: str) -> tuple[str, ...]:
    """The names of the state entries that a rule reads; () if there are none.

    Where they are not called as in torch, they are found by their values: after the first step, the second moment is proportional
    to the square of the first one. A buffer of momentum is the only entry.
    """
    usual, steps = MOMENTS[kind], recording.recorded_steps()
    names = [name for name, spec in recording.manifest.params.items() if spec.numel > 1]
    if not steps:
        return ()
    found = {name: slots for name in names if (slots := recording.state_slots(steps[0], name))}
    if not found or any(set(usual) & set(slots) for slots in found.values()):
        return usual
    name, slots = next(iter(found.items()))
    if len(usual) == 1:
        return (slots[0],) if len(slots) == 1 else ()
    values = {slot: assemble(recording, STATE, steps[0], name, slot).elements for slot in slots}
    for first, second in permutations(slots, 2):
        x, y = values[first], values[second]
        if x is not None and y is not None and _is_square(x, y):
            return first, second
    return ()


def _is_square(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether y is a multiple of the square of x, up to 8 roundings."""
    square, wide = np.square(np.asarray(x, np.float64)), np.asarray(y, np.float64)
    bound = 8 * roundoff_of(y) * norm(wide)
    return norm(wide) > 0 and distance(wide, factor_between(square, wide) * square) <= bound


def _follows(recording: Recording, kind: str) -> bool:
    """Whether a rule explains the first recorded step of a few parameters."""
    steps = recording.recorded_steps()
    step = next((step for step in steps if step == 0 or step - 1 in steps), None)
    if step is None:
        return False
    slots = slots_of(recording, kind)
    names = [
        name
        for name, spec in recording.manifest.params.items()
        if spec.numel > 1
        and recording.has(UPDATE, step, name)
        and all(recording.has(STATE, step, name, use=slot) for slot in slots)
    ][:_TRIED]
    return bool(names and slots) and all(_explains(recording, kind, step, name) for name in names)


def _explains(recording: Recording, kind: str, step: int, name: str) -> bool:
    stated = rule_at(recording, kind, step, name)
    phase, last = (UPDATE, step - 1) if step else (PARAMETERS, 0)
    if stated is None or not recording.has(phase, last, name):
        return False
    sides = [assemble(recording, phase, last, name), assemble(recording, UPDATE, step, name)]
    sides += [assemble(recording, STATE, step, name, slot) for slot in slots_of(recording, kind)]
    arrays = [side.elements for side in sides]
    if any(array is None for array in arrays):
        return False
    roundoff = max(roundoff_of(array) for array in arrays if array is not None)
    before, after, *moments = (np.asarray(array, np.float64) for array in arrays)
    if not all(np.isfinite(array).all() for array in (before, after, *moments)):
        return False
    update = Update(before, after, tuple(moments), roundoff)
    scheduled = factor_between(update.way(stated.rule), update.moved)
    rules = [stated.rule, *([replace(stated.rule, rate=scheduled)] if scheduled > 0 else [])]
    if not stated.states_decay and isinstance(stated.rule, AdamW):
        rules.append(read_off(update, stated.rule))
    return any(update.residual(rule) <= update.error(rule) for rule in rules)
