"""Scripts that train with an optimizer of fastai, which is none of torch.optim. A stand-in has its interface."""

import sys

import pytest

from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from torch_backend.recorder import script

_LIBRARY = """
import math, sys, types
from collections import defaultdict
import torch

class Optimizer:
    def __init__(self, params, cbs, **hypers):
        self.param_lists, self.cbs, self.hypers, self.state = [list(params)], cbs, [hypers], defaultdict(dict)

    def zero_grad(self):
        for param in self.param_lists[0]:
            param.grad = None

    def step(self, closure=None):
        for param in self.param_lists[0]:
            for each in self.cbs:
                found = each(param, **{**self.state[param], **self.hypers[0]})
                self.state[param] = {**self.state[param], **(found or {})}

def weight_decay(param, lr, wd, **_):
    param.data.mul_(1 - lr * wd)

def averages(param, mom, sqr_mom, step=0, grad_avg=None, sqr_avg=None, **_):
    grad = param.grad
    grad_avg = (1 - mom) * grad if grad_avg is None else mom * grad_avg + (1 - mom) * grad
    sqr_avg = (1 - sqr_mom) * grad**2 if sqr_avg is None else sqr_mom * sqr_avg + (1 - sqr_mom) * grad**2
    return {"grad_avg": grad_avg, "sqr_avg": sqr_avg, "step": step + 1}

def adam_step(param, lr, mom, sqr_mom, step, grad_avg, sqr_avg, eps, **_):
    denominator = (sqr_avg / (1 - sqr_mom**step)).sqrt() + eps
    param.data.addcdiv_(grad_avg, denominator, value=-float(lr) / (1 - mom**step))

library = types.ModuleType("fastai.optimizer")
library.Optimizer = Optimizer
sys.modules["fastai.optimizer"] = library
"""
_TRAINING = """
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
{optimizer}
for step in range(3):
    rate(torch.tensor(0.01 * (step + 1)))  # a schedule
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FASTAI = _LIBRARY + _TRAINING.format(
    optimizer="optimizer = Optimizer(net.parameters(), [weight_decay, averages, adam_step], lr=0.01, mom=0.9, sqr_mom=0.99, "
    "eps=1e-5, wd=0.1)\ndef rate(value):\n    optimizer.hypers[0]['lr'] = value"
)
OF_TORCH = "import torch\n" + _TRAINING.format(
    optimizer="optimizer = torch.optim.AdamW(net.parameters(), 0.01, (0.9, 0.99), 1e-5, 0.1)\n"
    "def rate(value):\n    optimizer.param_groups[0]['lr'] = value.item()"
)


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Record scripts in this process, from which the stand-in is gone afterwards."""
    monkeypatch.setitem(sys.modules, "fastai.optimizer", sys)

    def record(*texts):
        found = []
        for i, text in enumerate(texts):
            monkeypatch.delitem(sys.modules, "fastai.optimizer", raising=False)
            monkeypatch.setattr(sys, "argv", sys.argv)
            path = tmp_path / f"{i}.py"
            path.write_text(text)
            assert script.run([str(path)], directory=str(tmp_path / str(i)), every=1, dense=3) == 0
            found.append(Recording.open(tmp_path / str(i)))
        return found

    return record


def test_an_optimizer_of_fastai_is_recorded_as_that_of_torch(recorded):
    ours, theirs = recorded(FASTAI, OF_TORCH)
    assert ours.manifest.settings["optimizer"] == theirs.manifest.settings["optimizer"] == "AdamW"
    assert [ours.learning_rates(step) for step in range(3)] == [theirs.learning_rates(step) for step in range(3)]
    for step in range(3):
        assert ours.state_slots(step, "0.weight") == theirs.state_slots(step, "0.weight") == ("exp_avg", "exp_avg_sq")
    found = compare(ours, theirs)
    assert found.verdict is Verdict.ROUNDING and not found.settings, found.reason


def test_a_fault_of_an_optimizer_of_fastai_is_diagnosed(recorded):
    right, wrong = recorded(FASTAI, FASTAI.replace("(1 - lr * wd)", "(1 - 2 * lr * wd)"))
    found = compare(right, wrong)
    assert found.first_divergence is not None and found.first_divergence.phase == "update", found.reason
    assert found.diagnosis is not None and "weight decay" in found.diagnosis.evidence
