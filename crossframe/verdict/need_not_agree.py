"""Quantities that need not agree, since the updates do not depend on them as they are recorded."""

from collections.abc import Iterator

import numpy as np

from crossframe.recording import Recording
from crossframe.recording.event_format import BACKWARD, FORWARD, NORM, REDUCE
from crossframe.recording.known_settings import BY_HAND, GRADIENT_NORM, LOSSES, UPDATES
from crossframe.recording.program import GRADIENTS, PROGRAM
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
    if (where.phase, where.event) == (FORWARD, "loss"):
        yield from ((frozenset((FORWARD,)), f"{text}; gradients agree") for text in _factors(a, b, names))
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


def _factors(a: Recording, b: Recording, names: tuple[str, str]) -> Iterator[str]:
    """Why all losses of one recording are those of the other one, times one number."""
    steps = min(a.num_steps, b.num_steps)
    first, second = (np.mean(each.losses()[:steps], axis=1) for each in (a, b))

    def are_multiples(factor: float) -> bool:
        return factor != 1 and bool(np.all(np.abs(first - factor * second) <= _NEAR * np.abs(first)))

    worlds = [each.manifest.world_size for each in (a, b)]
    if are_multiples(worlds[0] / worlds[1]):
        # Each rank has the loss of all samples, and no gradient of the parts that come from other ranks.
        yield f"the losses of {names[worlds[0] < worlds[1]]} are multiplied by the number of ranks"
    numbers = [each.manifest.settings.get(PROGRAM, {}).get(GRADIENTS, 1) for each in (a, b)]
    if all(numbers) and are_multiples(numbers[1] / numbers[0]):
        # A recorder takes several gradients for those of microbatches, whose losses are averaged.
        more = numbers[0] < numbers[1]
        yield f"the losses of {names[more]} are means of {numbers[more]}, and those of {names[not more]} their sums"


def has_loss_alone(a: Recording, b: Recording) -> bool:
    """Whether one recording alone has losses, and the other one the norm of gradients."""
    return len({each.manifest.settings.get(LOSSES) == GRADIENT_NORM for each in (a, b)}) == 2
