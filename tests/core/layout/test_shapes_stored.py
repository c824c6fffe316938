"""The shapes of models that are stored: safetensors files and recordings."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from crossframe.errors import CrossframeError, UsageError
from crossframe.shapes import model_shapes
from tests.core.helpers import synthetic

SHAPES = {"wte.weight": (5, 2), "h.2.mlp.up.weight": (4, 2), "h.10.mlp.up.weight": (4, 2), "head.0.weight": (5, 2)}


def save(path, names):
    arrays = {name: np.zeros(SHAPES[name], np.float16 if name == "wte.weight" else np.float32) for name in names}
    save_file(arrays | {f"{names[0]}_mask": np.zeros(3, np.int64)}, path)


def test_a_safetensors_file_states_parameters_and_its_blocks_are_units(tmp_path):
    path = tmp_path / "model.safetensors"
    save(path, list(SHAPES))
    shapes = model_shapes(str(path), "bfloat16")
    assert {param.name: param.shape for param in shapes.params} == SHAPES  # and no buffer of integers
    assert {param.dtype for param in shapes.params if param.name != "wte.weight"} == {"float32"}
    assert next(param.dtype for param in shapes.params if param.name == "wte.weight") == "float16"
    assert (shapes.name, shapes.units) == ("model", ("h.2", "h.10"))


def test_a_folder_of_safetensors_files_is_one_model(tmp_path):
    save(tmp_path / "model-00001-of-00002.safetensors", ["wte.weight", "h.2.mlp.up.weight"])
    save(tmp_path / "model-00002-of-00002.safetensors", ["h.10.mlp.up.weight", "head.0.weight"])
    shapes = model_shapes(str(tmp_path))
    assert {param.name: param.shape for param in shapes.params} == SHAPES
    assert shapes.units == ("h.2", "h.10")


def test_a_recording_states_parameters_and_units(tmp_path):
    recording = synthetic.record(tmp_path / "run")
    shapes = model_shapes(str(tmp_path / "run"))
    assert {param.name for param in shapes.params} == set(recording.manifest.params)
    assert dict(shapes.unit_params()).keys() == {unit for unit, _ in recording.manifest.units}


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, (10**6).to_bytes(8, "little")], ids=["empty", "noise", "cut"])
def test_a_damaged_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    for given in (path, tmp_path, tmp_path / "none.safetensors"):
        with pytest.raises(UsageError, match=r"expected a safetensors file, cannot read it"):
            model_shapes(str(given))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(CrossframeError, match="expected at least one floating tensor in safetensors files, got none"):
        model_shapes(str(tmp_path))
