"""`crossframe bisect` and `crossframe compare A B C`, on runs that numpy makes up instead of a training script."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from crossframe.cli import kept_runs
from crossframe.cli.bisect_settings import SettingsOfTwo
from crossframe.cli.training_command import TrainingCommand
from crossframe.environment.configuration import format_configuration, parse_configuration
from crossframe.errors import FailedRunError
from crossframe.recording import Schedule
from crossframe.recording.event_format import perturbed_run_folder
from tests.commands import invoke, status_of
from tests.core.helpers import synthetic

STEPS = 30


def parse(text):
    return TrainingCommand.parse(text.split(), command="test")


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Runs commands in numpy: with --late they go wrong at step 23, and with --wrong, or TWIST and scale = 2.0, at once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    trained = []

    def record_script(training, *, output, stop_after, every, dense, windows, **_):
        arguments, variables = training.arguments, training.variables
        if "--fails" in arguments:
            raise FailedRunError("train.py was not recorded")
        scale = 1.0
        if "--config" in arguments:
            scale = parse_configuration(tmp_path / arguments[arguments.index("--config") + 1])["model"]["scale"]
        twists = "--wrong" in arguments or (variables.get("TWIST") == "1" and scale == 2.0)

        def tamper(phase, step, rank, name, array):
            is_wrong = twists or ("--late" in arguments and step >= 23)
            return array * 1.01 if is_wrong and (phase, name) == ("reduce", "embed") else array

        made = synthetic.manifest(
            steps=min(STEPS, stop_after or STEPS), schedule=Schedule(dense, every, tuple(windows)), seed=0
        )
        if "--resume" in arguments:
            made = replace(made, terms=17)
        synthetic.record(output, made, tamper=tamper, overwrite=True)
        trained.append(output.as_posix())

    monkeypatch.setattr(kept_runs, "record_script", record_script)
    return trained


def test_the_step_is_found_by_denser_recordings_and_an_interrupted_search_goes_on(trained):
    search = ("bisect", "--every", 25, "--output", "out", "--", "train.py", "--", "train.py", "--late")
    status, said = invoke(*search)
    assert status == 1 and "the runs diverge at step 23: There is a bug" not in said
    assert "the runs diverge at step 23:" in said
    assert trained == [f"out/{stage}/{side}" for stage in STAGES for side in "ab"]
    state = json.loads(Path("out/bisect.json").read_text())
    assert state["result"]["step"] == 23 and len(state["runs"]) == len(trained)
    del state["runs"][f"{STAGES[-1]}/b"]  # as if interrupted in the last run
    Path("out/bisect.json").write_text(json.dumps(state))
    trained.clear()
    status, said = invoke(*search)
    assert status == 1 and trained == [f"out/{STAGES[-1]}/b"] and "1 runs, 5 reused" in said
    status, said = invoke("bisect", "--output", "out", "--", "train.py", "--", "train.py", "--wrong")
    assert status == 2 and "holds the runs of another search" in said


STAGES = ["first", "every-3-from-0-to-25", "dense-1-from-0-to-24"]


def test_perturbed_runs_measure_rounding_in_every_recording(monkeypatch, tmp_path):
    """Two float32 runs that round differently in every step, and one of which goes wrong at step 4."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")

    def record_script(training, *, output, perturbed_runs, stop_after, every, dense, windows, **_):
        def tamper(seed):
            rounds = synthetic.jitter(seed, 2e-7)

            def change(phase, step, rank, name, array):
                is_wrong = "--other" in training.arguments and step >= 4 and (phase, name) == ("reduce", "embed")
                return rounds(phase, step, rank, name, array * np.float32(1.00006) if is_wrong else array)

            return change

        made = synthetic.manifest(
            dtype="float32", steps=min(STEPS, stop_after or STEPS), schedule=Schedule(dense, every, tuple(windows))
        )
        synthetic.record(output, made, tamper=tamper(100 if "--other" in training.arguments else 0), overwrite=True)
        for number in range(1, perturbed_runs + 1):
            path = output / perturbed_run_folder(number)
            synthetic.record(path, made, tamper=tamper(number), overwrite=True)

    monkeypatch.setattr(kept_runs, "record_script", record_script)
    words = ("--every", 5, "--perturbed-runs", 4, "--", "train.py", "--", "train.py", "--other")
    status, said = invoke("bisect", "--output", "out", *words)
    assert status == 1 and "the runs diverge at step 4:" in said, said
    assert "measured on 4 perturbed runs of a" in said[said.index("the runs diverge") :]


