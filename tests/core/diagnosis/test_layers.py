"""Faults of layers and of counts: each is named as itself, and none is taken for another."""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from crossframe.dtypes import numpy_dtype
from crossframe.layout import FlatLayout
from crossframe.mesh import MeshSpec
from crossframe.param_map import identity_map
from crossframe.params import ParamSpec
from crossframe.recording import Manifest, Recording, RecordingWriter, Schedule, create_recording
from crossframe.verdict import PairVerdict, Verdict, compare
from crossframe.verdict.diagnosis.attention_fits import MOST_KEYS, Attention, Projections, attention_of
from crossframe.verdict.diagnosis.fit import Contrast
from crossframe.verdict.diagnosis.kernel_fits import other_kernel
from crossframe.verdict.diagnosis.layer_fits import pooled, rows_off
from crossframe.verdict.diagnosis.module_fits import norm_epsilons
from crossframe.verdict.measure.metrics import norm
from tests.conftest import EXHAUSTIVE
from tests.core.helpers.kept_texts import check_text

TEXTS = Path(__file__).with_name("diagnoses_of_layers.json")
WORDS, WIDTH, LENGTH, SAMPLES, HEADS = 40, 8, 6, 3, 2
UNITS = {
    "": {"tok.weight": (WORDS, WIDTH), "pos.weight": (LENGTH + 4, WIDTH), "end.weight": (WIDTH,), "odd": (3,)},
    **{
        f"blocks.{i}": {
            f"blocks.{i}.{name}": shape
            for name, shape in {
                "norm.weight": (WIDTH,),
                "q.weight": (WIDTH, WIDTH),
                "k.weight": (WIDTH, WIDTH),
                "v.weight": (WIDTH, WIDTH),
                "out.weight": (WIDTH, WIDTH),
            }.items()
        }
        for i in range(2)
    },
}
SHAPES = {name: shape for params in UNITS.values() for name, shape in params.items()}


def drawn(text: str, *shape: int) -> np.ndarray:
    return np.random.default_rng(list(text.encode())).standard_normal(shape)


def rms(x: np.ndarray, counted: int = WIDTH, centred: bool = False, epsilon: float = 1e-5) -> np.ndarray:
    mean = x.sum(-1, keepdims=True) / counted if centred else 0.0
    squares = np.square(x - mean).sum(-1, keepdims=True) + (counted - WIDTH) * np.square(mean)
    return (x - mean) / np.sqrt(squares / counted + epsilon)


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(numpy_dtype(dtype)).astype(np.float64)


def rotated(x: np.ndarray) -> np.ndarray:
    """Rotary positions of (batch, heads, LENGTH, width)."""
    half = x.shape[-1] // 2
    angle = np.arange(LENGTH)[:, None] * 1e4 ** -(np.arange(half) / half)
    turned = np.concatenate([-x[..., half:], x[..., :half]], -1)
    return x * np.tile(np.cos(angle), 2) + turned * np.tile(np.sin(angle), 2)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, run: "Run") -> np.ndarray:
    if run.scrambled:
        q, k, v = (x.reshape(len(x), HEADS, LENGTH, -1) for x in (q, k, v))
    else:
        q, k, v = (x.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2) for x in (q, k, v))
    if run.rotary:
        q, k = rotated(q), rotated(k)
    scores = run.scale * q @ k.swapaxes(2, 3)
    scores = np.where(np.tri(LENGTH, dtype=bool), scores, -np.inf) if run.causal else scores
    keys = np.arange(LENGTH) < LENGTH - np.arange(len(q))[:, None] * run.padding
    scores = np.where(keys[:, None, None], scores, -np.inf)
    shares_in = run.shares_in
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares = cast(shares / shares.sum(-1, keepdims=True), shares_in)
    return (shares @ v).swapaxes(1, 2).reshape(-1, LENGTH, WIDTH)


def mean(grads: list[list[np.ndarray]], counts: list[int]) -> np.ndarray:
    """Of [rank][microbatch], weighted by samples."""
    totals = np.array([np.sum(own, axis=0) for own in grads])
    return np.tensordot(np.array(counts) / sum(counts), totals, 1)


