"""`crossframe map`, as a user meets it: safetensors files and recordings, the map that it writes, and its exit status."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from crossframe.alignment.models import read_models, read_recorded
from crossframe.baseline import condense
from crossframe.checkpoint import finish
from crossframe.cli.commands import app
from crossframe.errors import MappingError, RecordingError, UsageError
from crossframe.layout import PerParamLayout
from crossframe.param_map import ParamMap
from crossframe.recording import Recording
from tests.core.helpers import checkpoints, synthetic
from tests.core.helpers.translated import translate


def run(*arguments, command="map"):
    """Exit status and what was printed."""
    result = CliRunner().invoke(app, [command, *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    first = {"fc.weight": rng.normal(size=(6, 4)), "out.weight": rng.normal(size=(2, 6)), "out.bias": np.zeros(2)}
    second = {"dense.kernel": first["fc.weight"].T, "head.kernel": first["out.weight"].T, "head.bias": np.zeros(2)}
    for name, arrays in (("a", first), ("b", second)):
        save_file({key: np.ascontiguousarray(array) for key, array in arrays.items()}, tmp_path / f"{name}.safetensors")
    return tmp_path / "a.safetensors", tmp_path / "b.safetensors"


def test_two_files_give_a_map_that_can_be_read(files, tmp_path):
    status, text = run(*files)
    assert (
        status == 0
        and "fc.weight = dense.kernel  a b -> b a" in text
        and "3 parameters aligned by their values" in text
    )
    status, text = run(*files, "--output", tmp_path / "map.json")
    assert status == 0 and str(tmp_path / "map.json") in text.replace("\n", "")
    loaded = ParamMap.load(tmp_path / "map.json")
    pairs = [(entry.name, entry.path) for entry in loaded.entries]
    assert pairs == [("fc.weight", "dense.kernel"), ("out.bias", "head.bias"), ("out.weight", "head.kernel")]
    assert json.loads(run(*files, "--json")[1])["map"] == loaded.to_json()


def test_the_names_are_those_of_the_second_file_if_only_these_can_be_mapped(tmp_path):
    queries, others = (
        np.random.default_rng(0).normal(size=(4, 6, 8)),
        np.random.default_rng(1).normal(size=(2, 2, 6, 8)),
    )
    joined = np.concatenate([each.swapaxes(-1, -2).reshape(-1, 6) for each in (queries, others)])
    both = tmp_path / "joined.safetensors", tmp_path / "parts.safetensors"
    save_file({"qkv": joined}, both[0])
    save_file({"q": queries, "kv": others}, both[1])
    status, text = run(*both)
    assert status == 0 and f"the names are those of {both[1]}, and the paths those of {both[0]}" in text.replace(
        "\n", ""
    )
    assert json.loads(run(*both, "--json")[1])["names_of"] == str(both[1])


def test_what_is_undecided_is_exit_status_1(files, tmp_path):
    save_file({"dense.kernel": np.ones((4, 6)), "head.bias": np.zeros(2)}, tmp_path / "other.safetensors")
    status, text = run(files[0], tmp_path / "other.safetensors")
    assert status == 1 and "undecided: fc.weight: no counterpart has the same elements" in text


def test_a_recording_aligns_with_itself(tmp_path):
    synthetic.write_run(tmp_path / "run", synthetic.manifest())
    status, text = run(tmp_path / "run", tmp_path / "run")
    assert status == 0 and "undecided" not in text


def test_recordings_with_other_names_are_compared_with_a_map_or_without(tmp_path):
    first = synthetic.record(tmp_path / "a", synthetic.manifest(1))
    paths = {name: f"net.{name}_p" for name in synthetic.SHAPES}
    translate(first, tmp_path / "b", paths, params=lambda name, array: array.T)
    both = (tmp_path / "a", tmp_path / "b")
    status, text = run(*both, command="compare")
    assert status == 0 and "4 parameters with other names were matched by their values" in " ".join(text.split())
    assert run(*both, "--output", tmp_path / "map.json")[0] == 0
    status, text = run(*both, "--map", tmp_path / "map.json", command="compare")
    assert status == 0 and "by the given map" in text
    (tmp_path / "map.json").write_text('[["embed", "nothing", null]]')
    status, text = run(*both, "--map", tmp_path / "map.json", command="compare")
    assert status == 2 and "'nothing'" in text


@pytest.mark.parametrize("kind", ["flat", PerParamLayout], ids=["flat", "per_param"])
def test_a_sharded_checkpoint_is_aligned_with_a_file(tmp_path, kind):
    sharding = checkpoints.made(kind, 3)
    finish(tmp_path / "checkpoint", checkpoints.written(tmp_path / "checkpoint", sharding), {"model": sharding})
    weight, bias = np.arange(15.0).reshape(5, 3), 20 + np.arange(7.0)
    save_file({"dense.kernel": np.ascontiguousarray(weight.T), "dense.bias": bias}, tmp_path / "b.safetensors")
    status, text = run(tmp_path / "checkpoint", tmp_path / "b.safetensors")
    assert status == 0 and "w = dense.kernel  a b -> b a" in text and "b = dense.bias" in text


@pytest.mark.parametrize("content", [None, b"", b"not safetensors"])
def test_a_model_that_cannot_be_read_is_named(files, tmp_path, content):
    path = tmp_path / "c.safetensors"
    if content is not None:
        path.write_bytes(content)
    status, text = run(files[0], path)
    assert status == 2 and "c.safetensors: expected a safetensors file" in text.replace("\n", "")


def test_models_without_floating_tensors_steps_or_elements_are_refused(files, tmp_path):
    save_file({"n": np.arange(3)}, tmp_path / "ints.safetensors")
    (tmp_path / "empty").mkdir()
    for name in ("ints.safetensors", "empty"):
        status, text = run(files[0], tmp_path / name)
        assert status == 2, text
    with pytest.raises(
        UsageError, match=r"ints.safetensors: expected a recording, .* with floating tensors; there is none"
    ):
        read_models((files[0], tmp_path / "ints.safetensors"))
    synthetic.write_run(tmp_path / "begun", synthetic.manifest(), stop_before=0)
    with pytest.raises(RecordingError, match="begun: expected one complete step, got none"):
        read_recorded(Recording.open(tmp_path / "begun", partial=True))
    whole = synthetic.record(tmp_path / "whole")
    condense(whole, [whole, whole], most_bytes=100_000).write(tmp_path / "a.golden")
    with pytest.raises(
        RecordingError, match=r"a.golden: expected the elements or samples of .*'embed' was .* align checkpoints"
    ):
        read_recorded(Recording.open(tmp_path / "a.golden"))


@pytest.mark.parametrize("content", ["", "{}", '[["w"]]', '[["w", "k", "i o -> o"]]'])
def test_an_invalid_map_file_is_refused(tmp_path, content):
    (tmp_path / "map.json").write_text(content)
    with pytest.raises(MappingError, match="expected"):
        ParamMap.load(tmp_path / "map.json")