def test_the_result_as_json_is_all_that_is_printed(trained, tmp_path, capfd):
    found = {}
    for kind, more in (("steps", ()), ("settings", ("--settings",))):
        words = (
            "bisect",
            *more,
            "--json",
            "--every",
            25,
            "--output",
            kind,
            "--",
            "train.py",
            "--",
            "train.py",
            "--late",
        )
        assert status_of(*words) == 1
        found[kind] = json.loads(capfd.readouterr().out)
    assert found["steps"]["step"] == 23 and found["steps"]["first_divergence"]["parameter"] == "embed"
    assert (found["steps"]["runs"], found["steps"]["reused"], found["steps"]["exit_status"]) == (6, 0, 1)
    assert found["steps"]["recordings"] == [f"steps/{STAGES[-1]}/{side}" for side in "ab"]
    assert [len(cause) for cause in found["settings"]["causes"]] == [1]
    assert status_of("bisect", "--json", "--output", "same", "--", "train.py", "--", "train.py") == 0
    assert json.loads(capfd.readouterr().out)["verdict"] == "equal"


def test_a_checkpoint_that_gives_other_losses_is_not_used(trained, tmp_path):
    for side in "ab":
        (tmp_path / side).mkdir()
        (tmp_path / side / "2.pt").write_text("")
    search = ("bisect", "--every", 25, "--output", "out", "--resume", "--resume {side}/{step}.pt")
    status, said = invoke(*search, "--", "train.py", "--", "train.py", "--late")
    assert status == 1 and "go on after 2 steps are not like those from the start" in said
    assert "the runs diverge at step 23:" in said


def test_settings_that_make_runs_diverge_are_found_alone_and_together(trained, tmp_path):
    for name, scale in (("a", 1.0), ("b", 2.0)):
        (tmp_path / f"{name}.toml").write_text(f"[model]\nscale = {scale}\nlabel = '{name}'\n")
    a = ["train.py", "--config", "a.toml", "--log", "1"]
    b = ["TWIST=1", "OTHER=1", "train.py", "--config", "b.toml", "--log", "2", "--wrong"]
    status, said = invoke("bisect", "--settings", "--output", "out", "--", *a, "--", *b)
    assert status == 1 and f"6 settings differ; {len(trained)} runs, 0 reused" in said
    alone, together, rest = (
        said.index("this setting alone"),
        said.index("these 2 settings together"),
        said.index("without those"),
    )
    assert "the argument --wrong" in said[alone:together]
    assert "model.scale" in said[together:rest] and "TWIST" in said[together:rest]
    assert all(name in said[rest:] for name in ("OTHER", "--log", "model.label"))


def test_a_command_that_fails_is_wrong_use(trained):
    status, said = invoke("bisect", "--settings", "--output", "other", "--", "train.py", "--", "train.py", "--fails")
    assert status == 2 and "was not recorded" in said


@pytest.mark.parametrize("words", [["train.py"], ["a.py", "--", "b.py", "--", "c.py"], ["a.py", "--", "-m"]])
def test_anything_but_two_commands_is_rejected(words, tmp_path):
    status, said = invoke("bisect", "--output", tmp_path / "out", "--", *words)
    assert status == 2 and "training command" in said