@dataclass(frozen=True)
class Run:
    """What a run does; a fault replaces one of these."""

    counts: tuple[int, ...] = (SAMPLES, SAMPLES)
    microbatches: int = 1
    dtype: str = "float64"
    layer_norm: bool = False
    shift: int = 0
    counted: int = WIDTH
    norms_in: str | None = None
    shares_in: str = "float64"
    loss_in: str = "float64"
    scale: float = (WIDTH / HEADS) ** -0.5
    rotary: bool = False
    causal: bool = True
    padding: int = 0
    exchanged: bool = False
    scrambled: bool = False  # heads are read without exchanging dims
    epsilon: float = 1e-5
    runs_first: int = 0
    recorded: int = WIDTH  # so many features of the norms' inputs
    num_recorded: int = 9  # microbatches whose activations are recorded
    head: bool = False  # the embedding is also the head; gradients of projections are sums of their inputs
    order: tuple[int, int] = (0, 1)
    reduce: Callable[[list[list[np.ndarray]], list[int]], np.ndarray] = mean
    local: Callable[[int, list[np.ndarray]], list[np.ndarray]] = lambda rank, own: own
    norm: Callable[[float], float] = lambda norm: norm
    output: Callable[[np.ndarray], np.ndarray] = lambda x: x
    gathered: Callable[[str, np.ndarray, dict[str, np.ndarray]], np.ndarray] = lambda name, own, every: own


