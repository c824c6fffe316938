"""`crossframe bisect` of commands of torchrun that also round differently: the step and the line are found on two gloo ranks."""

import pytest

from tests.commands import invoke

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down, self.late = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 3), False
    def forward(self, x):
        if "--by-hand" in sys.argv:
            x = x - x.mean(-1, keepdim=True)
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.norm.weight + self.norm.bias
        else:
            x = self.norm(x)
        y = torch.tanh(self.up(x))
        if self.late:
            y = y * 1.02
        return self.down(y)
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
net = Net()
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
draw = torch.Generator().manual_seed(dist.get_rank())
for step in range(6):
    net.late = step >= 4 and "--by-hand" in sys.argv
    loss = model(torch.randn(8, 8, generator=draw)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
def test_two_ranks_that_round_differently_diverge_at_the_step_of_the_mistake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ("torchrun", "--nproc-per-node", 2, "train.py")
    status, said = invoke("bisect", "--every", 5, "--perturbed-runs", 4, "--", *command, "--", *command, "--by-hand")
    assert status == 1 and "the runs diverge at step 4:" in said, said
    line = SCRIPT.splitlines().index("            y = y * 1.02") + 1
    assert f"train.py:{line}: y = y * 1.02" in said, said
