"""Directions of differences, and what norms and GELUs compute from their own inputs: the figures are kept in directions.json."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossframe.dtypes import numpy_dtype
from crossframe.verdict.measure.quantities import Quantity
from crossframe.verdict.perturbed_runs.directions import Casts, Directions, Tally, directions_of
from crossframe.verdict.perturbed_runs.norms_and_gelus import Recogniser
from tests.core.helpers.kept_texts import check_text
from tests.core.helpers.quantities import quantity

TEXTS = Path(__file__).with_name("directions.json")
Effect = Callable[[np.ndarray], np.ndarray]


def low(x: np.ndarray, dtype: str = "bfloat16") -> np.ndarray:
    return x.astype(np.float32).astype(numpy_dtype(dtype))


def drawn(*seed: int, shape: tuple[int, ...] = (200, 8)) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def activation(a: np.ndarray, b: np.ndarray, step: int, module: str, use: str) -> list[Quantity]:
    return [quantity(low(a), low(b), phase="forward", step=step, module=module, use=use, parameter="")]


def gelu(x: np.ndarray, tanh: float = 0.0) -> np.ndarray:
    by_tanh = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    by_erf = 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return by_erf + tanh * (by_tanh - by_erf)


def normed(x: np.ndarray, kind: str, gain: float = 1.0) -> np.ndarray:
    over = 0 if kind == "batch norm" else -1
    x = x if kind == "RMS norm" else x - x.mean(over, keepdims=True)
    y = gain * x / np.sqrt(np.square(x).mean(over, keepdims=True)) * np.linspace(0.5, 2, x.shape[-1])
    return y if kind == "RMS norm" else y + np.linspace(-1, 1, x.shape[-1])


def tally(seed: int, effect: Effect = lambda x: x, *, kind: str = "", steps: int = 5, noise: float = 0.01) -> Tally:
    """A pair of runs that differ by noise and, in b, by an effect on an output or on a gradient."""
    made = Tally()
    weight = np.linspace(0.5, 2, 8)
    made.note_weights([quantity(weight, weight, phase="parameters", parameter="norm.weight")])
    for step in range(steps):
        a = drawn(1, step)
        b = a + noise * drawn(2, seed, step)
        if kind == "gradients":
            for i in range(5):
                a = drawn(3, step, i, shape=(40,))
                b = effect(a) + noise * drawn(4, seed, step, i, shape=(40,))
                made.add([quantity(low(a), low(b), phase="backward", step=step, parameter=f"w{i}")])
            continue
        made.add(activation(a, b, step, "norm", "input"))
        if kind == "gelu":
            made.add(activation(gelu(a), effect(b), step, "act", "output"))
        elif kind:
            made.add(activation(normed(a, kind), effect(b), step, "norm", "output"))
        else:
            made.add(activation(a, effect(b), step, "block", "output"))
    return made


def told(found: Directions | None) -> str:
    if found is None:
        return "not tested"
    what = found.found.describe(("a", "b")) if found.found else "nothing"
    power = [
        f"{kind} {name} from {least:.3g}, {half:.3g}"
        for kind, by_name in found.power.items()
        for name, (least, half) in by_name.items()
    ]
    return f"{what}; near {found.near:.3g} of {found.num_tests} tests; {'; '.join(power)}"


EFFECTS: dict[str, tuple[str, Effect, Effect]] = {
    "none": ("", lambda x: x, lambda x: x),
    "a factor": ("", lambda x: 1.05 * x, lambda x: x),
    "a shift": ("", lambda x: x + 0.05, lambda x: x),
    "a shift by channel": ("", lambda x: x + 0.2 * np.sign(np.arange(8) - 3.5), lambda x: x),
    "a factor of the size": ("", lambda x: x + 0.05 * np.sign(x), lambda x: x),
    "a tanh GELU": ("gelu", lambda x: gelu(x, 1.0), gelu),
    "another gain of an RMS norm": (
        "RMS norm",
        lambda x: normed(x, "RMS norm", 1.05),
        lambda x: normed(x, "RMS norm"),
    ),
    "another gain of a layer norm": (
        "layer norm",
        lambda x: normed(x, "layer norm", 1.05),
        lambda x: normed(x, "layer norm"),
    ),
    "another gain of a batch norm": (
        "batch norm",
        lambda x: normed(x, "batch norm", 1.01),
        lambda x: normed(x, "batch norm"),
    ),
    "a factor of all gradients": ("gradients", lambda x: 1.05 * x, lambda x: x),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_figures_of_directions(name: str) -> None:
    kind, effect, plain = EFFECTS[name]
    runs = [
        [tally(seed, plain, kind=kind) for seed in range(100 + 10 * side, 104 + side + 10 * side)] for side in (0, 1)
    ]
    pair = tally(7, effect, kind=kind)
    check_text(TEXTS, told(directions_of(pair, runs, "bfloat16", 1e-4)), "both perturbed")
    check_text(TEXTS, told(directions_of(pair, runs[:1], "bfloat16", 1e-2)), "one perturbed")
    casts = Casts([tally(seed, plain, kind=kind, noise=0.02) for seed in range(200, 203)], 0.5)
    check_text(TEXTS, told(directions_of(pair, runs, "bfloat16", 1e-4, casts)), "casts")
    check_text(TEXTS, told(directions_of(pair, runs, "bfloat16", 1e-4, Casts([], 0.5))), "casts of no perturbed runs")
    assert directions_of(pair, runs, "float32", 1e-4) is None


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8, 9])
def test_windows_double_up_to_all_steps(steps: int) -> None:
    expected = {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 4], 5: [1, 2, 4, 5], 8: [1, 2, 4, 8], 9: [1, 2, 4, 8, 9]}
    assert tally(0, steps=steps).windows == expected[steps]


SHAPES: dict[str, tuple[int, ...]] = {
    "rows": (60, 8),
    "images": (6, 4, 5, 5),
    "tokens": (4, 9, 8),
    "two channels": (60, 2),
}


def estimated(x: Any, y: Any, weight: np.ndarray | None, others: int = 0) -> str:
    recogniser = Recogniser()
    if weight is not None:
        recogniser.note_weights([quantity(weight, weight, phase="update", parameter="norm.weight")])
    recogniser.estimates(activation(x[0], x[1], 0, "norm", "input"))
    for i in range(others):
        recogniser.estimates(
            activation(drawn(50 + i, shape=y[0].shape), drawn(50 + i, shape=y[0].shape), 0, f"m{i}", "output")
        )
    found = recogniser.estimates(activation(y[0], y[1], 0, "norm", "output"))
    numbers = {"way": found.way, "tanh": found.tanh, "gain": found.gain, "cast": found.cast}
    lines = [f"{name} {'none' if value is None else f'{value:.4g}'}" for name, value in numbers.items()]
    return f"{', '.join(lines)}, {len(found.statistics)} statistics"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["RMS norm", "layer norm", "batch norm", "batch norm of channels", "affine", "gelu"])
def test_estimates_of_norms_and_gelus(shape: str, kind: str) -> None:
    sides = [drawn(5, shape=SHAPES[shape]), drawn(5, shape=SHAPES[shape]) + 0.01 * drawn(6, shape=SHAPES[shape])]
    weight = np.linspace(0.5, 2, SHAPES[shape][1 if kind.endswith("channels") else -1])

    def output(x: np.ndarray, gain: float) -> np.ndarray:
        if kind == "gelu":
            return gelu(x, gain - 1)
        if kind == "affine":
            return gain * x * 3 + 1
        if not kind.endswith("channels"):
            return normed(x, kind, gain)
        dims = (0, *range(2, x.ndim))
        x = (x - x.mean(dims, keepdims=True)) / x.std(dims, keepdims=True)
        return gain * x * weight.reshape(-1, *[1] * (x.ndim - 2))

    y = output(sides[0], 1.0), output(sides[1], 1.5)
    check_text(TEXTS, estimated(sides, y, weight), "with its weight")
    check_text(TEXTS, estimated(sides, y, 1.1 * weight), "with another weight")
    check_text(TEXTS, estimated(sides, y, None, others=2), "without a weight, two modules later")
    check_text(TEXTS, estimated(sides, y, None, others=4), "four modules later")
