"""The JSON objects that commands print with --json, field by field: programs read them."""

import json
import math
from dataclasses import replace

import pytest

from crossframe.alignment.align import Alignment, Undecided
from crossframe.check.result import Check
from crossframe.checkpoint_comparison.compare import CheckpointVerdict
from crossframe.checkpoint_comparison.tensors import Kind, TensorDifference
from crossframe.environment import Effect
from crossframe.environment.differences import Absent, Difference
from crossframe.environment.ranks import OddRanks
from crossframe.inspection.agreement import Disagreement
from crossframe.inspection.growth import Growth
from crossframe.inspection.inspect import Inspection
from crossframe.inspection.not_finite import NotFinite
from crossframe.inspection.optimizer import Departure
from crossframe.monitoring import alarm
from crossframe.param_map import MapEntry, ParamMap
from crossframe.verdict.diagnosis import Diagnosis
from crossframe.verdict.environments import Environments
from crossframe.verdict.measure.locate import Divergence
from crossframe.verdict.perturbed_runs.directions import Directions
from crossframe.verdict.result import PairVerdict
from crossframe.verdict.verdicts import Verdict

DIFFERENCE = Difference("packages", "torch", "2.11", "2.13", Effect.POSSIBLY, "kernels differ", 3)
TORCH = {
    "section": "packages",
    "name": "torch",
    "a": "2.11",
    "b": "2.13",
    "absent": [],
    "effect": "possibly",
    "reason": "kernels differ",
    "description": "the version of torch differs: 2.11 in a, 2.13 in b",
}
ODD = OddRanks(DIFFERENCE, (1, 4), ("node1",), True)
ODD_JSON = TORCH | {
    "ranks": [1, 4],
    "hosts": ["node1"],
    "by_majority": True,
    "description": "the version of torch on ranks 1, 4 (node1) is 2.13, on the other ranks 2.11",
}
WHERE = Divergence(2, "reduce", 1, "h.0", "h.0.w", 4, 8, "reduce_scatter", (1, 3), None)
WHERE_JSON = {"step": 2, "phase": "reduce", "rank": 1, "unit": "h.0", "parameter": "h.0.w", "start": 4, "stop": 8,
              "event": "reduce_scatter", "ranks": [1, 3], "module": None, "buffer": None}  # fmt: skip