def record(directory: Path, run: Run, noise: int = 0) -> Recording:
    """Two steps of a transformer, gradients drawn."""
    world, dtype = len(run.counts), np.dtype(run.dtype)
    units = tuple(
        (unit, FlatLayout(tuple(ParamSpec(n, s, run.dtype) for n, s in params.items()), world, True))
        for unit, params in UNITS.items()
    )
    settings: dict[str, Any] = {"accumulate": run.microbatches}
    made = Manifest(
        "torch", "toy", run.dtype, MeshSpec(world), 2, 0.1, 0, 18, Schedule(2, 1), identity_map(SHAPES), units, settings=settings
    )  # fmt: skip
    create_recording(directory, made)
    rng = np.random.default_rng(noise)
    u = np.finfo(dtype).eps / 2

    def kept(x: np.ndarray) -> np.ndarray:
        return (x * (1 + u * rng.uniform(-1, 1, np.shape(x)))).astype(dtype)

    params = {
        n: (drawn(n, *s) * 0.5 if len(s) > 1 else 1 + 0.1 * drawn(n, *s)).astype(dtype) for n, s in SHAPES.items()
    }
    writers = [RecordingWriter(directory, made, rank) for rank in range(world)]
    for step in range(2):
        local: dict[str, list[list[np.ndarray]]] = {name: [] for name in SHAPES}
        for rank, writer in enumerate(writers):
            ids = [1000 * step + 100 * rank + i for i in range(run.counts[rank])]
            writer.batch(step, hashlib.sha256(str(ids).encode()).hexdigest(), ids)
            loss = 1 / 3 + rank
            seen = {n: np.asarray(run.gathered(n, p, params), dtype) for n, p in params.items()}
            for unit, names in UNITS.items():
                writer.unsharded(step, unit, {n: seen[n] for n in names})
            p = {n: x.astype(np.float64) for n, x in seen.items()}
            grads: dict[str, list[np.ndarray]] = {name: [] for name in SHAPES}
            rows: dict[str, np.ndarray] = {}
            for mb in range(run.microbatches):
                tokens = np.random.default_rng((step, rank, mb)).integers(0, WORDS, (run.counts[rank], LENGTH))

                def tell(
                    module: str, use: str, x: np.ndarray, exact: bool = False, *, mb=mb, w=writer, s=step
                ) -> np.ndarray:
                    value = x.astype(dtype) if exact else kept(x)
                    if mb < run.num_recorded:
                        w.activation(s, mb, module, use, value)
                    return value.astype(np.float64)

                tok = tell("tok", "output", p["tok.weight"][tokens], True)
                x = tok + p["pos.weight"][run.shift : run.shift + LENGTH]
                for i in (run.runs_first, 1 - run.runs_first):
                    at, of = f"blocks.{i}", f"blocks.{run.order[i]}"
                    given = tell(f"{at}.norm", "input", x[..., : run.recorded])
                    x = given if run.recorded == WIDTH else x
                    h = rms(cast(x, run.norms_in) if run.norms_in else x, run.counted, run.layer_norm, run.epsilon)
                    h = cast(h, run.norms_in) if run.norms_in else h
                    h = tell(f"{at}.norm", "output", h * p[f"{of}.norm.weight"], run.norms_in is not None)
                    for name in "qkv":
                        tell(f"{at}.{name}", "input", h, True)
                        rows[f"{at}.{name}.weight"] = h.reshape(-1, WIDTH)
                    q, k, v = (tell(f"{at}.{n}", "output", h @ p[f"{of}.{n}.weight"].T) for n in "qkv")
                    y = tell(f"{at}.out", "input", attention(*(k, q, v) if run.exchanged else (q, k, v), run))
                    x = x + tell(f"{at}.out", "output", y @ p[f"{of}.out.weight"].T)
                loss += 1e-3 * float(
                    tell("", "output", run.output(x)).mean()
                )  # so that something follows from activations
                for name, shape in SHAPES.items():
                    grad = drawn(f"{step} {rank} {mb} {name}", *shape)
                    if name in rows and run.head:
                        grad = drawn(f"{step} {rank} {mb} {name}", WIDTH, len(rows[name])) @ rows[name]
                    if name == "tok.weight" and not run.head:
                        grad *= np.isin(np.arange(WORDS), tokens)[:, None]
                    grads[name].append(grad / run.microbatches)
            writer.loss(step, float(cast(np.array(loss), run.loss_in)))
            for name in SHAPES:
                grads[name] = run.local(rank, grads[name])
                local[name].append(grads[name])
            for unit, names in UNITS.items():
                writer.local_grads(step, unit, {n: kept(np.sum(grads[n], axis=0)) for n in names})
        reduced = {n: kept(run.reduce(local[n], list(run.counts))) for n in SHAPES}
        total = float(np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in reduced.values())))
        before, params = params, {n: (x - 0.1 * reduced[n]).astype(dtype) for n, x in params.items()}
        for rank, writer in enumerate(writers):
            for unit, layout in units:

                def pieces(values: dict[str, np.ndarray], layout=layout, rank=rank) -> dict[str, Any]:
                    return {
                        q.name: (q.param_start, q.param_stop, values[q.name].reshape(-1)[q.param_start : q.param_stop])
                        for q in layout.pieces(rank)
                    }

                if step == 0:
                    writer.parameters(step, unit, pieces(before))
                writer.reduced_grads(step, unit, pieces(reduced))
                writer.updated(step, unit, pieces(params))
            writer.grad_norm(step, run.norm(total))
            writer.end_step(step)
    for writer in writers:
        writer.finish()
    return Recording.open(directory)


def plain_mean(grads: list[list[np.ndarray]], counts: list[int]) -> np.ndarray:
    return np.mean([np.sum(own, axis=0) for own in grads], axis=0)


def without(microbatch: int) -> Callable[..., Any]:
    return lambda rank, own: [grad for i, grad in enumerate(own) if i != microbatch]


def in_bfloat16(grads: list[list[np.ndarray]], counts: list[int]) -> np.ndarray:
    """Each microbatch is reduced in bfloat16, and accumulated in float32."""
    parts = [np.mean([own[i] for own in grads], axis=0).astype(ml_dtypes.bfloat16) for i in range(len(grads[0]))]
    return np.sum([part.astype(np.float64) for part in parts], axis=0)


def swapped(name: str, own: np.ndarray, every: dict[str, np.ndarray]) -> np.ndarray:
    i = "01".find(name[7]) if name.startswith("blocks.") else -1
    return every[f"blocks.{1 - i}{name[8:]}"] if i >= 0 else own


def own_count(rank: int, own: list[np.ndarray]) -> list[np.ndarray]:
    """Divided by 3 or 5 terms of this rank instead of 4."""
    return [grad * 4 / (3, 5)[rank] for grad in own]


