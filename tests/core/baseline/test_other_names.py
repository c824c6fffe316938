"""A golden is compared with runs whose parameters were renamed, fused or split."""

from dataclasses import replace

import numpy as np
import pytest

from crossframe.alignment.golden_values import golden_values
from crossframe.alignment.summary import Summary
from crossframe.baseline import condense
from crossframe.cli.baseline import run_to_compare
from crossframe.params import ParamSpec
from crossframe.recording import Recording
from crossframe.recording.event_format import perturbed_run_folder
from crossframe.recording.sketch import sketches_of
from crossframe.verdict import Verdict, compare
from crossframe.verdict.one_naming import in_one_naming
from tests.core.helpers import synthetic
from tests.core.helpers.translated import translate

NOISE = 1e-6
RENAMED = {name: name for name in synthetic.SHAPES} | {"block.w": "layer.w", "block.k_bias": "layer.k_bias"}
DRAW = np.random.default_rng(0)
Q, K, V = (DRAW.normal(size=(rows, 6)).astype(np.float32) for rows in (8, 4, 4))
BLOCKS = np.concatenate([part.reshape(4, -1, 6) for part in (Q, K, V)], 1).reshape(16, 6)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("runs") / "first", synthetic.manifest(dtype="float32")
    synthetic.record(folder, made)
    for i in range(1, 9):
        synthetic.record(folder / perturbed_run_folder(i), made, tamper=synthetic.jitter(i, NOISE))
    run = Recording.open(folder)
    path = folder.with_suffix(".golden")
    condense(run, run.perturbed_runs(), most_bytes=20_000).write(path)
    return Recording.open(path)


class OneParameter:
    """A golden with one parameter."""

    def __init__(self, array):
        self.sketched = Summary.of(array).sketch.folded(32)
        self.manifest = type("Manifest", (), {"params": {"w": ParamSpec("w", array.shape, array.dtype.name)}})

    def has(self, *of):
        return True

    def sketch(self, *of):
        return self.sketched


@pytest.mark.parametrize(
    ("array", "others"),
    [
        pytest.param(Q, {"a": K, "b": Q}, id="renamed"),
        pytest.param(Q.T, {"a": K, "b": Q}, id="transposed"),
        pytest.param(K, {"qkv": np.concatenate([Q, K, V])}, id="rows"),
        pytest.param(V.T, {"qkv": np.concatenate([Q, K, V])}, id="transposed_rows"),
        pytest.param(Q[:, 2:4], {"a": Q}, id="columns"),
        pytest.param(K, {"qkv": BLOCKS}, id="rows_in_blocks"),
        pytest.param(K, {"stacked": np.stack([V, K])}, id="slice"),
        pytest.param(np.concatenate([Q, K, V]), {"q.w": Q, "k.w": K, "v.w": V}, id="joined"),
        pytest.param(np.concatenate([Q, K]), {"o.w": 2 * V, "q.w": Q, "k.w": K, "v.w": V}, id="two_of_four_joined"),
        pytest.param(np.concatenate([K, V[:, :2]], 1), {"k.w": K, "v.w": V[:, :2]}, id="joined_columns"),
        pytest.param(np.concatenate([V, K]), {"k.w": K, "k.b": K[0], "v.w": V}, id="joined_in_another_order"),
        pytest.param(
            np.concatenate([V, Q, K, -V]), {"q.w": Q, "k.w": K, "v.w": V, "o.w": -V}, id="four_joined_in_another_order"
        ),
        pytest.param(BLOCKS, {"q.w": Q, "k.w": K, "v.w": V}, id="joined_in_blocks"),
        pytest.param(np.stack([K, V], 1), {"0.w": K, "0.o": Q, "1.w": V}, id="stacked"),
        pytest.param(np.full(7, -0.1, np.float32), {"a": K}, id="one_value"),
    ],
)
def test_values_of_a_golden_are_found_in_another_model(array, others):
    found = golden_values(OneParameter(array), others)["w"]
    assert isinstance(found, np.ndarray) and np.array_equal(found, array)


