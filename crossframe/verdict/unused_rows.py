"""Finds activations that differ in rows that nothing uses, such as padded positions that the loss leaves out.

Kernels and formulas may give any value there: one attention kernel returns zeros for a row that sees no key, another one the
mean of all values. Such a difference is large and appears at once, as a bug does, but it has no consequence. It is set aside
only if

- every activation outside its bound has rows (vectors along its last dim) that agree and are not zero, so both sides compute the
  same function there, and the rows that differ are not the same ones in another order, from which nothing follows either;
- everything else, at all compared steps, is within its bound: losses, gradients, their norm, optimizer state and parameters; and
- at each of these steps, each difference is at least n times the bounds of the loss and of all gradients taken together, where n
  is the number of rows that the activation has at this step, in all microbatches and on all ranks.

The last condition gives the others their power. Let norm(a - b) / norm(a) be D in one microbatch of one rank. Then some row
differs by at least D, in units of the root mean square of its rows. Losses, gradients, pooling and uniform attention are means
over at most n rows. A mean that includes this row as it includes the others differs by at least D / n, which would exceed a
bound: with 64 rows and a D of 0.2, bounds must be below 0.3 %. Bounds in bfloat16 and float16 are not as tight, so nothing is set
aside there, unless a batch has very few rows.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from crossframe.recording.event_format import BACKWARD, FORWARD, REDUCE
from crossframe.verdict.measure.judge import Judgement
from crossframe.verdict.measure.quantities import ACTIVATION, finite


@dataclass
class JudgedStep:
    """What was judged at one step, and whether a difference of activations would show in it.

    Attributes:
        smallest: by name, the smallest difference of an activation outside its bound.
        rows: by name, the number of rows of an activation.
        loss: the largest bound of a loss, relative to the loss.
        squares: the sums of the squares of all gradients' limits and of their norms.
    """

    smallest: dict[str, float] = field(default_factory=dict)
    rows: Counter[str] = field(default_factory=Counter)
    loss: float = math.inf
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, group: Sequence[Judgement]) -> None:
        """Add the judgements of a group."""
        q = group[0].quantity
        if q.kind == ACTIVATION:
            self.rows[q.name] += sum(math.prod(each.quantity.a.shape[:-1]) for each in group)
        elif q.kind == FORWARD:
            self.loss = max(each.quantity.bound or 0.0 for each in group)
        elif q.kind in (BACKWARD, REDUCE):
            for each in group:
                limit = (each.quantity.bound or 0.0) * each.quantity.scale
                if math.isfinite(limit):
                    self.squares[0] += limit**2
                    self.squares[1] += each.quantity.norms[0] ** 2

    def add_beyond(self, group: Sequence[Judgement]) -> None:
        """Add the judgements of an activation that are outside their bounds."""
        name = group[0].quantity.name
        self.smallest[name] = min(self.smallest.get(name, math.inf), *(each.difference for each in group))

    @property
    def visible(self) -> bool:
        """Whether a mean over all rows that includes one that differs would exceed a bound."""
        limits, norms = self.squares
        bound = max(self.loss, math.sqrt(limits / norms) if norms else math.inf)
        return all(smallest >= self.rows[name] * bound for name, smallest in self.smallest.items())


class UnusedRows:
    """The activations of one comparison that are outside their bounds, and what could follow from them.

    Attributes:
        has_consequence: whether anything else is outside its bound.
    """

    def __init__(self) -> None:
        self._first: Judgement | None = None
        self._num_activations = 0
        self._largest_share = 0.0
        self.has_consequence = False
        self._steps: defaultdict[int, JudgedStep] = defaultdict(JudgedStep)

    def add(self, group: Sequence[Judgement]) -> None:
        """Add the judgements of the next group in causal order."""
        q = group[0].quantity
        if any(each.beyond for each in group):
            self._add_beyond(group)
        self._steps[q.step].add(group)

    def _add_beyond(self, group: Sequence[Judgement]) -> None:
        beyond = [each for each in group if each.beyond]
        shares = [differing_share(each) for each in beyond]
        if any(share is None for share in shares):
            self.has_consequence = True
            return
        self._first = self._first or max(beyond, key=lambda each: each.difference)
        self._num_activations += 1
        self._largest_share = max(self._largest_share, *(share for share in shares if share is not None))
        self._steps[beyond[0].quantity.step].add_beyond(beyond)

    def describe(self) -> str | None:
        """The values that nothing uses as a sentence; None if nothing differs, or if anything may follow from it."""
        if self._first is None or self.has_consequence:
            return None
        if not all(step.visible for step in self._steps.values()):
            return None
        q, also = self._first.quantity, self._num_activations - 1
        where = f" on rank {q.rank}" if q.rank is not None else ""
        more = f", and {also} more activation{'s' if also > 1 else ''} after it" if also else ""
        return (
            f"values that nothing uses differ, such as those of padded positions: at step {q.step} the {q.name} (microbatch "
            f"{q.microbatch}){where} by {self._first.difference:.1e}{more}, in at most {100 * self._largest_share:.0f} % of the "
            "rows; other rows, losses, gradients and parameters agree within bounds that a mean over all rows would exceed"
        )


def differing_share(judgement: Judgement) -> float | None:
    """The share of an activation's rows that differ; None if no other row shows that both sides compute the same function, if the
    rows are the same in another order, or if it is no activation of finite elements.

    A row differs if norm(a - b) over it exceeds limit / sqrt(number of rows): without any, the norm over all rows would be within
    the limit. A row that is smaller than this agrees with any other of its size, and shows nothing.
    """
    q = judgement.quantity
    if q.kind != ACTIVATION or q.sketched or judgement.one_sided or judgement.both_not_finite or q.bound is None:
        return None
    if q.a.ndim < 2 or not q.a.size or q.a.shape != q.b.shape:
        return None
    a, b = (finite(side).reshape(-1, q.a.shape[-1]) for side in (q.a, q.b))
    most = q.bound * q.scale / math.sqrt(len(a))
    differs = np.linalg.norm(a - b, axis=1) > most
    shows = ~differs & (np.linalg.norm(a, axis=1) > most)
    return float(differs.mean()) if shows.any() and not _reordered(a[differs], b[differs], most) else None


def _reordered(a: np.ndarray, b: np.ndarray, most: float) -> bool:
    """Whether two or more rows agree in another order: their sorted products with any vector of norm 1 then do too."""
    angles = np.arange(a.shape[1])
    for vector in (np.cos(angles), np.sin(angles + 1), np.ones(a.shape[1])):
        x, y = (np.sort(side @ (vector / np.linalg.norm(vector))) for side in (a, b))
        if np.abs(x - y).max(initial=0.0) > most:
            return False
    return len(a) > 1
