"""What each fit finds in arrays with one fault, and at which noise and limit it ceases to: kept in fit_tolerances.json.

A fit whose tolerance grows explains faults that it should not, one whose tolerance shrinks leaves rounding unexplained.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from crossframe.dtypes import unit_roundoff
from crossframe.verdict.diagnosis.attention_fits import Attention, Projections, attention_of
from crossframe.verdict.diagnosis.factor_fits import factor_of, name_of
from crossframe.verdict.diagnosis.factor_hypotheses import is_shifted
from crossframe.verdict.diagnosis.fit import Contrast, best
from crossframe.verdict.diagnosis.kernel_fits import convolved, kernel_reordered, other_kernel, other_scale, paddings_of
from crossframe.verdict.diagnosis.layer_fits import (
    padded_norm,
    pooled,
    positions_off,
    rows_off,
)
from crossframe.verdict.diagnosis.module_fits import (
    ERF_GELU,
    FUNCTIONS,
    branch_of,
    dropout_of,
    functions_of,
    norm_epsilons,
    norm_kinds,
    rounded_epsilons,
    two_masks_of,
)
from crossframe.verdict.diagnosis.moment_deviations import Moment, Other, moment_deviations
from crossframe.verdict.diagnosis.movement_fits import read_elsewhere, reorderings, same_as, shift_of, transposition_of
from crossframe.verdict.diagnosis.optimizer_rules import SGD, AdamW, Average
from crossframe.verdict.diagnosis.rank_fits import absent_ranks, low_reduction, mixed_ranks, on_grid, weighted_ranks
from crossframe.verdict.diagnosis.tied_weights import uses_of
from crossframe.verdict.diagnosis.update_deviations import (
    Update,
    added_decay,
    epsilons_of_ratio,
    follow_one_rule,
    update_deviations,
)
from crossframe.verdict.measure.metrics import norm
from tests.core.helpers.kept_texts import NOISE, NUMBER, check_text

TEXTS = Path(__file__).with_name("fit_tolerances.json")
SINGLE, DOUBLE = unit_roundoff("float32"), unit_roundoff("float64")


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def described(found: Any, size: float = 1.0) -> str:
    """A result with its numbers to four digits; 0 for those that are rounding in float64 of values with the norm `size`."""
    if is_dataclass(found) and not isinstance(found, type):
        inside = [f"{each.name} {described(getattr(found, each.name), size)}" for each in fields(found)]
        return f"{type(found).__name__}({', '.join(inside)})"
    if isinstance(found, np.ndarray):
        return f"array of {list(found.shape)} with norm {norm(found.astype(float)):.4g}"
    if isinstance(found, list | tuple):
        return f"[{', '.join(described(each, size) for each in found)}]"
    if isinstance(found, float):
        return f"{found:.4g}" if abs(found) >= NOISE * size else "0"
    return str(found)


@dataclass
class Fault:
    """The sides of a quantity with one fault, and the fit that names it.

    Attributes:
        limit: relative to the norm of the wrong side.
        searched: whether noise and limits are searched, which takes a hundred fits.
    """

    fit: Callable[[Contrast], Any]
    right: np.ndarray
    wrong: np.ndarray
    limit: float = 0.0
    roundoff: float = SINGLE
    searched: bool = True

    def found(self, noise: float = 0.0, limit: float | None = None) -> Any:
        """With noise and a limit relative to the wrong side's norm."""
        away, size = drawn(99, *self.wrong.shape), norm(self.wrong)
        wrong = self.wrong + noise * size / norm(away) * away
        return self.fit(Contrast(self.right, wrong, (self.limit if limit is None else limit) * size, self.roundoff))

    def words(self, **options: float) -> str:
        return NUMBER.sub("", described(self.found(**options)))


