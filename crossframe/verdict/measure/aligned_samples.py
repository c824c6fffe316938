"""Aligns activations of two world sizes sample by sample, if sample ids were recorded.

A module's output for a sample must not depend on the rank of the sample. Rows of the first dim are samples, in the order of the
rank's sample ids, microbatches one after the other. Activations with another first dim (flattened tokens, time first) are
skipped.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from crossframe.recording import Recording

At = tuple[int, str, str]
"""(microbatch, module, use)."""


def shared_activations(a: Recording, b: Recording, step: int) -> list[At]:
    """The activations that both recorded at a step, in the order of a."""
    theirs = set(b.activations(step))
    return [at for at in a.activations(step) if at in theirs]


@dataclass(frozen=True)
class Rows:
    """The location of each sample of a step in one recording.

    A sample that occurs several times, as where models take turns with it, corresponds by its occurrence.

    Attributes:
        ids: by rank and microbatch, the samples in order, each as (sample id, earlier occurrences).
        place: by sample, (rank, microbatch, row).
    """

    ids: list[list[tuple[tuple[int, int], ...]]]
    place: dict[tuple[int, int], tuple[int, int, int]]


def rows_of(recording: Recording, step: int, *, numbered: bool = False) -> Rows | None:
    """The locations of the samples; None if not all ranks recorded sample ids that divide into microbatches.

    Args:
        numbered: number the samples in their order instead of using their ids.
    """
    microbatches = 1 + max((at[0] for at in recording.activations(step)), default=0)
    ids: list[list[tuple[tuple[int, int], ...]]] = []
    place: dict[tuple[int, int], tuple[int, int, int]] = {}
    occurred: Counter[int] = Counter()
    for rank in range(recording.manifest.world_size):
        fed = recording.batch(step, rank).sample_ids
        size = len(fed) // microbatches
        if not fed or size * microbatches != len(fed):
            return None
        if numbered:
            fed = tuple(range(len(place), len(place) + len(fed)))
        samples = []
        for i, sample in enumerate(fed):
            samples.append((sample, occurred[sample]))
            occurred[sample] += 1
            place[samples[-1]] = rank, i // size, i % size
        ids.append([tuple(samples[i * size : (i + 1) * size]) for i in range(microbatches)])
    return Rows(ids, place)


def aligned(a: Recording, b: Recording, step: int) -> Iterator[tuple[At, int, np.ndarray, np.ndarray]]:
    """Yield (activation, rank in a, elements in a, elements of the same samples in b), in the order of a's activations."""
    numbered = _in_one_order(a, b, step)
    rows = rows_of(a, step, numbered=numbered), rows_of(b, step, numbered=numbered)
    if rows[0] is None or rows[1] is None:
        return
    theirs = set(b.activations(step))
    for at in a.activations(step):
        microbatch, module, use = at
        held: dict[tuple[int, int], np.ndarray | None] = {}
        for rank, fed in enumerate(rows[0].ids):
            ids = fed[microbatch]
            ours = _elements(a, step, rank, at, len(ids))
            found = []
            for sample in ids:
                where = rows[1].place.get(sample)
                if where is None or (where[1], module, use) not in theirs:
                    break
                other, call, row = where
                if (other, call) not in held:
                    held[other, call] = _elements(b, step, other, (call, module, use), len(rows[1].ids[other][call]))
                block = held[other, call]
                if block is None:
                    break
                found.append(block[row])
            # Shapes of samples depend on how far microbatches are padded.
            if ours is not None and len(found) == len(ids) and all(each.shape == ours.shape[1:] for each in found):
                yield at, rank, ours, np.stack(found)


def in_place(a: Recording, b: Recording, step: int) -> bool:
    """Whether the samples of each rank and microbatch are the same in the same order, next to arrays that only one model is
    called with, so that whole activations correspond."""
    microbatches = ({at[0] for at in recording.activations(step)} for recording in (a, b))
    return _in_one_order(a, b, step) and len(set(map(frozenset, microbatches))) == 1


def unmatched(a: Recording, b: Recording, step: int, at: At) -> str:
    """Why an activation that both recorded could not be matched by sample, as a clause; "" if samples differ themselves."""
    numbered, of_sample = _in_one_order(a, b, step), []
    first, second = (rows_of(recording, step, numbered=numbered) for recording in (a, b))
    if first is None or second is None:
        return "sample ids are not known on all ranks, or do not divide into microbatches"
    if first.place.keys() != second.place.keys():
        return ""
    for recording, fed in ((a, first), (b, second)):
        held = next(each for each in recording.activations(step) if each[1:] == at[1:])
        for rank, ids in enumerate(fed.ids):
            shape, samples = recording.activation_shape(step, rank, *held), len(ids[held[0]])
            if shape[:1] != (samples,):
                return f"its shape is {shape} for {samples} samples, which must be the first dim"
            if recording.activation_sketch(step, rank, *held) is not None:
                return "it is too large to be recorded whole, and a sketch cannot be divided into samples"
            of_sample.append(shape[1:])
    if len(different := sorted(set(of_sample))) > 1:
        return f"its samples have the shapes {different}"
    return "not all of its samples were recorded on both sides"


def _in_one_order(a: Recording, b: Recording, step: int) -> bool:
    """Whether samples correspond by their order instead of by their ids, because these depend on arrays that only one model is
    called with. Requires the same order of all other arrays, and distinct samples."""
    if a.manifest.world_size != b.manifest.world_size:
        return False
    fed = [(a.batch(step, rank), b.batch(step, rank)) for rank in range(a.manifest.world_size)]
    return all(
        len(x.inputs) != len(y.inputs)
        and x.is_in_order_of(y)
        and len(set(x.sample_ids)) == len(set(y.sample_ids)) == len(x.sample_ids)
        for x, y in fed
    )


def _elements(recording: Recording, step: int, rank: int, at: At, num_rows: int) -> np.ndarray | None:
    """An activation whose rows are samples; None for other activations and for sketches."""
    shape = recording.activation_shape(step, rank, *at)
    if not shape or shape[0] != num_rows or recording.activation_sketch(step, rank, *at) is not None:
        return None
    return recording.activation(step, rank, *at)
