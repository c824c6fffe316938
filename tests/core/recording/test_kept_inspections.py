"""What an inspection tells of one recording with one fault, sentence by sentence, kept in inspections.json."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossframe.inspection import inspect
from crossframe.inspection.growth import growth
from crossframe.recording import Recording, Schedule
from tests.core.helpers import faulty, synthetic
from tests.core.helpers.faulty import Faults
from tests.core.helpers.kept_texts import check_text
from tests.core.helpers.synthetic import both, only

TEXTS = Path(__file__).with_name("inspections.json")
QUERY = "block.query.weight"


def first_of(value: float) -> Any:
    def change(array: np.ndarray) -> np.ndarray:
        array.reshape(-1)[0] = value
        return array

    return change


def noisy(size: float) -> Any:
    return lambda array: array + size * np.random.default_rng(1).standard_normal(array.shape).astype(array.dtype)


def mean_of(change: Any) -> Any:
    return lambda step, name, grads, old: change(step, name, np.mean([grad[name] for grad in grads], axis=0))


GROUPS = [{"params": [QUERY, "norm.weight"], "weight_decay": 0.0}]
# Options of a run under AdamW or SGD, and its fault.
TRAINED: dict[str, tuple[dict[str, Any], Faults]] = {
    "right": ({}, Faults()),
    "right in float32": ({"dtype": "float32"}, Faults()),
    "right in bfloat16": ({"dtype": "bfloat16", "clip": None}, Faults()),
    "right, SGD": ({"optimizer": "SGD", "clip": None}, Faults()),
    "right, sketches": ({"detail": "sketch"}, Faults()),
    "right, replicas": ({"world_size": 4, "replicate": 2}, Faults()),
    "not clipped": ({"clip": 2.0}, Faults(clips=False)),
    "clipped by hand": ({"clip": None}, Faults(by_hand=2.0)),
    "clipped without a statement": ({"clip": 2.0, "other": {"clip": ...}}, Faults(by_hand=2.0)),
    "another rate": ({}, Faults(rate=0.011)),
    "another decay": ({}, Faults(decay=0.3)),
    "another decay, SGD": ({"optimizer": "SGD", "clip": None}, Faults(decay=0.3)),
    "decay in the gradient": ({"optimizer": "Adam"}, Faults(decay=0.0, coupled=0.1)),
    "no decay of some": ({}, Faults(decays=lambda name: name != QUERY)),
    "no decay of a group": ({"other": {"param_groups": GROUPS}}, Faults(decays=lambda name: name != QUERY)),
    "another epsilon": ({}, Faults(adam_epsilon=1e-4)),
    "no correction": ({}, Faults(corrected=lambda t: (None, None))),
    "count lost": ({}, Faults(counted=lambda t: t - 1 if t > 2 else t)),
    "another beta": ({}, Faults(beta1=0.8)),
    "another second beta": ({}, Faults(beta2=0.99)),
    "moments lost": (
        {},
        Faults(moments=lambda s, n, state: np.zeros(state[n]["exp_avg"].shape) if s == 2 else None),
    ),
    "a parameter left out": ({}, Faults(skips=lambda s, n: n == QUERY and s == 1)),
    "seen otherwise": ({}, Faults(gathered=lambda s, r, n, now, old: now * 0.999 if s and n == QUERY else now)),
    "seen otherwise on a rank": ({}, Faults(gathered=lambda s, r, n, now, old: 2 * now if r and n == QUERY else now)),
    "no number in a gradient": ({}, Faults(mean=mean_of(lambda s, n, x: x * (np.nan if s == 1 else 1)))),
    "a skipped step": (
        {"clip": None},
        Faults(mean=mean_of(lambda s, n, x: x * (np.inf if s == 1 else 1)), skips=lambda s, n: s == 1),
    ),
    "norm of a rank": ({"world_size": 3}, Faults(norm=lambda s, r, x, grads: x * (1.25 if r == 1 else 1))),
    "no known optimizer": ({"other": {"optimizer": "Lion"}}, Faults()),
    "no optimizer": ({"other": {"optimizer": ...}}, Faults()),
}
RUN: dict[str, Any] = {"settings": {"optimizer": "SGD", "lr": 0.1}}
REPLICAS: dict[str, Any] = RUN | {"world_size": 4, "replicate": 2}
MEAN: dict[str, Any] = {"settings": {"optimizer": "SGD", "lr": 0.1, "losses": "mean"}}
# Changes to the recording of a small run, with its options.
TAMPERED: dict[str, tuple[Any, dict[str, Any]]] = {
    "initial value of a replica": (only("parameters", "embed", first_of(3.0), rank=2), REPLICAS),
    "gradient of a replica": (only("reduce", "embed", noisy(1e-3), rank=2), REPLICAS),
    "gradient of a replica, rounded": (only("reduce", "embed", noisy(1e-13), rank=2), REPLICAS),
    "gradients of three replicas": (
        both(only("reduce", "bias", noisy(1e-3), rank=2), only("reduce", "bias", noisy(1e-2), rank=1)),
        RUN | {"world_size": 3, "replicate": 3},
    ),
    "state of a replica": (only("state", "embed", noisy(1e-3), rank=1, step=1), REPLICAS),
    "update of a replica": (only("update", "block.w", noisy(1e-3), rank=3, step=1), REPLICAS),
    "infinity in a replica": (only("update", "block.w", lambda x: x * np.inf, rank=3, step=1), REPLICAS),
    "replicas in sketches": (only("reduce", "embed", noisy(1e-3), rank=2), REPLICAS | {"detail": "sketch"}),
    "full value of a rank": (only("unsharded", "block.w", noisy(1e-3), rank=1), RUN | {"world_size": 3}),
    "full value of two ranks": (only("unsharded", "block.w", noisy(1e-3), rank=1), RUN | {"world_size": 2}),
    "mean loss of a rank": (only("forward", "", lambda x: 2 * x, rank=1), MEAN | {"world_size": 3}),
    "nan in an input": (
        both(only("input", "block", first_of(np.nan), rank=1), only("forward", "", first_of(np.nan), rank=1)),
        RUN,
    ),
    "nan in an output": (
        both(only("output", "block", first_of(np.nan)), only("forward", "", first_of(np.nan), rank=1)),
        RUN,
    ),
    "nan in the model's output": (
        both(only("output", "", first_of(np.nan)), only("forward", "", first_of(np.nan), rank=1)),
        RUN,
    ),
    "nan in a loss": (only("forward", "", first_of(np.nan), rank=1), RUN),
    "infinity in a local gradient": (
        both(only("backward", "block.w", first_of(np.inf), rank=0), only("reduce", "block.w", first_of(np.inf))),
        RUN,
    ),
    "nan in a gradient": (only("reduce", "block.w", first_of(np.nan), step=1), RUN),
    "nan in a norm": (only("norm", "", first_of(np.nan), step=1), RUN),
    "nan in a moment": (only("state", "embed", first_of(np.nan), step=1), RUN),
    "nan in an update": (only("update", "embed", first_of(np.nan), step=1), RUN),
    "nan before the first step": (only("parameters", "embed", first_of(np.nan)), RUN),
    "a mask": (only("output", "block", first_of(-np.inf)), RUN),
    "nan in a step between": (
        only("forward", "", first_of(np.nan), step=2, rank=0),
        RUN | {"schedule": Schedule(dense=1, every=2)},
    ),
    "nan in sketches": (only("reduce", "block.w", first_of(np.nan), step=1), RUN | {"detail": "sketch"}),
}


def told(recording: Recording) -> str:
    found = inspect(recording).to_json()
    kinds = ("not_finite", "growing", "disagreements", "departures")
    lines = [f"{kind}: {each['description']}" for kind in kinds for each in found[kind]]
    return " | ".join([f"faulty {found['faulty']}, {found['values']} values", *lines, *found["notes"]])


@pytest.mark.parametrize("name", TRAINED)
def test_inspection_of_a_trained_run(name: str, tmp_path: Path) -> None:
    options, faults = TRAINED[name]
    check_text(TEXTS, told(faulty.record(tmp_path / "run", faults, **options)))


@pytest.mark.parametrize("name", TAMPERED)
def test_inspection_of_a_changed_run(name: str, tmp_path: Path) -> None:
    tamper, options = TAMPERED[name]
    made = synthetic.manifest(options.get("world_size", 2), **{k: v for k, v in options.items() if k != "world_size"})
    check_text(TEXTS, told(synthetic.record(tmp_path / "run", made, tamper=tamper)))


SERIES = {
    "doubles": [2.0**i for i in range(9)],
    "doubles too late": [3.0, 2.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0],
    "doubles just in time": [2.0, *(2.0**i for i in range(8))],
    "rises by less than twice": [10.0 + i for i in range(9)],
    "rises to twice": [1 + i / 8 for i in range(9)],
    "stands still once": [1.0, 2.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0],
    "explodes": [1.0, 0.5, 3.0, 1.0, 2.0, 1.0, 2.0, 1.0, 500.0],
    "almost explodes": [1.0, 0.5, 3.0, 1.0, 2.0, 1.0, 2.0, 1.0, 499.0],
    "explodes at once": [0.5, 500.0],
    "explodes after zeros and infinities": [0.0, math.inf, 1.0, math.inf, 0.0, 1000.0],
    "is one number": [1.0],
    "is zero": [0.0, 0.0],
    "falls": [2.0**-i for i in range(9)],
}


@pytest.mark.parametrize("name", SERIES)
def test_growth_of_a_loss(name: str, tmp_path: Path) -> None:
    values = SERIES[name]
    rising = lambda phase, step, rank, name, x: x * 0 + values[step] if phase == "forward" else x  # noqa: E731
    run = synthetic.record(tmp_path / "run", synthetic.manifest(1, steps=len(values), **RUN), tamper=rising)
    check_text(TEXTS, told(run))
    assert growth(run, {}) == []
