"""The ranks that have the samples of a step, in two recordings."""

from collections.abc import Iterator

from crossframe.recording import Recording, common_steps
from crossframe.recording.known_settings import PER_RANK


def is_by_rank(a: Recording, b: Recording) -> bool:
    """Whether ranks are compared one by one: at equal world sizes, unless samples are on other ranks (`are_redistributed`)."""
    return a.manifest.world_size == b.manifest.world_size and not are_redistributed(a, b)


def are_redistributed(a: Recording, b: Recording) -> bool:
    """Whether samples are on other ranks in the two recordings, at equal world sizes, and all ranks together have the same ones
    at each step. Then only what does not depend on the rank of a sample is compared, as at different world sizes, which needs the
    same (`why_incomparable`)."""
    if a.manifest.world_size != b.manifest.world_size:
        return False
    ranks = range(a.manifest.world_size)
    pairs = [(a.batch(step, rank), b.batch(step, rank)) for step in common_steps(a, b) for rank in ranks]
    others = [(x, y) for x, y in pairs if not x.has_samples_of(y)]
    # Samples that stay on their rank, but are not the same, were not moved.
    if not others or any(sorted(x.sample_ids) == sorted(y.sample_ids) for x, y in others):
        return False
    return can_be_joined(a, b)


def can_be_joined(a: Recording, b: Recording, *, in_place: bool = False) -> bool:
    """Whether the values of all ranks together can be compared, instead of those of each rank.

    Args:
        in_place: each rank has the same samples in both, so that statistics of a rank's samples are the same.
    """
    if not in_place and any(recording.manifest.settings.get(PER_RANK) for recording in (a, b)):
        return False
    return not any(reason for step in common_steps(a, b) for reason in other_samples(a, b, step, ("a", "b")))


def other_samples(a: Recording, b: Recording, step: int, names: tuple[str, str]) -> Iterator[str]:
    """What forbids to compare a step of two recordings whose ranks have other samples, as clauses.

    Args:
        names: names of the recordings.
    """
    samples = []
    for recording, name in zip((a, b), names, strict=True):
        fed = [recording.batch(step, rank).sample_ids for rank in range(recording.manifest.world_size)]
        if not all(fed):
            yield f"{name} has no sample ids, which are needed to compare different world sizes; record sample_ids"
        if len({len(ids) for ids in fed}) > 1:
            yield (
                f"the ranks of {name} have {[len(ids) for ids in fed]} samples: a mean over ranks is not a mean "
                "over samples, so the result depends on the world size"
            )
        samples.append(sorted(i for ids in fed for i in ids))
    if samples[0] != samples[1]:
        yield f"{names[0]} and {names[1]} have different samples"
