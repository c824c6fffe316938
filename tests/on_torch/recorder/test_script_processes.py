"""Scripts that start their ranks by `torch.multiprocessing.spawn`, recorded."""

import subprocess

import pytest

from crossframe.cli.record import script_command
from crossframe.cli.training_command import TrainingCommand
from crossframe.recording import Recording
from crossframe.scripts import NOT_RECORDED
from crossframe.verdict import Verdict, compare
from tests.on_torch.helpers.recorded_scripts import HEAD

TRAIN = """
import os, tempfile
import torch.distributed as dist, torch.multiprocessing as mp

def train(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for x in tokens:
        optimizer.zero_grad()
        loss_of(model, x.chunk(2)[rank]).backward()
        optimizer.step()
        if "--fail" in sys.argv:
            raise KeyError("mine")
    dist.destroy_process_group()
"""
STARTS = """
if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (f"{folder}/store",), nprocs=2)
"""
ALREADY_STARTED = """
if __name__ == "__main__":
    train(int(os.environ["RANK"]), sys.argv[1])
"""
COUNTS = """
import torch.multiprocessing as mp

def count(rank):
    print("counted by", rank)

if __name__ == "__main__":
    mp.spawn(count, nprocs=1)
"""
TRAINS_ITSELF = """
    optimizer = torch.optim.SGD((model := net()).parameters(), 0.1)
    for x in tokens:
        loss_of(model, x).backward()
        optimizer.step()
"""


AGAIN = (
    STARTS
    + """
        if "--again" in sys.argv:
            mp.spawn(train, (f"{folder}/another",), nprocs=2)
    assert "--stops" not in sys.argv, "what rank 0 saves at the end is not there"
"""
)


@pytest.fixture
def record(tmp_path):
    """Record a script by the process of the command, into a folder of tmp_path."""

    def record(name, text, *arguments, ranks=None, **options):
        (tmp_path / "script.py").write_text(HEAD + text)
        options = {"directory": str(tmp_path / name), "every": 2, "dense": 1, "windows": []} | options
        command = script_command(
            "torch", TrainingCommand(tmp_path / "script.py", arguments, nproc_per_node=ranks), options
        )
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return record


def test_processes_that_a_script_spawns_are_ranks(record, tmp_path):
    spawned = record("spawned", TRAIN + STARTS)
    assert spawned.returncode == 0, spawned.stderr
    started = record("started", TRAIN + ALREADY_STARTED, str(tmp_path / "store"), ranks=2)
    assert started.returncode == 0, started.stderr
    recordings = [Recording.open(tmp_path / name) for name in ("spawned", "started")]
    assert [(each.manifest.world_size, each.num_steps) for each in recordings] == [(2, 3)] * 2
    found = compare(*recordings)
    assert found.verdict is Verdict.EQUAL, found.reason


def test_a_spawned_process_that_fails_fails_the_script(record, tmp_path):
    failed = record("out", TRAIN + STARTS, "--fail")
    assert failed.returncode == 1 and "KeyError: 'mine'" in failed.stderr, failed.stderr


def test_a_script_that_spawns_training_twice_is_refused(record, tmp_path):
    """Even if it may replace a recording: each training would replace that of the one before."""
    assert record("out", TRAIN + AGAIN, overwrite=True).returncode == 0
    again = record("out", TRAIN + AGAIN, "--again", overwrite=True)
    assert again.returncode == NOT_RECORDED
    assert "processes that the script has started train separately, or one after another" in again.stderr


def test_a_script_whose_spawned_ranks_stop_early_ends_there(record, tmp_path):
    stopped = record("out", TRAIN + AGAIN, "--stops", stop_after=1)
    assert stopped.returncode == 0 and Recording.open(tmp_path / "out").num_steps == 1, stopped.stderr


def test_a_recording_that_nothing_replaces_is_no_success(record):
    assert record("out", COUNTS + TRAINS_ITSELF).returncode == 0
    nothing = record("out", COUNTS, overwrite=True)
    assert nothing.returncode == NOT_RECORDED and "nothing was trained in this process" in nothing.stderr


def test_spawned_processes_may_train_nothing(record, tmp_path):
    alone = record("alone", COUNTS)
    assert "counted by 0" in alone.stdout and "nothing was trained in this process" in alone.stderr
    trains = record("trains", COUNTS + TRAINS_ITSELF)
    assert trains.returncode == 0 and "counted by 0" in trains.stdout, trains.stderr
    assert Recording.open(tmp_path / "trains").num_steps == 3
