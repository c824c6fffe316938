"""The training script that others copy: what it computes depends neither on how it is sharded nor on where it was interrupted, and
what it cannot use it names.

The long form of the trials in which it is killed is `python -m tests.on_torch.campaign`.
"""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from typer.testing import CliRunner

from crossframe.errors import CrossframeError, UsageError
from crossframe.verdict.bounds import bounds_for
from experiments import train_torch
from experiments.data import text_batch
from experiments.models import model_named
from experiments.train import checkpoints
from experiments.train.settings import TrainSettings
from experiments.train.together import CheckpointError, together
from tests.on_torch.campaign import Trials, content, damage, finals, metrics
from tests.on_torch.ranks import RankError

SMALL = TrainSettings(
    Path("unused"), model="gpt-tiny", steps=4, batch_size=12, warmup_steps=2, checkpoint_every=2, device="cpu"
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
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((step + 1, loss.item(), norm.item()))
    return found


@pytest.mark.parametrize(
    ("world_size", "how"),
    [
        (1, {"face": "fsdp2"}),
        (2, {"face": "fsdp2", "layout": "flat", "micro_batch_size": 2}),
        (3, {"face": "fsdp2", "layout": "ragged", "strategy": "shard_grad_op"}),
        (4, {"face": "fsdp2", "strategy": "hybrid_shard", "shard": 2, "micro_batch_size": 1}),
        (2, {"face": "fsdp2", "strategy": "no_shard"}),
        (2, {"face": "fsdp1", "micro_batch_size": 3}),
        (4, {"face": "fsdp1", "strategy": "hybrid_shard", "shard": 2}),
    ],
)
def test_the_run_is_that_of_a_plain_loop_however_it_is_sharded(ranks, tmp_path, expected, world_size, how):
    assert ranks.run(world_size, _trained, replace(EXACT, output=tmp_path, **how)) == [True] * world_size
    bounds = bounds_for("float64")
    for (step, loss, norm), (_, expected_loss, expected_norm) in zip(metrics(tmp_path), expected, strict=True):
        assert abs(loss - expected_loss) <= bounds.loss * expected_loss, step
        assert abs(norm - expected_norm) <= bounds.parameter * expected_norm, step
    assert [path.name for path in finals(tmp_path)] == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize(
    ("number", "kind"),
    [(1, "one rank killed in a save"), (2, "all ranks killed in a save"), (3, "file too large"), (4, "other world")],
)
def test_R36_R37_what_harms_a_run_is_survived_or_named(trials, number, kind):
    outcome = trials.run(number, kind)
    assert not outcome.complaints and outcome.harms, (number, kind, outcome)


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    return Trials(tmp_path_factory.mktemp("campaign"), seed=1)


def test_R36_a_damaged_checkpoint_is_named_and_set_aside_and_two_are_refused(ranks, tmp_path, capfd):
    settings = replace(SMALL, output=tmp_path)
    ranks.run(2, _trained, settings)
    older, newer = finals(tmp_path)
    whole = content(newer)
    file = newer / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    assert ranks.run(2, _trained, settings) == [True, True]
    assert {path.name for path in older.parent.iterdir()} == {older.name, newer.name, f"damaged-{newer.name}"}
    again = content(newer)
    assert all(
        torch.equal(whole[name], again[name]) if torch.is_tensor(whole[name]) else whole[name] == again[name]
        for name in whole
    )

    (older / ".metadata").unlink()
    manifest = newer / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 4', '"step": 3'))
    before = sorted(tmp_path.rglob("*"))
    for kind, message in ranks.run(2, _refused, settings):
        assert kind == "CheckpointError"
        assert "no checkpoint is whole" in message
        assert "step-00000004: manifest.json has other content" in message
        assert "step-00000002: .metadata is missing" in message
    assert sorted(tmp_path.rglob("*")) == before
