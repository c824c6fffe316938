"""The files of a recording, line by line, kept in files.json: recordings of today are read by the versions to come.

All values are small integers, so that no line depends on how a machine rounds.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossframe.dtypes import numpy_dtype
from crossframe.layout import FlatLayout, PerParamLayout
from crossframe.mesh import MeshSpec
from crossframe.param_map import identity_map
from crossframe.params import ParamSpec
from crossframe.plan import Strategy, plan_units, step_plan
from crossframe.recording import Manifest, Recording, RecordingWriter, Schedule, create_recording
from crossframe.trace import collectives
from tests.core.helpers.kept_texts import check_text
from tests.core.helpers.synthetic import pieces_of

TEXTS = Path(__file__).with_name("files.json")
KEPT_OF_ENDS = ("event", "rank", "steps", "content")
SPECS = (ParamSpec("block.w", (4, 3)), ParamSpec("block.b", (3,)))
OTHER = (ParamSpec("embed", (5, 2), "bfloat16"),)


def manifest(**other: Any) -> Manifest:
    layouts = {"": PerParamLayout(OTHER, 2), "block": FlatLayout(SPECS, 2, True)}
    fields: dict[str, Any] = {
        "framework": "torch",
        "model": "toy",
        "dtype": "float32",
        "mesh": MeshSpec(shard=2),
        "steps": 3,
        "learning_rate": 0.5,
        "seed": 7,
        "terms": 16,
        "schedule": Schedule(dense=1, every=2),
        "param_map": identity_map({spec.name: spec.shape for spec in (*OTHER, *SPECS)}),
        "units": tuple(layouts.items()),
        "settings": {"optimizer": "AdamW", "weight_decay": 0.25, "command": "python train.py"},
    }
    return Manifest(**(fields | other))


def whole(spec: ParamSpec, start: int) -> np.ndarray:
    return np.arange(start, start + spec.numel).reshape(spec.shape).astype(numpy_dtype(spec.dtype))


def write(folder: Path, made: Manifest, *, window: bool = False) -> None:
    create_recording(folder, made)
    for rank in range(2):
        with RecordingWriter(folder, made, rank) as writer:
            for step in range(3):
                if window and step == 1:
                    writer.open_window(2)
                writer.batch(step, f"{step}{rank}" * 32, [10 * step + rank, 5], [(2, 77), (2, 78)] if step else ())
                writer.loss(step, 2.5 - step if step < 2 else float("inf"))
                if step == 0:
                    writer.collectives(
                        step, collectives(step_plan(plan_units(made.units, Strategy(made.strategy)), made.mesh, rank))
                    )
                if writer.is_dense(step):
                    image = np.arange(2 * 3 * 2 * 2, dtype=np.float32).reshape(2, 3, 2, 2)
                    writer.activation(step, 0, "block", "input", image)
                    writer.activation(step, 0, "block", "output", image[:, :1] + rank, operator="aten.mm")
                    writer.activation(step, 0, "", "output", np.ones((2, 40), np.float32))
                if step < 2:
                    writer.grad_norm(step, 3.0)
                for unit, layout in made.units:
                    arrays = {spec.name: whole(spec, step) for spec in layout.params}
                    if step == 0:
                        writer.parameters(step, unit, pieces_of(layout, rank, arrays))
                    if writer.is_dense(step):
                        writer.unsharded(step, unit, arrays)
                        writer.local_grads(
                            step, unit, {name: (array + rank).astype(array.dtype) for name, array in arrays.items()}
                        )
                    if writer.records(step):
                        pieces = pieces_of(
                            layout, rank, {name: (array + 1).astype(array.dtype) for name, array in arrays.items()}
                        )
                        writer.reduced_grads(step, unit, pieces)
                        writer.state(step, unit, "exp_avg", pieces)
                        writer.counts(step, {name: step + (1.0 if name != "block.b" else 2.0) for name in arrays})
                        writer.updated(step, unit, pieces)
                if step == 0 and rank == 1:
                    writer.disagreement(step, "update", "block", "block.w", "", 0.125, "tensor", [1])
                    writer.disagreement(step, "state", "block", "block.b", "exp_avg", 0.5, "tensor", [2, 1])
                    writer.disagreement(step, "forward", "block", "block", "input", 0.25, "expert", [1])
                writer.end_step(step, [0.5, 0.25] if step else ())


CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "full": ({}, False),
    "full with a window": ({}, True),
    "sketches": ({"detail": "sketch"}, False),
    "jax": ({"framework": "jax", "steps": None, "schedule": Schedule(dense=0, every=1, windows=((1, 2),))}, False),
}


@pytest.mark.parametrize("name", CASES)
def test_files_of_a_recording(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields, window = CASES[name]
    monkeypatch.setattr("crossframe.recording.manifest.WHOLE", 4)  # more elements than these are sketched
    write(tmp_path / "run", made := manifest(**fields), window=window)
    files = sorted(path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").rglob("*.*"))
    check_text(TEXTS, " ".join(files), "files")
    kept = json.loads((tmp_path / "run" / "manifest.json").read_text())
    check_text(
        TEXTS, json.dumps({key: kept[key] for key in sorted(kept) if key not in ("versions", "token")}), "manifest"
    )
    lines = (tmp_path / "run" / "rank00001" / "events.jsonl").read_text().splitlines()
    for number, line in enumerate(lines if name in ("full", "sketches") else lines[:0]):
        # The other fields depend on the token of the recording, which is random.
        told = {key: value for key, value in json.loads(line).items() if key in KEPT_OF_ENDS or '"step": ' in line}
        check_text(TEXTS, json.dumps(told), f"line {number:03}")
    assert Recording.open(tmp_path / "run").manifest == made


def test_what_a_recording_holds_comes_back(tmp_path: Path) -> None:
    write(tmp_path / "run", manifest())
    run = Recording.open(tmp_path / "run")
    assert run.num_steps == 3 and run.recorded_steps() == (0, 2)
    assert (run.count(0, "block.w"), run.count(0, "block.b"), run.count(1, "embed")) == (1.0, 2.0, None)
    assert (run.count(2, "block.b"), run.learning_rates(0), run.learning_rates(2)) == (4.0, (), (0.5, 0.25))
    assert run.losses()[:, 1].tolist() == [2.5, 1.5, np.inf]
    assert [run.grad_norm(step, 1) for step in range(3)] == [3.0, 3.0, None]
    batch = run.batch(2, 1)
    assert (batch.digest, batch.sample_ids, batch.inputs) == ("21" * 32, (21, 5), ((2, 77), (2, 78)))
    assert run.activations(0) == [(0, "block", "input"), (0, "block", "output"), (0, "", "output")]
    assert run.activations(1) == [] and run.activation_shape(0, 1, 0, "block", "output") == (2, 1, 2, 2)
    assert run.activation(0, 1, 0, "block", "output").reshape(-1).tolist() == [1, 2, 3, 4, 13, 14, 15, 16]
    assert run.activation_operator(0, 1, 0, "block", "output") == "aten.mm"
    assert run.activation_operator(0, 1, 0, "block", "input") == ""
    assert [(each.phase, each.name, each.use, each.axis) for each in run.disagreements(1)] == [
        ("forward", "block", "input", "expert"),
        ("state", "block.b", "exp_avg", "tensor"),
        ("update", "block.w", "parameter", "tensor"),
    ] and run.disagreements(0) == []
    assert {each.name: (each.difference, each.ranks) for each in run.disagreements(3)} == {
        "block.w": (0.125, (1,)),
        "block.b": (0.5, (2, 1)),
        "block": (0.25, (1,)),
    }
