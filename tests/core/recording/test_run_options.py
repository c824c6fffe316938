"""What the arguments of a recorder mean in every backend: the directory, the schedule, sketches, and the manifest's settings."""

from pathlib import Path

import pytest

from crossframe.errors import RecordingError, UsageError
from crossframe.layout import PerParamLayout
from crossframe.mesh import MeshSpec
from crossframe.param_map import identity_map
from crossframe.params import ParamSpec
from crossframe.recording import Manifest, Schedule
from crossframe.recording.event_format import perturbed_run_folder
from crossframe.recording.program import with_digests
from crossframe.recording.run_options import RunOptions
from crossframe.recording.sketch import FULL_NUMEL

ARGUMENTS = {"every": 5, "dense": 2, "windows": [(7, 9)], "detail": "auto", "steps": 10, "seed": 3, "perturbed_run": 0}
ARGUMENTS |= dict.fromkeys(("forward_only", "overwrite"), False)
ARGUMENTS |= dict.fromkeys(("settings", "manifest", "trace_directory"))


def options(**given):
    return RunOptions("run", **{**ARGUMENTS, **given})


def units(numel):
    return (("", PerParamLayout((ParamSpec("w", (numel,), "float32"),), 1)),)


def made(of, numel=4, **stated) -> Manifest:
    fields = {"framework": "torch", "model": "net", "dtype": "float32", "mesh": MeshSpec(shard=1), "terms": None}
    return of.manifest(
        units=units(numel),
        packages=["numpy", "no_such_package"],
        program={"device": "cpu"},
        stated=stated,
        param_map=identity_map(["w"]),
        learning_rate=None,
        **fields,
    )


def test_directories_of_perturbed_and_traced_runs():
    existing = made(options(dense=4, detail="sketch"))
    inside = Path("run", perturbed_run_folder(2))
    assert options().path == Path("run") and options(perturbed_run=2).path == inside
    joined = options(perturbed_run=2, trace_directory="trace", manifest=existing)
    assert (joined.path, joined.schedule, joined.overwrite) == (Path("run"), existing.schedule, False)
    assert joined.sketches(units(4))
    traced = options(perturbed_run=2, trace_directory="trace", detail="full")
    assert (traced.path, traced.overwrite) == (Path("trace", "recording"), True)
    assert not any(traced.schedule.is_dense(step) or traced.schedule.records(step, None) for step in range(1, 1000))


@pytest.mark.parametrize(
    ("detail", "numel", "sketches"),
    [("auto", FULL_NUMEL, False), ("auto", FULL_NUMEL + 1, True), ("full", FULL_NUMEL + 1, False), ("sketch", 1, True)],
)
def test_large_models_are_sketched_unless_the_detail_is_stated(detail, numel, sketches):
    of = options(detail=detail)
    assert of.sketches(units(numel)) == sketches
    assert made(of, numel).detail == ("sketch" if sketches else "full")


def test_unknown_detail_raises():
    with pytest.raises(UsageError, match="Recorder: detail: expected 'auto', 'full' or 'sketch', got 'some'"):
        options(detail="some")


def test_manifest_has_the_options_and_the_users_settings():
    manifest = made(options(perturbed_run=2, forward_only=True, settings={"lr": 0.5}), lr=0.1, optimizer="SGD")
    assert (manifest.steps, manifest.seed, manifest.schedule) == (10, 3, Schedule(2, 5, ((7, 9),)))
    assert set(manifest.versions) == {"numpy"}
    settings = dict(manifest.settings)
    assert settings.pop("command").startswith("python ")
    assert settings.pop("program") == with_digests({"device": "cpu"})
    assert settings == {"lr": 0.5, "optimizer": "SGD", "perturbed_run": 2, "forward_only": True}
    assert not {"perturbed_run", "forward_only"} & made(options()).settings.keys()


def test_a_stated_program_gets_digests_and_its_own_facts_have_precedence():
    stated = {"device": "tpu", "source": "of a release"}
    program = made(options(settings={"program": stated})).settings["program"]
    assert program == with_digests({}) | stated
    with pytest.raises(RecordingError, match=r"'settings\.program': expected an object of names, .* got 'tpu'"):
        made(options(settings={"program": "tpu"}))