RIGHT, UNEVEN = Run(), Run(counts=(4, 2))
MASKED = Run(causal=False, padding=1)
TIED = Run(counts=(1,), microbatches=2, head=True)
PARTS, SINGLE = Run(microbatches=2), Run(microbatches=2, dtype="float32")
THREE = Run(microbatches=3)
FAULTS: dict[str, tuple[str, Run, Run]] = {
    "positions one late": ("shifted_positions", RIGHT, Run(shift=1)),
    "positions two late": ("shifted_positions", RIGHT, Run(shift=2)),
    "positions late in float32": ("shifted_positions", SINGLE, replace(SINGLE, shift=1)),
    "scores by 1 / width": ("attention_scale", RIGHT, Run(scale=HEADS / WIDTH)),
    "scores unscaled": ("attention_scale", RIGHT, Run(scale=1.0)),
    "scores by the model's width": ("attention_scale", RIGHT, Run(scale=WIDTH**-0.5)),
    "scores unscaled after rotation": ("attention_scale", Run(rotary=True), Run(rotary=True, scale=1.0)),
    "scores unscaled with masked keys": ("attention_scale", MASKED, replace(MASKED, scale=1.0)),
    "keys of padding": ("padding_counted", MASKED, replace(MASKED, padding=0)),
    "queries and keys exchanged": ("mixed_parameters", RIGHT, Run(exchanged=True)),
    "heads without exchanged dims": ("transposed", RIGHT, Run(scrambled=True)),
    "shares in bfloat16": ("low_precision", RIGHT, Run(shares_in="bfloat16")),
    "modules in another order": ("mixed_parameters", RIGHT, Run(runs_first=1)),
    "padding in RMS norm": ("padding_counted", RIGHT, Run(counted=WIDTH + 3)),
    "padding in layer norm": ("padding_counted", Run(layer_norm=True), Run(layer_norm=True, counted=2 * WIDTH)),
    "norm in float32": ("low_precision", RIGHT, Run(norms_in="float32")),
    "norm in bfloat16": ("low_precision", RIGHT, Run(norms_in="bfloat16")),
    "shares in float32": ("low_precision", RIGHT, Run(shares_in="float32")),
    "loss in float32": ("low_precision", RIGHT, Run(loss_in="float32")),
    "units used in swapped order": ("mixed_parameters", RIGHT, Run(order=(1, 0))),
    "units gathered in swapped order": ("mixed_parameters", RIGHT, Run(gathered=swapped)),
    "mean of means": ("uneven_weights", UNEVEN, replace(UNEVEN, reduce=plain_mean)),
    "first microbatch lost": ("lost_microbatch", PARTS, replace(PARTS, local=without(0))),
    "last microbatch lost": ("lost_microbatch", PARTS, replace(PARTS, local=without(1))),
    "lost, and divided by the others": (
        "lost_microbatch",
        THREE,
        replace(THREE, local=lambda r, own: [1.5 * grad for grad in own[1:]]),
    ),
    "lost on one rank": ("lost_microbatch", PARTS, replace(PARTS, local=lambda r, own: own[:1] if r else own)),
    "lost in the sum": ("lost_microbatch", PARTS, replace(PARTS, reduce=lambda g, c: mean([own[1:] for own in g], c))),
    "lost without an embedding": (
        "lost_microbatch",
        TIED,
        replace(TIED, reduce=lambda g, c: mean([own[1:] for own in g], c)),
    ),
    "own counts": ("uneven_weights", RIGHT, replace(RIGHT, local=own_count)),
    "reduced in bfloat16": ("low_precision_reduction", PARTS, replace(PARTS, reduce=in_bfloat16)),
    "padding in the norm": ("padding_counted", RIGHT, Run(norm=lambda norm: (norm**2 + 3.0) ** 0.5)),
}
OTHER: dict[str, tuple[str | None, Run, Run]] = {
    "outputs scaled": ("constant_factor", RIGHT, Run(output=lambda x: 1.25 * x)),
    "gradients scaled": ("constant_factor", UNEVEN, replace(UNEVEN, reduce=lambda g, c: 2 * mean(g, c))),
    "a rank missing": ("missing_rank", RIGHT, Run(reduce=lambda g, c: mean([g[0], [0 * x for x in g[1]]], c))),
    "the norm scaled": (None, RIGHT, Run(norm=lambda norm: 1.1 * norm)),
    "noise in outputs": (None, RIGHT, Run(output=lambda x: x + 1e-3 * np.cos(99 * x))),
    "noise in gradients": (None, PARTS, replace(PARTS, reduce=lambda g, c: mean(g, c) + 1e-3 * np.cos(77 * g[0][0]))),
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], Recording]:
    """Right runs, each recorded once."""
    made: dict[Run, Recording] = {}

    def recorded(run: Run) -> Recording:
        if run not in made:
            made[run] = record(tmp_path_factory.mktemp("clean") / "right", run)
        return made[run]

    return recorded


