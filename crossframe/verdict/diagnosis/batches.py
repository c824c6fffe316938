"""Describes how the batches of two runs differ."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from crossframe.recording import Batch, Recording

Fed = list[list[Batch]]
"""Batches by step and rank."""


def fed_to(recording: Recording, num_steps: int) -> Fed:
    """The batches of a recording's first steps."""
    world = range(recording.manifest.world_size)
    return [[recording.batch(step, rank) for rank in world] for step in range(num_steps)]


@dataclass(frozen=True)
class Other:
    """The first step at which batches differ, and how.

    Attributes:
        same_samples: whether each rank has the same samples in the same order with different values.
        lost_step: whether one run has the batches of several steps of the other run in one step.
    """

    step: int
    text: str
    same_samples: bool = False
    lost_step: bool = False


def batch_difference(a: Fed, b: Fed, names: tuple[str, str]) -> Other | None:
    """The first difference between batches, by digests and sample ids; None if there is none.

    Args:
        names: names of the two runs.
    """
    step = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not _same(x, y)), None)
    if step is None:
        return None
    for tell in (_own_contents, _own_order, _other_ranks, _joined, _repeated, _order, _shifted, _some_arrays):
        if text := tell(a, b, step, names):
            return Other(step, text, same_samples=tell is _own_contents, lost_step=tell is _joined)
    return Other(step, _other_samples(a, b, step, names))


def _same(x: list[Batch], y: list[Batch]) -> bool:
    if len(x) != len(y):
        return _samples(x) == _samples(y)
    return all(one.has_samples_of(other) for one, other in zip(x, y, strict=True))


def _samples(batches: list[Batch]) -> Counter[int]:
    return Counter(i for batch in batches for i in batch.sample_ids)


def _own_contents(a: Fed, b: Fed, step: int, names: tuple[str, str]) -> str | None:
    x, y = a[step], b[step]
    if len(x) != len(y) or any(p.sample_ids != q.sample_ids for p, q in zip(x, y, strict=True)):
        return None
    ranks = [rank for rank, (p, q) in enumerate(zip(x, y, strict=True)) if p.digest != q.digest]
    return f"ranks {ranks} received the same samples in the same order, but with different values"


def _own_order(a: Fed, b: Fed, step: int, names: tuple[str, str]) -> str | None:
    x, y = a[step], b[step]
    if len(x) == len(y) and all(Counter(p.sample_ids) == Counter(q.sample_ids) for p, q in zip(x, y, strict=True)):
        ranks = [rank for rank, (p, q) in enumerate(zip(x, y, strict=True)) if p.sample_ids != q.sample_ids]
        return f"ranks {ranks} received the same samples in a different order"
    return None


def _other_ranks(a: Fed, b: Fed, step: int, names: tuple[str, str]) -> str | None:
    x, y = a[step], b[step]
    if len(x) != len(y) or len({batch.sample_ids for batch in x}) != len(x):
        return None
    came_from = [next((i for i, p in enumerate(x) if p.sample_ids == q.sample_ids), None) for q in y]
    if None in came_from:
        return None
    if len(set(came_from)) < len(y):
        return (
            f"the ranks of {names[1]} received the batches of ranks {came_from} of {names[0]}: some twice, some never"
        )
    return f"the ranks of {names[1]} received the batches of ranks {came_from} of {names[0]}"


def _joined(a: Fed, b: Fed, step: int, names: tuple[str, str]) -> str | None:
    for longer, shorter, name, other in ((b, a, *names[::-1]), (a, b, *names)):
        joined: Counter[int] = Counter()
        for stop, batches in enumerate(shorter[step:], step + 1):
            joined += _samples(batches)
            if stop > step + 1 and joined == _samples(longer[step]):
                lost = stop - step - 1
                return (
                    f"{name} has the samples of steps {step} to {stop - 1} of {other} in one step: it left out {lost} optimizer "
                    f"step{'s' if lost > 1 else ''}"
                )
            if joined.total() >= _samples(longer[step]).total():
                break
    return None


def _repeated(a: Fed, b: Fed, step: int, names: tuple[str, str]) -> str | None:
    for fed, name, other in ((a, names[0], b), (b, names[1], a)):
        twice = [i for i, times in _samples(fed[step]).items() if times > 1]
        if twice and not any(times > 1 for times in _samples(other[step]).values()):
            return f"in {name} {len(twice)} samples were used more than once in the step"
    return None


def _order(a: Fed, b: Fed, step: int, names: tuple[str, str]) -> str | None:
    if _samples(a[step]) == _samples(b[step]):
        return "all ranks together received the same samples, distributed differently"
    return None


def _shifted(a: Fed, b: Fed, step: int, names: tuple[str, str]) -> str | None:
    def ahead(by: int, same: Callable[[list[Batch]], object]) -> bool:
        pairs = [(a[i + by], b[i]) for i in range(step, len(b)) if 0 <= i + by < len(a)]
        return bool(pairs) and all(same(x) == same(y) for x, y in pairs)

    for by in sorted((by for by in range(-len(a) + 1, len(a)) if by), key=abs):
        if ahead(by, _samples):
            steps = f"{abs(by)} step{'s' if abs(by) > 1 else ''}"
            return f"{names[1]} is {steps} {'ahead of' if by > 0 else 'behind'} {names[0]} in the data"
    every = [sum((_samples(batches) for batches in fed), Counter()) for fed in (a, b)]
    return "all steps together used the same samples in a different order" if every[0] == every[1] else None


def _some_arrays(a: Fed, b: Fed, step: int, names: tuple[str, str]) -> str | None:
    """Some arrays of the batch, such as the inputs, are the same, and others, such as labels or a mask, are not."""
    x, y = a[step], b[step]
    if len(x) != len(y) or {len(batch.inputs) for batch in (*x, *y)} != {len(x[0].inputs)}:
        return None
    pairs = [(p, q) for p, q in zip(x, y, strict=True) if p.inputs != q.inputs]
    others = sorted(
        {i for p, q in pairs for i, (one, other) in enumerate(zip(p.inputs, q.inputs, strict=True)) if one != other}
    )
    if not 0 < len(others) < len(x[0].inputs):
        return None
    called = f"of the {len(x[0].inputs)} arrays that the model is called with"
    if len(others) == 1:
        return f"{called}, only array {others[0] + 1} of {names[1]} differs from that of {names[0]}"
    places = " and ".join(str(i + 1) for i in others)
    return f"{called}, only arrays {places} of {names[1]} differ from those of {names[0]}"


def _other_samples(a: Fed, b: Fed, step: int, names: tuple[str, str]) -> str:
    x, y = _samples(a[step]), _samples(b[step])
    return f"of {sum(x.values())} samples in {names[0]} and {sum(y.values())} in {names[1]}, {sum((x & y).values())} are the same"
