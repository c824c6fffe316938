"""Diagnoses of one fault per run, compared with a correct run."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from crossframe.dtypes import unit_roundoff
from crossframe.recording import Recording, RecordingWriter
from crossframe.verdict.diagnosis import Diagnosis, diagnose, diagnose_batches, needs_full_tensors
from crossframe.verdict.diagnosis.case import case_of
from crossframe.verdict.diagnosis.module_hypotheses import norm_epsilon
from crossframe.verdict.diagnosis.stated_optimizer import betas_of
from crossframe.verdict.measure.causal_order import walk
from crossframe.verdict.measure.judge import judge
from crossframe.verdict.measure.locate import locate, locate_sketch
from crossframe.verdict.measure.metrics import distance
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import Quantity, finite
from tests.conftest import EXHAUSTIVE
from tests.core.helpers.faulty import CLIP, DECAY, OWN_ADAM, RATE, Faults, manifest, record, started
from tests.core.helpers.kept_texts import check_text

TEXTS = Path(__file__).with_name("diagnoses_of_pairs.json")
QUERY, KEY, DOWN, NORM = "block.query.weight", "block.key.weight", "block.down.weight", "norm.weight"


def tanh_gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def dropped(p: float) -> Callable[[int, int, np.ndarray], np.ndarray]:
    def drop(step: int, rank: int, x: np.ndarray) -> np.ndarray:
        return x * (np.random.default_rng((8, step, rank)).random(x.shape) >= p) / (1 - p)

    return drop


def seen_as(change: Callable[[np.ndarray], np.ndarray], *names: str):
    return lambda step, rank, name, now, old: change(now) if name in names else now


def mean_of(change: Callable[[int, str, list[np.ndarray]], Any]) -> Any:
    return lambda step, name, grads, old: change(step, name, [grad[name].astype(np.float64) for grad in grads])


def rolled(by: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.concatenate([np.full(by, 42.0), x.reshape(-1)[:-by]]).reshape(x.shape)


def exchanged(step: int, name: str, grads: list, old: list) -> np.ndarray:
    other = {QUERY: KEY, KEY: QUERY}.get(name, name)
    return np.mean([grad[other] for grad in grads], axis=0)


def mixed_on_rank_1(step: int, name: str, grads: list, old: list) -> np.ndarray:
    other = {QUERY: KEY}.get(name, name)
    return np.mean([grad[name if rank != 1 else other] for rank, grad in enumerate(grads)], axis=0)


def in_bfloat16(step: int, name: str, grads: list[np.ndarray]) -> np.ndarray:
    return np.mean([grad.astype(ml_dtypes.bfloat16).astype(np.float64) for grad in grads], axis=0)


def summed_in_bfloat16(step: int, name: str, grads: list[np.ndarray]) -> np.ndarray:
    total: Any = grads[0].astype(ml_dtypes.bfloat16)
    for grad in grads[1:]:
        total = total + grad.astype(ml_dtypes.bfloat16)
    return total.astype(np.float64) / len(grads)


def without_rank_1(step: int, name: str, grads: list[np.ndarray]) -> np.ndarray:
    return (sum(grads) - grads[1]) / len(grads)


def in_own_shard(rank: int, name: str, array: np.ndarray, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Change what one rank holds of a parameter."""
    flat = array.reshape(-1).copy()
    for _, layout in manifest(UNDER_TEST["world_size"], "float64", "AdamW", CLIP).units:
        for piece in layout.pieces(rank):
            if piece.name == name:
                flat[piece.param_start : piece.param_stop] = change(flat[piece.param_start : piece.param_stop])
    return flat.reshape(array.shape)


def doubled_on_rank_1(step: int, name: str, grads: list[np.ndarray]) -> np.ndarray:
    mean = np.mean(grads, axis=0)
    return in_own_shard(1, name, mean, lambda x: 2 * x) if name == DOWN else mean


def added_to_the_last(step: int, name: str, grads: list, old: list) -> np.ndarray:
    return np.mean([grad[name] for grad in grads], axis=0) + (old[-1][name] if old else 0.0)


def read_early(step: int, name: str, grads: list, old: list) -> np.ndarray:
    """The key's gradient is read from a flat tensor 5 elements after the start of the query's."""
    own = np.mean([grad[name] for grad in grads], axis=0)
    if name != KEY:
        return own
    flat = np.concatenate([np.mean([grad[each] for grad in grads], axis=0).reshape(-1) for each in (QUERY, DOWN)])
    return flat[5 : 5 + own.size].reshape(own.shape)


