"""Verdicts on small runs, with every figure that a report shows, kept as they were: whoever changes one, means it.

    python -m tests.core.verdict.test_golden_verdicts

writes them anew.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from crossframe.recording.event_format import perturbed_run_folder
from crossframe.verdict import PairVerdict, compare
from tests.core.helpers.faulty import Faults, record

FILE = Path(__file__).with_name("golden_verdicts.json")
# Runs are rounded by fixed random numbers, so that figures depend on the machine by rounding in float64 alone.
TOLERANCE = 1e-5
SINGLE: dict[str, Any] = {"dtype": "float32"}
HALF: dict[str, Any] = {"dtype": "bfloat16"}
SGD: dict[str, Any] = SINGLE | {"optimizer": "SGD", "clip": None}
FOUR: dict[str, Any] = SINGLE | {"world_size": 4}


def scaled(factor: float) -> Faults:
    return Faults(mean=lambda s, n, grads, old: factor * np.mean([grad[n] for grad in grads], axis=0))


def late(step: int, rank: int, x: np.ndarray) -> np.ndarray:
    return 0.9 * x if step == 1 else x


# Options of a and of b, the number of perturbed runs of each, and what b does otherwise.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int], Faults]] = {
    "rounding": (SINGLE, SINGLE, (4, 4), Faults()),
    "rounding, perturbed runs of one": (SINGLE, SINGLE, (0, 2), Faults()),
    "rounding without perturbed runs": (SINGLE, SINGLE, (0, 0), Faults()),
    "rounding in bfloat16": (HALF, HALF, (4, 4), Faults()),
    "rounding in sketches": (SINGLE | {"detail": "sketch"}, SINGLE | {"detail": "sketch"}, (3, 3), Faults()),
    "two ranks and four": (SINGLE, FOUR, (2, 0), Faults()),
    "replicas": (FOUR, FOUR | {"replicate": 2}, (3, 3), Faults()),
    "float32 and bfloat16": (SINGLE, HALF, (4, 4), Faults()),
    "epsilon": (SINGLE, SINGLE, (4, 4), Faults(epsilon=1e-3)),
    "epsilon without perturbed runs": (SINGLE, SINGLE, (0, 0), Faults(epsilon=1e-3)),
    "a factor of gradients": (SINGLE, SINGLE, (4, 4), scaled(1.001)),
    "a small factor": (SINGLE, SINGLE, (4, 4), scaled(1 + 3e-7)),
    "a small factor in sgd": (SGD, SGD, (4, 4), scaled(1 + 1e-6)),
    "a branch in one step": (SINGLE, SINGLE, (3, 3), Faults(branch=late)),
    "a branch in one step, bfloat16": (HALF, HALF, (4, 4), Faults(branch=late)),
    "rate": (SINGLE, SINGLE, (4, 4), Faults(rate=0.0101)),
    "decay": (SINGLE, SINGLE, (2, 2), Faults(decay=0.09)),
    "clipped by hand": (SINGLE, SINGLE | {"clip": None}, (2, 2), Faults(by_hand=2.0)),
    "beta in sketches": (SINGLE | {"detail": "sketch"}, SINGLE | {"detail": "sketch"}, (3, 3), Faults(beta2=0.99)),
    "stated rate": (SINGLE, SINGLE | {"other": {"weight_decay": 0.2}}, (2, 2), Faults(decay=0.2)),
}


def verdict(name: str, folder: Path) -> PairVerdict:
    options, others, perturbed, faults = CASES[name]
    sides = []
    for side, (chosen, number, does) in enumerate(zip((options, others), perturbed, (Faults(), faults), strict=True)):
        at, made = folder / "ab"[side], {"world_size": 2, **chosen}
        sides.append(record(at, does, noise=side, **made))
        for i in range(1, number + 1):
            record(at / perturbed_run_folder(i), does, noise=10 * side + i + 1, **made)
    return compare(*sides)


def figures(found: PairVerdict) -> dict[str, Any]:
    """What a report shows, and of all quantities of a phase the number, the number outside, and means."""
    shown = found.to_json() | {
        "limit_used": found.limit_used,
        "judged_share": found.judged_share,
        "loss_differences": list(found.loss_differences),
        "parameter_differences": [list(each) for each in found.parameter_differences],
        "parted": asdict(found.parted) if found.parted else None,
    }
    if found.directions is not None:
        shown["directions"] = {"near": found.directions.near, "num_tests": found.directions.num_tests}
    phases: dict[str, list] = {}
    for each in found.judged:
        phases.setdefault(f"{each.phase}, {each.event}", []).append(each)
    shown["judged"] = {
        phase: {
            "num": len(group),
            "num_beyond": sum(each.beyond for each in group),
            "num_equal": sum(each.equal for each in group),
            "mean_difference": float(np.mean([min(each.difference, 1e9) for each in group])),
            "mean_used": float(np.mean([min(each.used or 0.0, 1e9) for each in group])),
        }
        for phase, group in phases.items()
    }
    return json.loads(json.dumps(shown))


def is_same(kept: Any, found: Any) -> bool:
    if isinstance(kept, Mapping) and isinstance(found, Mapping):
        return kept.keys() == found.keys() and all(is_same(kept[name], found[name]) for name in kept)
    if isinstance(kept, list) and isinstance(found, list):
        return len(kept) == len(found) and all(map(is_same, kept, found))
    if isinstance(kept, float) and isinstance(found, float | int):
        return math.isclose(kept, found, rel_tol=TOLERANCE, abs_tol=1e-12)
    return kept == found


@pytest.mark.parametrize("name", CASES)
def test_figures_of_a_verdict(name: str, tmp_path: Path) -> None:
    kept, found = json.loads(FILE.read_text())[name], figures(verdict(name, tmp_path))
    differ = {
        key: (kept.get(key), found.get(key)) for key in kept | found if not is_same(kept.get(key), found.get(key))
    }
    assert not differ, f"{differ}; if this is meant: python -m tests.core.verdict.test_golden_verdicts"


def write() -> None:
    made = {}
    for name in CASES:
        with TemporaryDirectory() as folder:
            made[name] = figures(verdict(name, Path(folder)))
    FILE.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(write())