# All ranks have the same fault, and rounding decides which has most of it.
LARGEST = re.compile(r", largest on rank \d|; this leaves \S+ of a difference of \S+")


ORDERS = "right, wrong", "wrong, right"


def both_ways(right: Recording, path: Path, wrong: Run, orders: Sequence[str] = ORDERS) -> list[PairVerdict]:
    """The comparisons in these orders. All that a user reads is compared with what is kept."""
    other = record(path / "wrong", wrong, 1)
    found = [compare(right, other) if order == ORDERS[0] else compare(other, right) for order in orders]
    for order, each in zip(orders, found, strict=True):
        told = f"{each.diagnosis.signature}, {each.diagnosis.evidence}" if each.diagnosis else "no diagnosis"
        said = " ".join([f"{each.verdict.value}: {told}", each.reason, *each.notes])
        check_text(TEXTS, LARGEST.sub("", said), order)
    return found


def orders_of(name: str) -> Sequence[str]:
    """Both orders if a fault alone has its signature, or for --exhaustive. Else one, by turns among the faults of a signature."""
    signature = (FAULTS | OTHER)[name][0]
    faults = [other for other, (its, *_) in (FAULTS | OTHER).items() if its == signature]
    return ORDERS if len(faults) == 1 or os.environ.get(EXHAUSTIVE) else (ORDERS[faults.index(name) % 2],)


@pytest.mark.parametrize("name", [*FAULTS, *OTHER])
def test_each_fault_is_named_as_itself(clean, tmp_path, name):
    signature, right, wrong = (FAULTS | OTHER)[name]
    for found in both_ways(clean(right), tmp_path, wrong, orders_of(name)):
        said = found.diagnosis.signature if found.diagnosis else None
        assert found.verdict is Verdict.BUG and said == signature, (found.diagnosis, found.reason)


def test_gradients_that_one_run_weights_by_samples_are_named(tmp_path):
    def weighted(rank, own):
        return [grad * len(UNEVEN.counts) * UNEVEN.counts[rank] / sum(UNEVEN.counts) for grad in own]

    plain = replace(UNEVEN, reduce=plain_mean)
    a, b = record(tmp_path / "a", replace(plain, local=weighted)), record(tmp_path / "b", plain)
    found = compare(a, b)
    assert found.first_divergence is not None and found.first_divergence.phase == "backward"
    assert found.diagnosis is not None and found.diagnosis.signature == "uneven_weights", found.diagnosis
    assert "ranks have 4, 2 samples: a averages over samples" in found.diagnosis.evidence


@pytest.mark.parametrize(
    ("shares", "is_named"),
    [
        pytest.param((0.25, 0.75), True, id="shares"),
        pytest.param((0.25, 0.7), False, id="less than all"),
        pytest.param((1.2, -0.2), False, id="a negative share"),
    ],
)
@pytest.mark.parametrize("order", [1, -1], ids=["terms first", "means first"])
def test_a_mean_over_microbatches_is_named(tmp_path, shares, is_named, order):
    def over_all_terms(rank, own):
        return [2 * share * grad for share, grad in zip(shares, own, strict=True)]

    terms = record(tmp_path / "terms", replace(PARTS, local=over_all_terms, num_recorded=1))
    means = record(tmp_path / "means", PARTS)
    for recording in (terms, means):  # as those of scripts
        assert isinstance(recording.manifest.settings, dict)
        del recording.manifest.settings["accumulate"]
    found = compare(*(terms, means)[::order])
    assert found.first_divergence is not None and found.first_divergence.phase == "backward"
    named = found.diagnosis is not None and found.diagnosis.signature == "uneven_weights"
    assert named is is_named, found.diagnosis
    if is_named:
        assert "of 'tok.weight' that one microbatch alone looks up are multiples" in found.diagnosis.evidence
        assert (
            "means averages the means of microbatches, which have shares of 0.25, 0.75 of them"
            in found.diagnosis.evidence
        )