CHANGED = TensorDifference("w", Kind.BEYOND, "w differs by 0.5", Verdict.INCONCLUSIVE, 0.5)
CHANGED_JSON = {
    "name": "w",
    "kind": "beyond",
    "verdict": "inconclusive",
    "difference": 0.5,
    "description": "w differs by 0.5",
}
INFINITE = NotFinite(3, 0, (0, 2), "reduce", "reduced gradient of 'w'", "", "w", 5, 12, False, (), (1, 3))
GROWING = Growth("gradient norm", 4, 10, 1.0, 64.0, 2.0)
APART = Disagreement(2, "norm", "gradient norm", (1,), math.inf, False)
DEPARTED = Departure(5, "update", ("w", "v"), 0.25, "")
WRONG_PAIR = PairVerdict(
    "x", "y", "float32", (2, 4), 7, Verdict.BUG, "it differs", 0.5, math.inf, ("k.bias",), WHERE,
    diagnosis=Diagnosis("transposed", "it is transposed"), settings=("the seed differs",), bits="bits differ",
    directions=Directions(None, {"update": {"size": (0.25, 0.5)}}, 0.1, 9), notes=("a note",),
    environments=Environments((DIFFERENCE,), (("x", ODD),), "it explains"),
)  # fmt: skip
OBJECTS = {
    "difference": (DIFFERENCE, TORCH),
    "absent": (
        Difference("packages", "pip", Absent, "25", Effect.HARDLY, "no kernels", 9),
        {"a": None, "b": "25", "absent": ["a"], "effect": "hardly", "reason": "no kernels"},
    ),
    "ranks": (ODD, ODD_JSON),
    "check": (
        Check(("x", "y"), (DIFFERENCE,), (("x", ODD),), ("a note",)),
        {
            "a": "x",
            "b": "y",
            "effect": "possibly",
            "differences": [TORCH | {"description": "the version of torch differs: 2.11 in x, 2.13 in y"}],
            "odd_ranks": [{"run": "x"} | ODD_JSON],
            "notes": ["a note"],
        },
    ),
    "equal environments": (Check(("x", "y")), {"effect": None, "differences": [], "odd_ranks": []}),
    "equal ranks": (Check(("x", "y"), (replace(DIFFERENCE, effect=Effect.HARDLY), DIFFERENCE)), {"effect": "possibly"}),
    "equal values": (Check(("x", "y"), (), (("x", ODD),)), {"effect": "possibly", "differences": []}),
    "place": (WHERE, WHERE_JSON),
    "verdict": (
        WRONG_PAIR,
        {
            "a": "x",
            "b": "y",
            "dtype": "float32",
            "world_size": [2, 4],
            "steps": 7,
            "verdict": "bug",
            "reason": "it differs",
            "max_relative_loss_difference": 0.5,
            "max_relative_parameter_difference": None,
            "zero_gradient_parameters": ["k.bias"],
            "first_divergence": WHERE_JSON,
            "diagnosis": {"signature": "transposed", "evidence": "it is transposed"},
            "settings": ["the seed differs"],
            "environment": {
                "explanation": "it explains",
                "differences": [TORCH],
                "odd_ranks": [{"run": "x"} | ODD_JSON],
            },
            "unrecorded": None,
            "bits": "bits differ",
            "power": {"update": {"size": {"least": 0.25, "half": 0.5}}},
            "notes": ["a note"],
        },
    ),
    "equal runs": (
        PairVerdict("x", "y", "float32", 2, 7, Verdict.EQUAL, "they are equal"),
        {"world_size": 2, "verdict": "equal", "first_divergence": None, "diagnosis": None, "bits": None, "power": None}
        | {"environment": {"explanation": None, "differences": [], "odd_ranks": []}},
    ),
    "tensor": (CHANGED, CHANGED_JSON),
    "infinite tensor": (
        TensorDifference("w", Kind.NOT_FINITE, "NaN", Verdict.BUG, math.inf),
        {"kind": "not finite", "verdict": "bug", "difference": None},
    ),
    "checkpoints": (
        CheckpointVerdict("x", "y", Verdict.BUG, "w differs", 5, 4, (CHANGED,)),
        {
            "a": "x",
            "b": "y",
            "verdict": "bug",
            "reason": "w differs",
            "tensors": 5,
            "equal": 4,
            "differences": [CHANGED_JSON],
        },
    ),
    "not finite": (
        INFINITE,
        {
            "step": 3,
            "microbatch": 0,
            "ranks": [0, 2],
            "phase": "reduce",
            "name": "reduced gradient of 'w'",
            "module": "",
        }
        | {"parameter": "w", "num_not_finite": 5, "numel": 12, "skipped": False, "inputs": [], "unseen": [1, 3]}
        | {"description": INFINITE.describe()},
    ),
    "growth": (
        GROWING,
        {"name": "gradient norm", "start": 4, "stop": 10, "first": 1.0, "last": 64.0, "factor": 2.0}
        | {"description": GROWING.describe()},
    ),
    "ranks disagree": (
        APART,
        {"step": 2, "phase": "norm", "name": "gradient norm", "ranks": [1], "difference": None, "rounding": False}
        | {"by_majority": True, "description": APART.describe()},
    ),
    "departure": (
        DEPARTED,
        {"step": 5, "name": "update", "parameters": ["w", "v"], "share": 0.25, "evidence": ""}
        | {"description": DEPARTED.describe()},
    ),
    "inspection": (
        Inspection("runs/a", 8, 99, (INFINITE,), (GROWING,), (APART,), (DEPARTED,), ("a note",)),
        {"recording": "runs/a", "steps": 8, "values": 99, "faulty": True, "not_finite": [INFINITE.describe()]}
        | {"growing": [GROWING.describe()], "disagreements": [APART.describe()], "departures": [DEPARTED.describe()]}
        | {"notes": ["a note"]},
    ),
    "alarm": (
        alarm.Alarm(alarm.Kind.RANKS, 7, "w", "step 7: ranks differ"),
        {"kind": "ranks disagree", "step": 7, "subject": "w", "text": "step 7: ranks differ"},
    ),
    "alignment": (
        Alignment(
            ParamMap((MapEntry("w", "k", "a b -> b a"),)), {"w": "values"}, (Undecided(("v",), ("x", "y"), "equal"),)
        ),
        {
            "map": ParamMap((MapEntry("w", "k", "a b -> b a"),)).to_json(),
            "evidence": {"w": "values"},
            "undecided": [{"names": ["v"], "paths": ["x", "y"], "why": "equal"}],
        },
    ),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_fields_of_objects(name):
    made, expected = OBJECTS[name]
    found = json.loads(json.dumps(made.to_json(), allow_nan=False))
    if name == "inspection":
        found |= {
            key: [each["description"] for each in found[key]]
            for key in ("not_finite", "growing", "disagreements", "departures")
        }
    assert {key: found[key] for key in expected} == expected
    if "equal" not in name and name not in ("absent", "infinite tensor"):
        assert found.keys() == expected.keys()


def test_environments_without_differences_hardly_change_numbers():
    assert Check(("x", "y")).effect is Effect.HARDLY
