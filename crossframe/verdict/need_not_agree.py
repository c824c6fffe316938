"""Quantities that need not agree, since the updates do not depend on them as they are recorded."""

from collections.abc import Iterator

import numpy as np

from crossframe.recording import Recording
from crossframe.recording.event_format import BACKWARD, FORWARD, NORM, REDUCE
from crossframe.recording.known_settings import BY_HAND, GRADIENT_NORM, LOSSES, UPDATES
from crossframe.verdict.measure.comparable import labels
from crossframe.verdict.measure.locate import Divergence
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import ACTIVATION
from crossframe.verdict.measure.replaced_gradients import gradients_are_replaced

_NEAR = 1e-3
"""A share of a loss, by which a factor between losses is known. Nothing is judged by it."""


def need_not_agree(
    a: Recording, b: Recording, where: Divergence, sketched: bool
) -> Iterator[tuple[frozenset[str], str]]:
    """Kinds of quantities that need not agree if all others do, and a clause that says why."""
    names = labels(a, b)
    by_hand = [name for name, each in zip(names, (a, b), strict=True) if each.manifest.settings.get(UPDATES) == BY_HAND]
    if by_hand:
        yield (
            frozenset((FORWARD, BACKWARD, REDUCE, NORM)),
            f"losses or gradients differ, but updates agree: the script of {' and of '.join(by_hand)} updates its parameters by "
            "itself, and gradients are recorded before it divides or clips them",
        )
    if (where.phase, where.event) == (FORWARD, "loss") and (name := _multiplied_by_ranks(a, b, names)) is not None:
        yield frozenset((FORWARD,)), f"the losses of {name} are multiplied by the number of ranks; gradients agree"
    numbers = [recording.num_losses(where.step, 0) for recording in (a, b)]
    if numbers[0] != numbers[1]:
        sums = "a step adds " + " and ".join(
            f"{n} loss{'es' * (n > 1)} in {name}" for name, n in zip(names, numbers, strict=True)
        )
        yield frozenset((ACTIVATION,)), f"activations differ, since {sums}; losses and gradients agree"
        if gradients_are_replaced(Pair(a, b, sketched=sketched)):
            yield (
                frozenset((ACTIVATION, FORWARD, BACKWARD)),
                f"losses and local gradients differ ({sums}), but the optimizer gets other gradients than these, which agree",
            )


def _multiplied_by_ranks(a: Recording, b: Recording, names: tuple[str, str]) -> str | None:
    """The name of the recording whose losses are those of the other one, times the ratio of the numbers of ranks: each rank has
    the loss of all samples, and no gradient of the parts that come from other ranks."""
    worlds, steps = [each.manifest.world_size for each in (a, b)], min(a.num_steps, b.num_steps)
    first, second = (np.mean(each.losses()[:steps], axis=1) for each in (a, b))
    ratio = worlds[0] / worlds[1]
    are_multiples = ratio != 1 and np.all(np.abs(first - ratio * second) <= _NEAR * np.abs(first))
    return names[ratio < 1] if are_multiples else None


def has_loss_alone(a: Recording, b: Recording) -> bool:
    """Whether one recording alone has losses, and the other one the norm of gradients."""
    return len({each.manifest.settings.get(LOSSES) == GRADIENT_NORM for each in (a, b)}) == 2
