"""The environment that recordings of torch state, scripts that stop after their first steps, and ranks that differ."""

import os
import sys
from importlib.metadata import version
from unittest import mock

import pytest
import torch
from torch import nn

import torch_backend
from crossframe.check import check_ranks_of, check_recordings
from crossframe.environment import Effect, read_environment
from crossframe.errors import UsageError
from crossframe.recording import Recording
from tests.commands import invoke
from torch_backend.recorder import Recorder, script
from torch_backend.recorder._environment import environment_of

SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, eps=float(sys.argv[1])))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(50):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
raise SystemExit("the script was not stopped")
"""


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """The recording of the first two steps of a script."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", sys.argv)
        monkeypatch.setattr(sys, "path", [*sys.path])
        path = tmp_path / "script.py"
        path.write_text(SCRIPT)
        assert (
            script.run([str(path), *arguments], directory=str(tmp_path / name), every=100, dense=0, stop_after=2) == 0
        )
        return Recording.open(tmp_path / name)

    return run


def test_a_stopped_script_has_a_complete_recording(stopped):
    assert stopped("a", "1e-5").num_steps == 2


def test_another_epsilon_ranks_first(stopped):
    found = check_recordings(stopped("a", "1e-5"), stopped("b", "1e-6"))
    first, second = found.differences[:2]
    assert (first.section, first.name, first.effect) == ("modules", "1", Effect.CERTAINLY)
    assert "eps=1e-05" in str(first.a) and "eps=1e-06" in str(first.b)
    assert (second.section, second.name) == ("command", "argument 1")


def test_equal_runs_differ_in_nothing_that_matters(stopped):
    assert check_recordings(stopped("a", "1e-5"), stopped("b", "1e-5")).effect is Effect.HARDLY


def test_flags_generators_and_modules_are_stated(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.25)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "run", model=model) as recorder:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        recorder.step()
    found = read_environment(tmp_path / "run", 0)
    assert found is not None
    assert found["modules"]["1"] == "Dropout(p=0.25, inplace=False) in evaluation"
    assert found["framework"]["torch.backends.cuda.matmul.allow_tf32"] is False
    assert found["framework"]["device"] == "cpu" and found["packages"]["torch"] == version("torch")
    assert len(str(found["random"]["torch"])) == 16


class Accelerator:
    """A device module of torch, such as torch.xpu."""

    def __init__(self, initialized):
        self.initialized = initialized

    def is_initialized(self):
        return self.initialized

    def get_rng_state(self):
        assert self.initialized, "reading the state initialises the accelerator"
        return torch.arange(16, dtype=torch.uint8)


@pytest.mark.parametrize("initialized", [True, False], ids=["used", "unused"])
def test_the_generator_of_any_accelerator_in_use_is_stated(monkeypatch, initialized):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: Accelerator(initialized))
    found = environment_of(nn.Linear(2, 2))["random"]
    assert ("torch.xpu" in found) is initialized
    assert "torch" in found


def test_the_newer_interface_of_float32_precision_is_no_error():
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        found = environment_of()["framework"]
        assert found["torch.backends.cuda.matmul.allow_tf32"] is True
        assert found["torch.get_float32_matmul_precision"] == "high"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def tell_odd(rank, world_size, folder):
    """The findings of a rank of two hosts, and a recording. The only rank of the second host has another algorithm of
    all-reduces, and TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    os.environ["NCCL_ALGO"] = "Tree" if rank == 2 else "Ring"
    try:
        torch.backends.cuda.matmul.allow_tf32 = rank == 2
        with mock.patch("socket.gethostname", return_value=f"node{rank // 2}"):
            told = [each.describe() for each in torch_backend.check_ranks()]
            model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with Recorder(folder, model=model, optimizer=optimizer) as recorder:
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                recorder.step()
        return told
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
        del os.environ["NCCL_ALGO"]


def test_ranks_and_their_recording_name_the_host_that_differs(ranks, tmp_path):
    told = ranks.run(3, tell_odd, tmp_path / "run")
    assert told[0] == told[1] == told[2]
    assert [text for text in told[0] if "NCCL_ALGO" in text] == [
        "the variable NCCL_ALGO on rank 2 (node1) is Tree, on the other ranks Ring"
    ]
    assert any(text.startswith("torch.backends.cuda.matmul.allow_tf32 on rank 2 (node1) is True") for text in told[0])
    assert [each.describe() for _, each in check_ranks_of(tmp_path / "run").odd_ranks] == told[0]
    status, said = invoke("check", tmp_path / "run")
    assert status == 3 and "NCCL_ALGO on rank 2 (node1)" in said


def test_ranks_are_checked_after_the_process_group():
    with pytest.raises(UsageError, match="init_process_group"):
        torch_backend.check_ranks()
