"""Hypotheses about weights and counts: unequal numbers of samples, lost microbatches, padding in the gradient norm."""

import math
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from crossframe.recording import Recording
from crossframe.recording.event_format import BACKWARD, FORWARD, INPUT, NORM, OUTPUT, REDUCE
from crossframe.recording.known_settings import LOSSES, MEAN
from crossframe.verdict.diagnosis.case import Case
from crossframe.verdict.diagnosis.factor_fits import BY_CHANCE
from crossframe.verdict.diagnosis.fit import TINY, Claim, Fit, accepted, factor_between, sum_roundoff
from crossframe.verdict.diagnosis.rank_fits import sum_error
from crossframe.verdict.diagnosis.tied_weights import rows_looked_up
from crossframe.verdict.measure.metrics import distance, norm
from crossframe.verdict.measure.values import assemble


def uneven_weights(case: Case) -> Iterator[Fit]:
    """With unequal numbers of samples per rank, one side averages over samples and the other over ranks."""
    world = case.right.manifest.world_size
    counts = np.array([len(case.right.batch(case.step, rank).sample_ids) for rank in range(world)], float)
    if world != case.wrong.manifest.world_size or np.ptp(counts) == 0:
        return
    shares = counts / counts.sum()
    fed = f"ranks have {', '.join(f'{count:g}' for count in counts)} samples"
    text = f"{fed}: {case.names[0]} averages over samples, {case.names[1]} averages the means of ranks"
    if case.phase == REDUCE and (grads := case.local_grads(case.wrong, case.name)) is not None:
        terms = np.array([case.cut(grad).reshape(-1) for grad in grads])
        error = sum_error(list(terms), max(case.sides.roundoff, case.reduce_roundoff)) + case.limit
        weighted, plain = shares @ terms, terms.mean(axis=0)
        residual = distance(case.sides.wrong.reshape(-1), plain)
        fits = distance(case.sides.right.reshape(-1), weighted) <= error
        if fits and accepted(residual, case.sides.difference, error):
            yield Fit("uneven_weights", text, residual, error)
    elif (sides := _of_all_ranks(case)) is not None:
        # The right side multiplies a rank's loss by its share of samples times the number of ranks.
        residuals = [distance(right, shares[rank] * world * wrong) for rank, (right, wrong) in enumerate(sides)]
        errors = [(case.limit + 4 * case.sides.roundoff * norm(right)) for right, _ in sides]
        whole = norm(np.array([distance(*each) for each in sides]))
        if (
            all(residual <= error for residual, error in zip(residuals, errors, strict=True))
            and 2 * norm(np.array(residuals)) <= whole
        ):
            yield Fit("uneven_weights", text, max(residuals), max(errors))


def uneven_counts(case: Case) -> Iterator[Fit]:
    """One side averages over all terms of all ranks, the other one averages the means of ranks, whose counts are not recorded.

    A rank that divides by its own count n instead of the mean count of W ranks has f = mean / n times the gradient, so that the
    inverses of all f add up to W. Parts of the loss that no count divides may be left out: all ranks' gradients of some parameter
    must be multiples.
    """
    world, is_loss = case.right.manifest.world_size, case.phase == FORWARD
    if world != case.wrong.manifest.world_size:
        return
    if not is_loss and case.phase != BACKWARD:
        return
    within = case.limit / max(norm(case.both.right), TINY) + 64 * case.compute_roundoff
    agreed: np.ndarray | None = None
    names = []
    for name in case.right.manifest.params if is_loss else [case.name]:
        own = case.in_both(lambda recording, name=name: case.local_grads(recording, name))
        if own is None or own[0][0].size < 2:
            continue
        sides = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in zip(*own, strict=True)]
        factors = np.array([factor_between(x, y) for x, y in sides])
        fits = all(distance(y, f * x) <= within * norm(y) and norm(y) for (x, y), f in zip(sides, factors, strict=True))
        if not fits or (np.abs(factors - 1) <= 4 * within).all():
            continue
        if agreed is not None and (np.abs(factors / agreed - 1) > 4 * within).any():
            return
        agreed = factors if agreed is None else agreed
        names.append(name)
    if agreed is None or agreed.min() <= 0 or np.ptp(agreed) * BY_CHANCE < world * within:
        return
    apart = abs((1 / agreed).sum() / world - 1)
    if apart > within:
        return
    text = (
        f"the gradients of {names[0]!r}{f' and {len(names) - 1} others' if names[1:] else ''} on each rank are multiples whose "
        f"inverses add up to the number of ranks: {_means(case, 'ranks', 1 / (agreed * world))}"
    )
    size = norm(case.both.right)
    yield Fit("uneven_weights", text, apart * size, within * size)