@pytest.mark.parametrize("size", [3, 7, 1000])
def test_one_value_is_found_from_a_norm_in_float32(size):
    for value in DRAW.normal(size=40).astype(np.float32):
        golden = OneParameter(np.full(size, value))
        norm = np.float32(golden.sketched.norm)
        golden.sketched = replace(golden.sketched, squares=float(norm) ** 2)
        assert golden_values(golden, {})["w"].tolist() == [value] * size


@pytest.mark.parametrize(
    ("array", "places"),
    [
        pytest.param(Q, None, id="equal"),
        pytest.param(np.full((2, 3), -0.1, np.float32), [], id="one value"),
        pytest.param(K + np.float32(1e-3), [], id="unknown"),
        pytest.param(np.full(3, np.nan, np.float32), [], id="not finite"),
        pytest.param(np.zeros((0, 2), np.float32), [], id="empty"),
    ],
)
def test_next_to_summaries_a_golden_has_the_sample_of_an_equal_one(array, places):
    others = {"a": Summary.of(K), "b": Summary.of(Q), "c": V}
    golden = OneParameter(array)
    found = golden_values(golden, others)["w"]
    assert isinstance(found, Summary) and found.shape == array.shape and found.sketch is golden.sketched
    if places is None:
        assert found.sample is others["b"].sample
    value = array.flat[0] if array.size and np.ptp(array) == 0 else None
    assert found.value == (value if value is None else pytest.approx(value))
    assert (found.sample.signature == others["b"].sample.signature) is (places is None)


def test_other_values_are_not_found():
    found = golden_values(OneParameter(K + np.float32(1e-3)), {"a": K, "qkv": BLOCKS})["w"]
    assert isinstance(found, np.ndarray) and found.shape == K.shape and abs(found - K).max() > 0.1


@pytest.mark.parametrize("detail", ["sketch", "full"])
def test_renamed_parameters_agree_with_a_golden(golden, tmp_path, detail):
    made = synthetic.manifest(dtype="float32")
    run = synthetic.record(tmp_path / "run", made, tamper=synthetic.jitter(99, NOISE))
    same = translate(
        run, tmp_path / "same", RENAMED, modules={"": "", "block": "layer"}, framework="torch", detail=detail
    )
    found = compare(golden, same, bitwise=False)
    assert found.verdict is Verdict.ROUNDING and "2 parameters with other names" in found.notes[0], found.reason
    assert any(each.name == "output of block" for each in found.judged)


@pytest.mark.parametrize(
    ("name", "transposed"),
    [
        pytest.param("block.w", "block.w", id="transposed"),
        pytest.param("bias", "embed", id="next_to_a_transposed_one"),
    ],
)
def test_a_bug_behind_renamed_and_transposed_parameters_is_found(golden, tmp_path, name, transposed):
    fault = synthetic.only("reduce", name, lambda array: array * np.float32(1.01), step=1)
    wrong = synthetic.record(
        tmp_path / "wrong",
        synthetic.manifest(dtype="float32"),
        tamper=synthetic.both(synthetic.jitter(99, NOISE), fault),
    )
    options = {"params": lambda name, array: array.T if name == transposed else array, "framework": "torch"}
    named = translate(wrong, tmp_path / "named", RENAMED | {transposed: f"{transposed}_t"}, **options)
    found = compare(golden, named, bitwise=False)
    assert found.verdict is Verdict.BUG and found.first_divergence is not None, found.reason
    assert (found.first_divergence.step, found.first_divergence.parameter) == (1, name)
    view = in_one_naming(golden, named).b
    for run in view.ranges("update", 1, name):  # read to name the rank
        assert view.sketch_of(1, name, run).equals(sketches_of([view.elements(1, run)], run.start)[0])


def test_renamed_parameters_with_other_initial_values_ask_for_an_update(golden, tmp_path):
    other = synthetic.record(
        tmp_path / "other",
        synthetic.manifest(dtype="float32"),
        tamper=lambda *at: at[-1] + np.float32(at[3] == "block.w"),
    )
    details = []

    def record(detail):
        details.append(detail)
        return translate(other, tmp_path / detail, RENAMED, framework="torch", detail=detail)

    found = compare(golden, run_to_compare(golden, record))
    assert details == ["sketch", "full"]
    assert found.verdict is Verdict.INCOMPARABLE
    assert "those of block.w; " in found.reason and "layer.w" in found.reason, found.reason
    assert "crossframe baseline update" in found.reason
