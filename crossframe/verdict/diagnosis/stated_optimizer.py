"""The optimizer that a manifest states, and the known rule that recorded values follow."""

import math
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from crossframe.recording import Manifest, Recording
from crossframe.recording.event_format import PARAMETERS, STATE, UPDATE
from crossframe.recording.known_settings import GROUPS
from crossframe.verdict.diagnosis.fit import factor_between, roundoff_of
from crossframe.verdict.diagnosis.optimizer_rules import SGD, AdamW
from crossframe.verdict.diagnosis.update_deviations import Rule, Update, read_off
from crossframe.verdict.measure.values import assemble

ADAM, ADAMW, SGD_ = "Adam", "AdamW", "SGD"
MOMENTS = {ADAM: ("exp_avg", "exp_avg_sq"), ADAMW: ("exp_avg", "exp_avg_sq"), SGD_: ("momentum_buffer",)}
"""The optimizer state entries that each optimizer's update reads."""


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


def stated_rule(manifest: Manifest, kind: str, count: float, name: str = "") -> Stated | None:
    """The stated rule of a parameter at step `count` of the optimizer. Missing constants have the defaults of torch and optax.

    Returns None if a constant is not a valid number.
    """
    settings = {**manifest.settings, **_own_settings(manifest, name)}
    rate = settings.get("lr", manifest.learning_rate) or 1.0
    if not isinstance(rate, int | float):
        return None
    betas = settings.get("betas", (0.9, 0.999))
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        return None
    numbers = [
        settings.get("weight_decay", 0.01 if kind == ADAMW else 0.0),
        settings.get("momentum", 0.0),
        settings.get("eps", 1e-8),
        settings.get("clip", math.inf),
        *betas,
    ]
    if not all(isinstance(number, int | float) and number >= 0 for number in numbers):
        return None
    decay, momentum, epsilon, clip, beta1, beta2 = map(float, numbers)
    if kind == SGD_:
        return Stated(kind, SGD(rate, momentum, decay), decay, clip)
    own = decay if kind == ADAMW else 0.0
    rule = AdamW(rate, beta1, beta2, epsilon, own, count, count)
    return Stated(kind, rule, decay - own, clip, states_decay="weight_decay" in settings)


def _own_settings(manifest: Manifest, name: str) -> dict[str, Any]:
    """The settings of the parameter's group."""
    groups = manifest.settings.get(GROUPS, [])
    for group in groups if isinstance(groups, list) else []:
        if isinstance(group, dict) and isinstance(group.get("params"), list) and name in group["params"]:
            return group
    return {}


OTHERS = frozenset(
    (
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
    )
)
"""Optimizers with other rules, which are not matched against known rules."""
_TRIED = 4
"""The number of parameters that must follow a rule for an optimizer of another name to be recognised."""
_KNOWN: "WeakKeyDictionary[Recording, str | None]" = WeakKeyDictionary()


def rule_of(recording: Recording) -> str | None:
    """The rule that a recording's optimizer follows; None if unknown.

    An optimizer whose name is not in MOMENTS or OTHERS, such as a subclass, follows the first rule that explains its updates.
    """
    name = recording.manifest.settings.get("optimizer")
    if name in MOMENTS or name in OTHERS:
        return name if name in MOMENTS else None
    if recording not in _KNOWN:
        _KNOWN[recording] = next((kind for kind in (ADAMW, ADAM, SGD_) if _follows(recording, kind)), None)
    return _KNOWN[recording]


def _follows(recording: Recording, kind: str) -> bool:
    """Whether a rule explains the first recorded step of a few parameters."""
    steps = recording.recorded_steps()
    step = next((step for step in steps if step == 0 or step - 1 in steps), None)
    if step is None:
        return False
    names = [
        name
        for name, spec in recording.manifest.params.items()
        if spec.numel > 1
        and recording.has(UPDATE, step, name)
        and all(recording.has(STATE, step, name, use=slot) for slot in MOMENTS[kind])
    ][:_TRIED]
    return bool(names) and all(_explains(recording, kind, step, name) for name in names)


def _explains(recording: Recording, kind: str, step: int, name: str) -> bool:
    stated = stated_rule(recording.manifest, kind, recording.count(step, name) or step + 1, name)
    phase, last = (UPDATE, step - 1) if step else (PARAMETERS, 0)
    if stated is None or not recording.has(phase, last, name):
        return False
    sides = [assemble(recording, phase, last, name), assemble(recording, UPDATE, step, name)]
    sides += [assemble(recording, STATE, step, name, slot) for slot in MOMENTS[kind]]
    arrays = [side.elements for side in sides]
    if any(array is None for array in arrays):
        return False
    roundoff = max(roundoff_of(array) for array in arrays if array is not None)
    before, after, *moments = (np.asarray(array, np.float64) for array in arrays)
    update = Update(before, after, tuple(moments), roundoff)
    scheduled = factor_between(update.way(stated.rule), update.moved)
    rules = [stated.rule, *([replace(stated.rule, rate=scheduled)] if scheduled > 0 else [])]
    if not stated.states_decay and isinstance(stated.rule, AdamW):
        rules.append(read_off(update, stated.rule))
    return any(update.residual(rule) <= update.error(rule) for rule in rules)
