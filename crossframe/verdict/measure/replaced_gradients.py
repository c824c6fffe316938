"""Detects loops that give the optimizer other gradients than those of the losses that were recorded, such as clipped gradients of
samples with noise, or those of a further loss that `torch.autograd.grad` returns.

Then the local gradients that a recorder sees are no cause of the reduced ones. A loop that only clips or scales its gradients
multiplies each of them by a number. A reduction between R ranks rounds at most R + 2 times (`loss_scale`), so what of a reduced
gradient is no multiple of the mean x of local gradients g_r has a norm of at most (R + 2) u c mean(norm(g_r)), where c x is the
nearest multiple.
"""

import numpy as np

from crossframe.dtypes import unit_roundoff
from crossframe.recording import Recording
from crossframe.recording.event_format import BACKWARD, REDUCE
from crossframe.verdict.measure.bounds_by_dtype import reduces_in
from crossframe.verdict.measure.metrics import norm
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.values import assemble, match_values, rank_values

_LEAST_SHARE = 0.01
"""Of the squared norm of all gradients. Gradients that are zero but for rounding are no multiples of anything."""


def gradients_are_replaced(pair: Pair) -> bool:
    """Whether in one recording, or both, more of the reduced gradients than rounding are no multiples of the local ones."""
    return any(_are_replaced(recording, pair) for recording in (pair.a, pair.b))


def _are_replaced(recording: Recording, pair: Pair) -> bool:
    ranks = range(recording.manifest.world_size)
    u = max(unit_roundoff(dtype) for dtype in (pair.dtype, reduces_in(recording)))
    replaced = total = 0.0
    for step in recording.recorded_steps():
        for name in recording.manifest.params:
            if not recording.has(REDUCE, step, name) or not all(recording.has(BACKWARD, step, name, r) for r in ranks):
                continue
            reduced = assemble(recording, REDUCE, step, name)
            local = [rank_values(recording, BACKWARD, step, rank, name) for rank in ranks]
            by_sketch = any(side.sketch is not None for side in (*local, reduced))
            matched = [match_values(each, reduced, by_sketch=by_sketch) for each in local]
            parts = [np.asarray(each[0], np.float64).reshape(-1) for each in matched]
            mean, found = np.mean(parts, axis=0), np.asarray(matched[0][1], np.float64).reshape(-1)
            square, weight = norm(mean) ** 2, norm(found) ** 2
            if not 0 < weight < np.inf or not square < np.inf:
                continue
            factor = float(np.vdot(mean, found)) / square if square else 0.0
            rounding = (len(ranks) + 2) * u * abs(factor) * float(np.mean([norm(each) for each in parts]))
            total += weight
            replaced += weight * (norm(found - factor * mean) > rounding)
    return replaced > _LEAST_SHARE * total
