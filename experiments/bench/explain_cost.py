"""What `crossframe explain` costs at scale: reading two traces of a step, matching their operators, and reporting the first.

The traces are made up: the operators of forward and backward of a transformer, with the shapes of a model of eight billion
parameters and random signatures. Running the programs again, which `explain` does first, is not simulated.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from crossframe.operators import Operator, Trace, find
from crossframe.operators.signature import FREQUENCIES, PARTS, Signature
from crossframe.operators.trace import SourceLine
from crossframe.recording.sketch import NUM_SUMS
from experiments.models.llama import LlamaConfig

TOLERANCE = 1e-4
_NOISE = 1e-7
_TOKENS = 4096
_FOLLOWS = ("aten.mul", "aten.add", "aten.rsqrt", "aten.mul", "aten.transpose", "aten.silu")
"""Operators after each multiplication with a weight: with them a block has 105 operators in forward and backward."""
Shape = tuple[int, ...]


@dataclass
class _Maker:
    """Draws the operators of one trace. Two makers of one seed draw the same values; `noise` is what the second adds to them.

    Attributes:
        fault: the index of the operator whose output, and all that is computed after it, differs; None: none.
    """

    noise: float
    fault: int | None

    def __post_init__(self) -> None:
        self._rng, self._other = np.random.default_rng(0), np.random.default_rng(1)
        self.operators: list[Operator] = []

    def value(self, shape: Shape, *, normalized: bool = False, cut: bool = True) -> Signature:
        """The signature of a random tensor.

        Args:
            normalized: whether it is the output of a norm, all of which have almost the same norm.
        """
        size = self._rng.normal()
        norm = float(np.exp(1e-5 * size if normalized else size) * np.sqrt(np.prod(shape)))
        features = self._rng.normal(size=1 + 2 * len(FREQUENCIES))
        sums = norm / np.sqrt(NUM_SUMS) * self._rng.normal(size=NUM_SUMS)
        bits = self._rng.integers(2**63, size=2)
        if self.noise:
            bits += 1
            sums = sums + self.noise * norm * self._other.normal(size=NUM_SUMS)
        if self.fault is not None and len(self.operators) >= self.fault:
            norm, features, sums = 1.5 * norm, features + 0.1, 2.0 * sums
        width = shape[-1] if len(shape) > 1 and cut else 0
        cuts = [number for number in PARTS if width > number and width % number == 0]
        parts = tuple(
            tuple(self.value((*shape[:-1], width // number), cut=False) for _ in range(number)) for number in cuts
        )
        encoded = base64.b64encode(sums.astype(np.float32).tobytes()).decode()
        texts = (f"{int(bits[0]):016x}", f"{int(bits[1]):016x}", encoded)
        return Signature(shape, "float32", 0, norm, tuple(map(float, features)), *texts, parts)

    def apply(
        self, name: str, phase: str, module: str, shape: Shape, *inputs: Signature, normalized: bool = False
    ) -> Signature:
        """Add an operator; returns its output."""
        output = self.value(shape, normalized=normalized)
        line = SourceLine("model.py", 100 + len(self.operators) % 50, "forward", "x = layer(x)")
        self.operators.append(Operator(len(self.operators), name, "", phase, module, line, inputs, (output,)))
        return output


def made_trace(model: LlamaConfig, *, noise: float = 0.0, fault: float | None = None) -> Trace:
    """The trace of forward and backward of one rank.

    Args:
        noise: by how much values differ from those of a trace without noise, in parts of them.
        fault: where an operator computes another value, as a part of all operators of forward; None: nowhere.
    """
    num_forward = sum(1 + len(_FOLLOWS) for _ in _forward(model))
    maker = _Maker(noise, None if fault is None else int(fault * num_forward))
    width, tokens = model.width, _TOKENS
    x, results = maker.value((tokens, width)), []
    layers: list[tuple[str, Shape, Signature, Signature]] = []
    for name, shape in _forward(model):
        weight = maker.value(shape)
        module = name.rpartition(".")[0]
        before = x
        x = maker.apply("aten.mm", "forward", module, (tokens, shape[0]), before, weight)
        for follow in _FOLLOWS:
            x = maker.apply(follow, "forward", module, x.shape, x, before, normalized=follow == "aten.rsqrt")
        results.append(x)
        layers.append((module, shape, before, weight))
    gradient = x
    for module, shape, before, weight in reversed(layers):
        maker.apply("aten.mm", "backward", module, shape, gradient, before)
        gradient = maker.apply("aten.mm", "backward", module, before.shape, gradient, weight)
        for _ in _FOLLOWS:
            gradient = maker.apply("aten.mul", "backward", module, gradient.shape, gradient, before)
        results.append(gradient)
    return Trace(maker.operators, results)


def _forward(model: LlamaConfig) -> Iterator[tuple[str, Shape]]:
    """The weights that forward multiplies with, in order, each (outputs, inputs)."""
    return ((name, shape) for name, shape in model.shapes.items() if len(shape) == 2)


def write_traces(folder: Path, model: LlamaConfig) -> tuple[Path, Path]:
    """Two traces that differ by rounding, and from the middle of forward on by a fault."""
    paths = folder / f"a-{model.num_blocks}", folder / f"b-{model.num_blocks}"
    made_trace(model).write(paths[0])
    made_trace(model, noise=_NOISE, fault=0.5).write(paths[1])
    return paths


def read_traces(*paths: Path) -> None:
    """Read both."""
    assert all(Trace.read(path).operators for path in paths)


def explain_traces(*paths: Path) -> None:
    """Read both and find the first operators that differ."""
    a, b = map(Trace.read, paths)
    found = find(a, b, TOLERANCE)
    assert found.a is not None and found.b is not None and found.a.index == found.b.index, found