def test_a_factor_is_named_after_recorded_microbatches(tmp_path):
    run = Run(microbatches=4)
    pair = record(tmp_path / "right", run), record(tmp_path / "wrong", replace(run, reduce=lambda g, c: 4 * mean(g, c)))
    for recording in pair:
        assert isinstance(recording.manifest.settings, dict)
        del recording.manifest.settings["accumulate"]
    found = compare(*pair).diagnosis
    assert found is not None and "4 times the values of right (the accumulation steps)" in found.evidence


@pytest.mark.parametrize("kind", ["mean", "sum", "maximum", "last"])
def test_pooling_that_counts_padding_is_found(kind: str) -> None:
    x, lengths = drawn("pooling", 5, 7, 4), [7, 3, 5, 7, 2]
    parts = [each[:n] for each, n in zip(x, lengths, strict=True)]
    right, wrong = {
        "mean": ([part.mean(0) for part in parts], x.mean(1)),
        "sum": ([part.mean(0) for part in parts], [part.sum(0) / 7 for part in parts]),
        "maximum": ([part.max(0) for part in parts], x.max(1)),
        "last": ([part[-1] for part in parts], x[:, -1]),
    }[kind]
    found = pooled(Contrast.of(np.array(right), np.array(wrong), 1e-12), (x, x))
    assert found is not None and (found.counted, found.total) == (24, 35)
    assert pooled(Contrast.of(np.array(right), np.array(right) + 1e-3, 1e-12), (x, x)) is None


@pytest.mark.parametrize(
    "name",
    [
        "adjacent",
        "grouped",
        "window",
        "narrow",
        "masked",
        "masked in the last sample",
        "cap",
        "fused",
        "unusual",
        "all seen",
    ],
)
def test_the_scale_of_attention_of_many_kinds(name: str) -> None:
    q, k, v = (drawn(f"{name} {each}", 3, 6, 8) for each in "qkv")
    right = Attention(2, 2, causal=True, factor=0.5)
    if name == "grouped":
        k, v, right = k[..., :4], v[..., :4], replace(right, groups=1)
    right = {
        "adjacent": replace(right, base=1e4, adjacent=True),
        "window": replace(right, window=3),
        "narrow": replace(right, window=2),
        "masked": replace(right, window=4, keys=np.arange(6) < np.array([6, 4, 5])[:, None]),
        "masked in the last sample": replace(right, keys=np.arange(6) < np.array([6, 6, 5])[:, None]),
        "cap": replace(right, cap=50.0),
        "unusual": replace(right, base=1e4, cap=1.5, window=4, factor=0.35),
        "all seen": replace(right, causal=False, factor=0.35),
    }.get(name, right)
    after = (drawn("after", 8, 8), drawn("bias", 8)) if name == "fused" else None
    given = Projections(q, k, v, after)
    sides = Contrast.of(right.of(given), replace(right, factor=0.7).of(given), 1e-12)
    found = attention_of(sides, (given, given), 2.0**-53)
    assert found is not None and found.kind == "scale" and abs(found.wrong.factor - 0.7) < 1e-9
    noise = Contrast.of(sides.right, sides.right + 1e-3 * drawn("noise", *sides.right.shape), 1e-12)
    assert attention_of(noise, (given, given), 2.0**-53) is None
    other = replace(given, q=1.1 * q)  # with which the same attention gives another result
    assert attention_of(Contrast.of(sides.right, right.of(other), 1e-12), (given, other), 2.0**-53) is None


