"""The training script that others copy: its run depends neither on how it is sharded nor on where it was interrupted, and
what it cannot use it names.

The long form of the trials in which it is killed is `python -m tests.on_torch.programs.campaign`.
"""

import fcntl
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from typer.testing import CliRunner

from crossframe.checkpoint import CheckpointError, writing
from crossframe.errors import AgreementError, CrossframeError, UsageError
from crossframe.trace import ALL_GATHER, REDUCE_SCATTER
from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from experiments import train_torch
from experiments.data import text_batch
from experiments.models import model_named
from experiments.train.journal import Journal
from experiments.train.settings import TrainSettings
from experiments.train.sharded import build
from experiments.train.together import together
from tests.on_torch.programs.campaign import Trials, arguments, content, finals, metrics
from torch_backend.observe import record_trace

SMALL = TrainSettings(
    Path("unused"), model="gpt-tiny", steps=4, batch_size=12, warmup_steps=2, checkpoint_every=2, clip=0.5, device="cpu"
)
EXACT = replace(SMALL, precision="float64")


def _trained(rank, world_size, settings):
    return train_torch.train(settings, torch.device("cpu"))


def _refused(rank, world_size, settings):
    """What a rank is told."""
    try:
        train_torch.train(settings, torch.device("cpu"))
    except CrossframeError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.fixture(scope="module")
def expected():
    """Losses and norms of a loop without any sharding, written down once more."""
    config = model_named("gpt-tiny").config
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = model_named("gpt-tiny").make_torch()[0]
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    found = []
    for step, rate in enumerate((5e-4, 1e-3, 1e-3, 5.5e-4)):
        optimizer.param_groups[0]["lr"] = rate
        batch = text_batch(0, step, 0, 1, 12, config.context)
        logits = model(torch.from_numpy(batch.tokens).long())
        loss = functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).long().flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append((step + 1, loss.item(), norm.item()))
    return found


@pytest.mark.parametrize(
    ("world_size", "how"),
    [
        (1, {"api": "fsdp2"}),
        (2, {"api": "fsdp2", "layout": "flat", "micro_batch_size": 2}),
        (3, {"api": "fsdp2", "layout": "ragged", "strategy": "shard_grad_op"}),
        pytest.param(
            4,
            {"api": "fsdp2", "strategy": "hybrid_shard", "shard": 2, "micro_batch_size": 1},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(2, {"api": "fsdp2", "strategy": "no_shard"}, marks=pytest.mark.exhaustive),
        pytest.param(2, {"api": "fsdp1", "micro_batch_size": 3}, marks=pytest.mark.exhaustive),
        (4, {"api": "fsdp1", "strategy": "hybrid_shard", "shard": 2}),
    ],
)
def test_the_run_is_that_of_a_plain_loop_however_it_is_sharded(ranks, tmp_path, expected, world_size, how):
    assert ranks.run(world_size, _trained, replace(EXACT, output=tmp_path, **how)) == [True] * world_size
    bounds = bounds_for("float64")
    for (step, loss, norm), (_, expected_loss, expected_norm) in zip(metrics(tmp_path), expected, strict=True):
        assert abs(loss - expected_loss) <= bounds.loss * expected_loss, step
        assert abs(norm - expected_norm) <= bounds.parameter * expected_norm, step
    assert [path.name for path in finals(tmp_path)] == ["step-00000002", "step-00000004"]


def _settings_reach(rank, world_size, settings):
    """What travels in a step of two microbatches, in each of them: kind, phase and dtype."""
    sharded = build(settings, torch.device("cpu"))
    found = []
    for last in (False, True):
        with record_trace() as events, sharded.microbatch(last=last):
            sharded.model(torch.zeros(1, 8, dtype=torch.long)).float().sum().backward()
        found.append({(event.kind, event.phase, event.dtype) for event in events})
    return found


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(("strategy", "precision"), [("full_shard", "bfloat16"), ("shard_grad_op", "float32")])
def test_R08_R15_R33_strategy_precision_and_microbatches_are_what_was_asked_for(ranks, api, strategy, precision):
    for first, last in ranks.run(2, _settings_reach, replace(SMALL, api=api, strategy=strategy, precision=precision)):
        again = {dtype for kind, phase, dtype in first if (kind, phase) == (ALL_GATHER, "backward")}
        assert again == ({precision} if strategy == "full_shard" else set())
        assert {dtype for kind, _, dtype in first if kind == ALL_GATHER} == {precision}
        reduced = [{dtype for kind, _, dtype in each if kind == REDUCE_SCATTER} for each in (first, last)]
        assert reduced == [set(), {"float32"}]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("number", "kind"),
    # All kinds: python -m tests.on_torch.programs.campaign
    [(1, "one rank killed in a save"), (4, "other world")],
)
def test_R36_R37_what_harms_a_run_is_survived_or_named(trials, number, kind):
    outcome = trials.run(number, kind)
    assert not outcome.complaints and outcome.harms, (number, kind, outcome)


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    return Trials(tmp_path_factory.mktemp("campaign"), seed=1)


