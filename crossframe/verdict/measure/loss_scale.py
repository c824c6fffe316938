"""Detects a loop that multiplies its loss by a factor and divides its gradients by it before the optimizer steps.

A recorder takes the scale of torch's GradScaler out of losses and local gradients. It cannot see a factor that a loop applies
itself. In this case the local gradients of one recording are those of the other times one factor, on all ranks and for all
parameters, and so are the losses, unless the loop gives the recorder the loss without the factor. The reduced gradients, which
the optimizer uses, agree. A loss that is multiplied without dividing the gradients multiplies the reduced gradients too. Updates
do not distinguish the two cases, because Adam's do not depend on a factor of the gradients.

The factor only brings both recordings to the same units. Every quantity is then judged by its own bound, so a wrong loss or
gradient on one rank or of one parameter is found. If a loop clips its gradients itself, they are recorded after it, and clipping
takes out any factor. So the unscaled side's reduced gradients must be the mean or the sum of its local gradients, up to the
roundings of a reduction. Factors below two are never attributed to a scale: the reduced gradients could then agree within the
rounding of a coarse dtype although the optimizer receives wrong ones.

The factor is the weighted median over all local gradients. Each of them has its own rounding, so the median is uncertain by less
than the middle half of the factors is wide, and all have the rounding of both losses in common, which is 2 u. A power of two that
is no farther away is the factor, because scalers use powers of two; nothing depends on this but that no rounding is added.

A loop may also divide the loss of a rank by the samples or tokens of all ranks, and sum gradients over ranks. Then the losses of
ranks are shares, whose sum is the loss of the step. At another world size the mean over ranks would be another number.

A contrastive loss over cached features has a backward for each microbatch, and each time its value is that of the whole batch. A
recorder adds them, so that the loss of a step is that of the batch times the number of microbatches, while gradients agree.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crossframe.dtypes import unit_roundoff
from crossframe.recording import Recording
from crossframe.recording.event_format import BACKWARD, REDUCE
from crossframe.recording.known_settings import LOSSES, MEAN
from crossframe.verdict.measure.bounds_by_dtype import reduces_in
from crossframe.verdict.measure.clipping import Multiplied, clipped_on_one_side
from crossframe.verdict.measure.metrics import norm, weighted_median
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.values import assemble, match_values, rank_values

_LEAST = 2.0
"""The smallest factor that is attributed to a scale."""
_NEAR_LOSSES = 0.01
"""Relative difference up to which losses of the whole batch are taken for the same; they are judged by their own bounds."""


@dataclass(frozen=True)
class Scaled(Multiplied):
    """One recording has local gradients of a multiplied loss. The factor is at least 2, and a power of two is exact.

    Attributes:
        in_loss: whether its recorded losses have the factor too.
    """

    in_loss: bool

    def describe(self, names: tuple[str, str], step: int) -> str:
        what = "losses and local gradients are" if self.in_loss else "local gradients are"
        return (
            f"from step {step} on, {names[self.side]} multiplies its loss by {self.factor:.6g} and divides its gradients before "
            f"the optimizer's step; {what} compared without the factor"
        )


def scaled_on_one_side(pair: Pair, step: int) -> Scaled | None:
    """The recording that alone multiplies its loss, according to the last step up to this one with local gradients; None if there
    is none."""
    dense = next((s for s in reversed(pair.steps) if s <= step and _has_local_grads(pair, s)), None)
    return None if dense is None else pair.remember((scaled_on_one_side, dense), lambda: _scaled_at(pair, dense))


def shares_of(pair: Pair) -> tuple[float, float]:
    """What the means of a's and of b's losses over ranks are multiplied by at unequal world sizes: the number of ranks if their
    losses are shares, and else 1.

    Losses are shares if the reduced gradients are nearer to the sum of the local ones than to their mean, while both recordings
    agree on the reduced gradients: a sum instead of a mean is else the fault.
    """
    return pair.remember(shares_of, lambda: _shares_of(pair))


def _shares_of(pair: Pair) -> tuple[float, float]:
    worlds = [float(recording.manifest.world_size) for recording in (pair.a, pair.b)]
    for step in pair.steps:
        names = [name for name in pair.names() if pair.has(REDUCE, step, name)]
        sums = [_sums(recording, step, names) for recording in (pair.a, pair.b)]
        if None in sums:
            continue
        given = _factors([pair.assemble(REDUCE, step, name, (0, 0))[:2] for name in names])
        factor = weighted_median(*given) if given[0] else 0.0
        if factor <= 0 or not _is_nearer(max(factor, 1 / factor), 1.0, max(worlds)):
            return 1.0, 1.0
        return worlds[0] if sums[0] else 1.0, worlds[1] if sums[1] else 1.0
    return 1.0, 1.0


def _sums(recording: Recording, step: int, names: Sequence[str]) -> bool | None:
    """Whether reduced gradients are sums of local ones, by weight; None if no local ones were recorded.

    False if a recorded loss is that of all ranks.
    """
    world = recording.manifest.world_size
    if world == 1 or recording.manifest.settings.get(LOSSES) == MEAN:
        return False
    factors, weights = _factors(_mean_local(recording, recording, step, names))
    return _is_nearer(weighted_median(factors, weights), float(world), 1.0) if factors else None


def _mean_local(
    local: Recording, reduced: Recording, step: int, names: Sequence[str]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The mean over ranks of the local gradients of a recording, and the reduced gradient of the same or another one, of each
    parameter that has both."""
    found = []
    ranks = range(local.manifest.world_size)
    for name in names:
        if reduced.has(REDUCE, step, name) and all(local.has(BACKWARD, step, name, rank) for rank in ranks):
            of_all = assemble(reduced, REDUCE, step, name)
            of_ranks = [rank_values(local, BACKWARD, step, rank, name) for rank in ranks]
            by_sketch = any(side.sketch is not None for side in (*of_ranks, of_all))
            matched = [match_values(each, of_all, by_sketch=by_sketch) for each in of_ranks]
            found.append((np.mean([np.asarray(each[0], np.float64) for each in matched], axis=0), matched[0][1]))
    return found