def uneven_ranks(case: Case) -> Iterator[Fit]:
    """One side averages over all terms, the other one averages the means of its ranks, of which it has another number.

    By the shares that ranks have of the terms, their gradients add up to those of the other side, and so do their losses, where
    they are recorded by rank. The shares are those that fit the gradients of all parameters best.
    """
    world = case.wrong.manifest.world_size
    if case.phase != FORWARD or world < 2 or world == case.right.manifest.world_size:
        return
    # The columns of R, of those gradients as columns [ranks of the wrong side, right side], have their products and norms.
    columns = np.zeros((0, world + 1))
    for name, spec in case.right.manifest.params.items():
        if spec.requires_grad:
            own, reduced = case.local_grads(case.wrong, name), case.read(case.right, REDUCE, case.step, name)
            if own is None or reduced is None or own[0].size != reduced.size:
                return
            found = np.stack([np.asarray(grad, np.float64).reshape(-1) for grad in (*own, reduced)], axis=1)
            columns = np.asarray(np.linalg.qr(np.concatenate([columns, found]), mode="r"))
    terms, mixed = columns[:, :world], columns[:, world]
    shares = np.linalg.lstsq(terms, mixed, rcond=None)[0]
    whole, left, apart = (norm(each) for each in (mixed, mixed - terms @ shares, mixed - terms.mean(axis=1)))
    size = norm(case.both.right)
    within = case.limit / max(size, TINY) + 64 * case.compute_roundoff
    if not accepted(left, apart, within * whole):
        return
    if shares.min() <= 0 or abs(shares.sum() - 1) > within:
        return
    residual = left / whole * size
    if case.wrong.manifest.settings.get(LOSSES) != MEAN:
        residual = abs(float(shares @ case.wrong.losses()[case.step]) - float(case.both.right.mean()))
        if not accepted(residual, case.both.difference, case.limit):
            return
    text = f"the gradients of {case.names[0]} are sums of those of the ranks of {case.names[1]}: {_means(case, 'ranks', shares)}"
    yield Fit("uneven_weights", text, residual, within * size)


def uneven_microbatches(case: Case) -> Iterator[Fit]:
    """One side averages over all terms, the other one averages the means of its microbatches, of which it has another number.

    An embedding shows this: in rows that one microbatch alone looked up, the gradients of the sides are multiples, by the share
    that this microbatch has of the terms times the number of microbatches.
    """
    num = case.wrong.num_microbatches
    if case.phase not in (FORWARD, BACKWARD, REDUCE) or num < 2 or num == case.right.num_microbatches:
        return
    size = norm(case.both.right)
    within = case.limit / max(size, TINY) + 64 * case.compute_roundoff
    for name, spec in case.right.manifest.params.items():
        looked_up = _looked_up(case, case.wrong, name, num) if len(spec.shape) == 2 else None
        if looked_up is None or (sides := _gradients(case, name)) is None:
            continue
        alone = looked_up & (looked_up.sum(axis=0) == 1)
        pairs = [tuple(side[rows] for side in sides) for rows in alone]
        if not all(norm(wrong) for _, wrong in pairs):
            continue
        times = np.array([factor_between(wrong, right) for right, wrong in pairs])
        fits = [distance(y, f * x) <= within * norm(y) for (y, x), f in zip(pairs, times, strict=True)]
        apart = abs(times.mean() - 1)
        if all(fits) and times.min() > 0 and apart <= within and np.ptp(times) * BY_CHANCE >= num * within:
            text = (
                f"the gradients of the rows of {name!r} that one microbatch alone looks up are multiples, which add up to the "
                f"number of microbatches: {_means(case, 'microbatches', times / num)}"
            )
            yield Fit("uneven_weights", text, apart * size, within * size)
            return


def _means(case: Case, parts: str, shares: np.ndarray) -> str:
    """What both sides average."""
    return (
        f"{case.names[0]} averages over all terms, {case.names[1]} averages the means of {parts}, which have shares of "
        f"{', '.join(f'{share:.4g}' for share in shares)} of them"
    )


