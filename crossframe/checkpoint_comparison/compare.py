"""The verdict on two stored models."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from crossframe.checkpoint_comparison.missing_update import missing_update
from crossframe.checkpoint_comparison.stored import StoredModel
from crossframe.checkpoint_comparison.tensors import VERDICTS, Kind, TensorDifference, difference_of
from crossframe.quoting import quote
from crossframe.verdict.verdicts import Verdict, overall

_KINDS = list(Kind)
# Kinds of differences that one optimizer step may make.
_OF_AN_UPDATE = frozenset({Kind.BEYOND, Kind.UNRELATED, Kind.ROUNDING})


@dataclass(frozen=True)
class CheckpointVerdict:
    """The result of comparing two stored models.

    Attributes:
        a, b: their names.
        verdict: the gravest of all differences.
        reason: what differs first, as a sentence.
        num_tensors: the number of tensors that both have.
        num_equal: the number of these that are equal bit for bit.
        differences: the gravest kinds first.
    """

    a: str
    b: str
    verdict: Verdict
    reason: str
    num_tensors: int
    num_equal: int
    differences: tuple[TensorDifference, ...]

    def to_json(self) -> dict:
        """The result as a JSON object."""
        return {
            "a": self.a,
            "b": self.b,
            "verdict": self.verdict.value,
            "reason": self.reason,
            "tensors": self.num_tensors,
            "equal": self.num_equal,
            "differences": [each.to_json() for each in self.differences],
        }


def compare_checkpoints(a: StoredModel, b: StoredModel) -> CheckpointVerdict:
    """Compare two stored models tensor by tensor.

    Equal bits are *equal*. Casts that round, and differences within the bounds of the dtype
    (`crossframe.verdict.measure.bounds_by_dtype`), are *rounding*. Tensors that were moved, truncated or lost, and parameters
    without an update that the optimizer state has seen, are a *bug*. Other names, shapes, initial values or steps are
    *incomparable*. Any other difference is *inconclusive*: training may have amplified rounding.
    """
    labels = (a.name, b.name) if a.name != b.name else ("a", "b")
    shared = [name for name in a.tensors if name in b.tensors]
    found = [each for name in shared if (each := difference_of(name, a.tensors[name](), b.tensors[name](), labels))]
    num_equal = len(shared) - len(found)
    whole = list(_of_models(a, b, labels))
    apart = {each.name: each for each in found}
    moved = [name for name in apart if ":" not in name and apart[name].kind in _OF_AN_UPDATE]
    with_state = [name for name in moved if any(each.endswith(f":{name}") for each in shared)]
    state_equal = not any(":" in name for name in apart)
    if not whole and with_state and state_equal and (update := missing_update(a, b, with_state)) is not None:
        earlier, later = labels[1 - update.later], labels[update.later]
        text = (
            f"the optimizer states are equal, and the parameters of {later} are those of {earlier} after one more update, with "
            f"a learning rate of about {update.learning_rate:.2g} (this leaves {100 * update.left:.2g} % of the difference): "
            f"{earlier} has parameters before the optimizer's step and its state after it"
        )
        whole.append(TensorDifference("", Kind.UPDATE, text, VERDICTS[Kind.UPDATE]))
    found.sort(key=lambda each: (_KINDS.index(each.kind), each.name))
    verdict = overall(each.verdict for each in (*whole, *found))
    if not whole and not found:
        verdict = Verdict.EQUAL
    values = list(_of_values(a, b, labels))
    deciding = next((each for each in (*whole, *found) if each.verdict is verdict), None)
    if deciding is None:
        reason = "; ".join([f"all {len(shared)} tensors are equal in every bit", *(each.text for each in values[:1])])
    else:
        counts = Counter(each.kind for each in found)
        alike = counts[deciding.kind] - 1 if deciding.name else 0
        reason = deciding.text + (f"; and {alike} more of this kind" if alike > 0 else "")
    if not shared:
        verdict, reason = (
            Verdict.INCOMPARABLE,
            (
                f"no tensor has the same name in both: {_first(a)} in {labels[0]}, {_first(b)} in {labels[1]}; "
                "crossframe map finds which is which"
            ),
        )
    return CheckpointVerdict(*labels, verdict, reason, len(shared), num_equal, (*whole, *found, *values))


def _first(model: StoredModel) -> str:
    return quote(next(iter(model.tensors), None))


def _of_models(a: StoredModel, b: StoredModel, labels: tuple[str, str]) -> Iterator[TensorDifference]:
    """Differences of names and steps."""
    if a.steps and b.steps and a.steps != b.steps:
        x, y = (", ".join(map(str, sorted(model.steps))) for model in (a, b))
        text = f"the optimizer's number of steps is {x} in {labels[0]} and {y} in {labels[1]}"
        if len(a.steps) == len(b.steps) == 1:
            (first,), (second,) = a.steps, b.steps
            number = abs(first - second)
            text += f": {labels[0 if first < second else 1]} misses {number} step{'s' * (number > 1)}"
        yield TensorDifference("", Kind.STEP, text, VERDICTS[Kind.STEP])
    for own, other, label in ((a, b, labels[0]), (b, a, labels[1])):
        only = [name for name in own.tensors if name not in other.tensors]
        # A checkpoint of the model alone is compared with one that has the optimizer's state too.
        if not any(":" in name for name in other.tensors):
            only = [name for name in only if ":" not in name]
        if only:
            more = f" and {len(only) - 1} more" if len(only) > 1 else ""
            yield TensorDifference(
                "", Kind.MISSING, f"{quote(only[0])}{more} is only in {label}", VERDICTS[Kind.MISSING]
            )


def _of_values(a: StoredModel, b: StoredModel, labels: tuple[str, str]) -> Iterator[TensorDifference]:
    """Differences of values that are no tensors, such as learning rates, which do not decide."""
    for key in a.values:
        if key in b.values and a.values[key] != b.values[key]:
            text = f"the value {quote(key)} is {quote(a.values[key])} in {labels[0]}, {quote(b.values[key])} in {labels[1]}"
            yield TensorDifference("", Kind.VALUE, text, VERDICTS[Kind.VALUE])