def repeats_of_loss(pair: Pair) -> tuple[float, float]:
    """The divisors of a's and of b's losses: the number of added losses if each is that of the whole batch, else 1.

    The losses are then equal to a hundredth, and are not as they were recorded, while the recordings agree on the mean of the
    local gradients: reduced ones may be recorded after clipping, which takes out any factor.
    """
    return pair.remember(repeats_of_loss, lambda: _repeats_of_loss(pair))


def describe_repeats(pair: Pair, names: tuple[str, str]) -> str | None:
    """A clause on `repeats_of_loss`; None if it is 1 for both recordings."""
    found = [(name, int(n)) for name, n in zip(names, repeats_of_loss(pair), strict=True) if n > 1]
    clauses = [f"each of the {n} losses that {name} adds in a step is that of the whole batch" for name, n in found]
    return f"{' and '.join(clauses)}; their mean is compared" if found else None


def _repeats_of_loss(pair: Pair) -> tuple[float, float]:
    step = next((step for step in pair.steps if any(pair.has(REDUCE, step, name) for name in pair.names())), None)
    if step is None:
        return 1.0, 1.0
    of_a, of_b = (float(recording.num_losses(step, 0)) for recording in (pair.a, pair.b))
    shares = (1.0, 1.0) if pair.by_rank or of_a == of_b == 1 else shares_of(pair)
    x, y = (float(losses[step].mean()) * share for losses, share in zip(pair.losses, shares, strict=True))
    choices = [(1.0, 1.0), (1.0, of_b), (of_a, 1.0), (of_a, of_b)]
    found = next((by for by in choices if math.isclose(x / by[0], y / by[1], rel_tol=_NEAR_LOSSES)), choices[0])
    if found == choices[0]:  # without reading gradients
        return found
    names = [name for name in pair.names() if pair.has(REDUCE, step, name)]
    local = [_factors(_mean_local(recording, pair.a, step, names)) for recording in (pair.a, pair.b)]
    if not all(factors for factors, _ in local):
        return choices[0]
    of_a, of_b = (weighted_median(*factors) for factors in local)
    ratio, of_grads = found[1] / found[0], of_a / of_b if of_b else 0.0
    return found if _is_nearer(of_grads, 1.0, ratio) and _is_nearer(of_grads, 1.0, 1 / ratio) else choices[0]


def _has_local_grads(pair: Pair, step: int) -> bool:
    return pair.by_rank and all(any(r.has(BACKWARD, step, n) for n in pair.names()) for r in (pair.a, pair.b))