def _of_all_ranks(case: Case) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """(right, wrong) loss or local gradient of each rank."""
    if case.phase == FORWARD and case.quantity.rank is not None:
        rows = [recording.losses()[case.step] for recording in (case.right, case.wrong)]
        return [(np.array([x]), np.array([y])) for x, y in zip(*rows, strict=True)]
    if case.phase != BACKWARD:
        return None
    own = case.in_both(lambda recording: case.local_grads(recording, case.name))
    return own and [(case.cut(x), case.cut(y)) for x, y in zip(*own, strict=True)]


def lost_microbatch(case: Case) -> Iterator[Fit]:
    """The gradients of one of several microbatches are lost.

    An embedding shows this: rows that only this microbatch looked up have no gradient, and rows that it did not look up have the
    correct one.
    """
    if case.phase not in (BACKWARD, REDUCE):
        return
    num = case.right.num_microbatches
    if num < 2:
        return
    for name, spec in case.right.manifest.params.items():
        if len(spec.shape) != 2:
            continue
        looked_up, sides = _looked_up(case, case.right, name, num), _gradients(case, name)
        if looked_up is None or sides is None:
            continue
        right, wrong = sides
        for lost in range(num):
            others = np.any(np.delete(looked_up, lost, axis=0), axis=0)
            alone, never = looked_up[lost] & ~others, others & ~looked_up[lost]
            if not alone.any() or not never.any() or norm(wrong[alone]) or not norm(right[alone]):
                continue
            limit = case.limit / max(norm(case.both.right), TINY) * norm(right)
            for times, divisor in (
                (1.0, f"divided by {num}"),
                (num / (num - 1), f"divided by {num - 1} instead of {num}"),
            ):
                residual = distance(wrong[never], times * right[never])
                if residual <= limit * times:
                    rows = f"the {int(alone.sum())} rows of {name!r} that only it looks up have no gradient"
                    text = (
                        f"in {case.names[1]} the gradients of microbatch {lost} of {num} are lost: {rows}, and the "
                        f"{int(never.sum())} rows that it does not look up are right, {divisor}"
                    )
                    yield Fit("lost_microbatch", text, residual, limit * times, Claim("microbatch", lost))
                    return


def lost_by_span(case: Case) -> Iterator[Fit]:
    """The gradients of one of several microbatches are lost: of a weight that multiplies its module's input, the rows of each
    gradient are sums of input rows.

    With fewer positions than features, the inputs of the other microbatches do not span all features. The wrong gradient is
    within their span, the right one is not.
    """
    if case.phase not in (BACKWARD, REDUCE):
        return
    # All parameters of a step have the same answer.
    known = _SPANS.setdefault(case.wrong, {})
    key = (case.names, case.phase, case.step, case.quantity.rank, case.quantity.replica)
    if key not in known:
        known[key] = _spanned(case)
    if found := known[key]:
        lost, text, residual, error = found
        size = norm(case.both.wrong)
        yield Fit("lost_microbatch", text, residual * size, error * size, Claim("microbatch", lost))


_Span = tuple[int, str, float, float]
_SPANS: "WeakKeyDictionary[Recording, dict[Any, _Span | None]]" = WeakKeyDictionary()


def _spanned(case: Case) -> _Span | None:
    """(lost microbatch, evidence, residual and error relative to the gradient)."""
    num = case.right.num_microbatches
    if num < 2:
        return None
    for name, spec in case.right.manifest.params.items():
        if len(spec.shape) != 2 or (inputs := _inputs(case, name, num)) is None:
            continue
        sides, width = _gradients(case, name), inputs[0].shape[1]
        if sides is None or width not in spec.shape:
            continue
        right, wrong = (side if side.shape[1] == width else side.T for side in sides)
        for lost in range(num):
            others = np.concatenate([rows for i, rows in enumerate(inputs) if i != lost])
            if len(others) >= width:
                continue
            outside = [_outside(side, others) for side in (right, wrong)]
            # Inputs as recorded are those of the products, whose sum over positions rounds.
            error = sum_roundoff(len(others), case.compute_roundoff) * norm(wrong) * math.sqrt(len(others))
            if outside[0] > 100 * error and outside[1] <= error:
                text = (
                    f"in {case.names[1]} the gradients of microbatch {lost} of {num} are lost: the gradient of {name!r} is a sum "
                    f"of {len(others)} inputs, those of the other microbatches, up to {outside[1] / norm(wrong):.1e} of it, and "
                    f"that of {case.names[0]} up to {outside[0] / norm(right):.1e}"
                )
                return lost, text, outside[1] / norm(wrong), error / norm(wrong)
    return None


