"""Checkpoints of orbax, compared by `crossframe compare`."""

import json

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from crossframe.checkpoint_comparison import compare_checkpoints, format_of, read_unpacked
from crossframe.checkpoint_comparison.stored import Format
from crossframe.cli.commands import app
from jax_backend.state.unpack_checkpoint import unpack

TREE = {"params": {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(2, jnp.bfloat16)}, "count": jnp.int32(3)}


def opened(path, folder):
    folder.mkdir()
    unpack(path, folder)
    return read_unpacked(folder, path.name)


def save(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


@pytest.mark.parametrize("managed", [False, True])
def test_every_array_is_read(tmp_path, managed):
    path = tmp_path / "a"
    if managed:
        with ocp.CheckpointManager(path) as manager:
            manager.save(7, args=ocp.args.StandardSave(TREE))
        path = path / "7"
    else:
        save(path, TREE)
    assert format_of(path) is Format.ORBAX
    found = opened(path, tmp_path / "unpacked")
    assert set(found.tensors) == {"params.w", "params.b", "count"}
    assert np.array_equal(found.tensors["params.w"](), TREE["params"]["w"])
    assert found.tensors["params.b"]().dtype.name == "bfloat16"


def test_a_part_that_was_not_loaded_is_a_bug(tmp_path):
    save(tmp_path / "a", TREE)
    params = TREE["params"] | {"w": TREE["params"]["w"].at[1].set(0)}
    save(tmp_path / "b", TREE | {"params": params})
    found = compare_checkpoints(*(opened(tmp_path / x, tmp_path / f"unpacked {x}") for x in "ab"))
    assert (found.verdict.value, found.differences[0].kind.value) == ("bug", "zeros")


def test_the_command_compares_a_folder_and_a_file(tmp_path):
    save(tmp_path / "a", TREE)
    arrays = {"params.w": TREE["params"]["w"], "params.b": TREE["params"]["b"], "count": TREE["count"]}
    save_file({name: np.asarray(array) for name, array in arrays.items()}, tmp_path / "b.safetensors")
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b.safetensors"), "--json"])
    assert (result.exit_code, json.loads(result.output)["equal"]) == (0, 3), result.output