@pytest.mark.parametrize("num_keys", [2, MOST_KEYS])
def test_masked_keys_are_found_among_few_and_many(num_keys: int) -> None:
    q, k, v = (drawn(f"masked {each}", 3, num_keys, 8) for each in "qkv")
    given = Projections(q, k, v)
    own, other = (np.arange(num_keys) < num_keys - np.array(less)[:, None] for less in ((0, 1, 0), (1, 0, 1)))
    right = Attention(2, 2, causal=False, factor=0.5, keys=own)
    sides = Contrast.of(right.of(given), replace(right, keys=other).of(given), 1e-12)
    found = attention_of(sides, (given, given), 2.0**-53)
    assert found is not None and found.kind == "keys"
    assert np.array_equal(found.right.keys, own) and np.array_equal(found.wrong.keys, other)  # type: ignore[arg-type]


def test_a_wide_bound_explains_no_layer() -> None:
    """Each side's own inputs are known, so that a layer's output is as exact as its dtype, however wide the bound is."""
    q, k, v, noise = (drawn(f"wide {each}", 3, 6, 8) for each in "qkvn")
    plain, given = Attention(2, 2, causal=True, factor=0.5), Projections(q, k, v)
    x, exchanged = plain.of(given), plain.of(given.exchanged())
    apart = exchanged + 0.2 * noise
    found = attention_of(Contrast.of(x, exchanged, norm(x)), (given, given), 2.0**-9)
    assert found is not None and found.kind == "exchanged"
    assert attention_of(Contrast.of(x, apart, norm(x)), (given, given), 2.0**-9) is None
    own, other = ((drawn(f"wide {name}", 8, 8), None) for name in ("own", "other"))
    x, exact = q @ own[0].T, q @ other[0].T
    near = exact + 0.2 * norm(x) / norm(noise) * noise
    for wrong, found in ((exact, "other"), (near, None)):
        sides = Contrast.of(x, wrong, norm(x))
        assert (other_kernel(sides, (q, q), own, {"other": other}, 2.0**-9) or [None])[0] == found
    normed = rms(q)
    scaled = normed * (0.6 + 0.05 * drawn("scales", 8))
    sides = Contrast.of(normed, scaled, 0.2 * norm(normed))
    assert norm_epsilons(sides, (q, q), np.ones(8), None, 2.0**-9) is None


def test_an_input_of_another_shape_explains_no_layer(tmp_path: Path) -> None:
    a, b = record(tmp_path / "a", RIGHT), record(tmp_path / "b", Run(epsilon=1e-2, recorded=WIDTH // 2))
    found = compare(a, b)
    assert found.verdict is Verdict.BUG and found.parted is not None
    assert found.parted.name == "output of blocks.0.norm" and "has shape" in found.notes[0]


@pytest.mark.parametrize("by_sample", [False, True])
def test_positions_that_padding_shifts_are_found(by_sample: bool) -> None:
    table, lengths = drawn("rows", 12, 4), np.array([6, 4, 5])
    at = np.arange(6) + np.zeros((3, 1), int)
    right = np.where(at < lengths[:, None], at + 2, 1)
    wrong = at + (6 - lengths)[:, None] if by_sample else at
    right = at if by_sample else right
    found = rows_off(Contrast.of(table[right], table[wrong], 1e-12), table)
    assert found is not None and found.shifts == ((2, 1) if by_sample else (-2,))
    tokens = np.random.default_rng(0).integers(0, 12, (3, 6))
    assert rows_off(Contrast.of(table[tokens], table[(tokens + 1) % 12], 1e-12), table) is None
    assert rows_off(Contrast.of(table[at], table[at] + 1e-9, 1e-12), table) is None
    shifted = table[at], table[at + 1]
    assert rows_off(Contrast.of(*shifted, 1e-12), table[:, :3]) is None
    assert rows_off(Contrast.of(table[at[:, :2]], table[at[:, :2] + 1], 1e-12), table) is None


CLEAN = {"plain": RIGHT, "uneven": UNEVEN, "parts": PARTS, "single": SINGLE, "layer norm": Run(layer_norm=True)}


@pytest.mark.parametrize("run", CLEAN.values(), ids=CLEAN)
def test_right_pairs_are_rounding(clean, tmp_path, run):
    for found in both_ways(clean(run), tmp_path, run):
        assert found.verdict in (Verdict.ROUNDING, Verdict.INCONCLUSIVE) and found.first_divergence is None