def test_R36_a_damaged_checkpoint_is_named_and_set_aside_and_two_are_refused(ranks, tmp_path):
    settings = replace(SMALL, output=tmp_path)
    ranks.run(2, _trained, settings)
    older, newer = finals(tmp_path)
    whole = content(newer)
    shard = newer / "rank00001.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    assert ranks.run(2, _trained, settings) == [True, True]
    assert {path.name for path in older.parent.iterdir()} == {older.name, newer.name, f"damaged-{newer.name}"}
    again = content(newer)
    assert all(
        torch.equal(whole[name], again[name]) if torch.is_tensor(whole[name]) else whole[name] == again[name]
        for name in whole
    )

    (older / "rank00001.safetensors").unlink()
    shard = older / "rank00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    index = newer / "index.json"
    index.write_text(index.read_text().replace('"step": 4', '"step": 3'))
    before = sorted(tmp_path.rglob("*"))
    for kind, message in ranks.run(2, _refused, settings):
        assert kind == "CheckpointError"
        assert "no checkpoint is whole" in message
        assert f"step-00000004: {newer / 'index.json'}: has other content" in message
        assert f"rank00000.safetensors has {shard.stat().st_size} bytes, not " in message
        assert "rank00001.safetensors is missing" in message
    assert sorted(tmp_path.rglob("*")) == before


def test_the_run_goes_on_where_asked_and_writes_over_nothing(ranks, tmp_path):
    output = tmp_path / "a"
    settings = replace(SMALL, output=output, keep=3, checkpoint_every=1)
    ranks.run(2, _trained, settings)
    assert [path.name[-1] for path in finals(output)] == ["2", "3", "4"]
    second, _, newest = finals(output)

    # To the end from a checkpoint of another folder, with another batch, which is said.
    ranks.run(2, _trained, replace(settings, output=tmp_path / "b", resume=str(second), batch_size=4))
    assert [step for step, *_ in metrics(tmp_path / "b")] == [3, 4]

    before = sorted(output.rglob("*"))
    for resume, names in (("none", "step-00000002, step-00000003, step-00000004"), (str(second), "step-00000003, ")):
        for kind, message in ranks.run(2, _refused, replace(settings, resume=resume)):
            assert kind == "UsageError" and names in message and "another --output" in message
    for kind, message in ranks.run(2, _refused, replace(settings, precision="float64")):
        assert kind == "UsageError" and "'gpt-tiny' in float32, and this run of 'gpt-tiny' in float64" in message
    for kind, message in ranks.run(2, _refused, replace(settings, resume=str(tmp_path))):
        assert kind == "CheckpointError" and "got no index.json there" in message
    for kind, message in ranks.run(2, _refused, replace(settings, batch_size=5)):
        assert kind == "UsageError" and "--batch-size: expected a multiple of the 2 ranks, got 5" in message
    assert sorted(output.rglob("*")) == before
    assert ranks.run(2, _trained, replace(settings, resume=str(newest))) == [True, True]


