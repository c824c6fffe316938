"""`crossframe check` on recordings and configuration files, and what `compare` says of environments."""

import json
import shlex
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from crossframe.check import check_recordings
from crossframe.cli.commands import app
from crossframe.cli.training_command import TrainingCommand
from crossframe.environment import Environment
from crossframe.errors import UsageError
from crossframe.recording import Recording
from crossframe.verdict import compare
from tests.core.helpers import faulty, synthetic
from tests.core.helpers.synthetic import edit_events, manifest, only, record, write_run

STATED = {
    "framework": {"device": "cpu"},
    "packages": {"torch": "2.13.0", "pip": "24"},
    "modules": {"": "Net()", "h.0": "LayerNorm(eps=1e-05)"},
}


def run(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    return result.exit_code, result.output


def state(directory, rank=0, **sections):
    """Write the environment of a rank with other facts in some sections."""
    environment = Environment({name: facts | sections.get(name, {}) for name, facts in STATED.items()})
    (directory / f"rank{rank:05d}" / "environment.json").write_bytes(environment.to_bytes())


@pytest.fixture
def pair(tmp_path):
    for name in ("a", "b"):
        record(tmp_path / name)
        for rank in (0, 1):
            state(tmp_path / name, rank)
    return tmp_path / "a", tmp_path / "b"


def test_equal_runs_exit_with_0(pair):
    assert run("check", *pair) == (0, "nothing differs\n")


def test_differences_are_ranked_and_set_the_exit_status(pair):
    state(pair[1], packages={"pip": "25"})
    status, said = run("check", *pair)
    assert status == 0 and said.startswith(
        "should not change the numbers:\n  the version of pip differs: 24 in a, 25 in b"
    )
    state(pair[1], packages={"pip": "25", "torch": "2.11.0"})
    status, said = run("check", *pair)
    assert status == 3 and said.startswith(
        "may change the numbers:\n  the version of torch differs: 2.13.0 in a, 2.11.0 in b"
    )
    state(pair[1], modules={"h.0": "LayerNorm(eps=1e-06)"}, packages={"torch": "2.11.0"})
    status, said = run("check", *pair, "--json")
    found = json.loads(said)
    assert status == 1 and found["effect"] == "certainly"
    assert [each["name"] for each in found["differences"]] == ["h.0", "torch"]
    assert found["differences"][1] == {
        "section": "packages",
        "name": "torch",
        "a": "2.13.0",
        "b": "2.11.0",
        "absent": [],
        "effect": "possibly",
        "reason": found["differences"][1]["reason"],
        "description": "the version of torch differs: 2.13.0 in a, 2.11.0 in b",
    }


def test_the_rank_with_another_version_is_listed(pair):
    assert run("check", pair[0]) == (0, "the environments of all ranks are equal\n")
    state(pair[0], 1, packages={"torch": "2.11.0"})
    status, said = run("check", pair[0])
    assert status == 3 and "the version of torch on rank 1 is 2.11.0, on rank 0 2.13.0" in said
    status, said = run("check", *pair)
    assert status == 3 and "a: the version of torch on rank 1" in said


def test_settings_initial_values_and_batches_are_compared(tmp_path):
    a = record(tmp_path / "a", manifest(settings={"optimizer": "AdamW", "weight_decay": 0.1}))
    name = next(iter(a.manifest.params))
    b = record(
        tmp_path / "b",
        replace(manifest(settings={"optimizer": "AdamW", "weight_decay": 0.0}), learning_rate=0.5),
        tamper=only("parameters", name, lambda x: x + np.asarray(0.5, x.dtype)),
    )
    found = {each.name: each.describe() for each in check_recordings(a, b).differences}
    assert {"weight_decay", "initial values"} <= found.keys()
    assert "initial values of 1 of" in found["initial values"] and name in found["initial values"]


@pytest.mark.parametrize("detail", ["full", "sketch"])
@pytest.mark.parametrize(
    ("change", "how"),
    [
        (lambda x: -x, "drawn independently"),
        (lambda x: np.roll(x, 1), "related: rounded or moved"),
        (lambda x: 2 * x, "related"),
    ],
    ids=["drawn", "moved", "scaled"],
)
def test_initial_values_that_differ_are_called_drawn_or_moved(tmp_path, monkeypatch, detail, change, how):
    monkeypatch.setattr(synthetic, "SHAPES", synthetic.SHAPES | {"embed": (40, 30)})  # large enough for a sketch
    monkeypatch.setattr(synthetic, "UNITS", synthetic.UNITS | {"": {"embed": (40, 30), "bias": (3,)}})
    if detail == "sketch" and how.endswith("moved"):
        how = "drawn independently"  # a sketch does not show a permutation
    a = record(tmp_path / "a", manifest(detail=detail))
    b = record(tmp_path / "b", manifest(detail=detail), tamper=only("parameters", "embed", change))
    found = {each.name: each for each in check_recordings(a, b).differences}
    assert found.keys() == {"initial values"} and found["initial values"].section == "values"
    assert (found["initial values"].a, found["initial values"].b) == ("", "")
    text = "the initial values of 1 of 4 parameters differ, first those of 'embed'; they are "
    assert found["initial values"].describe().startswith(text + how)
    assert not check_recordings(a, a).differences


def test_initial_values_of_two_dtypes_are_compared_in_the_coarser_one(tmp_path):
    a = record(tmp_path / "a")
    b = record(tmp_path / "b", manifest(dtype="float32"))
    found = {each.name: each.describe() for each in check_recordings(a, b).differences}
    assert (
        "initial values" not in found
        and found["embed"] == "parameter 'embed' differs: float64[4, 3] in a, float32[4, 3] in b"
    )
    assert "initial values" not in {each.name for each in check_recordings(b, a).differences}
    other = record(tmp_path / "c", manifest(dtype="float32"), tamper=only("parameters", "embed", lambda x: x * 2))
    assert "initial values" in {each.name for each in check_recordings(a, other).differences}


def test_sketches_of_two_dtypes_and_parameters_of_two_shapes_have_no_common_values(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "SHAPES", synthetic.SHAPES | {"embed": (40, 30)})
    monkeypatch.setattr(synthetic, "UNITS", synthetic.UNITS | {"": {"embed": (40, 30), "bias": (3,)}})
    a = record(tmp_path / "a", manifest(detail="sketch"))
    b = record(tmp_path / "b", manifest(detail="sketch", dtype="float32"))
    monkeypatch.setattr(synthetic, "SHAPES", synthetic.SHAPES | {"embed": (30, 41)})
    monkeypatch.setattr(synthetic, "UNITS", synthetic.UNITS | {"": {"embed": (30, 41), "bias": (3,)}})
    c = record(tmp_path / "c", manifest(detail="sketch"))
    for first, second in ((a, b), (b, a), (a, c), (c, a)):
        found = {each.name: each for each in check_recordings(first, second).differences}
        assert "initial values" not in found and found["embed"].section == "parameters"
        sides = [f"{r.manifest.params['embed'].dtype}{list(r.manifest.params['embed'].shape)}" for r in (first, second)]
        assert [found["embed"].a, found["embed"].b] == sides


def test_the_same_initial_values_that_are_not_finite_do_not_differ(tmp_path):
    lost = only("parameters", "embed", lambda x: x * np.nan)
    a, b = (record(tmp_path / name, tamper=lost) for name in "ab")
    assert not check_recordings(a, b).differences


def test_batches_are_compared_by_samples_and_by_their_order(tmp_path):
    a = record(tmp_path / "a")
    record(tmp_path / "b")
    edit_events(tmp_path / "b", '"sample_ids": [7, 9, 11]', '"sample_ids": [9, 7, 11]', rank=1)
    ((name, text, section, *values),) = (
        (each.name, each.describe(), each.section, each.a, each.b)
        for each in check_recordings(a, Recording.open(tmp_path / "b")).differences
    )
    assert (name, section, *values) == ("order of samples", "values", "", "")
    assert text == "from step 1 on, ranks have the same samples in another order or in other microbatches"
    was = a.batch(0, 1).digest
    edit_events(tmp_path / "b", was, was[::-1], rank=1)
    edit_events(tmp_path / "b", '"sample_ids": [1, 3, 5]', '"sample_ids": [1, 3, 6]', rank=1)
    (found,) = check_recordings(a, Recording.open(tmp_path / "b")).differences
    assert (found.name, found.describe()) == ("batches", "the batch of rank 1 at step 0 differs between a and b")
    assert (found.section, found.a, found.b) == ("values", "", "")


def test_other_worlds_and_frameworks_leave_batches_and_modules_out(tmp_path):
    record(tmp_path / "a")
    record(tmp_path / "b", manifest(3, framework="jax"))
    record(tmp_path / "c", manifest(2))
    for name in "abc":
        state(tmp_path / name, modules={"h.0": f"LayerNorm(eps={name})"} if name == "b" else {})
    a, b, c = (Recording.open(tmp_path / name) for name in "abc")
    found = check_recordings(a, b)
    assert "modules" not in {each.section for each in found.differences}
    assert "the world sizes differ, so batches were not compared" in found.notes
    assert not any("world sizes" in note for note in check_recordings(a, c).notes)
    state(tmp_path / "c", modules={"h.0": "LayerNorm(eps=c)"})
    assert "modules" in {each.section for each in check_recordings(a, c).differences}


@pytest.mark.parametrize(("name", "differs"), [("MyAdamW", False), ("SGD", True)])
def test_optimizers_of_one_rule_do_not_differ(tmp_path, name, differs):
    a = faulty.record(tmp_path / "a")
    b = faulty.record(tmp_path / "b", other={"optimizer": name})
    for pair in ((a, b), (b, a)):
        assert [each.name for each in check_recordings(*pair).differences] == ["optimizer"] * differs


def test_runs_without_a_step_in_common_are_compared_by_what_they_state(tmp_path):
    a = record(tmp_path / "a")
    write_run(tmp_path / "b", manifest(seed=1), stop_before=0)
    b = Recording.open(tmp_path / "b", partial=True)
    assert [(each.name, each.section) for each in check_recordings(a, b).differences] == [("seed", "run")]


def test_the_recording_without_an_environment_is_named(pair):
    record(pair[0].parent / "c", manifest(learning_rate=0.5))
    found = check_recordings(Recording.open(pair[0]), Recording.open(pair[0].parent / "c"))
    assert found.notes == ("c does not state its environment; record it again with this version",)
    assert [(each.name, each.section) for each in found.differences] == [("learning_rate", "optimizer")]
    assert found.differences[0].describe() == "learning rate differs: 0.1 in a, 0.5 in c"
    assert (found.differences[0].a, found.differences[0].b) == (0.1, 0.5)


def test_an_old_recording_is_compared_by_its_manifest(tmp_path):
    a = record(tmp_path / "a", manifest(versions={"torch": "2.13.0"}))
    b = record(tmp_path / "b", manifest(versions={"torch": "2.11.0", "numpy": "2"}))
    found = check_recordings(a, b)
    assert [each.name for each in found.differences] == ["torch"]
    assert "does not state its environment" in found.notes[0]


def test_compare_states_the_environment_that_may_explain(pair):
    state(pair[1], packages={"torch": "2.11.0"})
    a, b = map(Recording.open, pair)
    assert compare(a, b).environments.explanation == ""  # equal numbers need none
    record(pair[1].parent / "c", tamper=only("reduce", next(iter(a.manifest.params)), lambda x: x * 2))
    state(pair[1].parent / "c", packages={"torch": "2.11.0", "pip": "25"})
    verdict = compare(a, Recording.open(pair[1].parent / "c"))
    assert verdict.environments.explanation == (
        "the version of torch differs: 2.13.0 in a, 2.11.0 in c, which may explain this: another version has other kernels and "
        "defaults"
    )
    assert verdict.to_json()["environment"]["differences"][0]["name"] == "torch"


def test_compare_states_the_rank_that_may_explain(pair):
    record(
        pair[1].parent / "c",
        tamper=only("reduce", next(iter(Recording.open(pair[0]).manifest.params)), lambda x: x * 2),
    )
    for rank in (0, 1):
        state(pair[1].parent / "c", rank, packages={"torch": "2.11.0"} if rank else {})
    verdict = compare(*map(Recording.open, (pair[0], pair[1].parent / "c")))
    assert verdict.environments.explanation == (
        "in c the version of torch on rank 1 is 2.11.0, on rank 0 2.13.0, which may explain this: another version has other "
        "kernels and defaults"
    )


def test_configuration_files_are_compared_key_by_key(tmp_path):
    (tmp_path / "a.json").write_text('{"optimizer": {"lr": 0.1}, "log": {"path": "x"}}')
    (tmp_path / "b.toml").write_text('[optimizer]\nlr = 0.2\n[log]\npath = "y"\n')
    status, said = run("check", tmp_path / "a.json", tmp_path / "b.toml")
    assert (
        status == 1 and "the configuration optimizer.lr differs: 0.1 in a.json, 0.2 in b.toml" in said.splitlines()[1]
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["none"], "expected a recording, a configuration file", id="nothing"),
        pytest.param(["."], "a folder without a recording", id="a folder"),
        pytest.param(["x.json"], "compared with another one", id="one configuration"),
        pytest.param(["missing.py"], "is not a file", id="no script"),
        pytest.param(["x.json", "x.json", "--steps", "3"], "--map and --steps", id="an option without use"),
        pytest.param(["x.py", "--steps", "0"], "expected an integer of at least 1", id="no steps"),
        pytest.param(["torchrun --nnodes 2 x.py"], "expected --nproc-per-node", id="nodes"),
    ],
)
def test_wrong_use_exits_with_2(tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.json").write_text("{}")
    status, said = run("check", *arguments)
    assert status == 2 and expected in said and "Traceback" not in said


def test_commands_are_parsed():
    def parse(text):
        return TrainingCommand.parse(shlex.split(text), command="check")

    found = parse("A=1 torchrun --standalone --nproc_per_node 2 train.py --lr 'a b'")
    assert (found.script.name, found.arguments, found.variables, found.nproc_per_node) == (
        "train.py",
        ("--lr", "a b"),
        {"A": "1"},
        2,
    )
    assert parse(str(found)) == TrainingCommand.parse(found.words(), command="check") == found
    assert parse("python3.11 t.py").nproc_per_node is None
    with pytest.raises(UsageError, match="check: expected a training command"):
        parse("python -m")
