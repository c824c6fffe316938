"""Checkpoints on disk: any layout into any other, and every damage found before anything is given out."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open

from crossframe.checkpoint import (
    MODEL,
    CheckpointError,
    Contents,
    abandon,
    begin,
    check_about,
    finish,
    read,
    remove,
    remove_unfinished,
    save,
    state_layout,
    write_rank,
)
from crossframe.checkpoint.index import digest_of, unit_from_json, unit_to_json
from crossframe.checkpoint.writing import Save
from crossframe.layout import FlatLayout, PerParamLayout, RaggedLayout, Sharding
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.tensor_file import MOST_DIMS
from tests.core.helpers.checkpoints import PARAMS, line_of, made, written


def saved(path, sharding, values=None, about=None):
    finish(path, written(path, sharding, values), {MODEL: sharding}, values, about)
    return path


@pytest.mark.parametrize("source", ["flat", PerParamLayout, RaggedLayout])
def test_R05_R36_any_layout_is_read_into_any_other_and_padding_is_0(source, tmp_path):
    values = {"count": np.array(3, np.int32), "scale": np.array([0.5, 2], "bfloat16"), "none": np.zeros((0, 2), bool)}
    path = saved(tmp_path / "c", made(source, 3), values)
    for kind in ("flat", PerParamLayout, RaggedLayout):
        target = made(kind, 4)
        for rank in range(4):
            (line,) = read(path).lines(MODEL, target, rank)
            np.testing.assert_array_equal(line, line_of(target, rank, padding=0))
    for key, value in values.items():
        found = read(path).value(key)
        assert found.dtype == value.dtype and found.shape == value.shape and np.array_equal(found, value)
    for rank in range(3):
        with safe_open(path / f"rank{rank:05d}.safetensors", framework="numpy") as file:
            stored = file.get_tensor("model:0").view("bfloat16")
        np.testing.assert_array_equal(stored, line_of(made(source, 3), rank, padding=0))


def test_only_the_files_that_a_rank_needs_are_read(tmp_path):
    path = saved(tmp_path / "c", made("flat", 2))
    (path / "rank00001.safetensors").unlink()
    read(path).lines(MODEL, made("flat", 2), 0)
    with pytest.raises(CheckpointError, match=r"nothing was loaded: rank00001.safetensors is missing"):
        read(path).lines(MODEL, made("flat", 2), 1)


def test_what_was_damaged_is_refused_by_name(tmp_path):
    whole, target = saved(tmp_path / "c", made("flat", 2)), made("flat", 1)

    def damaged(name, change):
        path = tmp_path / name
        shutil.copytree(whole, path)
        change(path)
        with pytest.raises(CheckpointError) as caught:
            read(path).lines(MODEL, target, 0)
        return str(caught.value)

    file = "rank00001.safetensors"
    edit = lambda path, name: (path / name).write_bytes((path / name).read_bytes()[:-1] + b"?")  # noqa: E731
    cut = lambda path: (path / file).write_bytes((path / file).read_bytes()[:-1])  # noqa: E731
    assert f"{file} has other content" in damaged("edited", lambda path: edit(path, file))
    assert f"{file} has" in (said := damaged("cut", cut)) and "cut off" in said
    assert "is not an index" in damaged("no json", lambda path: edit(path, "index.json"))
    text = lambda path: (path / "index.json").read_text()  # noqa: E731
    change = lambda path: (path / "index.json").write_text(text(path).replace('"w"', '"v"'))  # noqa: E731
    assert "index.json: has other content" in damaged("renamed", change)
    with pytest.raises(CheckpointError, match="expected a checkpoint"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": True}, "'world_size': expected int, got True"),
        ({"about": None}, "'about': expected dict, got None"),
        ({"world_size": 0}, "'world_size': expected 1 to 131072 ranks, got 0"),
        ({"world_size": 131073}, "'world_size': expected 1 to 131072 ranks, got 131073"),
        ({"sections": {}}, "'sections': expected at least one, got none"),
        ({"files": {}}, "'files': expected one for each of 2 ranks, got []"),
        ({"files": {"bytes": -1}}, "'files': rank00000.safetensors: expected its size and its sha256, got "),
        ({"files": {"sha256": "0" * 63}}, "'files': rank00000.safetensors: expected its size and its sha256, got "),
        ({"values": {"n": ["int32"]}}, "value 'n': expected its dtype and shape, got ['int32']"),
        ({"values": {"n": ["object", []]}}, "value 'n': expected its dtype and shape, got ['object', []]"),
        ({"values": {"n": ["int32", 3]}}, "value 'n': expected its dtype and shape, got ['int32', 3]"),
        (
            {"values": {"n": ["int32", [1] * (MOST_DIMS + 1)]}},
            "value 'n': expected its dtype and shape, got ['int32', [1, 1",
        ),
        ({"values": {"n": ["int32", [-1]]}}, "value 'n': expected a shape, got [-1]"),
        ({"values": {"n": ["int32", [True]]}}, "value 'n': expected a shape, got [True]"),
        ({"values": {"n": ["int32", [2**62, 2]]}}, "value 'n': expected a shape, got [4611686018427387904, 2]"),
    ],
)
def test_a_field_of_the_index_that_is_invalid_is_named(tmp_path, change, message):
    path = saved(tmp_path / "c", made("flat", 2))
    content = json.loads((path / "index.json").read_text())["content"]
    if file := change.get("files"):
        change = {"files": {name: fields | file for name, fields in content["files"].items()}}
    content |= change
    (path / "index.json").write_text(json.dumps({"content": content, "sha256": digest_of(content)}))
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert f"c/index.json: {message}" in str(caught.value) and str(caught.value).endswith("; restore it from a copy")


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "bfloat16"])
def test_values_of_every_dtype_and_of_the_most_dims_are_read(tmp_path, dtype):
    value = np.ones((1,) * MOST_DIMS, dtype)
    found = read(saved(tmp_path / "c", made("flat", 1), {"n": value})).value("n")
    assert (found.dtype, found.shape) == (value.dtype, value.shape) and found.tobytes() == value.tobytes()


@pytest.mark.parametrize(
    "row", [["w", 6, "float32", [], True], ["w", [6], "float32", "v", True], ["w", [6], "float32", []], "w,6,f,,1", 5]
)
def test_a_parameter_that_is_described_otherwise_is_refused(row):
    layout = PerParamLayout(PARAMS, 2)
    described = unit_to_json("", layout)
    assert unit_from_json(described) == ("", layout)
    described["params"][1] = row
    with pytest.raises(CheckpointError, match="'params': expected name, shape, dtype, aliases and requires_grad, got"):
        unit_from_json(described)


def test_another_model_is_refused_with_all_names(tmp_path):
    path = saved(tmp_path / "c", made("flat", 2))
    params = (ParamSpec("w", (3, 5), "bfloat16"), ParamSpec("extra", (2,), "bfloat16"))
    other = Sharding((("", PerParamLayout(params, 2)),), MeshSpec(2))
    with pytest.raises(CheckpointError, match=r"nothing was loaded: .*'extra'.*'b'.*'w' is bfloat16 \(5, 3\)"):
        read(path).lines(MODEL, other, 0)
    with pytest.raises(CheckpointError, match="expected a section 'state'"):
        read(path).lines("state", other, 0)
    with pytest.raises(CheckpointError, match="expected a value 'count'"):
        read(path).value("count")


def test_a_checkpoint_is_whole_or_not_there_and_none_is_written_over(tmp_path):
    sharding, path = made("flat", 2), tmp_path / "c"
    token = begin(path)
    write_rank(path, token, 0, {MODEL: sharding}, {MODEL: [line_of(sharding, 0, 0)]})
    with pytest.raises(CheckpointError, match="rank00001"):
        finish(path, token, {MODEL: sharding})
    assert not path.exists()
    saved(path, sharding)  # what was left half-written is not in the way
    remove_unfinished(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c"]
    with pytest.raises(CheckpointError, match="expected nothing there"):
        begin(path)


@pytest.mark.parametrize("order", ["both begin, then both finish", "one begins inside the other"])
def test_two_jobs_under_one_name_one_succeeds(tmp_path, order):
    sharding, path = made("flat", 2), tmp_path / "c"
    if order.startswith("both"):
        first, second = written(path, sharding, bump=0), written(path, sharding, bump=100)
    else:
        second = written(path, sharding, bump=100)
        first = written(path, sharding, bump=0)
    finish(path, first, {MODEL: sharding}, about={"job": 1})
    with pytest.raises(CheckpointError, match=r"c: expected nothing there, but another job has saved under this name"):
        finish(path, second, {MODEL: sharding}, about={"job": 2})
    abandon(path, second)
    assert [file.name for file in tmp_path.iterdir()] == ["c"] and read(path).about == {"job": 1}
    for rank in range(2):
        (line,) = read(path).lines(MODEL, sharding, rank)
        np.testing.assert_array_equal(line, line_of(sharding, rank, padding=0))


def test_processes_that_save_at_once_leave_one_whole_checkpoint(tmp_path):
    """Whichever wins: the others raise, and every value in the checkpoint is of the one that did not."""
    script = f"""
