"""One script in float32, under autocast and with parameters in bfloat16: recorded, and compared."""

import pytest
import torch
from torch import nn

from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from tests.on_torch.helpers.recorded_loops import Net, batches
from torch_backend.recorder import Recorder


def train(directory, *, autocast=False, dtype=torch.float32, perturbed=0, detaches=False) -> Recording:
    for perturbed_run in range(perturbed + 1):
        torch.manual_seed(0)
        model = Net().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        with Recorder(directory, model=model, optimizer=optimizer, name="net", perturbed_run=perturbed_run) as recorder:
            for step in range(2):
                tokens = batches(step, 0, 1)[0]
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    logits = model(tokens[:, :-1])
                logits = logits.detach() + 0.5 * (logits - logits.detach()) if detaches else logits
                nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step()
    return Recording.open(directory)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Recording:
    return train(tmp_path_factory.mktemp("plain") / "plain")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"autocast": True}, id="autocast", marks=pytest.mark.exhaustive),
        pytest.param({"dtype": torch.bfloat16}, id="parameters"),
    ],
)
def test_bfloat16_is_told_from_a_bug(plain, tmp_path, options):
    low = train(tmp_path / "low", perturbed=4, **options)
    assert low.manifest.dtype == "bfloat16"
    found = compare(plain, low)
    assert found.verdict is Verdict.ROUNDING, found.reason
    assert "plain computes in float32 and low computes in bfloat16" in found.reason
    halved = compare(plain, train(tmp_path / "halved", perturbed=4, detaches=True, **options))
    assert halved.verdict is Verdict.BUG, halved.reason
    assert halved.first_divergence is not None and halved.first_divergence.phase == "backward"


COPIES = """
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
for x in torch.randn(3, 8, 4).bfloat16():
    model(x).float().square().mean().backward()
    for param in model.parameters():
        param.data, param.grad.data = param.data.float(), param.grad.data.float()
    optimizer.step()
    for param in model.parameters():
        param.data = param.data.bfloat16()
    optimizer.zero_grad()
"""


def test_wider_copies_that_a_script_updates_are_rounded(run, tmp_path):
    assert run(COPIES, every=1) == 0
    found = Recording.open(tmp_path / "out")
    assert found.num_steps == 3 and found.manifest.dtype == "bfloat16"
    updated, state = found.full("update", 2, "0.weight"), found.full("state", 2, "0.weight", use="exp_avg")
    assert _is_rounded(updated) and not _is_rounded(state)


def _is_rounded(values):
    found = torch.from_numpy(values.astype("float32"))
    return found.equal(found.bfloat16().float())