def _inputs(case: Case, name: str, num: int) -> list[np.ndarray] | None:
    """The input rows of a parameter's module in each microbatch, on the rank of the quantity or on all ranks."""
    recording, module = case.wrong, name.rpartition(".")[0]
    found, ranks = [], case.ranks(recording)
    for microbatch in range(num):
        at = (microbatch, module, INPUT)
        if at not in recording.activations(case.step):
            return None
        if any(recording.activation_sketch(case.step, rank, *at) for rank in ranks):
            return None
        rows = [np.asarray(recording.activation(case.step, rank, *at), np.float64) for rank in ranks]
        if any(not each.ndim for each in rows):
            return None
        found.append(np.concatenate([each.reshape(-1, each.shape[-1]) for each in rows]))
    return found


def _outside(gradient: np.ndarray, rows: np.ndarray) -> float:
    """The norm of the part of a gradient (out, in) that is no sum of these rows (number, in)."""
    _, sizes, basis = np.linalg.svd(rows, full_matrices=False)
    basis = basis[sizes > 1e-12 * sizes.max(initial=0.0)]
    return distance(gradient, gradient @ basis.T @ basis)


def _looked_up(case: Case, recording: Recording, name: str, num: int) -> np.ndarray | None:
    """Mask of shape (microbatches, rows) of the rows of an embedding that each microbatch looked up; None for other
    parameters."""
    module = name.rpartition(".")[0]
    found = np.zeros((num, recording.manifest.params[name].shape[0]), bool)
    for microbatch in range(num):
        at = (microbatch, module, OUTPUT)
        if at not in recording.activations(case.step):
            return None
        for rank in case.ranks(recording):
            weight = case.as_used(recording, name, rank)
            if weight is None or recording.activation_sketch(case.step, rank, *at):
                return None
            rows = rows_looked_up(weight, recording.activation(case.step, rank, *at))
            if rows is None:
                return None
            found[microbatch] |= rows
    return found


def _gradients(case: Case, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The local or reduced gradient of a parameter in both recordings, like the quantity."""
    sides = case.in_both(lambda recording: case.gradient(recording, case.step, name))
    return sides and (np.asarray(sides[0], np.float64), np.asarray(sides[1], np.float64))


def padding_in_gradient_norm(case: Case) -> Iterator[Fit]:
    """The gradient norm includes nonzero padding.

    At every recorded step, its square exceeds that of the recorded gradients by the same amount, known to at least 1 %.
    """
    if case.phase != NORM:
        return
    padding = sum(sum(getattr(layout, "spaces", ())) for _, layout in case.wrong.manifest.units)
    extras, errors, sizes = [], [], []
    for step in case.wrong.recorded_steps():
        told = case.wrong.grad_norm(step, 0)
        names = [name for name in case.wrong.manifest.params if case.wrong.has(REDUCE, step, name)]
        if told is None or not names or not math.isfinite(told):
            continue
        own = norm(np.array([assemble(case.wrong, REDUCE, step, name).norm for name in names]))
        extras.append(told**2 - own**2)
        errors.append(2 * case.limit * told)
        sizes.append(own**2)
    if not padding or not extras or min(extras) <= 100 * max(errors) or np.ptp(sizes) <= 4 * max(errors):
        return
    if np.ptp(extras) > 2 * max(errors):
        return
    each = math.sqrt(float(np.mean(extras)) / padding)
    text = (
        f"the squared norm in {case.names[1]} exceeds that of its own gradients by {np.mean(extras):.6g} at each of "
        f"{len(extras)} steps, as with {padding} padding elements of {each:.4g} each"
    )
    yield Fit("padding_counted", text, 0.0, case.limit)


ALL = (uneven_weights, uneven_counts, uneven_microbatches, lost_microbatch, lost_by_span, padding_in_gradient_norm)
OF_LOSS = (uneven_weights, uneven_counts, uneven_ranks, uneven_microbatches)
"""Hypotheses about a loss."""