FAULTS: dict[str, tuple[str, Faults]] = {
    "gradients summed": ("constant_factor", Faults(mean=mean_of(lambda s, n, grads: sum(grads)))),
    "root of the ranks": ("constant_factor", Faults(mean=mean_of(lambda s, n, grads: sum(grads) / len(grads) ** 0.5))),
    "a ten thousandth": ("constant_factor", Faults(mean=mean_of(lambda s, n, grads: 1.0001 * sum(grads) / len(grads)))),
    "loss times two": ("constant_factor", Faults(local=lambda s, r, grads: {n: 2 * g for n, g in grads.items()})),
    "norm times the ranks": ("constant_factor", Faults(norm=lambda s, r, x, grads: x * UNDER_TEST["world_size"])),
    "rate": ("constant_factor", Faults(rate=1.1 * RATE)),
    "beta": ("constant_factor", Faults(beta1=0.8)),
    "not clipped": ("constant_factor", Faults(clips=False)),
    "seen transposed": ("transposed", Faults(gathered=seen_as(np.transpose, QUERY))),
    "gradient transposed": (
        "transposed",
        Faults(local=lambda s, r, grads: {n: g.T if n == QUERY else g for n, g in grads.items()}),
    ),
    "kernel transposed": ("transposed", Faults(query=lambda x, w: x @ w)),
    "read in columns": ("transposed", Faults(gathered=seen_as(lambda x: x.T.reshape(x.shape), "block.up.weight"))),
    "shifted by 3": ("padding_shift", Faults(gathered=seen_as(rolled(3), QUERY, KEY, "block.down.weight"))),
    "gradient shifted": (
        "padding_shift",
        Faults(
            mean=mean_of(
                lambda s, n, grads: rolled(1)(np.mean(grads, axis=0)) if n == QUERY else np.mean(grads, axis=0)
            )
        ),
    ),
    "gradient read elsewhere": ("padding_shift", Faults(mean=read_early)),
    "stale gather": (
        "stale_copy",
        Faults(gathered=lambda s, r, name, now, old: old[name][-1] if s == 2 and name == QUERY else now),
    ),
    "stale from the start": (
        "stale_copy",
        Faults(gathered=lambda s, r, name, now, old: old[name][-1] if s == 1 and name == NORM else now),
    ),
    "gradient not zeroed": ("stale_copy", Faults(mean=added_to_the_last)),
    "gradient of the step before": (
        "stale_copy",
        Faults(mean=lambda s, n, grads, old: old[-1][n] if s == 2 else np.mean([grad[n] for grad in grads], axis=0)),
    ),
    "rank 1 missing": ("missing_rank", Faults(mean=mean_of(without_rank_1))),
    "own gradient alone": ("missing_rank", Faults(mean=mean_of(lambda s, n, grads: grads[0]))),
    "norm of one shard": ("missing_rank", Faults(norm=lambda s, r, x, grads: norm_of_shard(r, grads))),
    "slice of a rank missing": (
        "missing_rank",
        Faults(gathered=lambda s, r, n, now, old: in_own_shard(1, n, now, np.zeros_like) if n == DOWN else now),
    ),
    "slice of a rank missing in the gradient of a unit": (
        "missing_rank",
        Faults(mean=mean_of(lambda s, n, grads: in_own_shard(2, n, np.mean(grads, axis=0), np.zeros_like))),
    ),
    "a rank counts more": (
        "constant_factor",
        Faults(mean=mean_of(lambda s, n, grads: np.mean([*grads[:-1], 1.001 * grads[-1]], axis=0))),
    ),
    "every rank counts by its tokens": (
        "constant_factor",
        Faults(mean=mean_of(lambda s, n, grads: (0.9 * grads[0] + 1.05 * grads[1] + 1.05 * grads[2]) / 3)),
    ),
    "a rank's own twice": ("constant_factor", Faults(mean=mean_of(doubled_on_rank_1))),
    "cast before the sum": ("low_precision_reduction", Faults(mean=mean_of(in_bfloat16))),
    "summed coarsely": ("low_precision_reduction", Faults(mean=mean_of(summed_in_bfloat16))),
    "lookup not counted": ("tied_weight", Faults(uses=(0.0, 1.0))),
    "lookup counted twice": ("tied_weight", Faults(uses=(2.0, 1.0))),
    "head not counted": ("tied_weight", Faults(uses=(1.0, 0.0))),
    "head counted twice": ("tied_weight", Faults(uses=(1.0, 2.0))),
    "neither counted": ("tied_weight", Faults(uses=(0.0, 0.0))),
    "gradients exchanged": ("mixed_parameters", Faults(mean=exchanged)),
    "gradients mixed on a rank": ("mixed_parameters", Faults(mean=mixed_on_rank_1)),
    "moments exchanged": (
        "mixed_parameters",
        Faults(moments=lambda s, n, state: state[KEY]["exp_avg"].astype(float) if s == 2 and n == QUERY else None),
    ),
    "stale moments": (
        "lost_step",
        Faults(moments=lambda s, n, state: np.zeros(state[n]["exp_avg"].shape) if s == 2 else None),
    ),
    "moments of a rank lost": (
        "lost_step",
        Faults(
            moments=lambda s, n, state: (
                in_own_shard(2, n, state[n]["exp_avg"].astype(float), np.zeros_like) if s == 2 else None
            )
        ),
    ),
    "no decay": ("weight_decay", Faults(decay=0.0)),
    "decay in the gradient": ("weight_decay", Faults(decay=0.0, coupled=DECAY)),
    "decay without the rate": ("weight_decay", Faults(unscaled=True)),
    "another decay": ("weight_decay", Faults(decay=2 * DECAY)),
    "epsilon in the root": ("optimizer_epsilon", Faults(in_root=True)),
    "another epsilon": ("optimizer_epsilon", Faults(adam_epsilon=1e-4)),
    "no correction": ("bias_correction", Faults(corrected=lambda t: (None, None))),
    "no correction of m": ("bias_correction", Faults(corrected=lambda t: (None, t))),
    "no correction of v": ("bias_correction", Faults(corrected=lambda t: (t, None))),
    "corrected too late": ("bias_correction", Faults(corrected=lambda t: (t + 1, t + 1))),
    "count began anew": ("lost_step", Faults(corrected=lambda t: (t - 2, t - 2) if t > 2 else (t, t))),
    "count lost": ("lost_step", Faults(counted=lambda t: t - 1 if t > 2 else t)),
    "a step left out": ("lost_step", Faults(skips=lambda s, n: s == 1)),
    "a parameter left out": ("lost_step", Faults(skips=lambda s, n: n == QUERY)),
    "another epsilon in the norm": ("norm_epsilon", Faults(epsilon=1e-6)),
    "tanh": ("tanh_gelu", Faults(gelu=tanh_gelu)),
    "branch dropped": ("dropout", Faults(branch=dropped(0.1))),
    "output dropped": ("dropout", Faults(output=dropped(0.3))),
}