def test_what_a_killed_run_left_in_part_is_gone(ranks, tmp_path):
    settings = replace(SMALL, output=tmp_path, steps=3, checkpoint_every=1, warmup_steps=0)
    ranks.run(2, _trained, settings)
    for name in ("writing-step-00000009-0123456789abcdef", "removing-step-00000001"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "rank00000.safetensors").write_bytes(b"in part")
    for name in ("writing-step-00000009", "removing-step-00000002"):  # a user's own
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "notes.txt").write_text("mine")
    lines = (tmp_path / "metrics.jsonl").read_bytes()
    for rest in (b'{"step": 4, "lo', b"\n", b'{"step": 4, "loss": 1.0, "grad_norm": 1.0}\n'):
        (tmp_path / "metrics.jsonl").write_bytes(lines + rest)
        ranks.run(2, _trained, settings)
        assert (tmp_path / "metrics.jsonl").read_bytes() == lines
    names = ["removing-step-00000002", "step-00000002", "step-00000003", "writing-step-00000009"]
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == names
    assert [(tmp_path / "checkpoints" / name / "notes.txt").read_text() for name in (names[0], names[-1])] == [
        "mine"
    ] * 2


class _FullDisk:
    """A file of a disk that is full at first, and then takes some bytes at a time."""

    def __init__(self, file):
        self.file, self.full = file, 2

    def write(self, data):
        if self.full:
            self.full -= 1
            raise OSError(28, "No space left on device")
        return self.file.write(data[:5])

    def __getattr__(self, name):
        return getattr(self.file, name)


def _on_a_full_disk(rank, world_size, folder):
    said = []
    with Journal(folder, train_torch.TorchRanks()) as journal:
        journal.say = lambda text: said.append(text)
        journal.open(0)
        journal._lines = _FullDisk(journal._lines)
        for step in (1, 2):
            journal.write({"step": step})
        before = (folder / "metrics.jsonl").read_text()
        journal.flush()
    return said, before, (folder / "metrics.jsonl").read_text()


def test_lines_wait_while_the_disk_is_full_and_none_is_lost(ranks, tmp_path):
    ((said, before, after),) = ranks.run(1, _on_a_full_disk, tmp_path)
    assert len(said) == 1 and "No space left on device; lines wait in memory" in said[0]
    assert before == "" and after == '{"step": 1}\n{"step": 2}\n'


