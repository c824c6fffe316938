"""Whether two recordings are comparable, and which of their settings differ."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossframe.dtypes import unit_roundoff
from crossframe.quoting import quote
from crossframe.recording import Recording, common_steps
from crossframe.recording.event_format import BUFFERS, FORWARD, PARAMETERS, STATE, UNSHARDED, UPDATE
from crossframe.recording.known_settings import EARLIER_UPDATES, EPS_HAT, FORWARD_ONLY, GROUPS, PER_RANK
from crossframe.verdict.measure.locate import Divergence
from crossframe.verdict.measure.sample_ranks import are_redistributed, other_samples
from crossframe.verdict.measure.values import assemble, is_same, match_values

# Settings that recordings may state, and the first phase whose values they change; None if they change no values by themselves.
_MANIFEST = {"model": None, "steps": None, "dtype": None, "seed": PARAMETERS, "learning_rate": UPDATE}
_FREE = {
    "accumulate": FORWARD,
    "optimizer": STATE,
    "clip": STATE,
}
# Settings of parameter groups.
_OF_GROUPS = {"weight_decay": STATE, "momentum": STATE, "betas": STATE, "eps": UPDATE, EPS_HAT: UPDATE}
_DECAY = "weight_decay"
_ORDER = (FORWARD, STATE, UPDATE, BUFFERS)
_ROUNDINGS = 16
"""More operations than a script needs to compute a setting or the rate of a step from its constants: each rounds once."""
MOST_REASONS = 8
"""The number of reasons that are listed in full."""
_TO_DO = (
    "train the same parameters in both runs, or, if only their names differ, pass a map (crossframe map, then --map)"
)
BATCH = "batch"
"""The name of the setting that stands for different samples."""


@dataclass(frozen=True)
class Setting:
    """A setting that two recordings state differently.

    Attributes:
        name: its name in the manifest.
        a, b: its values.
        acts_in: the first phase whose values it changes; None if it changes none by itself, such as a class name.
        since: the first step at which it differs.
        parameters: the parameters for which it differs, if not all.
        num_parameters: the number of parameters with this setting.
        text: the description, if its values do not describe it.
        scheduled: whether the runs state the same initial value, so that only their schedules differ.
        moved_samples: whether it is a batch that has samples of the other run's other steps or ranks, so that the numbers of both
            runs differ for certain.
        redistributed: whether it is a batch of which all ranks together have the same samples (`are_redistributed`).
    """

    name: str
    a: Any
    b: Any
    acts_in: str | None
    since: int = 0
    parameters: tuple[str, ...] = ()
    num_parameters: int = 0
    text: str = ""
    scheduled: bool = False
    moved_samples: bool = False
    redistributed: bool = False

    def explains(self, where: Divergence) -> bool:
        """Whether it can cause a divergence."""
        if self.acts_in is None or where.phase == UNSHARDED:  # no setting changes the result of an all-gather
            return False
        if where.step != self.since:
            return where.step > self.since
        if self.parameters and where.parameter not in (None, *self.parameters):
            return False
        if self.acts_in == PARAMETERS or where.phase == PARAMETERS:
            return self.acts_in == PARAMETERS
        return self.acts_in == FORWARD or where.phase in _ORDER[_ORDER.index(self.acts_in) :]

    def describe(self, names: tuple[str, str]) -> str:
        """The setting with both values, as a sentence."""
        if self.text:
            return self.text
        when = f" from step {self.since} on" if self.since else ""
        some = ""
        if self.parameters:
            some = f" of {len(self.parameters)} of {self.num_parameters} parameters (first {self.parameters[0]!r})"
        text = f"{self.name.replace('_', ' ')}{some} differs{when}: {quote(self.a)} in {names[0]}, {quote(self.b)} in {names[1]}"
        same = "; if both are one model, record both with the same Recorder(..., name=...)"
        return f"{text}{same if self.name == 'model' else ''}"


def differing_settings(a: Recording, b: Recording) -> tuple[Setting, ...]:
    """The settings that both recordings state with different values (`_are_one`).

    Learning rates are compared at all steps if both recordings have them, else only the initial rates of the manifests.
    """
    stated = [(name, phase, *(getattr(r.manifest, name) for r in (a, b))) for name, phase in _MANIFEST.items()]
    stated += [(name, phase, *(r.manifest.settings.get(name) for r in (a, b))) for name, phase in _FREE.items()]
    found = [Setting(name, x, y, phase) for name, phase, x, y in stated if None not in (x, y) and not _are_one(x, y)]
    found += [setting for name, phase in _OF_GROUPS.items() if (setting := _of_parameters(a, b, name, phase))]
    found += [each for each in (_trained(a, b), _earlier_updates(a, b)) if each]
    scheduled = _rates(a, b)
    if scheduled is not None:
        found = [*scheduled, *(setting for setting in found if setting.name != "learning_rate")]
    return tuple(found)


def _trained(a: Recording, b: Recording) -> Setting | None:
    """The parameters that require gradients in one recording alone when it begins. They may have none until later, or none."""
    of_a, of_b = ({name for name, spec in each.manifest.params.items() if spec.requires_grad} for each in (a, b))
    common = a.manifest.params.keys() & b.manifest.params.keys()
    if not (apart := [name for name in a.manifest.params if name in common & (of_a ^ of_b)]):
        return None
    x, y = apart[0] in of_a, apart[0] in of_b
    some = f"requires_grad of {len(apart)} of {len(common)} parameters (first {apart[0]!r})"
    first, second = labels(a, b)
    return Setting("requires_grad", x, y, FORWARD, text=f"{some} differs: {x} in {first}, {y} in {second}")


def _earlier_updates(a: Recording, b: Recording) -> Setting | None:
    """The updates before the recordings, of which nothing is recorded, if they have changed initial values, or in one of them
    optimizer state."""
    numbers = [recording.manifest.settings.get(EARLIER_UPDATES) or 0 for recording in (a, b)]
    if not any(numbers):
        return None
    clauses = [
        f"{name} begins after {number or 'no'} stated update{'s' * (number != 1)} of its parameters"
        for name, number in zip(labels(a, b), numbers, strict=True)
    ]
    text = f"{' and '.join(clauses)}: a recording begins with the first forward for which there is an optimizer"
    initial = [{name: assemble(each, PARAMETERS, 0, name) for name in each.manifest.params} for each in (a, b)]
    are_equal = initial[0].keys() == initial[1].keys() and all(
        is_same(match_values(value, initial[1][name], by_sketch=False)) for name, value in initial[0].items()
    )
    if are_equal and numbers[0] == numbers[1]:
        return None
    return Setting(EARLIER_UPDATES, numbers[0], numbers[1], STATE if are_equal else PARAMETERS, text=text)


def differing_batches(a: Recording, b: Recording) -> Setting | None:
    """The first step at which a rank has other samples in the two recordings, at equal world sizes; None if there is none.

    Like a setting, it explains any difference from then on. It does not prevent a comparison: the arrays that a model is called
    with may differ although the samples are the same, for example by their padding.
    """
    first, second = labels(a, b)
    if a.manifest.world_size != b.manifest.world_size:
        return None
    for step in common_steps(a, b):
        for rank in range(a.manifest.world_size):
            own, other = a.batch(step, rank), b.batch(step, rank)
            if not (own.is_unknown or other.is_unknown or own.has_samples_of(other)):
                text = f"the batch of rank {rank} at step {step} differs between {first} and {second}"
                if are_redistributed(a, b):
                    together = f"{text}, though all ranks together have the same samples"
                    return Setting(BATCH, "", "", FORWARD, step, text=together, redistributed=True)
                moved = _has_moved_samples(a, b, step, rank) or _has_moved_samples(b, a, step, rank)
                return Setting(BATCH, "", "", FORWARD, step, text=text, moved_samples=moved)
    return None


def _has_moved_samples(a: Recording, b: Recording, step: int, rank: int) -> bool:
    """Whether a rank of a has samples that b has elsewhere: others for certain, not the same ones with other rounding."""
    own = set(a.batch(step, rank).sample_ids) - set(b.batch(step, rank).sample_ids)
    ranks = range(b.manifest.world_size)
    return any(own & set(b.batch(other, each).sample_ids) for other in common_steps(a, b) for each in ranks)


def _of_parameters(a: Recording, b: Recording, option: str, phase: str) -> Setting | None:
    """An optimizer option that differs for at least one parameter, however parameters are grouped."""
    first, second = (_by_parameter(recording, option) for recording in (a, b))
    left_out = set(exempt_on_one_side(a, b)) if option == _DECAY else ()
    both = [name for name, value in first.items() if None not in (value, second.get(name)) and name not in left_out]
    apart = [name for name in both if not _are_one(first[name], second[name])]
    if not apart:
        return None
    some = tuple(apart) if len(apart) < len(both) else ()
    return Setting(option, first[apart[0]], second[apart[0]], phase, parameters=some, num_parameters=len(both))


def exempt_on_one_side(a: Recording, b: Recording) -> tuple[str, ...]:
    """The parameters that one recording exempts from weight decay by its groups, and the other one perhaps does not.

    A script may exempt parameters in a way that a recorder cannot see, such as a transformation of optax within a mask. So if the
    other recording is of another framework and states no groups, the decay of these parameters is not compared: their updates
    tell.
    """
    groups = [bool(r.manifest.settings.get(GROUPS)) for r in (a, b)]
    if a.manifest.framework == b.manifest.framework or groups[0] == groups[1]:
        return ()
    exempting, other = (_by_parameter(r, _DECAY) for r in ((a, b) if groups[0] else (b, a)))
    return tuple(name for name, decay in exempting.items() if decay == 0.0 and other.get(name))


def _are_one(x: Any, y: Any) -> bool:
    """Whether two settings are equal up to how scripts compute and hold them, such as 0.01 / 3 and 1 / 300.

    Each of the n operations by which a script computes a setting rounds once: the result is exact times at most (1 + u)^n, with u
    the unit roundoff. So two scripts that need 8 operations each differ by at most 16 u to first order, relative to the larger
    value. u is that of float64, in which Python computes, or that of float32 if one of the values is held in float32 (is exact in
    it), as those of arrays are.
    """
    if isinstance(x, list | tuple) and isinstance(y, list | tuple):
        return len(x) == len(y) and all(map(_are_one, x, y))
    if x == y or not isinstance(x, int | float) or not isinstance(y, int | float) or {type(x), type(y)} == {int}:
        return x == y
    with np.errstate(over="ignore"):
        is_single = any(float(np.float32(each)) == each and not float(each).is_integer() for each in (x, y))
    return _is_near(x, y, "float32" if is_single else "float64")


def _is_near(x: float, y: float, dtype: str, scale: float = 0.0) -> bool:
    return abs(x - y) <= _ROUNDINGS * unit_roundoff(dtype) * max(abs(x), abs(y), scale)


def _by_parameter(recording: Recording, option: str, default: Any = None) -> dict[str, Any]:
    manifest = recording.manifest
    found = dict.fromkeys(manifest.params, manifest.settings.get(option, default))
    for group in manifest.settings.get(GROUPS, ()):
        found |= {name: group[option] for name in group["params"] if name in found and group.get(option) is not None}
    return found


def _rates(a: Recording, b: Recording) -> list[Setting] | None:
    """The first step at which learning rates differ, if any; None if not both recordings have them.

    They are equal up to 16 roundings in float32 (`_are_one`) of the group's largest rate: a schedule may compute in float32,
    whatever it returns, and adds terms as large as its peak, which cancel where the rate is small, as at the end of a cosine.
    """
    steps = [step for step in common_steps(a, b) if a.learning_rates(step) and b.learning_rates(step)]
    peaks: dict[int, float] = {}
    for rates in (r.learning_rates(step) for step in steps for r in (a, b)):
        for group, rate in enumerate(rates):
            peaks[group] = max(peaks.get(group, 0.0), abs(rate))
    for step in steps:
        x, y = a.learning_rates(step), b.learning_rates(step)
        num = len(x) if len(x) == len(y) else 1  # with different groups, only the first one is compared
        pairs = enumerate(zip(x[:num], y[:num], strict=True))
        apart = [(p, q) for group, (p, q) in pairs if not _is_near(p, q, "float32", peaks[group])]
        if apart:
            return [Setting("learning_rate", *apart[0], UPDATE, step, scheduled=_start_alike(a, b))]
    return [] if steps else None


def _start_alike(a: Recording, b: Recording) -> bool:
    """Whether both state the same initial learning rate of every parameter."""
    rates = [r.manifest.learning_rate for r in (a, b)]
    if None in rates or not _are_one(*rates):
        return False
    initial = [_by_parameter(r, "lr", rate) for r, rate in zip((a, b), rates, strict=True)]
    return initial[0].keys() == initial[1].keys() and all(
        _are_one(initial[0][name], initial[1][name]) for name in initial[0]
    )


def labels(a: Recording, b: Recording) -> tuple[str, str]:
    """Names for the two recordings: their frameworks if these differ, else their directories."""
    by_framework = (a.manifest.framework, b.manifest.framework)
    by_name = (a.directory.resolve().name, b.directory.resolve().name)
    for names in (by_framework, by_name):
        if names[0] != names[1]:
            return names
    return str(a.directory), str(b.directory)


def why_incomparable(a: Recording, b: Recording) -> str | None:
    """Why the recordings cannot be compared: all reasons, as clauses; None if they can.

    Parameters must agree in name and shape; dtypes may differ (`crossframe.verdict.measure.unequal_dtypes`). At different world
    sizes, all ranks together must have the same samples, with the same number on each rank, and no module may normalise over the
    samples of its rank, as batch norm does: otherwise a mean over ranks is not a mean over samples. At equal world sizes, other
    samples are like a setting that differs (`differing_batches`).
    """
    found = list(_reasons(a, b))
    more = [f"and {len(found) - MOST_REASONS} more differences"] if len(found) > MOST_REASONS else []
    if a.manifest.params.keys() != b.manifest.params.keys():
        more.append(_TO_DO)
    return "; ".join([*found[:MOST_REASONS], *more]) or None


def _reasons(a: Recording, b: Recording) -> Iterator[str]:
    first, second = labels(a, b)
    ours, theirs = a.manifest.params, b.manifest.params
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if name not in ours or name not in theirs:
            yield f"parameter {name!r} is only in {first if name in ours else second}"
        elif (x := ours[name].shape) != (y := theirs[name].shape):
            yield f"parameter {name!r} has shape {x!r} in {first}, {y!r} in {second}"
    if a.manifest.world_size != b.manifest.world_size:
        for recording, label in ((a, first), (b, second)):
            if found := recording.manifest.settings.get(PER_RANK):
                yield (
                    f"in {label} {quote(found)} normalises over the samples of its own rank, so the result depends on the world "
                    "size; compare at equal world sizes"
                )
    alone = [bool(r.manifest.settings.get(FORWARD_ONLY)) for r in (a, b)]
    if alone[0] != alone[1]:
        yield f"{first if alone[0] else second} has forward alone, and {second if alone[0] else first} is of training"
    if not common_steps(a, b):
        yield f"{first if a.num_steps == 0 else second} has no complete step"
    if a.manifest.world_size != b.manifest.world_size:
        by_reason: dict[str, list[int]] = {}
        for step in common_steps(a, b):
            for reason in other_samples(a, b, step, (first, second)):
                by_reason.setdefault(reason, []).append(step)
        for reason, steps in by_reason.items():
            later = f" and {len(steps) - 1} later step{'s' * (len(steps) > 2)}" if len(steps) > 1 else ""
            yield f"at step {steps[0]}{later} {reason}"
