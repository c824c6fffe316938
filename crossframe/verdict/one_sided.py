"""Tensors that one recording alone has, such as activations whose parts a recorder could not put together."""

from collections.abc import Iterator

from crossframe.recording.event_format import BACKWARD
from crossframe.recording.reader import Recording
from crossframe.verdict.measure.pair import Pair


def recorded_on_one_side(pair: Pair, names: tuple[str, str]) -> Iterator[str]:
    """The activations and local gradients that one of two recordings of the same modules lacks, as clauses."""
    sides = pair.a, pair.b
    step = next((step for step in pair.steps if all(side.activations(step) for side in sides)), None)
    if step is None:
        return
    recorded = [dict.fromkeys((module, use) for _, module, use in side.activations(step)) for side in sides]
    modules = [{module for module, _ in own} for own in recorded]
    with_params = {name.rpartition(".")[0] for name in pair.names()}
    for i in (0, 1):
        # A module that only one of them watches is no part of the other model's units.
        known = modules[1 - i] | with_params
        alone = [
            (module, use) for module, use in recorded[i] if (module, use) not in recorded[1 - i] and module in known
        ]
        if alone:
            module, use = alone[0]
            more = f" and {len(alone) - 1} more activations" if len(alone) > 1 else ""
            what = f"the {use} of {f'{module!r}' if module else 'the model'}{more}"
            yield f"{what}, which {names[i]} alone recorded, {'are' if more else 'is'} not compared"
    if pair.same_world:
        have = [_has_local_gradients(side, step) for side in sides]
        if have[0] != have[1]:
            yield f"local gradients, which {names[have.index(True)]} alone recorded, are not compared"


def _has_local_gradients(recording: Recording, step: int) -> bool:
    return any(recording.has(BACKWARD, step, name) for name in recording.manifest.params)