import sys
from pathlib import Path
from crossframe.checkpoint import MODEL, CheckpointError, abandon, finish
from tests.core.helpers.checkpoints import made, written
job, sharding = int(sys.argv[1]), made("flat", 2)
token = written(Path({str(tmp_path / "c")!r}), sharding, bump=job)
print("ready", flush=True)
sys.stdin.readline()
try:
    finish({str(tmp_path / "c")!r}, token, {{MODEL: sharding}}, about={{"job": job}})
    print("saved")
except CheckpointError as error:
    abandon({str(tmp_path / "c")!r}, token)
    print("told" if "another job has saved" in str(error) else error)
"""
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(job)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for job in range(4)
    ]
    assert all(job.stdout.readline() == "ready\n" for job in jobs)  # type: ignore[union-attr]
    for job in jobs:
        job.stdin.write("\n")  # type: ignore[union-attr]
        job.stdin.flush()  # type: ignore[union-attr]
    said = [job.communicate(timeout=60)[0].strip() for job in jobs]
    assert sorted(said) == ["saved", "told", "told", "told"]
    assert [file.name for file in tmp_path.iterdir()] == ["c"]
    winner, sharding = said.index("saved"), made("flat", 2)
    assert read(tmp_path / "c").about == {"job": winner}
    for rank in range(2):
        (line,) = read(tmp_path / "c").lines(MODEL, sharding, rank)
        expected = line_of(sharding, rank, padding=0)
        held = sharding.units[0][1].pieces(rank)
        for piece in held:
            run = slice(piece.shard_start, piece.shard_stop)
            np.testing.assert_array_equal(line[run], expected[run] + np.array(winner, "bfloat16"))


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EEXIST, "expected nothing there, but another job has saved under this name"),
        (errno.ENOTEMPTY, "expected nothing there, but another job has saved under this name"),
        (errno.ENOTDIR, "expected nothing there, but another job has saved under this name"),
        (errno.EISDIR, "expected nothing there, but another job has saved under this name"),
        (errno.ENOSPC, r"cannot be written \(No space left on device\)"),
    ],
)
def test_a_name_that_is_taken_as_it_is_given_is_no_fault_of_the_disk(tmp_path, monkeypatch, number, expected):
    sharding, path = made("flat", 1), tmp_path / "c"
    token = written(path, sharding)

    def refused(self, target):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(CheckpointError, match=expected):
        finish(path, token, {MODEL: sharding})


def test_nothing_that_is_not_a_checkpoints_is_deleted(tmp_path):
    sharding = made("flat", 1)
    kept = ["writing-c", "writing-c-notes", "writing-c-0123456789abcdef"]
    for name in kept:
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("years of work")
    (tmp_path / "writing-d-0123456789abcdef").symlink_to(tmp_path / "writing-c")
    saved(tmp_path / "c", sharding)
    abandon(tmp_path / "c", "0123456789abcdef")
    abandon(tmp_path / "d", "0123456789abcdef")
    remove_unfinished(tmp_path)
    assert all((tmp_path / name / "thesis.tex").read_text() == "years of work" for name in kept)
    (tmp_path / "c" / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match=r"nothing else, got 'notes'; nothing was deleted"):
        remove(tmp_path / "c")
    assert len(read(tmp_path / "c").lines(MODEL, sharding, 0)) == 1
    (tmp_path / "c" / "notes").unlink()
    remove(tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_links_and_folders_named_like_files_stay(tmp_path, kind):
    path, other = saved(tmp_path / "c", made("flat", 1)), tmp_path / "mine"
    other.write_text("years of work")
    entry = path / "rank00007.safetensors"
    entry.symlink_to(other) if kind == "link" else entry.mkdir()
    with pytest.raises(CheckpointError, match=r"nothing else, got 'rank00007\.safetensors'; nothing was deleted"):
        remove(path)
    assert sorted(each.name for each in path.iterdir()) == [
        "index.json",
        "rank00000.safetensors",
        "rank00007.safetensors",
    ]
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(CheckpointError, match="nothing else, got a link; nothing was deleted"):
        remove(tmp_path / "link")
    assert other.read_text() == "years of work"


def test_what_its_writer_told_of_it_is_given_back_and_what_json_has_not_is_refused(tmp_path):
    about = {"step": 3, "settings": {"clip": 0.5, "layout": None}}
    check_about(about)
    path = saved(tmp_path / "c", made("flat", 2), about=about)
    assert read(path).about == about and read(saved(tmp_path / "d", made("flat", 2))).about == {}
    for wrong in ({"at": (1, 2)}, {3: "x"}, {"x": object()}, [1]):
        with pytest.raises(CheckpointError, match="about: expected a dict of JSON values"):
            check_about(wrong)  # type: ignore[arg-type]


def test_a_file_that_the_finishing_rank_sees_otherwise_is_refused(tmp_path):
    sharding, path = made("flat", 2), tmp_path / "c"
    token = begin(path)
    writing = tmp_path / f"writing-c-{token}"
    for rank in range(2):
        write_rank(path, token, rank, {MODEL: sharding}, {MODEL: [line_of(sharding, rank, 0)]})
    file = writing / "rank00001.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    with pytest.raises(CheckpointError, match=rf"its rank wrote {len(whole)} bytes, and here it has {len(whole) - 3}"):
        finish(path, token, {MODEL: sharding})
    file.write_bytes(whole)
    finish(path, token, {MODEL: sharding})
    assert sorted(each.name for each in path.iterdir()) == ["index.json", *read(path).files]
    abandon(tmp_path / "d", begin(tmp_path / "d"))
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_a_lost_file_is_told_with_the_parameters_that_were_in_it(tmp_path):
    path = saved(tmp_path / "c", made("flat", 2))
    assert [read(path).complaint(name) for name in read(path).files] == ["", ""]
    (path / "rank00001.safetensors").unlink()
    assert [read(path).complaint(name) for name in read(path).files] == ["", "is missing"]
    with pytest.raises(CheckpointError, match=r"what rank 1 held of 'w', 'b'\. Restore the file from a copy"):
        read(path).lines(MODEL, made("flat", 1), 0)


@pytest.mark.parametrize(
    ("num", "listed"), [(5, "'p0', 'p1', 'p2', 'p3', 'p4'"), (7, "'p0', 'p1', 'p2', 'p3', 'p4' and 2 more")]
)
def test_five_parameters_of_a_lost_file_are_named(tmp_path, num, listed):
    layout = PerParamLayout(tuple(ParamSpec(f"p{i}", (2,)) for i in range(num)), 1)
    sharding, path = Sharding((("", layout),), MeshSpec(1)), tmp_path / "c"
    token = begin(path)
    write_rank(path, token, 0, {MODEL: sharding}, {MODEL: [np.zeros(layout.padded_shard_numel, np.float32)]})
    finish(path, token, {MODEL: sharding})
    (path / "rank00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=rf"what rank 0 held of {listed}\. Restore"):
        read(path).lines(MODEL, sharding, 0)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="names descriptors by /proc")
def test_checkpoints_are_on_disk_before_they_are_named(tmp_path, monkeypatch):
    synced, path = [], tmp_path / "c"

    def fsync(descriptor):
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    sharding = made("flat", 2)
    token = written(path, sharding)
    finish(path, token, {MODEL: sharding})
    names = ["rank00000.safetensors", "rank00001.safetensors", "index.json", f"writing-c-{token}"]
    assert synced == [*((name, False) for name in names), (tmp_path.name, True)]


def test_names_of_checkpoints_may_have_several_lines(tmp_path):
    begin(tmp_path / "a\nb")
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_paths_may_be_strings(tmp_path):
    sharding, path = made("flat", 1), str(tmp_path / "c")
    token = begin(path)
    write_rank(path, token, 0, {MODEL: sharding}, {MODEL: [line_of(sharding, 0, 0)]})
    finish(path, token, {MODEL: sharding})
    assert read(path).path == Path(path)
    remove(path)
    with pytest.raises(CheckpointError, match=r"c: cannot be deleted \(No such file or directory\); make space"):
        remove(path)


def test_an_index_that_is_no_object_is_refused(tmp_path):
    path = saved(tmp_path / "c", made("flat", 1))
    for content in ([], "model", None):
        (path / "index.json").write_text(json.dumps({"content": content, "sha256": digest_of(content)}))
        with pytest.raises(CheckpointError, match=r"index\.json: has other content than was written"):
            read(path)


def test_the_first_process_alone_abandons_its_own_folder(tmp_path):
    (tmp_path / "writing-c-").mkdir()
    first, second = (SimpleNamespace(is_first=each) for each in (True, False))
    Save(tmp_path / "c", first, None).abandon()
    each = Save(tmp_path / "c", second, None)
    each.token = begin(tmp_path / "c")
    each.abandon()
    folders = {"writing-c-", f"writing-c-{each.token}"}
    assert {path.name for path in tmp_path.iterdir()} == folders
    each.processes = first
    each.abandon()
    assert [path.name for path in tmp_path.iterdir()] == ["writing-c-"]


@pytest.mark.parametrize(("stated", "expected"), [(None, "bfloat16"), ("float16", "float16")])
def test_state_is_aligned_as_its_parameters(stated, expected):
    params = (ParamSpec("w", (17,), "bfloat16"), ParamSpec("b", (7,), "bfloat16"))
    layout = FlatLayout(params, 2, True, stated)
    kept = state_layout(layout, "exp_avg", "float32")
    assert (kept.compute_dtype, kept.dtype) == (expected, "float32")
    assert kept.padded_shard_numel == layout.padded_shard_numel


def test_what_the_disk_refuses_and_what_is_no_path_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path, message in [
        (tmp_path / "file" / "c", r"c: cannot be written \(.*Not a directory.*pass another path"),
        (3, "expected the folder of a checkpoint as a path with a name, got 3"),
        ("", "as a path with a name, got ''"),
        (tmp_path / "a\0b", r"'.*a\\x00b': cannot be written \(.*null byte"),
        (tmp_path / "a\udcff\udfff", r"a\\udcff\\udfff': cannot be written"),
        (tmp_path / ("n" * 300), r"nnn: cannot be written \(File name too long"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            begin(path)
    sharding = made("flat", 2)
    with pytest.raises(CheckpointError, match=r"rank00000.safetensors: cannot be written \(.*No such file"):
        write_rank(tmp_path / "c", "0" * 16, 0, {MODEL: sharding}, {MODEL: [line_of(sharding, 0, 0)]})
    with pytest.raises(CheckpointError, match="as a path with a name, got None"):
        read(None)  # type: ignore[arg-type]


def test_R31_R37_what_is_kept_of_a_shared_parameter_has_all_its_names_and_lies_as_it_does():
    layout = FlatLayout(PARAMS, 2, True, None)
    kept = [state_layout(layout, entry, "float32") for entry in ("exp_avg", "exp_avg_sq")]
    both = Sharding(tuple(("", each) for each in kept), MeshSpec(2))
    assert both.find("exp_avg_sq:tied") == both.find("exp_avg_sq:b") == (1, 1)
    # 15 elements of bfloat16 are aligned as such, whatever the dtype of moments.
    places = [[(piece.shard_start, piece.shard_stop) for piece in each.pieces(0)] for each in (layout, *kept)]
    assert places[0] == places[1] == places[2] and kept[0].dtype == "float32"
    renamed = state_layout(layout, "", "float32", "blocks.{}".format)
    assert [spec.name for spec in renamed.params] == ["blocks.w", "blocks.b"]


class Alone:
    """One process, which fails at a step if `fails` is that step's title."""

    is_first = True

    def __init__(self, fails: str = "") -> None:
        self.fails, self.titles = fails, []

    def together(self, title, act):
        self.titles.append(title)
        done = act()
        if title == self.fails:
            raise RuntimeError(title)
        return done

    def from_first(self, value):
        return value


def test_a_save_is_complete_or_leaves_nothing(tmp_path):
    sharding = Sharding((("", FlatLayout((ParamSpec("w", (3,)),), 1, True)),), MeshSpec(1))
    line = np.arange(sharding.units[0][1].padded_shard_numel, dtype=np.float32)
    contents = Contents({MODEL: sharding}, {}, [0], lambda place: {MODEL: [line]})
    alone = Alone()
    save(tmp_path / "c", alone, lambda: contents, {"step": 1})
    assert read(tmp_path / "c").lines(MODEL, sharding, 0)[0].tolist() == line.tolist()
    for title in alone.titles[:2]:
        with pytest.raises(RuntimeError, match=title):
            save(tmp_path / "d", Alone(title), lambda: contents)
    with pytest.raises(CheckpointError, match="about"):
        save(tmp_path / "d", Alone(), lambda: contents, {"at": (1,)})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
