"""Finds activations of two implementations that have one name but are not the same value.

One implementation returns the logits of a model's first head, another one the mean of two heads, and both train by the same loss.
Activations of two implementations are matched by the names of their modules, so such a pair is compared, differs by as much as
two unrelated values, and has no consequence. It is left out of the comparison, with a note, only if at the first step at which
it was recorded

- it is outside its bound, in all of its rows: values that differ in some rows are for `crossframe.verdict.unused_rows`;
- losses and gradients were recorded, and everything else but such activations is within its bound; and
- the difference would show in them, as `unused_rows` derives.

If anything else is outside its bound, the activation is judged like any other. So a fault in a model is found where it is: it has
consequences. Two recordings of one implementation have no such pairs.
"""

from collections.abc import Sequence

from crossframe.recording.event_format import BACKWARD, FORWARD, REDUCE
from crossframe.verdict.findings import Findings
from crossframe.verdict.measure.judge import Judgement
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import ACTIVATION, Quantity
from crossframe.verdict.unused_rows import JudgedStep, UnusedRows, differing_share

Of = tuple[str, str]
"""Module and use."""


class UnlikeActivations:
    """Collects the judgements of a walk, without those of activations that are not the same value.

    Attributes:
        findings, unused: what was collected; complete once `finish` was called.
    """

    def __init__(self, pair: Pair) -> None:
        self.findings, self.unused = Findings(), UnusedRows()
        self._pair = pair
        self._alike: set[Of] = set()
        self._unlike: set[Of] = set()
        self._step = -1
        self._begin(-1)

    def add(self, judged: list[Judgement], group: list[Quantity]) -> None:
        """Add the judgements of the next group in causal order."""
        q = group[0]
        if q.step != self._step:
            self.finish()
            self._begin(q.step)
        of = q.module, q.use
        if q.kind == ACTIVATION and of in self._unlike:
            return
        if q.kind == ACTIVATION and of not in self._alike and self._may_be_unlike(judged):
            if self._with is None:
                self._with = self.findings.copy()
            self._candidates.setdefault(of)
            self._judged.add(judged)
            self._judged.add_beyond([each for each in judged if each.beyond])
            self._with.add(judged, group)
            return
        if q.kind == ACTIVATION:
            self._alike.add(of)
        self._judged.add(judged)
        self._phases.add(q.kind if q.kind == FORWARD else q.phase)
        self._is_within = self._is_within and not any(each.beyond for each in judged)
        self.unused.add(judged)
        for findings in filter(None, (self.findings, self._with)):
            findings.add(judged, group)

    def finish(self) -> None:
        """Decide on the activations of the step that ends."""
        if self._with is None:
            return
        recorded = FORWARD in self._phases and not self._phases.isdisjoint((BACKWARD, REDUCE))
        if recorded and self._is_within and self._judged.visible:
            self._unlike |= self._candidates.keys()
            why = "they differ while losses and gradients agree, so they are not the same values in both"
            self._pair.unmatched.update(dict.fromkeys(self._candidates, why))
        else:
            self.findings, self.unused.has_consequence = self._with, True
            self._alike |= self._candidates.keys()
        self._with = None

    def _begin(self, step: int) -> None:
        self._step = step
        self._judged, self._phases, self._is_within = JudgedStep(), set[str](), True
        self._candidates: dict[Of, None] = {}
        # What is found if they are the same value.
        self._with: Findings | None = None

    def _may_be_unlike(self, judged: Sequence[Judgement]) -> bool:
        return (
            self._pair.two_programs
            and all(each.beyond and not each.one_sided for each in judged)
            and all(differing_share(each) is None for each in judged)
        )