def tight(dtype: str) -> Callable[[Quantity], float]:
    """How far the rounding of these runs reaches, with some room: it moves each number by up to a unit or two."""
    return lambda q: 0.0 if q.bound is None else 60 * unit_roundoff(dtype) * max(q.norms)


def first_diagnosis(pair: Pair, dtype: str) -> tuple[Quantity, Diagnosis | None]:
    """The diagnosis of the first quantity beyond rounding."""
    limit = tight(dtype)
    for group in walk(pair):
        for q in group:
            judged = judge(q)
            apart = judged.one_sided or distance(finite(q.a), finite(q.b)) > limit(q)
            if not judged.equal and (q.bound is None or apart):
                scaled = judge(q.with_scale(limit(q) / (q.bound or 1.0) or 1.0))
                where = locate_sketch(scaled, pair) if q.sketched else locate(scaled, pair.b.manifest)
                return q, diagnose(pair, judged, where, limit)
    raise AssertionError("nothing differs")


# What faults must know of the run that they are put in.
UNDER_TEST = {"world_size": 2}


def norm_of_shard(rank: int, grads: dict[str, np.ndarray]) -> float:
    made, square = manifest(UNDER_TEST["world_size"], "float64", "AdamW", CLIP), 0.0
    for _, layout in made.units:
        for p in layout.pieces(rank):
            square += np.square(grads[p.name].reshape(-1)[p.param_start : p.param_stop]).sum()
    return float(square**0.5)