def edge(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The number at which a condition that holds at `low` ceases to, to a twentieth of a percent; inf if it holds at `high`."""
    if not holds(low):
        return -math.inf
    if holds(high):
        return math.inf
    while math.log(high / low) > 5e-4:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def report(fault: Fault) -> str:
    """What is found, the largest noise with which it still is, and the smallest limit that excuses noise of a thousandth."""
    words = fault.words()
    text = described(fault.found(), max(norm(fault.wrong.astype(float)), 1.0))
    if text == "None" or not fault.searched:
        return text
    noise = edge(lambda size: fault.words(noise=size) == words, 1e-14, 4.0)
    allowed = edge(lambda limit: fault.words(noise=1e-3, limit=limit) != words, 1e-7, 0.01)
    wide = edge(lambda limit: fault.words(limit=limit) == words, 1e-12, 100.0)
    return f"{text}; with noise up to {noise:.3g}; noise of 0.001 from a limit of {allowed:.3g} on; limits up to {wide:.3g}"


def scaled(value: float, *shape: int) -> Fault:
    return Fault(factor_of, drawn(1, *shape), value * drawn(1, *shape))


def shifted(by: int, size: int, *options: Any) -> Fault:
    line = drawn(2, size + 2 * abs(by))
    start = abs(by) - by
    return Fault(lambda sides: shift_of(sides, *options), line[abs(by) : abs(by) + size], line[start : start + size])


def of_ranks(num: int, times: list[float], fit: Callable[[Contrast, list[np.ndarray]], Any]) -> Fault:
    grads = [drawn(10 + i, 12, 5) for i in range(num)]
    wrong = sum(t * grad for t, grad in zip(times, grads, strict=True)) / num
    return Fault(lambda sides: fit(sides, grads), np.mean(grads, axis=0), np.asarray(wrong))


OWN, THEIRS = [drawn(20 + i, 8, 6) for i in range(3)], [drawn(30 + i, 8, 6) for i in range(3)]


def in_low(low: str, way: str, num: int = 3) -> Fault:
    dtype = np.dtype(getattr(ml_dtypes, low, None) or low)
    grads = [drawn(40 + i, 20, 20).astype(np.float32).astype(np.float64) for i in range(num)]
    right = np.mean(grads, axis=0)
    cast = [grad.astype(dtype) for grad in grads]
    exact = [each.astype(np.float64) for each in cast]
    if way == "cast":
        wrong, known = np.mean(exact, axis=0), grads
    elif way == "summed":
        total = exact[0]
        for each in exact[1:]:
            total = (total + each).astype(dtype).astype(np.float64)
        wrong, known = total / num, grads
    elif way == "mean":
        wrong, known = right.astype(dtype).astype(np.float64), None
    else:  # of two microbatches
        parts = [(share * right).astype(dtype).astype(np.float64) for share in (0.3, 0.7)]
        wrong, known = sum(parts), None
    parts = 2 if way == "microbatches" else 1
    return Fault(
        lambda sides: low_reduction(sides, known, num, num_microbatches=parts),
        right,
        np.asarray(wrong),
        roundoff=SINGLE,
    )


def tied(lookups: float, head: float, *, knows: bool = True) -> Fault:
    looked_up, rows = np.zeros((20, 6)), np.random.default_rng(3).permutation(20)[:7]
    looked_up[rows] = drawn(50, 7, 6)
    of_head = drawn(51, 20, 6)
    of_head -= of_head.mean(axis=0)
    mask = np.isin(np.arange(20), rows) if knows else None
    return Fault(lambda sides: uses_of(sides, mask), looked_up + of_head, lookups * looked_up + head * of_head, 1e-7)


X, W, B = 0.3 * drawn(60, 5, 7, 16), drawn(61, 16), drawn(62, 16)
IMAGE, KERNEL, BIAS = drawn(63, 2, 3, 8, 8), drawn(64, 3, 3, 3, 3), drawn(65, 3)


def normed(epsilon: float, *, centred: bool = True, under_root: bool = True) -> np.ndarray:
    x = X - X.mean(-1, keepdims=True) if centred else X
    square = np.square(x).mean(-1, keepdims=True)
    return x / (np.sqrt(square + epsilon) if under_root else np.sqrt(square) + epsilon) * W + B


def of_norm(right: np.ndarray, wrong: np.ndarray, roundoff: float = SINGLE) -> Fault:
    return Fault(lambda sides: norm_epsilons(sides, (X, X), W, B, roundoff), right, wrong)


def in_bfloat16() -> Fault:
    def low(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)

    x, w = low(0.05 * drawn(66, 6, 16)), low(drawn(67, 16))
    right, wrong = (low(x / np.sqrt(np.square(x).mean(-1, keepdims=True) + each) * w) for each in (1e-6, 1e-5))
    return Fault(lambda sides: rounded_epsilons(sides, (x, x), w, None, "bfloat16"), right, wrong, 0.1, 2.0**-9)


def functions(first: str, second: str, size: int = 20, gated: bool = False) -> Fault:
    x, gate = 2 * drawn(68, size, 30), drawn(69, size, 30)
    right, wrong = (FUNCTIONS[name](x) * (gate if gated else 1.0) for name in (first, second))
    gates = (gate, gate) if gated else None
    return Fault(lambda sides: functions_of(sides, (x, x), SINGLE, gates), right, wrong)


def dropped(p: float, shape: tuple[int, ...] = (20, 30), kept: tuple[int, ...] = (20, 30), grown: float = 1.0) -> Fault:
    x, mask = drawn(70, *shape), np.random.default_rng(71).random(kept) >= p
    return Fault(dropout_of, x, x * mask * (1 + grown * p / (1 - p)), 1e-6)


def dropped_branch() -> Fault:
    x, branch = drawn(72, 20, 30), drawn(73, 20, 30)
    mask = np.random.default_rng(74).random(x.shape) >= 0.25
    return Fault(lambda sides: dropout_of(sides, branch), x + branch, x + branch * mask / 0.75, 1e-6)


def two_masks(p: float, other: float) -> Fault:
    x, rng = drawn(75, 40, 40), np.random.default_rng(76)
    right, wrong = (x * (rng.random(x.shape) >= each) / (1 - p) for each in (p, other))
    return Fault(two_masks_of, right, wrong, 1e-6)


def strided(stride: int, first: int, second: int, size: int = 3) -> Fault:
    kernel = drawn(77, 4, 3, size, size)

    def output(before: int) -> np.ndarray:
        around = (before, size - 1 - before)
        padded = np.pad(IMAGE, ((0, 0), (0, 0), around, around))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(2, 3))[:, :, ::stride, ::stride]
        return np.einsum("bihwyx,oiyx->bohw", windows, kernel) + drawn(78, 4)[:, None, None]

    fit = lambda sides: paddings_of(sides, (IMAGE, IMAGE), kernel, drawn(78, 4), SINGLE)  # noqa: E731
    return Fault(fit, output(first), output(second))


TABLE = drawn(80, 20, 6)


def late(by: int, length: int = 8, rows: int = 20) -> Fault:
    x = drawn(81, 3, length, 6)
    far = np.concatenate([drawn(82, 8, 6), TABLE[:rows], drawn(83, 8, 6)])
    moved = far[8 + by : 8 + by + length] - far[8 : 8 + length]
    return Fault(lambda sides: positions_off(sides, TABLE[:rows]), x, x + moved, 1e-7)


def looked_up(right: np.ndarray, wrong: np.ndarray) -> Fault:
    return Fault(lambda sides: rows_off(sides, TABLE), TABLE[right], TABLE[wrong])


def padded(counted: int, centred: bool) -> Fault:
    def output(number: int) -> np.ndarray:
        mean = X.sum(-1, keepdims=True) / number if centred else 0.0
        squares = np.square(X - mean).sum(-1, keepdims=True) + (number - 16) * np.square(mean)
        return (X - mean) / np.sqrt(squares / number + 1e-5) * W + B

    return Fault(lambda sides: padded_norm(sides, (X, X), W, B, SINGLE), output(16), output(counted), 1e-7)


def pooling(kind: str) -> Fault:
    x, lengths = drawn(84, 5, 7, 4), [7, 3, 5, 7, 2]
    parts = [each[:n] for each, n in zip(x, lengths, strict=True)]
    right, wrong = {
        "mean": ([part.mean(0) for part in parts], x.mean(1)),
        "sum": ([part.mean(0) for part in parts], [part.sum(0) / 7 for part in parts]),
        "maximum": ([part.max(0) for part in parts], x.max(1)),
        "last": ([part[-1] for part in parts], x[:, -1]),
    }[kind]
    return Fault(lambda sides: pooled(sides, (x, x)), np.array(right), np.array(wrong), 1e-7)


def other_weight(ndim: int) -> Fault:
    x = drawn(85, 9, 6)
    own, other = ((drawn(86 + i, *(6,) * ndim), drawn(88 + i, 6)) for i in range(2))
    if ndim == 2:
        right, wrong = (x @ weight.T + bias for weight, bias in (own, other))
        return Fault(lambda sides: other_kernel(sides, (x, x), own, {"theirs": other}, SINGLE), right, wrong)
    right, wrong = (x * weight + bias for weight, bias in (own, other))
    return Fault(lambda sides: other_scale(sides, own, {"theirs": other}), right, wrong)


PLAIN = Attention(2, 2, causal=True, factor=0.5)
GIVEN = Projections(drawn(90, 3, 6, 8), drawn(91, 3, 6, 8), drawn(92, 3, 6, 8))
KEYS = np.arange(6) < np.array([[6], [4], [3]])


def attending(right: Attention, wrong: Attention, given: Projections = GIVEN, other: Projections = GIVEN) -> Fault:
    def fit(sides: Contrast) -> str | None:
        found = attention_of(sides, (given, given), SINGLE)
        return found and f"{found.kind} {described((found.right, found.wrong, found.error))}"

    return Fault(fit, right.of(given), wrong.of(other), searched=wrong == changed(factor=0.25))


def changed(plain: Attention = PLAIN, **other: Any) -> Attention:
    return Attention(**(vars(plain) | other))


RULE = AdamW(rate=0.01, beta1=0.9, beta2=0.999, epsilon=1e-8, decay=0.1, count_m=3, count_v=3)
P, M, V = drawn(100, 80), 1e-3 * drawn(101, 80), 1e-6 * drawn(102, 80) ** 2


def updating(counted: Any = None, states_decay: Any = True, **other: Any) -> Fault:
    right, wrong = (rule.updated(P, M, V) for rule in (RULE, AdamW(**(vars(RULE) | other))))

    def fit(sides: Contrast) -> Any:
        a, b = (Update(P, side, (M, V), SINGLE) for side in (sides.right, sides.wrong))
        return best(update_deviations(a, b, RULE, counted, sides.difference, states_decay=states_decay))

    searched = other in ({"decay": 0.0}, {"epsilon": 1e-5}, {"count_m": 4, "count_v": 4}, {"rate": 0.011})
    return Fault(fit, right, wrong, searched=searched and states_decay)


def following(of: Any, moments: tuple[np.ndarray, ...]) -> Fault:
    after = of.updated(P, *moments)

    def fit(sides: Contrast) -> Any:
        a, b = (Update(P, each, moments, SINGLE) for each in (sides.right, sides.wrong))
        return follow_one_rule(a, b, of) or None

    return Fault(fit, after, after)


def by_sgd(rate: float) -> Fault:
    rule, buffer = SGD(0.01, 0.9, 0.1), drawn(103, 80)

    def fit(sides: Contrast) -> Any:
        a, b = (Update(P, side, (buffer,), SINGLE) for side in (sides.right, sides.wrong))
        return best(update_deviations(a, b, rule, None, sides.difference))

    return Fault(fit, P - 0.01 * buffer, P - rate * buffer)


FIRST = Average(0.9, 0.1)
OLD, GRADIENT = drawn(104, 60), drawn(105, 60)


def averaging(new: np.ndarray, average: Average = FIRST, *, squared: bool = False, decay: float = 0.0) -> Fault:
    gradient = np.square(GRADIENT) if squared else GRADIENT
    old = np.square(OLD) if squared else OLD
    others = [Other("lost_step", "starts from zero", 0 * OLD), Other("stale_copy", "is older", drawn(106, 60))]

    def fit(sides: Contrast) -> Any:
        a, b = (Moment(old, side, gradient, P[:60], SINGLE) for side in (sides.right, sides.wrong))
        return best(moment_deviations(a, b, average, others, sides.difference, decay=decay, squared=squared))

    return Fault(fit, average.new(old, gradient), new)


def ratio(first: float, second: float, in_root: bool) -> Fault:
    def moved(epsilon: float) -> np.ndarray:
        return GRADIENT / (np.sqrt(np.square(OLD) + epsilon) if in_root else np.abs(OLD) + epsilon)

    return Fault(
        lambda sides: epsilons_of_ratio((sides.right, sides.wrong), np.square(OLD), max(sides.limit, 1e-7)),
        moved(first),
        moved(second),
    )


TWO, SEVEN = drawn(3, 12, 5), drawn(4, 3, 4, 6)
SQUARE = drawn(5, 8, 8)
FLAT = {"a": drawn(6, 20), "b": drawn(7, 12)}
ELSEWHERE = np.concatenate([FLAT["a"], np.zeros(4), FLAT["b"]])
POSITIONS = np.arange(6) + np.zeros((4, 1), int)

FAULTS: dict[str, Callable[[], Fault]] = {
    **{f"factor {value}": lambda value=value: scaled(value, 12, 5) for value in (2.0, 0.5, 1.001, -1.0, 1e-3, 4e4)},
    "factor of one number": lambda: Fault(factor_of, np.array([3.0]), np.array([6.0]), 1e-4),
    "factor of two numbers": lambda: Fault(factor_of, np.array([3.0, 1.0]), np.array([6.0, 2.0]), 1e-4),
    "factor of two alike": lambda: Fault(
        lambda sides: is_shifted(sides, 1e-4) or None, np.array([5.51, 5.54]), np.array([5.52, 5.55])
    ),
    "transposed": lambda: Fault(transposition_of, SQUARE, SQUARE.T),
    "axes of three dims": lambda: Fault(transposition_of, SEVEN, SEVEN.transpose(2, 0, 1).reshape(SEVEN.shape)),
    "a split dim": lambda: Fault(transposition_of, TWO, TWO.reshape(3, 4, 5).swapaxes(0, 1).reshape(12, 5)),
    "a split line": lambda: Fault(transposition_of, drawn(8, 12), drawn(8, 12).reshape(3, 4).T.reshape(-1)),
    "four dims": lambda: Fault(transposition_of, drawn(9, 2, 2, 3, 3), drawn(9, 2, 2, 3, 3).transpose(0, 1, 3, 2)),
    "five dims": lambda: Fault(transposition_of, drawn(9, 2, 2, 3, 3, 1), drawn(9, 2, 2, 3, 3, 1).swapaxes(2, 3)),
    **{f"shift by {by}": lambda by=by: shifted(by, 130) for by in (1, -1, 2, -3, 64, -64, 65)},
    "shift by 65, as asked": lambda: shifted(65, 130, None, None, [65]),
    "shift by less than half": lambda: shifted(4, 8),
    "shift by more than half": lambda: shifted(5, 8),
    "shift of three": lambda: shifted(1, 3),
    "shift of two": lambda: shifted(1, 2),
    "shift of a range": lambda: shifted(3, 40, 20, 30),
    "shift of the start": lambda: shifted(3, 40, 0, 10),
    "other parameter": lambda: Fault(lambda sides: same_as(sides, {"x": TWO, "q": 2 * SQUARE}), SQUARE, 2 * SQUARE),
    **{
        f"read from {start} on": lambda start=start: Fault(
            lambda sides: read_elsewhere(sides, FLAT), drawn(11, 12), ELSEWHERE[start : start + 12], 1e-6
        )
        for start in (0, 1, 7, 12, 17, 18, 19, 24)
    },
    "rank 1 of 3 missing": lambda: of_ranks(3, [1, 0, 1], absent_ranks),
    "rank 1 of 3 missing, divided by 2": lambda: of_ranks(3, [1.5, 0, 1.5], absent_ranks),
    "ranks 0 and 2 of 4 missing": lambda: of_ranks(4, [0, 1, 0, 1], absent_ranks),
    "no rank missing": lambda: of_ranks(3, [1, 1, 1.4], absent_ranks),
    "one rank alone": lambda: of_ranks(1, [2], absent_ranks),
    "a rank twice": lambda: of_ranks(3, [1, 2, 1], weighted_ranks),
    "a rank half": lambda: of_ranks(3, [1, 0.5, 1], weighted_ranks),
    "tokens": lambda: of_ranks(3, [0.9, 1.05, 1.05], weighted_ranks),
    "a rank a little": lambda: of_ranks(4, [1, 1, 1.0001, 1], weighted_ranks),
    "all ranks twice": lambda: of_ranks(3, [2, 2, 2], weighted_ranks),
    "ranks mixed": lambda: Fault(
        lambda sides: mixed_ranks(sides, OWN, THEIRS), np.mean(OWN, axis=0), (OWN[0] + THEIRS[1] + OWN[2]) / 3
    ),
    "all ranks mixed": lambda: Fault(
        lambda sides: mixed_ranks(sides, OWN, THEIRS), np.mean(OWN, axis=0), np.mean(THEIRS, axis=0)
    ),
    **{
        f"{low}, {way}": lambda low=low, way=way: in_low(low, way)
        for low in ("bfloat16", "float16")
        for way in ("cast", "summed", "mean", "microbatches")
    },
    **{
        f"uses {lookups} and {head}": lambda lookups=lookups, head=head: tied(lookups, head)
        for lookups, head in ((0, 1), (2, 1), (1, 0), (1, 2), (2, 0), (0.5, 1), (3, 1))
    },
    "uses 2 and 1, rows unknown": lambda: tied(2, 1, knows=False),
    "layer norm": lambda: of_norm(normed(1e-5), normed(1e-3)),
    "layer norm in double": lambda: of_norm(normed(1e-5), normed(1e-6), DOUBLE),
    "layer norm added to the root": lambda: of_norm(normed(1e-5), normed(1e-3, under_root=False)),
    "layer norm without epsilon": lambda: of_norm(normed(1e-5), normed(0.0)),
    "RMS norm": lambda: of_norm(normed(1e-5, centred=False), normed(1e-3, centred=False)),
    "RMS norm and layer norm": lambda: of_norm(normed(1e-5), normed(1e-5, centred=False)),
    "norm in bfloat16": in_bfloat16,
    **{f"{ERF_GELU} and {name}": lambda name=name: functions(ERF_GELU, name) for name in FUNCTIONS},
    "SiLU and ReLU, gated": lambda: functions("SiLU", "ReLU", gated=True),
    "SiLU and ReLU of many": lambda: functions("SiLU", "ReLU", 140),
    "SiLU and ReLU of many, gated": lambda: functions("SiLU", "ReLU", 140, gated=True),
    **{f"dropout {p}": lambda p=p: dropped(p) for p in (0.02, 0.1, 0.5, 0.9)},
    "dropout of few": lambda: dropped(0.3, (7,), (7,)),
    "dropout of eight": lambda: dropped(0.3, (8,), (8,)),
    "dropout of channels": lambda: dropped(0.2, (8, 16, 5), (8, 16, 1)),
    "dropout of samples": lambda: dropped(0.2, (30, 4, 5), (30, 1, 1)),
    **{
        f"dropout grown by {grown}": lambda grown=grown: dropped(0.3, grown=grown)
        for grown in (0.0, 0.5, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5)
    },
    "dropout of a branch": dropped_branch,
    **{
        f"masks of {p} and {other}": lambda p=p, other=other: two_masks(p, other)
        for p, other in ((0.2, 0.2), (0.1, 0.1), (0.2, 0.3), (0.2, 0.42), (0.2, 0.0))
    },
    **{
        f"branch times {factor}": lambda factor=factor: Fault(
            lambda sides: branch_of(sides, TWO), drawn(12, 12, 5) + TWO, drawn(12, 12, 5) + factor * TWO
        )
        for factor in (0.0, 0.5, 2.0, -1.0)
    },
    **{
        f"convolution of axes {order}": lambda order=order: Fault(
            lambda sides: kernel_reordered(sides, (IMAGE, IMAGE), KERNEL, BIAS, SINGLE),
            np.asarray(convolved(IMAGE, KERNEL)) + BIAS[:, None, None],
            np.asarray(convolved(IMAGE, KERNEL.transpose(order))) + BIAS[:, None, None],
        )
        for order in ((1, 0, 2, 3), (0, 1, 3, 2), (1, 0, 3, 2))
    },
    "kernel transposed": lambda: Fault(
        lambda sides: kernel_reordered(sides, (SQUARE, SQUARE), drawn(13, 8, 8), drawn(14, 8), SINGLE),
        SQUARE @ drawn(13, 8, 8).T + drawn(14, 8),
        SQUARE @ drawn(13, 8, 8) + drawn(14, 8),
    ),
    **{
        f"stride {stride}, zeros {first} and {second} of {size}": lambda case=(stride, first, second, size): strided(*case)
        for stride, first, second, size in ((1, 1, 0, 3), (2, 1, 0, 3), (3, 0, 1, 3), (4, 0, 2, 3), (2, 2, 1, 5), (1, 1, 1, 3))
    },
    **{f"positions {by} late": lambda by=by: late(by) for by in (1, -1, 2, 4, -4, 5)},
    "positions of a short table": lambda: late(2, 8, 9),
    "positions beyond half": lambda: late(4, 7, 7),
    "rows 2 late": lambda: looked_up(POSITIONS, POSITIONS + 2),
    "rows late in most samples": lambda: looked_up(POSITIONS, POSITIONS + np.array([[2], [2], [0], [1]])),
    "rows late in half of the samples": lambda: looked_up(
        np.array([[0, 1, 2, 3], [9, 3, 7, 1]]), np.array([[1, 2, 3, 4], [3, 9, 1, 7]])
    ),
    "rows of tokens": lambda: looked_up(np.array([[0, 9, 2, 7], [9, 3, 7, 1]]), np.array([[1, 10, 3, 8], [10, 4, 8, 2]])),
    "rows with padding": lambda: looked_up(np.array([[2, 3, 4, 1, 1]]), np.array([[0, 1, 2, 3, 4]])),
    "rows with much padding": lambda: looked_up(np.array([[2, 3, 4, 1, 1, 1]]), np.array([[0, 1, 2, 3, 4, 5]])),
    **{
        f"padding up to {counted}, {'layer' if centred else 'RMS'} norm": lambda case=(counted, centred): padded(*case)
        for counted in (17, 20, 80, 81)
        for centred in (True, False)
    },
    **{f"pooled {kind}": lambda kind=kind: pooling(kind) for kind in ("mean", "sum", "maximum", "last")},
    "other kernel": lambda: other_weight(2),
    "other scale": lambda: other_weight(1),
    "scale of scores": lambda: attending(PLAIN, changed(factor=0.25)),
    "keys": lambda: attending(changed(keys=KEYS), PLAIN),
    "more keys": lambda: attending(PLAIN, changed(keys=KEYS)),
    "exchanged": lambda: attending(PLAIN, PLAIN, GIVEN, GIVEN.exchanged()),
    "scrambled": lambda: attending(PLAIN, changed(scrambled=True)),
    "shares in bfloat16": lambda: attending(PLAIN, changed(shares_in="bfloat16")),
    "scores in float16": lambda: attending(PLAIN, changed(scores_in="float16")),
    "without a mask": lambda: attending(changed(causal=False), changed(causal=False, factor=0.25)),
    "window": lambda: attending(changed(window=3), changed(window=3, factor=1.0)),
    **{
        f"update with {other}": lambda other=other: updating(**other)
        for other in (
            {"decay": 0.0},
            {"decay": 0.3},
            {"decay": 0.1001},
            {"decay": 10.0},
            {"decay": -0.1},
            {"epsilon_in_root": True},
            {"epsilon": 1e-5},
            {"epsilon": 1e-4, "epsilon_in_root": True},
            {"count_m": None, "count_v": None},
            {"count_m": None},
            {"count_v": None},
            {"count_m": 4, "count_v": 4},
            {"count_m": 2, "count_v": 2},
            {"count_m": 1, "count_v": 1},
            {"count_m": 7, "count_v": 7},
            {"count_m": 7, "count_v": 7, "counted": 7.0},
            {"rate": 0.011},
            {"rate": 0.0101},
            {"decay": 0.3, "states_decay": False},
            {"rate": 0.011, "states_decay": False},
        )
    },
    "update by SGD": lambda: by_sgd(0.011),
    "following AdamW": lambda: following(RULE, (M, V)),
    "following SGD": lambda: following(SGD(0.01, 0.9, 0.1), (M,)),
    "moment of twice the gradient": lambda: averaging(0.9 * OLD + 0.2 * GRADIENT),
    "moment of another beta": lambda: averaging(0.8 * OLD + 0.2 * GRADIENT),
    "moment with a decay": lambda: averaging(0.9 * OLD + 0.1 * (GRADIENT + 0.1 * P[:60])),
    "moment without its decay": lambda: averaging(0.9 * OLD + 0.1 * (GRADIENT - 0.1 * P[:60]), decay=0.1),
    "moment from zero": lambda: averaging(0.1 * GRADIENT),
    "moment of older": lambda: averaging(0.9 * drawn(106, 60) + 0.1 * GRADIENT),
    "moment of squares": lambda: averaging(0.999 * OLD**2 + 0.004 * GRADIENT**2, Average(0.999, 0.001), squared=True),
    "buffer of another momentum": lambda: averaging(0.8 * OLD + GRADIENT, Average(0.9, 1.0)),
    "added decay": lambda: Fault(
        lambda sides: added_decay((sides.right, sides.wrong), P, max(sides.limit, 1e-7)), drawn(107, 80), drawn(107, 80) + 0.1 * P
    ),
    **{
        f"epsilons {first} and {second}{', in the root' if in_root else ''}": lambda case=(first, second, in_root): ratio(*case)
        for first, second, in_root in ((1e-2, 1e-1, False), (1e-1, 1e-3, False), (1e-2, 1e-1, True), (0.0, 0.2, True))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fit_accepts_as_much_noise_as_before(name: str) -> None:
    check_text(TEXTS, report(FAULTS[name]()))


def test_another_decay_rate_is_accepted_up_to_its_own_rounding() -> None:
    half, gradient = Average(0.5, 0.5), 4 * GRADIENT
    own, stated = (average.error(OLD, gradient, SINGLE) for average in (half, FIRST))
    gap, noise = OLD - gradient, drawn(108, 60)
    noise -= (noise @ gap) / (gap @ gap) * gap
    noise *= 0.95 * own / norm(noise)
    assert norm(noise) > stated
    news = FIRST.new(OLD, gradient), half.new(OLD, gradient) + noise
    right, wrong = (Moment(OLD, new, gradient, P[:60], SINGLE) for new in news)
    fit = best(moment_deviations(right, wrong, FIRST, [], 1.0))
    assert fit and fit.evidence == "its decay rate is 0.5, while 0.9 is stated"


NAMES = {
    "the world size": 8.0,
    "the number of replicas": 2.0,
    "the accumulation steps": 3.0,
}


@pytest.mark.parametrize("value", [8.0, 2.0, 3.0, 4.0, 64.0, 24.0, 6.0, 16.0, 1.5, 8**0.5, 1 / 3, 9.0, 1 / 9, 5.0, 1.0])
def test_a_factor_is_named_up_to_an_error(value: float) -> None:
    name = name_of(value, 1e-9, NAMES)
    error = edge(lambda error: name_of(value, error, NAMES) == name, 1e-9, 1.0)
    alone = edge(lambda error: name_of(value, error, {"the world size": value}) == "the world size", 1e-9, 1.0)
    check_text(TEXTS, f"{name}, up to an error of {error:.3g}, alone up to {alone:.3g}")


@pytest.mark.parametrize(
    ("shape", "weight"),
    [((5, 16), (16,)), ((5, 7, 16), (16,)), ((6, 3, 4), (3, 4)), ((9, 4, 3, 3), (4,)), ((9, 6, 6), (6,)),
     ((9, 6), (6,)), ((16,), (16,))],
    ids=str,
)  # fmt: skip
def test_norms_that_match_a_weight(shape: tuple[int, ...], weight: tuple[int, ...]) -> None:
    check_text(TEXTS, "; ".join(map(described, norm_kinds(shape, weight))))


@pytest.mark.parametrize("shape", [(4,), (12,), (2, 3), (4, 6), (2, 3, 4)], ids=str)
def test_reorderings_of_a_shape(shape: tuple[int, ...]) -> None:
    x = np.arange(float(math.prod(shape))).reshape(shape)
    check_text(TEXTS, "; ".join(f"{text}: {list(map(int, moved.reshape(-1)[:8]))}" for text, moved in reorderings(x)))


def test_the_share_on_the_grid_of_a_low_dtype() -> None:
    values = np.array([1.0, 1 + 2.0**-7, 1 + 2.0**-8, 0.0, 3.0])
    assert on_grid(values, "bfloat16") == 0.75 and on_grid(values, "float16") == 1.0
    assert on_grid(np.zeros(3), "bfloat16") == 0.0
    # Two roundings are allowed, and no more.
    assert on_grid(np.array([1 + 2.0**-23]), "bfloat16", SINGLE) == 1.0
    assert on_grid(np.array([1 + 3 * 2.0**-23]), "bfloat16", SINGLE) == 0.0