def test_settings_are_exchanged_one_by_one(tmp_path):
    a = parse("XLA_FLAGS=--x=1 torchrun --nproc-per-node 2 train.py data --lr 1 --lr 2 --only-a")
    b = parse("TWIST=1 other.py data2 --lr 3")
    b = replace(b, variables={"XLA_FLAGS": "--x=1 --y=2", **b.variables})
    both = SettingsOfTwo(a, b, tmp_path)
    by_name = {setting.label: setting for setting, _ in both.differences}
    assert {*by_name} == {"XLA_FLAGS --y", "TWIST", "script", "world_size", "argument 1", "--lr", "--only-a"}
    texts = {each.name: each.describe() for _, each in both.differences}
    assert texts["XLA_FLAGS --y"] == "the variable XLA_FLAGS --y differs: not set in a, 2 in b"
    assert texts["world_size"] == "the run's world_size differs: 2 in a, 1 in b"
    assert both.command([], 0) == a
    assert both.command([by_name["--lr"], by_name["--only-a"]], 1).arguments == ("data", "--lr", "3")
    assert both.command([by_name["XLA_FLAGS --y"]], 2).variables == {"XLA_FLAGS": "--x=1 --y=2"}
    whole = both.command(list(by_name.values()), 3)
    assert (whole.script, whole.nproc_per_node, {*whole.arguments}) == (b.script, None, {*b.arguments})


VALUES = {"seed": "1", "optimizer": {"lr": "0.1", "name": 'a "b"'}}


@pytest.mark.parametrize(
    ("suffix", "values"),
    [
        (".json", VALUES | {"layers": [{"width": 4}], "none": None}),
        (
            ".toml",
            {"seed": 1, "layers": [{"width": 4.0}], "is": True, "optimizer": {"x y": float("inf"), "name": 'a "b"\n'}},
        ),
        (".ini", {"one": {"lr": "0.1"}, "two": {"name": "x"}}),
        (".yaml", VALUES | {"layers": [{"width": 4}], "none": None}),
    ],
)
def test_configurations_are_written_as_they_were_read(tmp_path, suffix, values):
    path = tmp_path / f"c{suffix}"
    path.write_text(format_configuration(values, suffix))
    assert parse_configuration(path) == values


def test_runs_are_grouped_by_agreement(tmp_path):
    def wrong(phase, step, rank, name, array):
        return array * np.float64(1.01) if (phase, name) == ("reduce", "embed") else array

    tampers = {"a": None, "b": wrong, "c": synthetic.jitter(1, 1e-15), "d": wrong}
    paths = [tmp_path / name for name in tampers]
    for path, tamper in zip(paths, tampers.values(), strict=True):
        synthetic.record(path, tamper=tamper)
    status, said = invoke("compare", *paths)
    assert status == 1 and "4 runs, in 2 groups by agreement" in said
    status, said = invoke("compare", *paths, "--json")
    assert json.loads(said)["groups"] == [[str(paths[0]), str(paths[2])], [str(paths[1]), str(paths[3])]]
    status, said = invoke("compare", paths[1], paths[3], paths[1])
    assert status == 0 and "3 runs, all agree" in said
    status, said = invoke("compare", *paths, "--output", tmp_path / "report")
    assert status == 2 and "--output: for two recordings, got 4" in said


def test_checkpoints_are_grouped_by_agreement(tmp_path):
    w = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for path, array in zip(paths, (w, w * np.float32(1.01), w + np.float32(1e-8)), strict=True):
        save_file({"w": array}, path)
    status, said = invoke("compare", *paths, "--json")
    found = json.loads(said)
    assert status != 0 and found["groups"] == [[str(paths[0]), str(paths[2])], [str(paths[1])]]
    assert all(each["reason"] for each in found["compared"])
    status, said = invoke("compare", *paths, "--github")
    assert status == 2 and "--github is for recordings" in said
    synthetic.record(tmp_path / "run")
    status, said = invoke("compare", *paths, tmp_path / "run")
    assert status == 2 and "is a recording" in said