Clean = Callable[..., Recording]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Clean:
    made: dict[tuple, Recording] = {}

    def run(**options: Any) -> Recording:
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = record(tmp_path_factory.mktemp("clean") / "right", **options)
        return made[key]

    return run


def both_ways(
    clean: Recording, folder: Path, faults: Faults, *, sides: Sequence[int] = (1, 0), **options: Any
) -> Iterator[tuple[Quantity, Diagnosis | None]]:
    """The diagnosis where the second recording is wrong, and where the first one is.

    All that a user reads is compared with what is kept.

    Args:
        sides: which of the two recordings is wrong, in this order.
    """
    UNDER_TEST["world_size"] = options["world_size"]
    wrong = record(folder / "wrong", faults, noise=1, **options)
    for side in sides:
        quantity, found = first_diagnosis(Pair(clean, wrong) if side else Pair(wrong, clean), options["dtype"])
        text = f"{found.signature}, {found.evidence}" if found else "nothing"
        part = f"{folder.name}, " if folder.name in ("forgotten", "one") else ""
        part += "the second run is wrong" if side else "the first run is wrong"
        check_text(TEXTS, f"{quantity.event} of {quantity.name or 'all'} in step {quantity.step}: {text}", part)
        yield quantity, found


SINGLE: dict[str, Any] = {"dtype": "float32", "world_size": 3}
DOUBLE: dict[str, Any] = {"dtype": "float64", "world_size": 2}
# What is said of both sides alike, so that nobody is called wrong.
OF_BOTH = ("constant_factor", "transposed", "padding_shift", "norm_epsilon", "tanh_gelu", "mixed_parameters")
IN_DOUBLE = ("gradients summed", "cast before the sum", "rank 1 missing", "lookup not counted", "head not counted",
             "no correction", "epsilon in the root", "decay in the gradient", "another epsilon in the norm", "tanh",
             "branch dropped")  # fmt: skip
CASES = [
    pytest.param(name, options, id=f"{name}, {options['dtype']}")
    for options, names in ((SINGLE, FAULTS), (DOUBLE, IN_DOUBLE))
    for name in names
]


def sides_with(name: str, options: dict) -> tuple[int, ...]:
    """The sides that get a fault: both if it alone has its signature, or for --exhaustive. Else one, by turns among the faults of
    a signature, and in float64 the other one, so that each signature is found on both sides."""
    signature = FAULTS[name][0]
    faults = [other for other, (its, _) in FAULTS.items() if its == signature]
    if len(faults) == 1 or os.environ.get(EXHAUSTIVE):
        return 1, 0
    return ((faults.index(name) + (options is DOUBLE)) % 2,)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_fault_is_given_its_name_whichever_side_has_it(
    name: str, options: dict, clean: Clean, tmp_path: Path
) -> None:
    signature, faults = FAULTS[name]
    diagnoses = both_ways(clean(**options), tmp_path, faults, sides=sides_with(name, options), **options)
    for quantity, found in diagnoses:
        assert found is not None, quantity.name
        assert found.signature == signature, (quantity.event, quantity.name, found.evidence)
        if name == "not clipped":
            assert "as without clipping to 2" in found.evidence, found.evidence
        if signature not in OF_BOTH:
            assert "wrong" in found.evidence and ("in right" not in found.evidence), found.evidence


