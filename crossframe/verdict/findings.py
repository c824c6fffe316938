"""Collects the judgements of a comparison: the first quantity outside its bound, the first bitwise difference, the largest
differences."""

import copy
import math
import sys
from dataclasses import replace

from crossframe.recording.event_format import FORWARD, UPDATE
from crossframe.verdict.measure.judge import Judgement
from crossframe.verdict.measure.quantities import ACTIVATION, Quantity
from crossframe.verdict.result import Judged


class Findings:
    """The judgements of a comparison so far."""

    def __init__(self) -> None:
        self.equal = True
        self.first: Judgement | None = None
        # The group of `first`: the same quantity on all ranks.
        self.group: list[Judgement] = []
        # The first quantity that differs in bits.
        self.in_bits: Judgement | None = None
        # The largest share of its bound that any quantity before `first` uses.
        self.used_before = 0.0
        # The largest share that any quantity outside its bound uses, and whether no perturbed run can bring one of them inside.
        self.most_beyond, self.settled = 0.0, False
        self.not_finite: Judgement | None = None
        # The first activation before `first` whose dtypes differ.
        self.other_dtype: Quantity | None = None
        self.losses: list[float] = []
        self.parameters: dict[int, float] = {}
        self.judged: list[Judged] = []
        self._at_first = self._at_bits = 0

    def entry_for(self, judgement: Judgement | None) -> Judged | None:
        """The entry of `judged` for a judgement."""
        if judgement is None:
            return None
        if judgement is self.first:
            return self.judged[self._at_first]
        if judgement is self.in_bits:
            return self.judged[self._at_bits]
        q = judgement.quantity
        same = (one for one in self.judged if (one.step, one.phase, one.name) == (q.step, q.phase, q.name))
        return next(same, None)

    def add(self, group: list[Judgement], quantities: list[Quantity]) -> None:
        """Add the judgements of a group.

        Args:
            quantities: the judged quantities, with all elements.
        """
        worst = max(group, key=lambda judgement: (judgement.beyond, judgement.difference))
        q = worst.quantity
        phase, step = q.phase, q.step
        known = q.bound != math.inf or worst.one_sided
        used = worst.used if known else None
        equal = all(judgement.equal for judgement in group)
        # Interned because names repeat at every step and there may be millions of entries.
        name = sys.intern(q.name)
        self.judged.append(Judged(step, phase, q.event, q.unit, name, worst.difference, used, worst.beyond, equal))
        if self.in_bits is None and not equal:
            both = zip(group, quantities, strict=True)
            apart = [
                replace(judged, quantity=replace(q, bound=judged.quantity.bound))
                for judged, q in both
                if not judged.equal
            ]
            self._at_bits = len(self.judged) - 1
            self.in_bits = max(apart, key=lambda judgement: (judgement.beyond, judgement.whole))
        self.equal = self.equal and equal
        if worst.beyond:
            beyond = [judgement for judgement in group if judgement.beyond]
            self.most_beyond = max(self.most_beyond, *(judgement.used for judgement in beyond))
            self.settled = self.settled or not all(judgement.undecided for judgement in beyond)
        if self.first is None:
            if self.other_dtype is None and q.kind == ACTIVATION and q.dtypes[0] != q.dtypes[1]:
                self.other_dtype = q
            if worst.beyond:
                self.first, self._at_first, self.group = worst, len(self.judged) - 1, group
            else:
                self.used_before = max(self.used_before, *(judgement.used for judgement in group))
        if self.not_finite is None:
            self.not_finite = next((judgement for judgement in group if judgement.both_not_finite), None)
        if q.kind == FORWARD:
            self.losses.append(worst.difference)
        elif phase == UPDATE:
            # A zero-gradient parameter (bound inf) counts only if it is not finite on one side.
            apart = max(judgement.whole for judgement in group)
            self.parameters[step] = max(self.parameters.get(step, 0.0), apart if known else 0.0)

    def copy(self) -> "Findings":
        """Findings to which further judgements can be added without changing these."""
        made = copy.copy(self)
        made.group, made.judged, made.losses = list(self.group), list(self.judged), list(self.losses)
        made.parameters = dict(self.parameters)
        return made

    def set_aside(self) -> None:
        """Judge nothing that is outside its bound: it has no consequence (`crossframe.verdict.unused_rows`)."""
        self.judged = [replace(each, used=None, beyond=False) if each.beyond else each for each in self.judged]
        self.first, self.group, self.most_beyond = None, [], 0.0
        self.used_before = max((each.used for each in self.judged if each.used is not None), default=0.0)
