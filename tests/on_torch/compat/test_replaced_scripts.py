"""`python -m torch_backend SCRIPT`: an unchanged script that trains with torch's FSDP, in processes that it starts itself."""

import re
import subprocess
import sys

import pytest

from torch_backend.__main__ import main

TRAIN = """
import sys
import tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import FSDPModule

def train(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for shard, kind in ((lambda model: FSDP(model, device_id=torch.device("cpu")), FSDP), (fully_shard, FSDPModule)):
        torch.manual_seed(0)
        model = shard(nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)).double())
        assert isinstance(model, kind)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(rank)
        for _ in range(3):
            model(torch.randn(4, 5, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        own = [getattr(param, "_local_tensor", param).detach().sum().item().hex() for param in model.parameters()]
        print(f"{kind.__name__} on rank {rank}: {kind.__module__.partition('.')[0]} {own}\\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.NamedTemporaryFile() as file:
        mp.spawn(train, (file.name + "_store",), nprocs=2)
"""


def lines_of(*words: str) -> list[str]:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_a_script_that_spawns_its_ranks_trains_to_equal_bits(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    as_is = lines_of(str(script))
    replaced = lines_of("-m", "torch_backend", str(script))
    assert len(as_is) == 4 and all(": torch [" in line for line in as_is)
    assert replaced == [line.replace(": torch [", ": torch_backend [") for line in as_is]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "torch_backend: expected a script or module\nusage: python -m torch_backend SCRIPT"),
        (("-m",), "torch_backend: expected a script or module"),
        (("none.py",), "torch_backend: expected a script, but none.py is no file"),
        (("-m", "none"), "torch_backend: expected a module that `python -m none` would run"),
    ],
)
def test_what_cannot_be_run_is_named(words, message):
    with pytest.raises(SystemExit, match=re.escape(message)):
        main(words)


def test_an_error_of_the_script_is_printed_from_its_first_line_on(tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys\nassert __name__ == '__main__' and sys.argv[1:] == ['--lr', '1']\n1 / 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch_backend", "train.py", "--lr", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and lines[0].startswith("Traceback") and "train.py" in lines[1]
    assert lines[-1] == "ZeroDivisionError: division by zero"
