"""Whether two recordings are of the same run, so that a difference between them means anything."""

from collections.abc import Iterator

from crossframe.recording import Recording
from crossframe.recording.known_settings import PER_RANK
from crossframe.shown import shown

_SAME = ("model", "dtype", "steps", "learning_rate", "seed")
# Of the free settings those that make another training, where both recordings name them.
_SAME_SETTINGS = ("optimizer", "weight_decay", "momentum", "clip", "accumulate")


def labels(a: Recording, b: Recording) -> tuple[str, str]:
    """What to call two recordings: by framework where that tells them apart, else by directory."""
    by_framework = (a.manifest.framework, b.manifest.framework)
    by_name = (a.directory.resolve().name, b.directory.resolve().name)
    for names in (by_framework, by_name):
        if names[0] != names[1]:
            return names
    return str(a.directory), str(b.directory)


def why_incomparable(a: Recording, b: Recording) -> str | None:
    """The first reason in one sentence, or None where the two can be compared.

    At one world size every rank must have been fed the same batch (by digest) at every step. At two, the ranks of each must
    together have been fed the same samples, all ranks the same number of them: a mean over ranks is a mean over samples only
    then, and where no module computes with all samples of its rank at once, as batch norm does. What a loop did not tell (its
    seed, its learning rate, how many steps it was to make) is not asked for.
    """
    return next(_reasons(a, b), None)


def _reasons(a: Recording, b: Recording) -> Iterator[str]:
    first, second = labels(a, b)
    for field in _SAME:
        x, y = getattr(a.manifest, field), getattr(b.manifest, field)
        if None not in (x, y) and x != y:
            advice = "; if both are one model, record both with the same Recorder(..., name=...)" * (field == "model")
            yield f"{field.replace('_', ' ')} differs: {x!r} in {first}, {y!r} in {second}{advice}"
    for setting in _SAME_SETTINGS:
        x, y = a.manifest.settings.get(setting), b.manifest.settings.get(setting)
        if None not in (x, y) and x != y:
            yield f"{setting.replace('_', ' ')} differs: {x!r} in {first}, {y!r} in {second}"
    ours, theirs = a.manifest.params, b.manifest.params
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if name not in ours or name not in theirs:
            yield f"parameter {name!r} is only in {first if name in ours else second}"
        else:
            for field in ("shape", "dtype", "requires_grad"):
                x, y = getattr(ours[name], field), getattr(theirs[name], field)
                if x != y:
                    yield f"parameter {name!r} has {field} {x!r} in {first}, {y!r} in {second}"
    if a.manifest.world_size != b.manifest.world_size:
        for recording, label in ((a, first), (b, second)):
            if found := recording.manifest.settings.get(PER_RANK):
                yield (
                    f"in {label} {shown(found)} normalises over the samples of its own rank, so that another world size computes "
                    "something else; compare at one world size"
                )
    if min(a.num_steps, b.num_steps) == 0:
        yield f"no step is whole in {first if a.num_steps == 0 else second}"
    for step in range(min(a.num_steps, b.num_steps)):
        if a.manifest.world_size == b.manifest.world_size:
            for rank in range(a.manifest.world_size):
                if a.batch(step, rank).digest != b.batch(step, rank).digest:
                    yield f"the batch of rank {rank} at step {step} differs between {first} and {second}"
        else:
            yield from _other_samples(a, b, step)


def _other_samples(a: Recording, b: Recording, step: int) -> Iterator[str]:
    samples = []
    for recording, label in zip((a, b), labels(a, b), strict=True):
        fed = [recording.batch(step, rank).sample_ids for rank in range(recording.manifest.world_size)]
        if not all(fed):
            yield (
                f"at step {step} {label} does not say which samples its ranks were fed, so that nobody knows whether another "
                "world size was fed the same; record sample_ids"
            )
        if len({len(ids) for ids in fed}) > 1:
            yield (
                f"at step {step} the ranks of {label} were fed {[len(ids) for ids in fed]} samples: its mean over ranks is "
                "no mean over samples, so another world size computes something else"
            )
        samples.append(sorted(i for ids in fed for i in ids))
    if samples[0] != samples[1]:
        yield f"at step {step} the ranks of {labels(a, b)[0]} were not fed the same samples as those of {labels(a, b)[1]}"