def without_bias(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x @ w.T + 0.3


def unlike(step: int, name: str, grads: list[np.ndarray]) -> np.ndarray:
    mean = np.mean(grads, axis=0)
    return mean + 0.01 * np.random.default_rng((9, step, *name.encode())).standard_normal(mean.shape)


UNNAMED: dict[str, Faults] = {
    "noise in the gradient": Faults(mean=mean_of(unlike)),
    "noise in one rank's gradient": Faults(
        local=lambda s, r, g: {n: x + 0.1 * np.sin(40 * x) if r == 1 else x for n, x in g.items()}
    ),
    "noise in what is seen": Faults(gathered=seen_as(lambda x: x + 1e-3 * np.cos(99 * x), QUERY)),
    "one element": Faults(gathered=seen_as(lambda x: x + np.eye(*x.shape)[3] * 0.1, QUERY)),
    "a bias more": Faults(query=without_bias),
    "a softer step": Faults(mean=mean_of(lambda s, n, grads: np.tanh(np.mean(grads, axis=0)))),
    "squashed outputs": Faults(output=lambda s, r, x: np.tanh(x)),
    "the loss alone": Faults(loss=lambda s, x: 1.37 * x + 0.2),
    "the norm alone": Faults(norm=lambda s, r, x, grads: 1.234567 * x),
    "the median of ranks": Faults(mean=mean_of(lambda s, n, grads: np.median(grads, axis=0))),
    "ranks reversed": Faults(gathered=seen_as(lambda x: x[::-1], "block.up.weight")),
    "a gradient lost": Faults(local=lambda s, r, g: {n: 0 * x if n == QUERY else x for n, x in g.items()}),
    "moments from elsewhere": Faults(moments=lambda s, n, state: np.full(state[n]["exp_avg"].shape, 0.01)),
}


@pytest.mark.parametrize("name", UNNAMED)
def test_a_fault_that_has_no_name_is_given_none(name: str, clean: Clean, tmp_path: Path) -> None:
    for quantity, found in both_ways(clean(**SINGLE), tmp_path, UNNAMED[name], **SINGLE):
        assert found is None, (quantity.event, quantity.name, found)


SGD = SINGLE | {"optimizer": "SGD", "clip": None}
OF_SGD: dict[str, tuple[str, str, Faults]] = {
    "no decay": (
        "weight_decay",
        "does not include the parameter, while 0.1 times is stated",
        Faults(decay=0.0),
    ),
    "twice the decay": ("weight_decay", "includes 0.2 times the parameter", Faults(decay=2 * DECAY)),
    "rate": ("constant_factor", "1.1 times that of", Faults(rate=1.1 * RATE)),
    "a step left out": ("lost_step", "in any bit", Faults(skips=lambda s, n: s == 2)),
    "buffer lost": (
        "lost_step",
        "starts from zero",
        Faults(moments=lambda s, n, state: np.zeros(state[n]["momentum_buffer"].shape) if s == 2 else None),
    ),
    "buffers exchanged": (
        "mixed_parameters",
        f"momentum_buffer of '{KEY}'",
        Faults(moments=lambda s, n, state: 0.9 * state[KEY]["momentum_buffer"] if (s, n) == (2, QUERY) else None),
    ),
}


@pytest.mark.parametrize("name", OF_SGD)
def test_what_sgd_did_otherwise_is_said(name: str, clean: Clean, tmp_path: Path) -> None:
    signature, said, faults = OF_SGD[name]
    for quantity, found in both_ways(clean(**SGD), tmp_path, faults, **SGD):
        assert found is not None and found.signature == signature, (quantity.name, found)
        assert said in found.evidence and "in wrong" in found.evidence, found.evidence


@pytest.mark.parametrize(("gradients", "signature"), [(0.5, "constant_factor"), (1.0, None), (0.6, None)])
def test_a_single_loss_has_a_factor_if_gradients_have_it(
    gradients: float, signature: str | None, tmp_path: Path
) -> None:
    alone: dict[str, Any] = {"dtype": "float32", "world_size": 1}
    faults = Faults(loss=lambda s, x: x / 2, local=lambda s, r, grads: {n: gradients * g for n, g in grads.items()})
    for quantity, found in both_ways(record(tmp_path / "right", **alone), tmp_path, faults, **alone):
        assert quantity.event == "loss" and (found.signature if found else None) == signature, found
        assert found is None or "and so do the gradients" in found.evidence


def test_gradients_whose_squares_overflow_confirm_no_factor(tmp_path: Path) -> None:
    alone: dict[str, Any] = {"dtype": "float64", "world_size": 1}

    def faults(factor: float, bias: float) -> Faults:
        def local(step: int, rank: int, grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: np.full_like(g, bias) if name == "norm.bias" else factor * g for name, g in grads.items()}

        return Faults(
            loss=lambda s, x: factor * x, local=local, mean=lambda s, n, grads, old: np.ones_like(grads[0][n])
        )

    for quantity, found in both_ways(
        record(tmp_path / "right", faults(1.0, 0.0), **alone), tmp_path, faults(0.5, 1e200), **alone
    ):
        assert quantity.event == "loss" and found is None, found


def test_local_gradients_in_the_dtype_of_the_reduction_are_named(tmp_path: Path) -> None:
    stated: dict[str, Any] = SINGLE | {"other": {"reduce_dtype": "bfloat16"}}
    faults = Faults(local=lambda s, r, grads: {n: g.astype(ml_dtypes.bfloat16) for n, g in grads.items()})
    for quantity, found in both_ways(record(tmp_path / "right", **stated), tmp_path, faults, **stated):
        assert quantity.event == "backward" and found is not None, quantity.event
        assert found.signature == "low_precision_reduction" and "bfloat16 values" in found.evidence


def test_adams_decay_belongs_in_its_gradient(clean: Clean, tmp_path: Path) -> None:
    adam: dict[str, Any] = {**SINGLE, "optimizer": "Adam"}
    right = record(tmp_path / "right", Faults(decay=0.0, coupled=DECAY), **adam)
    for _, found in both_ways(right, tmp_path, Faults(decay=DECAY), **adam):
        assert found is not None and found.signature == "weight_decay", found
        assert "does not include the parameter, while 0.1 times is stated" in found.evidence


@pytest.mark.parametrize(
    "settings",
    [{"weight_decay": None}, {"clip": -1.0}],
    ids=str,
)
def test_settings_that_state_no_rule_are_ignored(settings: dict, tmp_path: Path) -> None:
    right = record(tmp_path / "right", **SINGLE, other=settings)
    for quantity, found in both_ways(right, tmp_path, Faults(adam_epsilon=1e-4), **SINGLE, other=settings):
        assert quantity.event == "optimizer" and found is None, found


@pytest.mark.parametrize(
    ("signature", "decay", "faults"),
    [
        ("weight_decay", DECAY, Faults(decay=0.0)),
        ("weight_decay", DECAY, Faults(decay=2 * DECAY)),
        ("constant_factor", DECAY, Faults(rate=1.1 * RATE, decay=DECAY)),
        ("optimizer_epsilon", 0.0, Faults(adam_epsilon=1e-4, decay=0.0)),
        ("optimizer_epsilon", 0.0, Faults(adam_epsilon=1e-4, decay=0.0, in_root=True)),
    ],
)
def test_updates_of_an_optimizer_without_a_known_rule(
    signature: str, decay: float, faults: Faults, tmp_path: Path
) -> None:
    other = {"optimizer": "Lion"}
    in_root = Faults(decay=decay, in_root=faults.in_root)
    right = record(tmp_path / "right", in_root, **SINGLE, other=other)
    for quantity, found in both_ways(right, tmp_path, faults, **SINGLE, other=other):
        assert quantity.event == "optimizer" and found is not None and found.signature == signature, found


@pytest.mark.parametrize("faults", [Faults(decay=0.0), Faults(decay=2 * DECAY)], ids=["none", "twice"])
def test_a_decay_by_the_loop_next_to_a_known_rule_is_named(faults: Faults, tmp_path: Path) -> None:
    plain = {"weight_decay": 0.0}  # what the optimizer states; the loop decays the parameters itself
    right = record(tmp_path / "right", Faults(decay=DECAY / 2), **SINGLE, other=plain)
    for quantity, found in both_ways(right, tmp_path, faults, **SINGLE, other=plain):
        assert quantity.event == "optimizer" and found is not None and found.signature == "weight_decay", found


@pytest.mark.parametrize("name", ["no correction", "no correction of m", "no correction of v"])
def test_betas_that_are_not_stated_are_read_off_moments(name: str, tmp_path: Path) -> None:
    signature, faults = FAULTS[name]
    right = record(tmp_path / "right", Faults(beta1=0.8, beta2=0.95), **SINGLE)
    assert betas_of(right) == (0.8, 0.95)
    wrong = replace(faults, beta1=0.8, beta2=0.95)
    for _, found in both_ways(right, tmp_path, wrong, **SINGLE):
        assert found is not None and found.signature == signature, found


@pytest.mark.parametrize("name", ["no decay", "epsilon in the root", "no correction of m", "decay in the gradient"])
def test_an_own_optimizer_may_call_its_moments_as_it_likes(name: str, tmp_path: Path) -> None:
    signature, faults = FAULTS[name]
    other = {"optimizer": OWN_ADAM}
    right = record(tmp_path / "right", **SINGLE, other=other)
    for _, found in both_ways(right, tmp_path, faults, sides=(1,), **SINGLE, other=other):
        assert found is not None and found.signature == signature, found


def test_a_decay_that_a_loop_adds_to_gradients_is_named(clean: Clean, tmp_path: Path) -> None:
    faults = Faults(local=lambda s, r, grads: {n: g + 0.02 * started(n) for n, g in grads.items()} if not s else grads)
    for _, found in both_ways(clean(**SINGLE), tmp_path, faults, **SINGLE):
        assert found is not None and found.signature == "weight_decay" and "contains 0.02 times" in found.evidence, (
            found
        )


def test_parameters_that_a_loop_shrinks_after_the_step_are_decayed(clean: Clean, tmp_path: Path) -> None:
    faults = Faults(gathered=lambda s, r, name, now, old: now * 0.999 if s else now)
    for _, found in both_ways(clean(**SINGLE), tmp_path, faults, **SINGLE):
        assert found is not None and found.signature == "weight_decay", found


def test_R28_replicas_that_never_meet_are_ranks_that_are_missing(clean: Clean, tmp_path: Path) -> None:
    hybrid = {"dtype": "float64", "world_size": 4, "replicate": 2}
    alone = Faults(mean=mean_of(lambda s, n, grads: sum(grads[:2]) / 4))
    for _, found in both_ways(clean(**hybrid), tmp_path, alone, **hybrid):
        assert found is not None and found.signature == "missing_rank", found
        assert "ranks [2, 3] of 4" in found.evidence and "divided by 4" in found.evidence
    forgotten = Faults(mean=mean_of(lambda s, n, grads: sum(grads) / 2))
    for _, found in both_ways(clean(**hybrid), tmp_path / "forgotten", forgotten, **hybrid):
        assert found is not None and found.signature == "constant_factor", found
        assert "the number of replicas" in found.evidence


def test_a_rank_that_gathers_a_slice_of_the_step_before_is_named(clean: Clean, tmp_path: Path) -> None:
    def stale(step: int, rank: int, name: str, now: np.ndarray, old: dict) -> np.ndarray:
        if (step, name) != (2, DOWN):
            return now
        return np.where(in_own_shard(1, name, np.zeros_like(now), np.ones_like), old[name][-1], now)

    UNDER_TEST["world_size"] = SINGLE["world_size"]
    wrong = record(tmp_path / "wrong", Faults(gathered=stale), noise=1, **SINGLE)
    _, found = first_diagnosis(Pair(clean(**SINGLE), wrong), SINGLE["dtype"])
    assert found is not None and found.signature == "missing_rank", found
    assert "elements of rank 1 are unchanged by the step in wrong, all others are right" in found.evidence


def test_a_factor_that_all_parameters_share_is_said_to_be_shared(clean: Clean, tmp_path: Path) -> None:
    summed = FAULTS["gradients summed"][1]
    (_, found), (_, turned) = both_ways(clean(**SINGLE), tmp_path, summed, **SINGLE)
    assert found is not None and turned is not None
    assert "wrong has 3 times the values of right (the world size)" in found.evidence
    assert "right has 0.333333 times the values of wrong (1 / the world size)" in turned.evidence
    assert "the same holds for 7 of 7 other parameters" in found.evidence
    one = Faults(mean=mean_of(lambda s, n, grads: (3 if n == KEY else 1) * np.mean(grads, axis=0)))
    (_, found), _ = both_ways(clean(**SINGLE), tmp_path / "one", one, **SINGLE)
    assert found is not None and "no other parameter differs there" in found.evidence


BY_SKETCH: dict[str, str] = {
    "gradients summed": "constant_factor",
    "rank 1 missing": "missing_rank",
    "stale gather": "stale_copy",
    "gradient of the step before": "stale_copy",
    "a step left out": "lost_step",
}


@pytest.mark.parametrize("name", [*BY_SKETCH, "seen transposed", "tanh"])
def test_sketches_are_enough_for_what_is_linear(
    name: str, clean: Clean, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("verdict.measure.values", "recording.manifest"):
        monkeypatch.setattr(f"crossframe.{module}.WHOLE", 16)
    UNDER_TEST["world_size"] = 3
    options: dict[str, Any] = {**SINGLE, "detail": "sketch"}
    wrong = record(tmp_path / "wrong", FAULTS[name][1], noise=1, **options)
    quantity, found = first_diagnosis(Pair(clean(**options), wrong), "float32")
    assert quantity.sketched
    check_text(TEXTS, f"{quantity.name}: {found and found.evidence}")
    if name in BY_SKETCH:
        assert found is not None and found.signature == BY_SKETCH[name], (quantity.name, found)
    else:
        assert found is None, found
    wanted = needs_full_tensors(judge(quantity))
    assert wanted is not None and "detail='full'" in wanted and quantity.name in wanted


def test_elements_ask_for_nothing_more(clean: Clean, tmp_path: Path) -> None:
    wrong = record(tmp_path / "wrong", FAULTS["tanh"][1], **SINGLE)
    quantity, _ = first_diagnosis(Pair(clean(**SINGLE), wrong), "float32")
    assert needs_full_tensors(judge(quantity)) is None


def test_other_batches_are_said_from_recordings(clean: Clean, tmp_path: Path) -> None:
    right = clean(**SINGLE)
    turned = Faults(sample_ids=lambda s, r, ids: ids[::-1] if s == 2 else ids)
    found = diagnose_batches(right, record(tmp_path / "wrong", turned, **SINGLE))
    assert found is not None and found.signature == "other_batches"
    assert found.evidence == "from step 2 on, ranks [0, 1, 2] received the same samples in a different order."
    assert diagnose_batches(right, right) is None
    for name, faults, said in (
        ("labels", Faults(extra={"labels": 1}), "the output of embed does not differ, so labels differ."),
        ("inputs", Faults(extra={"labels": 1, "tokens": 1}), "the output of embed differs, so inputs differ."),
    ):
        found = diagnose_batches(right, record(tmp_path / name, faults, **SINGLE))
        assert found is not None and found.evidence.endswith(f"in the same order, but with different values; {said}"), (
            found
        )
    assert found.to_json() == {"signature": found.signature, "evidence": found.evidence}


def test_inputs_of_another_shape_differ(clean: Clean, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, own = clean(**SINGLE), RecordingWriter.activation
    monkeypatch.setattr(
        RecordingWriter,
        "activation",
        lambda writer, *at_and_array: own(writer, *at_and_array[:-1], at_and_array[-1][:, :-1]),
    )
    found = diagnose_batches(right, record(tmp_path / "wrong", Faults(extra={"labels": 1}), **SINGLE))
    assert found is not None and found.evidence.endswith("the output of embed differs, so inputs differ.")


def test_an_epsilon_is_found_with_one_side_as_the_right_one(clean: Clean, tmp_path: Path) -> None:
    pair = Pair(clean(), record(tmp_path / "wrong", Faults(epsilon=1e-3)))
    quantity, _ = first_diagnosis(pair, "float64")
    (fit,) = norm_epsilon(case_of(pair, quantity, tight("float64")))
    assert fit.signature == "norm_epsilon" and "and 0.001 in wrong" in fit.evidence
    assert not list(norm_epsilon(case_of(pair, quantity, tight("float64")).swap()))


def test_gradients_that_are_not_finite_explain_nothing(clean: Clean, tmp_path: Path) -> None:
    def spoilt(step: int, rank: int, grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: np.where(grad > 2, np.inf, grad) if name == QUERY else grad for name, grad in grads.items()}

    def mended(step: int, name: str, grads: list[dict[str, np.ndarray]], old: list) -> np.ndarray:
        return np.mean([np.where(np.isfinite(grad[name]), grad[name], 0.5) for grad in grads], axis=0)

    right = record(tmp_path / "right", Faults(local=spoilt, mean=mended), **SINGLE)
    wrong = Faults(local=spoilt, mean=lambda *args: np.tanh(mended(*args)) if args[1] == QUERY else mended(*args))
    for quantity, found in both_ways(right, tmp_path, wrong, **SINGLE):
        assert quantity.name == QUERY and found is None, found


def test_what_is_not_finite_is_given_no_name(clean: Clean, tmp_path: Path) -> None:
    nan = Faults(mean=mean_of(lambda s, n, grads: np.where(np.mean(grads, axis=0) > 1, np.nan, np.mean(grads, axis=0))))
    for _, found in both_ways(clean(**SINGLE), tmp_path, nan, **SINGLE):
        assert found is None