def _stopped(rank, world_size, settings):
    """Rank 1 is sent SIGTERM in step 2."""
    text_batch = train_torch.text_batch

    def batch_and_signal(seed, step, *rest):
        if (rank, step) == (1, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return text_batch(seed, step, *rest)

    train_torch.text_batch = batch_and_signal
    try:
        return train_torch.train(settings, torch.device("cpu"))
    finally:
        train_torch.text_batch = text_batch


def test_asked_to_stop_all_ranks_end_the_step_save_and_stop(ranks, tmp_path):
    settings = replace(SMALL, output=tmp_path, checkpoint_every=100)
    assert ranks.run(2, _stopped, settings) == [True, True]
    assert [path.name for path in finals(tmp_path)] == ["step-00000002"]
    assert [step for step, *_ in metrics(tmp_path)] == [1, 2]


def _second_run(rank, world_size, settings):
    """A run while another one writes to the folder."""
    if rank == 0:
        other = (settings.output / "lock").open("a+")
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write("process 7 on another")
        other.flush()
    dist.barrier()
    return _refused(rank, world_size, settings)


def test_a_second_run_in_the_same_folder_is_refused(ranks, tmp_path):
    for kind, message in ranks.run(2, _second_run, replace(SMALL, output=tmp_path)):
        assert kind == "CheckpointError" and "another run writes here (process 7 on another)" in message


def _one_fails(rank, world_size):
    def act():
        if rank == 1:
            raise OSError(28, "No space left on device", "a/file")
        if rank == 2:
            raise AgreementError("rank 1 failed")  # which says nothing new
        return rank

    try:
        together(train_torch.TorchRanks(), "writing a", act)
    except CheckpointError as error:
        return str(error)
    return together(train_torch.TorchRanks(), "asking", lambda: 10 * rank)


def test_what_fails_on_one_rank_fails_on_all_in_the_same_words(ranks):
    said = "writing a: rank 1: OSError: [Errno 28] No space left on device: 'a/file'"
    assert ranks.run(3, _one_fails) == [said] * 3


def _breaks(rank, world_size, settings, name, broken_rank):
    """A save in which one act of one rank fails, the first time."""
    owner = Journal if name == "_flush" else writing
    original, failed = getattr(owner, name), []

    def fails(*arguments):
        if rank == broken_rank and not failed:
            failed.append(name)
            raise OSError(28, "No space left on device")
        return original(*arguments)

    setattr(owner, name, fails)
    try:
        return train_torch.train(settings, torch.device("cpu"))
    finally:
        setattr(owner, name, original)


@pytest.mark.parametrize(("name", "broken_rank"), [("write_tensors", 1), ("flush", 1), ("digest_of", 0), ("_flush", 0)])
def test_a_failed_save_leaves_no_trace_and_training_goes_on(ranks, tmp_path, name, broken_rank):
    settings = replace(SMALL, output=tmp_path)
    assert ranks.run(2, _breaks, settings, name, broken_rank) == [True, True]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]
    assert len(metrics(tmp_path)) == 4


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"model": "bert"}, "unknown model 'bert'"),
        ({"api": "fsdp3"}, "--api: expected one of fsdp1, fsdp2, got 'fsdp3'"),
        ({"api": "fsdp1", "layout": "ragged"}, "--layout: fsdp1 has flat alone"),
        ({"strategy": "zero"}, "--strategy: expected one of full_shard"),
        ({"shard": 2}, "--shard: only hybrid strategies"),
        ({"steps": 0}, "--steps: expected an integer of at least 1"),
        ({"keep": True}, "--keep: expected an integer"),
        ({"micro_batch_size": 0}, "--micro-batch-size: expected an integer"),
        ({"learning_rate": float("nan")}, "--learning-rate: expected a number"),
        ({"dropout": 1.0}, "--dropout: expected a number from 0 to below 1"),
        ({"precision": 32}, "--precision: expected one of float32"),
        ({"model": "mlp"}, "model: expected one of text, got 'mlp'"),
    ],
)
def test_settings_out_of_range_are_named(wrong, named):
    with pytest.raises(UsageError, match=named):
        replace(SMALL, **wrong)


def test_the_command_passes_on_every_option_and_says_wrong_use_in_one_line(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(train_torch, "run", lambda settings: seen.append(settings) or True)
    asked = replace(SMALL, output=tmp_path, dropout=0.5, micro_batch_size=3, layout="flat", async_save=True)
    runner, words = CliRunner(), arguments(asked)
    assert runner.invoke(train_torch.app, words).exit_code == 0
    assert seen == [asked]
    monkeypatch.setattr(train_torch, "run", lambda settings: False)
    assert runner.invoke(train_torch.app, words).exit_code == 1
    monkeypatch.undo()
    monkeypatch.delenv("RANK", raising=False)
    result = runner.invoke(train_torch.app, words)
    assert result.exit_code == 2 and result.output.startswith("train_torch: start it by torchrun")


def _on_one_batch(rank, world_size, settings):
    """A run whose steps all have the batch of the first."""
    text_batch = train_torch.text_batch
    train_torch.text_batch = lambda seed, step, *rest: text_batch(seed, 0, *rest)
    try:
        return train_torch.train(settings, torch.device("cpu"))
    finally:
        train_torch.text_batch = text_batch


def test_each_step_drops_other_elements(ranks, tmp_path):
    ranks.run(2, _on_one_batch, replace(SMALL, output=tmp_path, steps=3, dropout=0.5, learning_rate=0.0))
    assert len({loss for _, loss, _ in metrics(tmp_path)}) == 3


def test_dropout_drops_and_follows_from_the_seed_alone(ranks, tmp_path):
    losses = []
    for i, dropout in enumerate((0.0, 0.5, 0.5)):
        ranks.run(2, _trained, replace(SMALL, output=tmp_path / str(i), steps=1, dropout=dropout))
        losses.append(metrics(tmp_path / str(i))[0][1])
        assert [path.name for path in finals(tmp_path / str(i))] == ["step-00000001"]  # the last step is saved
    assert losses[0] != losses[1] == losses[2]
