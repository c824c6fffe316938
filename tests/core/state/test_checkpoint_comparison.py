"""Two stored models: which tensors differ, how, and the verdict."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from crossframe.checkpoint import MODEL, STATE, begin, finish, state_layout, write_rank
from crossframe.checkpoint_comparison import (
    Format,
    Kind,
    StoredModel,
    Unpacked,
    compare_checkpoints,
    format_of,
    open_stored,
    read_unpacked,
)
from crossframe.checkpoint_comparison.missing_update import missing_update
from crossframe.checkpoint_comparison.tensors import difference_of
from crossframe.cli.commands import app
from crossframe.errors import UsageError
from crossframe.layout import Sharding
from tests.core.environment.cases import CHECKPOINTS
from tests.core.helpers import synthetic
from tests.core.helpers.checkpoints import line_of, made, written


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


def test_an_update_of_momentum_is_missing_on_the_side_without_it():
    rng = np.random.default_rng(0)
    before = {name: rng.standard_normal(64).astype(np.float32) for name in ("v", "w")}
    state = {f"momentum_buffer:{name}": rng.standard_normal(64).astype(np.float32) for name in before}
    after = {name: x - np.float32(0.5) * state[f"momentum_buffer:{name}"] for name, x in before.items()}
    a, b = (stored(name, {"model": model, "state": state}) for name, model in (("a", before), ("b", after)))
    found = missing_update(a, b, list(before))
    assert found is not None and found.later == 1
    assert found.learning_rate == pytest.approx(0.5) and found.left == pytest.approx(0, abs=1e-6)
    noise = {name: x + np.float32(0.02 * 0.5) * rng.standard_normal(64).astype(np.float32) for name, x in after.items()}
    noisy = missing_update(a, stored("c", {"model": noise, "state": state}), list(before))
    assert noisy is not None and noisy.left == pytest.approx(0.02, rel=0.25)


def test_bias_corrections_of_a_missing_update_are_of_the_last_step():
    a, b = next(case for case in CHECKPOINTS if case.kind == "update").make(np.random.default_rng(0))

    def learning_rate(steps):
        models = [
            dataclasses.replace(stored(name, made), steps=frozenset(steps)) for name, made in (("a", a), ("b", b))
        ]
        found = missing_update(*models, ["b.weight"])
        return 0.0 if found is None else found.learning_rate

    assert learning_rate({3, 10}) == pytest.approx(1e-3, rel=1e-4)
    # Without corrections m / sqrt(v) has another size, and so has its factor. Adam's epsilon then weighs less.
    expected = 1e-3 * np.sqrt(1 - 0.999**10) / (1 - 0.9**10)
    assert learning_rate(()) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(
    "state", [{}, {"exp_avg:w": np.ones(4, np.float32)}, {"momentum_buffer:w": np.array([1, np.inf, 1, 1], np.float32)}]
)
def test_no_update_is_missing_without_a_finite_direction(state):
    x = np.arange(4, dtype=np.float32)
    a, b = (stored(name, {"model": {"w": value}, "state": state}) for name, value in (("a", x), ("b", x - 1)))
    assert missing_update(a, b, ["w"]) is None


NAN = float("nan")


@pytest.mark.parametrize(
    ("a", "b", "kind", "verdict", "text"),
    [
        pytest.param(
            np.arange(3),
            np.array([0, 5, 2]),
            "beyond",
            "inconclusive",
            "'w' (int64) differs in 1 of 3 elements",
            id="integers",
        ),
        pytest.param(
            np.arange(3),
            np.arange(3, dtype=np.int32),
            "cast",
            "rounding",
            "'w' (int64 and int32) differs in 0 of 3 elements",
            id="integers of two widths",
        ),
        pytest.param(
            np.array([1, NAN, 3, 4]),
            np.array([[1, NAN], [3, 4]]),
            "shape",
            "incomparable",
            "'w' has another shape: [4] in one, [2, 2] in two; the elements are equal in order",
            id="reshaped",
        ),
        pytest.param(
            np.arange(4.0),
            np.ones((2, 2)),
            "shape",
            "incomparable",
            "'w' has another shape: [4] in one, [2, 2] in two",
            id="shape",
        ),
        pytest.param(
            np.arange(4.0),
            np.ones(5),
            "shape",
            "incomparable",
            "'w' has another shape: [4] in one, [5] in two",
            id="size",
        ),
        pytest.param(
            np.array([[1, NAN, 3], [4, 5, 6]]),
            np.array([[1, 4], [NAN, 5], [3, 6]]),
            "transposed",
            "incomparable",
            "'w' has another shape: [2, 3] in one, [3, 2] in two; it is transposed",
            id="a transposed shape",
        ),
        pytest.param(
            np.array([[1, NAN], [3, 4]]),
            np.array([[1, 3], [NAN, 4]]),
            "transposed",
            "bug",
            "'w' is transposed",
            id="a square matrix",
        ),
        pytest.param(
            np.array([1, NAN, 3, 4]),
            np.array([NAN, 4, 3, 1]),
            "permuted",
            "bug",
            "'w' has the same elements in another order",
            id="another order",
        ),
        pytest.param(
            np.array([1.0, 2, 3, 4]),
            np.array([1.0, 0, 0, 4]),
            "zeros",
            "bug",
            "'w' is zero in two in 2 of 4 elements (from 1 to 2), and equal elsewhere: a part was not saved or not loaded",
            id="zeros",
        ),
        pytest.param(
            np.array([0.0, 0, 3]),
            np.array([1.0, 2, 3]),
            "zeros",
            "bug",
            "'w' is zero in one in 2 of 3 elements (from 0 to 1), and equal elsewhere: a part was not saved or not loaded",
            id="zeros in the first",
        ),
        pytest.param(
            np.array([NAN, 2]),
            np.ones(2),
            "not finite",
            "bug",
            "'w' has 1 elements that are not finite in one, 0 in two",
            id="not finite",
        ),
        pytest.param(
            np.array([1, NAN, 1, 2]),
            np.array([NAN, 1, 1, 3]),
            "not finite",
            "bug",
            "'w' has elements that are not finite, 1 in both, in other places or with other values",
            id="not finite in other places",
        ),
        pytest.param(
            np.array([1, np.inf]),
            np.array([1, -np.inf]),
            "not finite",
            "bug",
            "'w' has elements that are not finite, 1 in both, in other places or with other values",
            id="infinity of another sign",
        ),
        pytest.param(
            np.array([1, NAN, np.inf], np.float32),
            np.array([np.nextafter(np.float32(1), np.float32(2)), NAN, np.inf], np.float32),
            "rounding",
            "rounding",
            "'w' differs by 1.2e-07 of its norm, at most 1 units in the last place of float32, which is one rounding",
            id="the same elements not finite",
        ),
        pytest.param(
            np.array([1.0]),
            np.array([-1.0]),
            "beyond",
            "inconclusive",
            "'w' differs by 2.0e+00 of its norm, at most 9.01e+15 units "
            "in the last place of float64, more than rounding",
            id="one element",
        ),
        pytest.param(
            np.array([1e6, 1], np.float32),
            np.array([np.inf, 1], np.float16),
            "not finite",
            "bug",
            "float32 in one, float16 in two: 'w' has 0 elements that are not finite in one, 1 in two",
            id="a cast that overflowed",
        ),
        pytest.param(
            np.array([1e6, np.inf], np.float32),
            np.array([np.inf, 1], np.float16),
            "not finite",
            "bug",
            "float32 in one, float16 in two: 'w' has 2 elements that are not finite in one, 1 in two",
            id="infinite after the cast",
        ),
        pytest.param(
            np.array([1 / 3, NAN], np.float32),
            np.array([1 / 3, NAN], ml_dtypes.bfloat16),
            "cast",
            "rounding",
            "'w' is float32 in one, bfloat16 in two; after a cast to bfloat16 every element is equal",
            id="cast with NaN",
        ),
        pytest.param(
            np.array([1, 2], np.float32),
            np.array([1, 3], ml_dtypes.bfloat16),
            "beyond",
            "inconclusive",
            "float32 in one, bfloat16 in two: 'w' differs by 4.5e-01 of its norm, at most 42.7 units in the last place of "
            "bfloat16, more than rounding",
            id="other values in another dtype",
        ),
        pytest.param(
            np.array([1.0, 2]),
            np.array([1, 2 + 1e-12]),
            "rounding",
            "rounding",
            "'w' differs by 4.5e-13 of its norm, at most 2.25e+03 units in the last place of float64, within 1.0e-11, the bound "
            "of rounding in a training run",
            id="within the bounds of float64",
        ),
    ],
)
def test_a_difference_of_two_tensors_is_described(a, b, kind, verdict, text):
    found = difference_of("w", a, b, ("one", "two"))
    assert found is not None
    assert (found.name, found.kind.value, found.verdict.value, found.text) == ("w", kind, verdict, text)


def test_the_result_as_json():
    a = stored("x/a", {"model": {"u": np.ones(2, np.float32), "v": np.zeros(2), "w": np.array([3.0, 4])}})
    b = stored("x/b", {"model": {"u": np.ones(2, np.float32), "v": np.array([1.0, -2]), "w": np.array([3.0, 5])}})
    found = compare_checkpoints(a, b).to_json()
    differences = found.pop("differences")
    about = "units in the last place of float64, more than rounding"
    assert found == {
        "a": "x/a",
        "b": "x/b",
        "verdict": "bug",
        "reason": "'v' is zero in x/a in 2 of 2 elements (from 0 to 1), and equal elsewhere: a part was not saved or not loaded",
        "tensors": 3,
        "equal": 1,
    }
    assert differences == [
        {"name": "v", "kind": "zeros", "verdict": "bug", "difference": None, "description": found["reason"]},
        {
            "name": "w",
            "kind": "beyond",
            "verdict": "inconclusive",
            "difference": pytest.approx(0.2),
            "description": f"'w' differs by 2.0e-01 of its norm, at most 9.01e+14 {about}",
        },
    ]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (((10,), (11,)), "is 10 in a and 11 in b: a misses 1 step"),
        (((12,), (10,)), "is 12 in a and 10 in b: b misses 2 steps"),
        (((3, 1), (2,)), "is 1, 3 in a and 2 in b"),
        (((), (2,)), None),
    ],
)
def test_other_numbers_of_steps_are_named(steps, expected):
    x = np.ones(2)
    a, b = (StoredModel(name, {"w": lambda: x}, {}, frozenset(each)) for name, each in zip("ab", steps, strict=True))
    found = compare_checkpoints(a, b)
    assert [each.text for each in found.differences] == (
        [f"the optimizer's number of steps {expected}"] if expected else []
    )
    assert found.verdict.value == ("incomparable" if expected else "equal")


def test_other_values_are_listed_and_decide_nothing():
    x = np.ones(2)
    a, b = (
        StoredModel(n, {"w": lambda: x}, values)
        for n, values in (("a", {"lr": 0.1, "n": 1, "own": 2}), ("b", {"lr": 0.2, "n": 1}))
    )
    found = compare_checkpoints(a, b)
    assert [(each.name, each.kind, each.verdict.value) for each in found.differences] == [("", Kind.VALUE, "equal")]
    assert found.verdict.value == "equal"
    assert found.reason == "all 1 tensors are equal in every bit; the value 'lr' is 0.1 in a, 0.2 in b"


def test_one_side_with_nan_is_a_bug():
    x = np.ones(4, np.float32)
    y = x.copy()
    y[1] = np.nan
    found = compare_checkpoints(stored("a", {"model": {"w": x}}), stored("b", {"model": {"w": y}}))
    assert (found.verdict.value, found.differences[0].kind) == ("bug", Kind.NOT_FINITE)


def test_bfloat16_within_one_unit_is_rounding_and_beyond_is_not_known():
    x = np.linspace(1, 2, 16).astype(ml_dtypes.bfloat16)
    near = (x.view(np.uint16) + 1).view(ml_dtypes.bfloat16)
    far = (x.view(np.uint16) + 2).view(ml_dtypes.bfloat16)
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


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("index.json", Format.OURS),
        (".metadata", Format.DCP),
        ("manifest.ocdbt", Format.ORBAX),
        ("_METADATA", Format.ORBAX),
        ("_CHECKPOINT_METADATA", Format.ORBAX),
        ("part.safetensors", Format.SAFETENSORS),
        ("model.pt", None),
    ],
)
def test_the_format_of_a_folder_is_found_by_its_files(tmp_path, file, expected):
    (tmp_path / file).touch()
    assert format_of(tmp_path) is expected


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".txt"])
def test_the_format_of_a_file_is_found_by_its_suffix(tmp_path, suffix):
    expected = {".txt": None, ".safetensors": Format.SAFETENSORS}.get(suffix, Format.TORCH)
    file = tmp_path / f"model{suffix}"
    assert format_of(file) is None
    file.touch()
    assert format_of(file) is expected
    if expected is not Format.SAFETENSORS:
        with pytest.raises(
            UsageError, match=rf"{file.name}: expected a checkpoint of save_checkpoint, a .safetensors file"
        ):
            open_stored(file)


def test_a_checkpoint_of_ours_has_tensors_steps_and_values(tmp_path):
    model = made("flat", 2)
    finish(tmp_path / "alone", written(tmp_path / "alone", model), {MODEL: model})
    alone = open_stored(tmp_path / "alone")
    assert (sorted(alone.tensors), alone.steps, alone.values) == (["b", "w"], frozenset(), {})
    ((unit, layout),) = model.units
    sections = {MODEL: model, STATE: Sharding(((unit, state_layout(layout, "exp_avg", "float32")),), model.mesh)}
    values = {"step": np.array(7, np.int32), "lr": np.array([0.5, 0.25])}
    path = tmp_path / "whole"
    token = begin(path)
    for rank in range(2):
        line = line_of(model, rank, padding=0)
        write_rank(
            path, token, rank, sections, {MODEL: [line], STATE: [line.astype(np.float32) / 2]}, {} if rank else values
        )
    finish(path, token, sections, values, {"epoch": 3})
    whole = open_stored(path)
    assert (whole.name, whole.steps, whole.values) == ("whole", {7}, {"lr": [0.5, 0.25], "about.epoch": 3})
    expected = {"w": np.arange(15.0).reshape(5, 3), "b": 20 + np.arange(7.0)}
    assert {name: read_tensor().tolist() for name, read_tensor in whole.tensors.items()} == {
        **{name: array.tolist() for name, array in expected.items()},
        **{f"exp_avg:{name}": (array / 2).tolist() for name, array in expected.items()},
    }
    assert compare_checkpoints(alone, whole).verdict.value == "equal"


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "uint64", "float16", "bfloat16", "float64"])
def test_safetensors_are_read_in_every_dtype(tmp_path, dtype):
    x = np.arange(6).reshape(2, 3).astype(dtype)
    save_file({"w": x, "none": x[:0], "one": np.array(x[1, 2])}, tmp_path / "a.safetensors", {"format": "np"})
    found = open_stored(tmp_path / "a.safetensors").tensors
    for name, expected in (("w", x), ("none", x[:0]), ("one", x[1, 2])):
        read_tensor = found[name]()
        assert (read_tensor.dtype, read_tensor.shape) == (expected.dtype, expected.shape)
        assert read_tensor.tobytes() == expected.tobytes()
    assert len(found) == 3


def test_a_safetensors_file_whose_tensors_do_not_fit_is_refused(tmp_path):
    file = tmp_path / "a.safetensors"
    for fields, size in (((0, 8), 4), ((4, 8), 8), ((4, 0), 8), ((-4, 0), 8)):
        header = json.dumps({"w": {"dtype": "F64", "shape": [1], "data_offsets": fields}}).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
        with pytest.raises(
            UsageError, match=r"a.safetensors: expected a safetensors file.*a tensor lies outside of the file"
        ):
            open_stored(file)
    file.write_bytes((100_000_001).to_bytes(8, "little"))
    with pytest.raises(UsageError, match="its header is too long"):
        open_stored(file)


def test_steps_and_moments_are_found_among_keys():
    keys = {"w": np.zeros(1), "optim.state.w.m": np.ones(1), "optim.state.v.m": np.ones(2), "v": np.zeros(2)}
    values = {"optim.state.w.step": 5, "optim.state.v.step": "five", "optim.state.w.lr": 1}
    found = StoredModel.of_keys("a", {key: (lambda value=value: value) for key, value in keys.items()}, values)
    assert found.steps == {5} and found.values == {"optim.state.v.step": "five", "optim.state.w.lr": 1}
    assert list(found.moments("v")) == ["m"] and found.moments("v")["m"].size == 2
    assert not found.moments("m") and not found.moments("")


def test_a_prefix_that_the_optimizers_parameters_have_too_is_kept():
    for state, expected in (("opt.state.model.w.m", {"model.w", "m:model.w"}), ("opt.state.w.m", {"w", "m:w"})):
        keys = dict.fromkeys(["model.w", state], lambda: np.ones(1))
        assert set(StoredModel.of_keys("a", keys).tensors) == expected


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
