"""A monitor of a recorded loop: alarms, the dense window and the checkpoint that follow, on all ranks at the same step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossframe.errors import UnsupportedError
from crossframe.monitoring import Kind, Monitor
from crossframe.recording import Recording
from torch_backend.recorder import Recorder

STEPS, WRONG, EVERY = 14, 5, 4
WINDOW = (8, 9)
"""The steps of the window: the step WRONG is judged at the end of step 7."""


def train(directory, monitor, wrong, *, wraps=False, **options):
    """Train a small net; `wrong` is called with the model and the loss at step WRONG, and returns the loss."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model = DistributedDataParallel(net) if wraps else net
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with Recorder(
        directory, model=model, optimizer=optimizer, every=100, dense=1, monitor=monitor, **options
    ) as recorder:
        for step in range(STEPS):
            loss = model(torch.randn(4, 6)).square().mean()
            if step == WRONG:
                loss = wrong(net, loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss)


def nan(net, loss):
    return loss * float("nan")


def test_an_alarm_opens_a_window_and_keeps_a_checkpoint(tmp_path):
    told, kept = [], []
    monitor = Monitor(every=EVERY, window=2, checkpoint=kept.append, on_alarm=told.append)
    train(tmp_path / "run", monitor, nan)
    recording = Recording.open(tmp_path / "run")
    assert [(alarm.kind, alarm.step) for alarm in told] == [(Kind.NOT_FINITE, WRONG)] and kept == [8]
    assert [step for step in range(STEPS) if recording.activations(step)] == [0, *WINDOW]


def test_a_healthy_run_records_what_it_records_without_a_monitor(tmp_path):
    for name, monitor in (("with", Monitor(every=EVERY)), ("without", None)):
        train(tmp_path / name, monitor, lambda net, loss: loss)
    both = [Recording.open(tmp_path / name) for name in ("with", "without")]
    assert both[0].recorded_steps() == both[1].recorded_steps() == (0,)
    assert (both[0].losses() == both[1].losses()).all()


def test_a_monitor_cannot_follow_forward_calls_of_several_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(UnsupportedError, match="crossframe watch"):
        Recorder(tmp_path, model=nn.Linear(2, 2), forward_only=True, monitor=Monitor())


def drift(net, loss):
    if dist.get_rank() == 1:
        with torch.no_grad():
            net[0].weight += 1e-3
    return loss


def train_on_ranks(rank, world_size, directory):
    """The alarms of this rank, and the steps at which it kept a checkpoint."""
    kept = []
    monitor = Monitor(every=EVERY, window=2, checkpoint=kept.append)
    train(directory, monitor, drift, wraps=True, windows=[(6, 7)])
    return [(alarm.kind.value, alarm.step, alarm.text) for alarm in monitor.alarms], kept


def test_ranks_that_diverge_raise_an_alarm_and_all_record_densely(ranks, tmp_path):
    (first, kept), (second, also_kept) = ranks.run(2, train_on_ranks, str(tmp_path / "run"))
    assert [(kind, step) for kind, step, _ in first] == [("ranks disagree", 6)] and second == []
    assert "'0.weight'" in first[0][2] and "ranks 0, 1" in first[0][2]
    # Step 6 is recorded, so it is judged at its end, and again once both ranks have written it.
    assert kept == also_kept and kept[0] in (7, 8)
    recording = Recording.open(tmp_path / "run")
    dense = [step for step in range(STEPS) if recording.activations(step)]
    assert dense[:2] == [0, 6] and {kept[0], kept[0] + 1} <= set(dense)
