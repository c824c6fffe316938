"""Models of more than a million parameters with other names, recorded as sketches: mapped and compared."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from crossframe.cli.commands import app
from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from torch_backend.recorder import Recorder

WIDTH = 512
NAMES = {"fc": "inp", "norm": "ln", "out": "head"}


def model(names):
    torch.manual_seed(0)
    parts = (nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))
    made = nn.Sequential()
    for name, part in zip(names, parts, strict=True):
        made.add_module(name, part)
    return made


def record(folder, names, *, factor=1.0):
    made = model(names)
    optimizer = torch.optim.AdamW(made.parameters(), 1e-3)
    with Recorder(folder, model=made, optimizer=optimizer, every=1, name="mlp") as recorder:
        for step in range(3):
            batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = made(batch).square().mean()
            (factor * loss if step == 1 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss)
    return Recording.open(folder)


@pytest.fixture
def first(tmp_path):
    return record(tmp_path / "a", NAMES)


def test_recordings_in_sketches_with_other_names_are_compared(tmp_path, first):
    assert first.is_sketched("update", 2, "fc.weight")
    same = compare(first, record(tmp_path / "b", NAMES.values()))
    assert same.verdict is Verdict.EQUAL, same.reason
    assert "6 parameters with other names were matched by their values" in " ".join(same.notes)
    assert {"fc.weight", "output of norm"} <= {each.name for each in same.judged}
    wrong = compare(first, record(tmp_path / "c", NAMES.values(), factor=1.5))
    assert wrong.first_divergence is not None and wrong.first_divergence.step == 1
    assert wrong.first_divergence.phase in ("backward", "reduce")


def test_a_recording_in_sketches_is_mapped_to_a_file(tmp_path, first):
    params = {name: param.detach() for name, param in model(NAMES.values()).named_parameters()}
    save_file({name: param.t().contiguous() for name, param in params.items()}, tmp_path / "model.safetensors")
    result = CliRunner().invoke(app, ["map", str(first.directory), str(tmp_path / "model.safetensors")])
    assert result.exit_code == 0, result.output
    assert "fc.weight = inp.weight  a b -> b a" in result.output and "norm.bias = ln.bias" in result.output
    assert "2 parameters aligned by a signature of all their values and the places of a sample" in result.output
    assert "4 parameters aligned by their values" in result.output
