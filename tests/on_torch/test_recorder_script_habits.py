"""What training scripts do besides a plain step: schedules, clipping by hand, optimizers of one's own."""

import pytest
import torch
from torch import nn

from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from tests.on_torch.recorded_loops import Net, batches
from torch_backend.recorder import Recorder

CLIP = 0.05


class MyAdam(torch.optim.AdamW):
    """AdamW under another name."""


def by_torch(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def by_hand(model: nn.Module) -> None:
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    total = torch.sqrt(sum((grad**2).sum() for grad in grads))  # type: ignore[arg-type]
    for grad in grads:
        grad.mul_(min(1.0, CLIP / (float(total) + 1e-6)))


def train(directory, *, clip=by_torch, optimizer=torch.optim.AdamW, warmup=4) -> Recording:
    torch.manual_seed(0)
    model = Net().double()
    made = optimizer(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: min(1.0, (step + 1) / warmup))
    with Recorder(directory, model=model, optimizer=made, name="net") as recorder:
        for step in range(4):
            tokens = batches(step, 0, 1)[0]
            logits = model(tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            clip(model)
            made.step()
            schedule.step()
            made.zero_grad()
            recorder.step()
    return Recording.open(directory)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Recording:
    return train(tmp_path_factory.mktemp("plain") / "plain")


def test_clipping_by_hand_in_a_script_is_rounding(plain, tmp_path):
    found = compare(plain, train(tmp_path / "hand", clip=by_hand))
    assert found.verdict is Verdict.ROUNDING, found.reason
    assert any("after clipping in hand" in note for note in found.notes)


def test_a_subclass_under_another_name_is_equal(plain, tmp_path):
    found = compare(plain, train(tmp_path / "mine", optimizer=MyAdam))
    assert found.verdict is Verdict.EQUAL and not found.settings


def test_rates_are_recorded_at_every_step(plain, tmp_path):
    assert [plain.learning_rates(step) for step in range(4)] == [(2.5e-3,), (5e-3,), (7.5e-3,), (1e-2,)]
    found = compare(plain, train(tmp_path / "longer", warmup=8))
    assert found.verdict is Verdict.INCOMPARABLE
    assert found.reason.startswith("learning rate differs: 0.0025 in plain, 0.00125 in longer")
