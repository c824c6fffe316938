"""Tensors that one recording alone has, such as activations whose parts a recorder could not put together."""

from collections.abc import Iterator

from crossframe.recording.event_format import BACKWARD, FORWARD, PARAMETERS, REDUCE, STATE, UPDATE
from crossframe.recording.module_calls import called_module
from crossframe.recording.reader import Recording
from crossframe.verdict.measure.pair import Pair

_WORDS = {
    PARAMETERS: "initial values",
    FORWARD: "activations",
    BACKWARD: "local gradients",
    REDUCE: "reduced gradients",
    STATE: "optimizer state",
}
_STEPS = 4
"""The number of first steps in which a kind of tensors is looked for."""


def recorded_on_one_side(pair: Pair, names: tuple[str, str], *, own: bool) -> Iterator[str]:
    """The kinds of tensors and the activations that one of two recordings lacks, as clauses.

    Args:
        own: whether the modules of both have the same names without a map.
    """
    for phase, words in _WORDS.items():
        if (phase == FORWARD and not own) or (phase == BACKWARD and not pair.by_rank):
            continue
        have = [_has_any(side, phase, pair.steps[:_STEPS]) for side in (pair.a, pair.b)]
        if have[0] != have[1]:
            yield f"{words}, which {names[have.index(True)]} alone recorded, are not compared"
        elif all(have) and phase == BACKWARD:
            yield from _local_grads(pair, names)
    if own:
        yield from _activations(pair, names)
    have = [any(side.buffers(step) for step in pair.steps[:_STEPS]) for side in (pair.a, pair.b)]
    known = [bool(has or side.initial_buffers()) for has, side in zip(have, (pair.a, pair.b), strict=True)]
    if any(have) and not all(known):
        yield f"buffers, which {names[known.index(True)]} alone recorded, are not compared"
    for name, mine, theirs in zip(names, (pair.a, pair.b), (pair.b, pair.a), strict=True):
        alone = [
            each
            for each in dict.fromkeys(each for step in pair.steps[:_STEPS] for each in mine.buffers(step))
            if not any(theirs.has_buffer(step, each) for step in (-1, *pair.steps[:_STEPS]))
        ]
        if alone and all(known):
            yield _not_compared(f"the buffer {alone[0]!r}", len(alone) - 1, "buffer", name)
    yield from _updates(pair, names)


def _local_grads(pair: Pair, names: tuple[str, str]) -> Iterator[str]:
    of_params, lacking = pair.names(backward=True), dict[str, int]()
    for step in pair.steps[:_STEPS]:
        if all(any(side.has(BACKWARD, step, name) for name in of_params) for side in (pair.a, pair.b)):
            found = {
                name: pair.lacks_local_grad(step, name) for name in of_params if pair.any_has(BACKWARD, step, name)
            }
            lacking |= {name: side for name, side in found.items() if side is not None}
    for side in (0, 1):
        if without := [name for name, lacks in lacking.items() if lacks == side]:
            yield _not_compared(f"the local gradient of {without[0]!r}", len(without) - 1, "parameter", names[1 - side])


def _not_compared(first: str, num_more: int, noun: str, name: str, *, verb: str = "is") -> str:
    """The clause on tensors that one side lacks: the first one, of which the verb is, and the number of the others."""
    more = f" and {num_more} more {noun}{'s' * (num_more > 1)}" if num_more else ""
    return f"{first}{more}, which {name} alone recorded, {'are' if num_more else verb} not compared"


def _has_any(recording: Recording, phase: str, steps: tuple[int, ...]) -> bool:
    if phase == FORWARD:
        return any(recording.activations(step) for step in steps)
    params = recording.manifest.params
    if phase == STATE:
        return any(recording.state_slots(step, name) for step in steps for name in params)
    return any(recording.has(phase, step, name) for step in steps for name in params)


def _updates(pair: Pair, names: tuple[str, str]) -> Iterator[str]:
    """Parameters after a step, such as the last one of a script that adds updates by a function of its own."""
    for name, side, other in zip(names, (pair.a, pair.b), (pair.b, pair.a), strict=True):
        steps = [
            step for step in pair.steps if _has_any(side, UPDATE, (step,)) and not _has_any(other, UPDATE, (step,))
        ]
        if steps:
            yield _not_compared(f"the parameters after step {steps[0]}", len(steps) - 1, "step", name, verb="are")


def _activations(pair: Pair, names: tuple[str, str]) -> Iterator[str]:
    """Those of the first step at which both recorded any."""
    sides = pair.a, pair.b
    step = next((step for step in pair.steps if all(side.activations(step) for side in sides)), None)
    if step is None:
        return
    recorded = [dict.fromkeys((module, use) for _, module, use in side.activations(step)) for side in sides]
    modules = [{module for module, _ in each} for each in recorded]
    with_params = {name.rpartition(".")[0] for name in pair.names()}
    for i in (0, 1):
        # A module that only one of them watches is no part of the other model's units.
        known = modules[1 - i] | with_params
        alone = [at for at in recorded[i] if at not in recorded[1 - i] and called_module(at[0]) in known]
        if alone:
            module, use = alone[0]
            what = f"the {use} of {f'{module!r}' if module else 'the model'}"
            yield _not_compared(what, len(alone) - 1, "activation", names[i])
