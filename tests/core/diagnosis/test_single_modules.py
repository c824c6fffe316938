"""Runs of a few modules, recorded for one step: what a comparison says when one of them does otherwise is kept."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from crossframe.layout import FlatLayout
from crossframe.mesh import MeshSpec
from crossframe.param_map import identity_map
from crossframe.params import ParamSpec
from crossframe.recording import Manifest, Recording, RecordingWriter, Schedule, create_recording
from crossframe.verdict import compare
from crossframe.verdict.diagnosis.attention_fits import Attention, Projections
from crossframe.verdict.diagnosis.module_fits import FUNCTIONS
from crossframe.verdict.diagnosis.module_hypotheses import affine_parameters
from tests.core.helpers.kept_texts import check_text

TEXTS = Path(__file__).with_name("diagnoses_of_modules.json")
Values = dict[tuple[str, str], np.ndarray]
"""Inputs and outputs by (module, use), in the order of forward."""


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng((17, seed)).standard_normal(shape)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [(1.0, None)]),
        ({"norm.scale": 0.5}, [(0.5, None), (1.5, None)]),
        ({"norm.scale": 0.5, "norm.shift": 3.0}, [(0.5, 3.0), (3.0, 0.5)]),
        ({"norm.scale": 0.5, "other.scale": 3.0, "scale": 2.0}, [(0.5, None), (1.5, None)]),
        ({"norm.a": 0.5, "norm.b": 3.0, "norm.c": 2.0}, []),
    ],
)
def test_the_affine_parameters_of_a_norm_are_its_own(params: dict[str, float], expected: list) -> None:
    made: Any = SimpleNamespace(
        both=SimpleNamespace(right=np.zeros((2, 4, 4))),
        module="norm",
        right=SimpleNamespace(manifest=SimpleNamespace(params=params)),
        as_used=lambda _, name: np.full(4, params[name]),
    )
    found = [(weight[0], None if bias is None else bias[0]) for weight, bias in affine_parameters(made)]
    assert found == expected


def record(folder: Path, params: dict[str, np.ndarray], values: Values, dtype: str = "float64") -> Recording:
    """A finished recording of a step in which a rank computes these values; its loss follows from the last one."""
    wide = {name: np.asarray(value, np.float64) for name, value in (params or {"end.scale": np.ones(3)}).items()}
    layout = FlatLayout(tuple(ParamSpec(name, value.shape, "float64") for name, value in wide.items()), 1, True)
    made = Manifest(
        framework="torch",
        model="toy",
        dtype=dtype,
        mesh=MeshSpec(shard=1),
        steps=1,
        learning_rate=0.1,
        seed=0,
        terms=4,
        schedule=Schedule(dense=1, every=1),
        param_map=identity_map({name: value.shape for name, value in wide.items()}),
        units=(("", layout),),
    )
    create_recording(folder, made)
    with RecordingWriter(folder, made, 0) as writer:
        writer.batch(0, "0" * 64, [0, 1, 2])
        for (module, use), value in values.items():
            writer.activation(0, 0, module, use, value)
        last = float(np.asarray(list(values.values())[-1], np.float64).mean())
        writer.loss(0, 1 + 1e-3 * last)
        grads = {name: drawn(i, *value.shape) * (1 + 1e-3 * last) for i, (name, value) in enumerate(wide.items())}
        writer.unsharded(0, "", wide)
        writer.local_grads(0, "", grads)
        writer.grad_norm(0, math.sqrt(sum(float(np.square(grad).sum()) for grad in grads.values())))
        whole = {name: (0, value.size) for name, value in wide.items()}
        writer.parameters(0, "", {name: (*whole[name], value.reshape(-1)) for name, value in wide.items()})
        writer.reduced_grads(0, "", {name: (*whole[name], grad.reshape(-1)) for name, grad in grads.items()})
        after = {name: value - 0.1 * grads[name] for name, value in wide.items()}
        writer.updated(0, "", {name: (*whole[name], value.reshape(-1)) for name, value in after.items()})
        writer.end_step(0)
    return Recording.open(folder)


BATCH, LENGTH, HEADS, WIDTH = 3, 6, 2, 8
X = drawn(1, BATCH, LENGTH, WIDTH)
QKV = drawn(2, 3 * WIDTH, WIDTH)
PROJECTED = X @ QKV.T
Q, K, V = (PROJECTED[..., i * WIDTH : (i + 1) * WIDTH] for i in range(3))
PLAIN = Attention(HEADS, HEADS, causal=True, factor=0.5)
OUT, IN_BIAS, OUT_BIAS = drawn(3, WIDTH, WIDTH), drawn(4, 3 * WIDTH), drawn(5, WIDTH)


def mixed(causal: bool) -> np.ndarray:
    """Values that positions mix by learned weights, with a causal mask or without, which no attention of the projections is."""
    weights = np.exp(drawn(27, LENGTH, LENGTH)) * (np.tri(LENGTH) if causal else 1.0)
    return (weights / weights.sum(-1, keepdims=True)) @ V


def attention(causal: bool = True, factor: float = 0.5, exchanged: bool = False) -> np.ndarray:
    given = Projections(K, Q, V) if exchanged else Projections(Q, K, V)
    return Attention(HEADS, HEADS, causal, factor).of(given)


def heads_apart(x: np.ndarray, num: int = HEADS) -> np.ndarray:
    """(batch, heads, positions, head width)."""
    return x.reshape(BATCH, LENGTH, num, -1).swapaxes(1, 2)


def fused(y: np.ndarray, *, by_head: bool = False) -> Values:
    whole = np.stack([each.reshape(BATCH, LENGTH, HEADS, -1) for each in (Q, K, V)], axis=3).reshape(BATCH, LENGTH, -1)
    return {("qkv", "input"): X, ("qkv", "output"): whole if by_head else PROJECTED, ("out", "input"): y}


def three(y: np.ndarray, shape: Callable[[np.ndarray], np.ndarray] = lambda x: x, extra: int = 0) -> Values:
    """Three projections, then others of their shape, then what follows from them."""
    values: Values = {(name, "output"): shape(x) for name, x in zip("qkv", (Q, K, V), strict=True)}
    values |= {(f"more{i}", "output"): drawn(60 + i, BATCH, LENGTH, WIDTH) for i in range(extra)}
    return values | {("out", "input"): y}


def normed_heads(y: np.ndarray) -> Values:
    """Queries and keys that are normed in each head, after all projections."""
    q, k = (x.reshape(BATCH, LENGTH, HEADS, -1) for x in (Q, K))
    rest: Values = {("q", "output"): drawn(50, BATCH, LENGTH, WIDTH), ("v", "output"): V}
    return rest | {("q_norm", "output"): q, ("k_norm", "output"): k, ("out", "input"): y}


def grouped(factor: float) -> Values:
    """Four heads of queries that share two of keys and values."""
    q, k, v = drawn(6, BATCH, LENGTH, WIDTH), drawn(7, BATCH, LENGTH, 4), drawn(8, BATCH, LENGTH, 4)
    y = Attention(4, 2, True, factor).of(Projections(q, k, v))
    return {("qkv", "output"): np.concatenate([q, k, v], axis=-1), ("out", "input"): y}


def memory(padding: int) -> Values:
    """Attention to the positions of a longer sequence, of which each sample masks more than the sample before."""
    k, v = drawn(28, BATCH, LENGTH + 3, WIDTH), drawn(29, BATCH, LENGTH + 3, WIDTH)
    keys = np.arange(LENGTH + 3) < LENGTH + 3 - padding * np.arange(BATCH)[:, None]
    y = Attention(HEADS, HEADS, False, 0.5, keys=keys).of(Projections(Q, k, v))
    return {("q", "output"): Q, ("k", "output"): k, ("v", "output"): v, ("out", "input"): y}


def multihead(factor: float, *, causal: bool = True) -> Values:
    q, k, v = np.split(PROJECTED + IN_BIAS, 3, axis=-1)
    y = Attention(HEADS, HEADS, causal, factor).of(Projections(q, k, v)) @ OUT.T + OUT_BIAS
    return {("attn", "input"): X, ("attn", "output"): y}


MULTIHEAD = {
    "attn.in_proj_weight": QKV,
    "attn.in_proj_bias": IN_BIAS,
    "attn.out_proj.weight": OUT,
    "attn.out_proj.bias": OUT_BIAS,
}
LENGTHS = np.array([6, 3, 4])


def pooled(kind: str, padded: bool) -> Values:
    parts = [x if padded else x[:n] for x, n in zip(X, LENGTHS, strict=True)]
    how: Callable[[np.ndarray], np.ndarray] = {"mean": lambda x: x.mean(0), "last": lambda x: x[-1]}.get(
        kind, lambda x: x.max(0)
    )
    return {("norm", "output"): X, ("pool", "output"): np.stack([how(part) for part in parts])}


TABLE, TOKENS = drawn(9, 12, WIDTH), drawn(10, BATCH, LENGTH, WIDTH)


def waves(pairs: bool) -> np.ndarray:
    angles = np.arange(LENGTH + 4)[:, None] * 1e4 ** -(np.arange(0, WIDTH, 2) / WIDTH)
    parts = np.sin(angles), np.cos(angles)
    return np.stack(parts, -1).reshape(len(angles), WIDTH) if pairs else np.concatenate(parts, -1)


def summed(table: np.ndarray, by: int) -> Values:
    return {("tokens", "output"): TOKENS, ("norm", "input"): TOKENS + table[by : by + LENGTH]}


def looked_up(rows: np.ndarray) -> Values:
    return {("positions", "output"): TABLE[rows], ("norm", "input"): TOKENS + TABLE[rows]}


POSITIONS = np.arange(LENGTH) + np.zeros((BATCH, 1), int)
IMAGE, KERNEL, BIAS = drawn(11, 2, 3, 8, 8), drawn(12, 3, 3, 3, 3), drawn(13, 3)


def convolution(before: int = 1, order: tuple[int, ...] = (0, 1, 2, 3), stride: int = 1) -> Values:
    around = (before, 2 - before)
    padded = np.pad(IMAGE, ((0, 0), (0, 0), around, around))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))[:, :, ::stride, ::stride]
    y = np.einsum("bihwyx,oiyx->bohw", windows, KERNEL.transpose(order)) + BIAS[:, None, None]
    return {("conv", "input"): IMAGE, ("conv", "output"): y}


CONVOLUTION = {"conv.weight": KERNEL, "conv.bias": BIAS}
SCALE, SHIFT = drawn(14, WIDTH), drawn(15, WIDTH)


def norm(epsilon: float, x: np.ndarray = X, kind: str = "layer", more: float = 0.0) -> Values:
    centred = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    y = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + epsilon)
    y = y * (more + SCALE) + SHIFT if kind == "layer" else y * (more + SCALE)
    return {("norm", "input"): x, ("norm", "output"): y}


def batch_norm(epsilon: float) -> Values:
    x = drawn(16, 9, 4, 3, 3)
    centred = x - x.mean((0, 2, 3), keepdims=True)
    y = centred / np.sqrt(np.square(centred).mean((0, 2, 3), keepdims=True) + epsilon)
    return {("norm", "input"): x, ("norm", "output"): y * SCALE[:4, None, None] + SHIFT[:4, None, None]}


def plain_norm(epsilon: float, *, as_function: bool = False) -> Values:
    """A norm without parameters, as a module or as a function between two modules."""
    y = X / np.sqrt(np.square(X).mean(-1, keepdims=True) + epsilon)
    name = ("next", "input") if as_function else ("norm", "output")
    first = ("before", "output") if as_function else ("norm", "input")
    return {first: X, name: y}


def low(x: np.ndarray, dtype: Any = ml_dtypes.bfloat16) -> np.ndarray:
    return x.astype(np.float32).astype(dtype)


def low_norm(epsilon: float) -> Values:
    x = low(0.05 * X)
    wide = x.astype(np.float64)
    y = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + epsilon) * low(SCALE).astype(np.float64)
    return {("norm", "input"): x, ("norm", "output"): low(y)}


def activated(name: str, *, gated: bool = False, between: int = 0) -> Values:
    values: Values = {("up", "output"): 2 * X, ("gate", "output"): drawn(20, *X.shape)}
    values |= {(f"other{i}", "output"): drawn(30 + i, *X.shape) for i in range(between)}
    y = FUNCTIONS[name](values["up", "output"]) * (values["gate", "output"] if gated else 1.0)
    return values | {("down", "input"): y}


def dropped(p: float, seed: int = 1, *, branch: bool = False) -> Values:
    x, rest = drawn(21, 20, 30), drawn(22, 20, 30) if branch else np.zeros((20, 30))
    mask = np.random.default_rng(seed).random(x.shape) >= p
    return {("before", "output"): x, ("next", "input"): rest + x * mask / (1 - p)}


def added(times: float) -> Values:
    branch, x = drawn(23, *X.shape), drawn(24, *X.shape)
    return {("mlp", "output"): branch, ("next", "input"): x + times * branch}


def linear(weight: np.ndarray, bias: np.ndarray | None = None) -> Values:
    y = X @ weight.T + (0.0 if bias is None else bias)
    return {("fc", "input"): X, ("fc", "output"): y}


OWN, OTHER = drawn(25, WIDTH, WIDTH), drawn(26, WIDTH, WIDTH)
LINEAR = {"fc.weight": OWN, "fc.bias": SHIFT, "other.weight": OTHER, "other.bias": SCALE}
NORMS = {"norm.weight": SCALE, "norm.bias": SHIFT}


def in_order(first: str, second: str) -> Values:
    x = {"a": X}
    x["b"] = np.tanh(X) + 1
    given = {first: x["a"], second: x["b"]}
    return {(name, "input"): given[name] for name in ("left", "right")}


# Parameters, what a and b compute, and their dtype.
PAIRS: dict[str, tuple[dict[str, np.ndarray], Values, Values, str]] = {
    name: (*pair, "float64")
    for name, pair in {
        "fused projections": ({}, fused(attention()), fused(attention(factor=0.25))),
        "projections fused in each head": (
            {},
            fused(attention(), by_head=True),
            fused(attention(factor=0.25), by_head=True),
        ),
        "heads as a dim": ({}, three(attention(), heads_apart), three(attention(factor=0.25), heads_apart)),
        "output with heads as a dim": (
            {},
            three(attention().reshape(BATCH, LENGTH, HEADS, -1), heads_apart),
            three(attention(factor=0.25).reshape(BATCH, LENGTH, HEADS, -1), heads_apart),
        ),
        "projections of five outputs before": ({}, three(attention(), extra=5), three(attention(factor=0.25), extra=5)),
        "projections of six outputs before": ({}, three(attention(), extra=6), three(attention(factor=0.25), extra=6)),
        "normed heads": ({}, normed_heads(attention()), normed_heads(attention(factor=0.25))),
        "groups of heads": ({}, grouped(0.5**0.5), grouped(1.0)),
        "keys exchanged": ({}, three(attention()), three(attention(exchanged=True))),
        "attention as a module": (MULTIHEAD, multihead(0.5), multihead(0.25)),
        "attention as a module, no mask": (MULTIHEAD, multihead(0.5, causal=False), multihead(0.25, causal=False)),
        "a mask is forgotten": ({}, three(attention()), three(attention(causal=False))),
        **{f"pooled {kind}": ({}, pooled(kind, False), pooled(kind, True)) for kind in ("mean", "max", "last")},
        "pooled otherwise": ({}, pooled("mean", False), pooled("max", True)),
        "positions of a parameter": ({"pos": TABLE[None]}, summed(TABLE, 0), summed(TABLE, 1)),
        "positions of a short parameter": ({"pos": TABLE[:5]}, summed(TABLE, 0), summed(TABLE, 1)),
        "positions of waves": ({}, summed(waves(True), 0), summed(waves(True), 2)),
        "positions of waves in halves": ({}, summed(waves(False), 2), summed(waves(False), 0)),
        "positions of a table": ({"positions.weight": TABLE}, looked_up(POSITIONS), looked_up(POSITIONS + 2)),
        "positions of padded samples": (
            {"positions.weight": TABLE},
            looked_up(POSITIONS),
            looked_up(POSITIONS + np.array([[2], [2], [0]])),
        ),
        "tokens of a table": (
            {"positions.weight": TABLE},
            looked_up(np.random.default_rng(1).integers(0, 9, (BATCH, LENGTH))),
            looked_up(np.random.default_rng(1).integers(0, 9, (BATCH, LENGTH)) + 1),
        ),
        "convolution pads before": (CONVOLUTION, convolution(1), convolution(0)),
        "convolution with a stride": (CONVOLUTION, convolution(1, stride=2), convolution(2, stride=2)),
        "kernel of a convolution": (CONVOLUTION, convolution(), convolution(order=(0, 1, 3, 2))),
        "layer norm": (NORMS, norm(1e-5), norm(1e-3)),
        "RMS norm": ({"norm.scale": SCALE}, norm(1e-5, kind="RMS"), norm(1e-3, kind="RMS")),
        "RMS norm of one more": (
            {"norm.scale": SCALE},
            norm(1e-5, kind="RMS", more=1.0),
            norm(1e-3, kind="RMS", more=1.0),
        ),
        "batch norm": (
            {"norm.weight": SCALE[:4], "norm.bias": SHIFT[:4]},
            batch_norm(1e-5),
            batch_norm(1e-3),
        ),
        "norm without parameters": ({}, plain_norm(1e-5), plain_norm(1e-3)),
        "norm as a function": ({}, plain_norm(1e-5, as_function=True), plain_norm(1e-3, as_function=True)),
        "SiLU and GELU": ({}, activated("SiLU"), activated("x Phi(x) by erf")),
        "GELUs": ({}, activated("x Phi(x) by erf"), activated("x Phi(x) by tanh")),
        "GELUs, gated": ({}, activated("x Phi(x) by erf", gated=True), activated("x Phi(x) by tanh", gated=True)),
        "GELUs of four outputs before": (
            {},
            activated("x Phi(x) by erf", between=4),
            activated("x Phi(x) by tanh", between=4),
        ),
        "GELUs of five outputs before": (
            {},
            activated("x Phi(x) by erf", between=5),
            activated("x Phi(x) by tanh", between=5),
        ),
        "dropout": ({}, dropped(0.0), dropped(0.1)),
        "dropout of a branch": ({}, dropped(0.0, branch=True), dropped(0.25, branch=True)),
        "two masks": ({}, dropped(0.2), dropped(0.2, 2)),
        "a branch is lost": ({}, added(1.0), added(0.0)),
        "a branch is halved": ({}, added(1.0), added(0.5)),
        "another weight": (LINEAR, linear(OWN, SHIFT), linear(OTHER, SCALE)),
        "another weight with its own bias": (LINEAR, linear(OWN, SHIFT), linear(OTHER, SHIFT)),
        "another weight without a bias": (
            {"fc.weight": OWN, "other.weight": OTHER},
            linear(OWN),
            linear(OTHER),
        ),
        "the bias of another": (LINEAR, linear(OWN, SHIFT), linear(OWN, SCALE)),
        "transposed weight": (LINEAR, linear(OWN, SHIFT), linear(OWN.T, SHIFT)),
        "norm of another weight": (
            NORMS | {"last.weight": 2 + SCALE, "last.bias": SHIFT},
            norm(1e-5),
            norm(1e-5, more=2.0),
        ),
        "modules exchanged": ({}, in_order("left", "right"), in_order("right", "left")),
        "noise": ({}, linear(OWN), linear(OWN + 1e-3 * OTHER)),
    }.items()
}
PAIRS["norm in bfloat16"] = ({"norm.weight": SCALE}, low_norm(1e-6), low_norm(1e-5), "bfloat16")
PAIRS["a mask of learned weights is forgotten"] = ({}, three(mixed(True)), three(mixed(False)), "float64")
for shapes, weight, bias, x, y in (
    ("an output without the last dim", SCALE, {}, X, X @ SCALE),
    ("a longer output", SCALE, {}, X, np.concatenate([X, X], axis=1)),
    ("a scalar output", OWN, {}, X, (X @ OWN).sum()),
    ("a scalar input", OWN, {}, np.array(2.0), 2 * OWN),
    ("a weight and a bias of two dims", X[0], {"f.bias": X[1]}, X, X * X[0] + X[1]),
):
    sides: list[Values] = [{("f", "input"): x, ("f", "output"): y + more} for more in (0.0, 0.1 * np.cos(9 * y))]
    PAIRS[shapes] = ({"f.weight": weight, "other.weight": weight + 1, **bias}, *sides, "float64")
PAIRS["outputs without positions"] = ({}, *(three(each, lambda x: x[:, :0]) for each in (X, np.tanh(X))), "float64")
for shapes, name in (
    ("a scalar output without a weight", ("f", "output")),
    ("a scalar input of a function", ("g", "input")),
):
    PAIRS[shapes] = ({}, *({("f", "input"): np.array(0.3), name: np.array(y)} for y in (0.3, 0.37)), "float64")
NEAR, CENTRING = 1 + 0.01 * X, np.eye(WIDTH) - 1 / WIDTH
PAIRS["a difference that a weight amplifies"] = (
    {"fc.weight": CENTRING, "other.weight": OTHER},
    *({("fc", "input"): x, ("fc", "output"): x @ CENTRING.T} for x in (NEAR, NEAR + 2e-12 * np.cos(9 * X))),
    "float64",
)
PAIRS["a weight with a dim of 1"] = (
    {"f.weight": SCALE[None]},
    *({("f", "input"): X[0], ("f", "output"): each} for each in (X[0], np.tanh(X[0]))),
    "float64",
)

for shapes, value in (
    ("in_proj_weight", QKV[:-2]),
    ("in_proj_bias", IN_BIAS[:-1]),
    ("out_proj.weight", OUT[:, :-1]),
    ("out_proj.bias", OUT_BIAS[:-1]),
):
    PAIRS[f"attention as a module with another {shapes}"] = (
        MULTIHEAD | {f"attn.{shapes}": value},
        multihead(0.5),
        multihead(0.25),
        "float64",
    )
PAIRS["keys of padding of another sequence"] = ({}, memory(1), memory(0), "float64")


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_said_of_a_module(name: str, tmp_path: Path) -> None:
    params, first, second, dtype = PAIRS[name]
    runs = [record(tmp_path / side, params, values, dtype) for side, values in (("a", first), ("b", second))]
    # Every other pair the other way round, since hypotheses try both sides.
    found = compare(*runs[:: 1 if list(PAIRS).index(name) % 2 else -1])
    told = f"{found.diagnosis.signature}, {found.diagnosis.evidence}" if found.diagnosis else "no diagnosis"
    check_text(TEXTS, f"{found.verdict.value}: {told} {found.reason}")
