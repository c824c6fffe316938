"""Scripts with torch's FSDP: the cases are whole, and what two runs wrote is compared in every bit."""

import json

import pytest
import torch
from safetensors.torch import save_file

from crossframe.errors import UsageError
from experiments.fsdp_scripts.cases import scripts_of
from experiments.fsdp_scripts.run import compared

SETS = ("first", "second")
WEIGHT = torch.tensor([1.0, -2.0, 3.0])


@pytest.fixture
def written(tmp_path):
    def write(name, loss=0.5, weight=WEIGHT, key="weight"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "figures.json").write_text(json.dumps({"loss": [1.0, loss], "names": ["a"]}))
        save_file({key: weight}, folder / "params.safetensors")
        return folder, ""

    return write


@pytest.mark.parametrize(
    ("other", "verdict", "reason"),
    [
        ({}, "equal", ""),
        (
            {"weight": WEIGHT.nextafter(torch.tensor(9.0))},
            "different",
            "1 of 4 values differ, params.safetensors weight most",
        ),
        ({"loss": 0.5 + 2**-50}, "different", "1 of 4 values differ, figures.json loss 1 most: 0.5, 0.50000000000"),
        ({"loss": 0.6}, "different", "figures.json loss 1 most: 0.5, 0.6"),
        ({"loss": float("nan")}, "different", "figures.json loss 1 most: 0.5, nan"),
        ({"weight": WEIGHT.double()}, "different", "float32[3], float64[3]"),
        ({"key": "bias"}, "different", "params.safetensors bias is written under torch_backend alone"),
    ],
)
def test_what_two_runs_wrote_is_compared_in_every_bit(written, other, verdict, reason):
    said = compared(written("torch"), written("ours", **other))
    assert said["verdict"] == verdict and reason in said["reason"] and said["values"] in (3, 4)


def test_signs_of_zeros_and_nans_are_bits(written):
    minus, nan = torch.tensor([-0.0]), torch.tensor([float("nan")])
    assert compared(written("a", weight=-minus), written("b", weight=minus))["verdict"] == "different"
    assert compared(written("c", weight=nan), written("d", weight=nan.clone()))["verdict"] == "equal"


def test_state_that_torch_has_overwritten_is_told_apart(written):
    (torchs, _), (ours, _), (others, _) = (written(name) for name in ("torch", "ours", "others"))
    states = {"exp_avg/w": WEIGHT.clone(), "exp_avg_sq/w": WEIGHT**2, "step/w": torch.tensor(1.0)}
    save_file(states, ours / "optimizer.safetensors")
    save_file(states | {"exp_avg/w": WEIGHT**2, "step/w": torch.tensor(1.0)}, torchs / "optimizer.safetensors")
    said = compared((torchs, ""), (ours, ""))
    assert said["verdict"] == "torch errs" and said["reason"].startswith("1 values read as another state")
    save_file(states | {"step/w": torch.tensor(2.0)}, others / "optimizer.safetensors")
    said = compared((torchs, ""), (others, ""))
    assert said["verdict"] == "different" and said["reason"].startswith("1 of 7 values differ")


def test_a_run_that_failed_states_under_which_fsdp(written):
    right = written("right")
    assert compared(right, (right[0], "no rank"))["reason"] == "no rank"
    assert compared((right[0], "no rank"), right)["reason"] == "under torch's FSDP too: no rank"


def test_scripts_are_whole():
    for script in scripts_of():
        text = (script.folder / "train.py").read_text()
        assert "torch_backend" not in text and "crossframe" not in text, script.name
        assert script.api in ("FSDP1", "FSDP2") and script.runs, script.name
        assert script.set in SETS, script.name
        assert all("{first}" in each.second for each in script.resumes), script.name


def test_a_script_that_does_not_exist_raises():
    with pytest.raises(UsageError, match="fsdp-scripts: expected names of"):
        scripts_of(["nobody"])