def _scaled_at(pair: Pair, step: int) -> Scaled | None:
    ranks = range(pair.a.manifest.world_size)
    names = [name for name in pair.names() if pair.has(BACKWARD, step, name)]
    # Most runs do not scale their loss, so one parameter is read first.
    largest = sorted(names, key=lambda name: -pair.a.manifest.params[name].numel)[:1]
    for some in (largest, names):
        factors, weights = _factors([pair.rank_values(BACKWARD, step, rank, n)[:2] for n in some for rank in ranks])
        factor = weighted_median(factors, weights) if factors else 0.0
        if factor <= 0 or _is_nearer(max(factor, 1 / factor), 1.0, _LEAST):
            return None
        # A single wrong gradient can have most of the weight.
        if 2 * sum(_is_nearer(each, factor, 1.0) for each in factors) <= len(factors):
            return None
    if clipped_on_one_side(pair, step) is not None or not _only_reduced(pair, step, int(factor < 1)):
        return None
    reduced = [name for name in names if pair.has(REDUCE, step, name)]
    given = _factors([pair.assemble(REDUCE, step, name, (0, 0))[:2] for name in reduced])
    if not given[0] or not _is_nearer(weighted_median(*given), 1.0, factor):
        return None
    factor = _power_of_two(factor, factors, weights, 2 * unit_roundoff(pair.dtype))
    if max(factor, 1 / factor) < _LEAST:
        return None
    sizes = [float(np.abs(losses[step]).mean()) for losses in pair.losses]
    in_loss = 0 < sizes[0] < math.inf and _is_nearer(sizes[1] / sizes[0], factor, 1.0)
    return Scaled(int(factor > 1), max(factor, 1 / factor), in_loss)


def _power_of_two(factor: float, factors: Sequence[float], weights: Sequence[float], common: float) -> float:
    """The nearest power of two if it is within the uncertainty of a weighted median, else the median.

    Args:
        common: a relative error that all factors share.
    """
    power = 2.0 ** round(math.log2(factor))
    uncertain = common + weighted_median([abs(each / factor - 1) for each in factors], weights)
    return power if abs(factor / power - 1) <= uncertain else factor


def _only_reduced(pair: Pair, step: int, side: int) -> bool:
    """Whether the reduced gradients of one side are the mean or the sum of its local gradients, for most of their weight.

    A reduction between R ranks rounds at most R + 2 times: a cast, a division before it, R - 1 additions and a division after
    it. Each rounding is at most u times a sum of magnitudes, so by the triangle inequality the result c x + e of gradients g_r
    with the mean x has norm(e) <= (R + 2) u c mean(norm(g_r)), and the factor estimated from it is at most norm(e) / norm(x)
    away from c (Cauchy-Schwarz).
    """
    world, recording = pair.a.manifest.world_size, (pair.a, pair.b)[side]
    u = max(unit_roundoff(dtype) for dtype in (pair.dtype, reduces_in(recording)))
    agree: dict[float, float] = dict.fromkeys((1.0, float(world), 1.0 / world), 0.0)
    total = 0.0
    for name in pair.names():
        if recording.has(BACKWARD, step, name) and recording.has(REDUCE, step, name):
            local = [pair.rank_values(BACKWARD, step, rank, name)[:2][side] for rank in range(world)]
            mean = np.mean(np.asarray(local, np.float64), axis=0)
            reduced = pair.assemble(REDUCE, step, name, (0, 0))[:2][side]
            if mean.size != reduced.size:  # one is a sketch
                continue
            for factor, weight in zip(*_factors([(mean, reduced)]), strict=True):
                rounding = (world + 2) * u * np.mean([norm(each) for each in local]) / norm(mean)
                total += weight
                for exact in agree:
                    agree[exact] += weight * (abs(factor / exact - 1) <= rounding)
    return max(agree.values()) > total / 2


def _factors(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[list[float], list[float]]:
    """The factor from the first to the second gradient of each pair, and its weight: the square of the smaller one."""
    factors, weights = [], []
    for a, b in pairs:
        x, y = (np.asarray(side, np.float64).reshape(-1) for side in (a, b))
        # Unlike `@`, np.vdot overflows without a warning.
        square, product, other = float(np.vdot(x, x)), float(np.vdot(x, y)), float(np.vdot(y, y))
        weight = min(square, other)
        if weight > 0 and math.isfinite(product) and math.isfinite(square):
            factors.append(product / square)
            weights.append(weight)
    return factors, weights


def _is_nearer(factor: float, here: float, there: float) -> bool:
    """Whether a factor is nearer to one factor than to another, as a ratio."""
    return 0 < factor < math.inf and abs(math.log(factor / here)) < abs(math.log(factor / there))
