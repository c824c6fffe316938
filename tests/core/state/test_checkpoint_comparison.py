"""Two stored models: which tensors differ, how, and the verdict."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from crossframe.checkpoint_comparison import Kind, StoredModel, Unpacked, compare_checkpoints, read_unpacked
from crossframe.cli.commands import app
from tests.core.environment.cases import CHECKPOINTS
from tests.core.helpers import synthetic


def stored(name, made):
    arrays = {**made["model"], **made.get("state", {})}
    steps = frozenset({int(made["values"]["step"])}) if "values" in made else frozenset()
    return StoredModel(name, {key: (lambda array=array: array) for key, array in arrays.items()}, {}, steps)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CHECKPOINTS])
def test_the_first_difference_and_the_verdict_are_the_expected_ones(case, seed):
    a, b = case.make(np.random.default_rng(seed))
    found = compare_checkpoints(stored("a", a), stored("b", b))
    first = found.differences[0].kind.value if found.differences else ""
    assert (found.verdict.value, first) == (case.verdict, case.kind)
    mirrored = compare_checkpoints(stored("b", b), stored("a", a))
    assert (mirrored.verdict, [each.kind for each in mirrored.differences]) == (
        found.verdict,
        [each.kind for each in found.differences],
    )


def test_a_missing_update_states_its_learning_rate_and_its_side():
    case = next(case for case in CHECKPOINTS if case.kind == "update")
    a, b = (stored(name, made) for name, made in zip("ab", case.make(np.random.default_rng(0)), strict=True))
    text = compare_checkpoints(a, b).reason
    assert "parameters of b are those of a after one more update, with a learning rate of about 0.001" in text
    assert "parameters of b are those of a after" in compare_checkpoints(b, a).reason


def test_an_update_is_missing_only_beside_equal_optimizer_states():
    a, b = next(case for case in CHECKPOINTS if case.kind == "update").make(np.random.default_rng(0))
    state = {**b["state"], "exp_avg:a.bias": b["state"]["exp_avg:a.bias"] * np.float32(2)}
    found = compare_checkpoints(stored("a", a), stored("b", {**b, "state": state}))
    assert Kind.UPDATE not in [each.kind for each in found.differences]


def test_a_random_difference_is_no_missing_update():
    rng = np.random.default_rng(0)
    made = next(case for case in CHECKPOINTS if case.kind == "update").make(rng)[0]
    moved = {name: (x + 1e-2 * rng.standard_normal(x.shape)).astype(np.float32) for name, x in made["model"].items()}
    found = compare_checkpoints(stored("a", made), stored("b", {**made, "model": moved}))
    assert {each.kind for each in found.differences} == {Kind.BEYOND}


def test_one_side_with_nan_is_a_bug():
    x = np.ones(4, np.float32)
    y = x.copy()
    y[1] = np.nan
    found = compare_checkpoints(stored("a", {"model": {"w": x}}), stored("b", {"model": {"w": y}}))
    assert (found.verdict.value, found.differences[0].kind) == ("bug", Kind.NOT_FINITE)


def test_bfloat16_within_one_unit_is_rounding_and_beyond_is_not_known():
    x = np.linspace(1, 2, 16).astype(ml_dtypes.bfloat16)
    near = (x.view(np.uint16) + 1).view(ml_dtypes.bfloat16)
    far = (x.view(np.uint16) + 4).view(ml_dtypes.bfloat16)
    for other, verdict in ((near, "rounding"), (far, "inconclusive")):
        found = compare_checkpoints(stored("a", {"model": {"w": x}}), stored("b", {"model": {"w": other}}))
        assert found.verdict.value == verdict


def test_keys_of_state_dicts_are_understood():
    keys = {
        "model.h.weight": np.ones(1),
        "optimizer.state.h.weight.exp_avg": np.ones(1),
        "optimizer.state.h.weight.step": np.array(7.0),
    }
    found = StoredModel.of_keys("a", {key: (lambda value=value: value) for key, value in keys.items()}, {"epoch": 3})
    assert (set(found.tensors), found.steps) == ({"h.weight", "exp_avg:h.weight"}, {7})
    assert list(found.moments("h.weight")) == ["exp_avg"] and found.values == {"epoch": 3}


def test_unpacked_checkpoints_keep_every_bit(tmp_path):
    arrays = {"a": np.arange(3, dtype=ml_dtypes.bfloat16), "b": np.zeros((0, 2), np.int64), "c": np.bool_(True)}
    unpacked = Unpacked(tmp_path)
    for key, value in (arrays | {"lr": 0.1, "other": {1, 2}}).items():
        unpacked.add(key, value)
    unpacked.finish()
    found = read_unpacked(tmp_path, "x")
    for key, array in arrays.items():
        same = found.tensors[key]()
        assert (same.dtype, same.shape, same.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert found.values["lr"] == 0.1 and isinstance(found.values["other"], str)


def run(*arguments):
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    return result.exit_code, result.output


def test_safetensors_are_compared_by_the_command(tmp_path):
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    (tmp_path / "a").mkdir()
    save_file({"model.w": x[:, :2].copy()}, tmp_path / "a" / "1.safetensors")
    save_file({"model.v": x, "model.n": np.arange(3)}, tmp_path / "a" / "2.safetensors")
    both = {"w": x[:, :2].copy(), "v": x, "n": np.arange(3)}
    save_file(both, tmp_path / "b.safetensors")
    status, said = run(tmp_path / "a", tmp_path / "b.safetensors")
    assert status == 0 and said.startswith("equal: all 3 tensors are equal in every bit")
    save_file(both | {"v": x.astype(ml_dtypes.bfloat16)}, tmp_path / "b.safetensors")
    status, said = run(tmp_path / "a", tmp_path / "b.safetensors")
    assert status == 0 and "after a cast to bfloat16 every element is equal" in said
    save_file(both | {"w": -both["w"]}, tmp_path / "b.safetensors")
    status, said = run(tmp_path / "a", tmp_path / "b.safetensors", "--json")
    assert status == 4 and json.loads(said)["differences"][0]["kind"] == "unrelated"
    save_file({"x.y": x}, tmp_path / "c.safetensors")
    status, said = run(tmp_path / "a", tmp_path / "c.safetensors")
    assert status == 4 and "no tensor has the same name" in said


def test_wrong_use_exits_with_2(tmp_path):
    save_file({"w": np.ones(2)}, tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"nothing of that kind")
    synthetic.record(tmp_path / "run")
    for arguments, expected in (
        (["a.safetensors", "b.safetensors"], "expected a safetensors file"),
        (["a.safetensors", "a.safetensors", "--steps", "2"], "--steps is for recordings"),
        (["a.safetensors", "run"], "run is a recording and"),
    ):
        status, said = run(*(tmp_path / x if (tmp_path / x).exists() else x for x in arguments))
        assert status == 2 and expected in said, said


def test_a_model_alone_differs_in_no_step_from_one_with_its_optimizer():
    x = np.ones(3, np.float32)
    alone, whole = {"model": {"w": x}}, {"model": {"w": x}, "state": {"exp_avg:w": x}, "values": {"step": 3}}
    for a, b in ((alone, whole), (whole, alone)):
        assert compare_checkpoints(stored("a", a), stored("b", b)).differences == ()


def test_the_reason_counts_what_else_differs_alike_and_what_else_is_missing():
    a = {name: np.ones(2, np.float32) for name in "uvwxyz"}
    b = {"u": a["u"], **{name: -a[name] for name in "vwx"}}
    found = compare_checkpoints(stored("a", {"model": a}), stored("b", {"model": b}))
    texts = [each.text for each in found.differences]
    assert "'y' and 1 more is only in a" in texts, texts
    same = compare_checkpoints(stored("a", {"model": {name: a[name] for name in b}}), stored("b", {"model": b}))
    assert same.reason.endswith("; and 2 more of this kind"), same.reason
    one = compare_checkpoints(stored("a", {"model": {"v": a["v"]}}), stored("b", {"model": {"v": -a["v"]}}))
    assert "more" not in one.reason, one.reason


@pytest.mark.parametrize("prefix", ["model.", "state_dict.", "module.", "app.model."])
def test_a_prefix_of_all_names_is_no_part_of_them(prefix):
    def names(keys):
        return set(StoredModel.of_keys("a", dict.fromkeys(keys, lambda: np.ones(1)), {}).tensors)

    assert names([f"{prefix}h.weight", f"{prefix}bias"]) == {"h.weight", "bias"}
    assert names([f"{prefix}h.weight", "bias"]) == {f"{prefix}h.weight", "bias"}
