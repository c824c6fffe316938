"""`crossframe record` in each process of a launcher."""

import os
import socket
import subprocess
import sys

from crossframe.cli.entry import run
from crossframe.recording import Recording
from crossframe.recording.known_settings import COMMAND

# Updates by hand, so that the script runs twice; rank 0 ends last.
SCRIPT = """
import time
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
torch.manual_seed(dist.get_rank())
for _ in range(3):
    model(torch.randn(4, 8)).square().mean().backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad
            param.grad = None
if dist.get_rank() == 0:
    time.sleep(3)
dist.destroy_process_group()
"""


def _start(script, rank, port, folder):
    """One process, as srun starts it where a script reads torch's variables."""
    own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    words = [str(script), "--output", str(folder), "--perturbed-runs", "2"]
    return subprocess.Popen(
        [sys.executable, "-m", "crossframe", "record", *words],
        env=os.environ | own | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_each_run_of_launched_processes_has_a_port(tmp_path):
    script, folder = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    processes = [_start(script, rank, port, folder) for rank in range(2)]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    recording = Recording.open(folder)
    assert (recording.manifest.world_size, recording.num_steps, len(recording.perturbed_runs())) == (2, 3, 2)
    assert all(each.num_steps == 3 for each in recording.perturbed_runs())
    # Of all that is said of the runs, one process says it.
    assert printed[0].count("recorded ") == 3 and "ran again with --by-hand" in printed[0]
    assert "recorded " not in printed[1] and "ran again" not in printed[1]
    # The stated command starts both processes on one machine.
    again = recording.manifest.settings[COMMAND]
    assert again == f"crossframe record {script} --nproc-per-node 2 --every 100 --dense 2 --by-hand"


def test_a_launched_process_starts_no_others(tmp_path, monkeypatch, capsys):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert run(["record", str(script), "--output", str(tmp_path / "out"), "--nproc-per-node", "2"]) == 2
    assert "but srun has started 4, each of which runs this command; leave the option out" in capsys.readouterr().err
