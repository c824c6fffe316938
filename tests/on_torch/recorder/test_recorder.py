"""Loops of every kind, recorded and held against one another."""

import copy
import os
import pickle
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from crossframe.errors import AgreementError, RecordingError, UsageError
from crossframe.recording import Recording
from crossframe.recording.event_format import BACKWARD, PARAMETERS, REDUCE, STATE, UNSHARDED, UPDATE
from crossframe.recording.program import OPTIMIZER_KERNEL, PROGRAM
from crossframe.verdict import Verdict, compare
from crossframe.verdict.diagnosis.rank_fits import sum_error
from crossframe.verdict.diagnosis.stated_optimizer import stated_rule
from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from crossframe.verdict.measure.metrics import distance
from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers.recorded_loops import (
    KINDS,
    Block,
    Net,
    batches,
    train,
    train_and_tell,
    train_with_checkpointing,
    train_without_a_rank,
    where,
)
from torch_backend.recorder import Recorder
from torch_backend.recorder._module_tree import choose_units, named_modules

FINE = (Verdict.EQUAL, Verdict.ROUNDING)
PARALLEL = [kind for kind in KINDS if kind != "one"]
LONG = EXHAUSTIVE in os.environ
# One kind of each source of recorded values: replicas, our flat and our ragged shards, torch's. Tests that do not depend on the
# kind use these; pytest --exhaustive takes all.
FEW = PARALLEL if LONG else ["ddp", "ours fsdp1 flat", "ours fsdp2 ragged", "torch fsdp1"]
NAMES = ["embed.weight", "scale"] + [
    f"blocks.{i}.{name}"
    for i in range(2)
    for name in ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight")
]


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory):
    """One device that is fed all samples, in two microbatches."""
    directory = where(tmp_path_factory.mktemp("alone"), "run")
    ranks.run(1, partial(train, microbatches=2), "one", directory)
    return Recording.open(directory)


@pytest.mark.parametrize("kind", FEW)
def test_every_kind_of_sharding_records_the_run_of_one_device(ranks, tmp_path, alone, kind):
    directory = where(tmp_path, kind)
    ranks.run(2, partial(train, microbatches=2), kind, directory)
    recording = Recording.open(directory)
    found = compare(recording, alone)
    assert found.verdict in FINE, found
    assert set(recording.manifest.params) == set(NAMES)
    assert recording.manifest.params["embed.weight"].aliases == ("head.weight",)
    assert set(recording.manifest.unit_of.values()) == {"", "blocks.0", "blocks.1"}
    assert recording.recorded_steps() == (0, 1)
    for name in NAMES:
        initial, reduced = recording.full(PARAMETERS, 0, name), recording.full(REDUCE, 0, name)
        local = [recording.local(0, rank, name) for rank in range(2)]
        # Two microbatches, unsharded twice on each rank, recorded once: what forward saw is what the shards held.
        assert all(np.array_equal(recording.unsharded(0, rank, name), initial) for rank in range(2))
        assert is_mean(local, reduced)
        assert np.array_equal(recording.unsharded(1, 1, name), recording.full(UPDATE, 0, name))
        assert recording.state_slots(1, name) == ("exp_avg", "exp_avg_sq")
        assert recording.count(1, name) == 2.0
        assert not recording.has(BACKWARD, 2, name)
    assert recording.activations(0) == alone.activations(0)
    modules = {module for _, module, _ in recording.activations(1)}
    assert modules == {"", "embed", "head", "blocks.0", "blocks.1"} | {
        f"blocks.{i}.{name}" for i in range(2) for name in ("norm", "up", "down")
    }


@pytest.mark.parametrize("kind", ["ours fsdp1", "ours fsdp2"])
def test_recording_changes_no_bit_of_training(ranks, tmp_path, kind):
    plain = ranks.run(2, train_and_tell, kind, "", None)
    # Densely, not at all, sparsely, and densely in a window.
    schedule = {"dense": 1, "every": 2, "windows": [(3, 4)]}
    directory = where(tmp_path, "mixed")
    assert ranks.run(2, train_and_tell, kind, directory, schedule) == plain
    recording = Recording.open(directory)
    assert [step for step in range(4) if recording.activations(step)] == [0, 3]
    assert recording.recorded_steps() == (0, 2, 3) and len(plain[0][0]) > 10


def is_mean(local, reduced):
    """Whether reduced gradients are the mean of the ranks' own, but for what rounding makes of a mean."""
    return distance(np.mean(local, axis=0), reduced) <= sum_error(local, 2.0**-53)


@pytest.mark.parametrize("kind", FEW if LONG else ["ddp", "ours fsdp2 ragged"])
def test_gradients_that_are_summed_and_not_averaged_are_a_bug_in_the_reduction(ranks, tmp_path, alone, kind):
    directory = where(tmp_path, kind)
    ranks.run(2, partial(train, microbatches=2, faulty=True, steps=1), kind, directory)
    found = compare(Recording.open(directory), alone)
    assert found.verdict is Verdict.BUG
    assert found.first_divergence is not None
    assert (found.first_divergence.phase, found.first_divergence.step) == (REDUCE, 0)


@pytest.mark.parametrize("kind", [kind for kind in PARALLEL if "torch fsdp1" not in kind])  # refuses to clip float64
def test_the_norm_is_recorded_and_gradients_are_those_before_clipping(ranks, tmp_path, alone, kind):
    directory = where(tmp_path, kind)
    ranks.run(2, partial(train, microbatches=2, clip=1e-3, steps=1), kind, directory)
    recording = Recording.open(directory)
    for name in NAMES:
        reduced, right = recording.full(REDUCE, 0, name), alone.full(REDUCE, 0, name)
        assert distance(reduced, right) <= bounds_for("float64").parameter * np.linalg.norm(right)
    squares = np.concatenate([np.square(recording.full(REDUCE, 0, name)).reshape(-1) for name in NAMES])
    # Summing n squares errs by at most n u of the sum in any order, twice, and the root halves that.
    assert recording.grad_norm(0, 0) == pytest.approx(np.sqrt(squares.sum()), rel=squares.size * 2.0**-53)
    assert np.abs(recording.full(STATE, 0, "scale", use="exp_avg")).max() < 1e-3 * 0.11


@pytest.mark.exhaustive
def test_a_group_of_one_rank_records_as_one_device_does(ranks, tmp_path, alone):
    for kind in PARALLEL:
        directory = where(tmp_path, kind)
        ranks.run(1, partial(train, microbatches=2), kind, directory)
        recording = Recording.open(directory)
        assert recording.manifest.mesh.world_size == 1
        assert compare(recording, alone).verdict in FINE, kind


@pytest.mark.parametrize(
    "kind", ["ours fsdp1", "ours fsdp2", "torch fsdp1 flat", "torch fsdp2"] if LONG else ["ours fsdp1", "torch fsdp2"]
)
def test_replicas_of_shards_are_recorded_as_such(ranks, tmp_path, alone, kind):
    directory = where(tmp_path, kind)
    ranks.run(4, partial(train, hybrid=True, microbatches=2), kind, directory)
    recording = Recording.open(directory)
    assert (recording.manifest.mesh.replicate, recording.manifest.mesh.shard) == (2, 2)
    assert compare(recording, alone).verdict in FINE
    assert np.array_equal(recording.full(UPDATE, 0, "scale", replica=0), recording.full(UPDATE, 0, "scale", replica=1))


@pytest.mark.parametrize("kind", FEW if LONG else ["ours fsdp2 ragged"])
def test_perturbed_runs_of_any_kind_part_by_rounding_and_judge_the_run(ranks, tmp_path, kind):
    directory = where(tmp_path, kind)
    for perturbed_run in range(3):
        ranks.run(2, partial(train, dtype=torch.float32, recorder={"perturbed_run": perturbed_run}), kind, directory)
    recording = Recording.open(directory)
    values = recording.full(PARAMETERS, 0, "blocks.0.up.weight")
    for perturbed_run in recording.perturbed_runs():
        apart = np.abs(perturbed_run.full(PARAMETERS, 0, "blocks.0.up.weight") - values) / np.abs(values)
        assert apart.min() > 0 and apart.max() < 2.0**-22
        assert perturbed_run.manifest.settings["perturbed_run"] in (1, 2)
        if kind == "ddp":
            first, second = (perturbed_run.full(UPDATE, 1, "scale", replica=replica) for replica in range(2))
            assert np.array_equal(first, second)
    assert len(recording.perturbed_runs()) == 2
    ranks.run(1, partial(train, dtype=torch.float32), "one", where(tmp_path, "one"))
    assert compare(recording, Recording.open(where(tmp_path, "one"))).verdict in FINE


@pytest.mark.parametrize(
    ("kind", "reentrant"),
    list(product(["ddp", "ours fsdp1", "torch fsdp1", "torch fsdp2"], [True, False]))
    if LONG
    else [("ours fsdp1", False), ("torch fsdp1", True)],
)
def test_what_checkpointing_computes_again_is_recorded_once(ranks, tmp_path, alone, kind, reentrant):
    directory = where(tmp_path, kind)
    ranks.run(2, train_with_checkpointing, kind, directory, reentrant)
    recording = Recording.open(directory)
    assert compare(recording, alone).verdict in FINE
    assert recording.activations(0) == alone.activations(0)
    for name in NAMES:
        assert is_mean([recording.local(0, rank, name) for rank in range(2)], recording.full(REDUCE, 0, name))


def test_in_low_precision_what_forward_saw_is_low_and_what_the_optimizer_has_is_not(ranks, tmp_path):
    for kind in ("ours fsdp1", "torch fsdp2"):
        directory = where(tmp_path, kind)
        ranks.run(2, partial(train, dtype=torch.float32, low=True), kind, directory)
        recording = Recording.open(directory)
        assert recording.manifest.dtype == "bfloat16"
        assert recording.unsharded(0, 0, "scale").dtype.name == recording.local(0, 0, "scale").dtype.name == "bfloat16"
        assert recording.full(REDUCE, 0, "scale").dtype == recording.full(UPDATE, 0, "scale").dtype == np.float32


@pytest.mark.parametrize("api", ["fsdp1", "fsdp1 flat", "fsdp2"])
def test_under_torch_and_ours_low_gradients_of_microbatches_are_equal(ranks, tmp_path, api):
    """Nothing is reduced after the first microbatch, and the embedding is used twice in each."""
    low = {"dtype": torch.float32, "low": True, "reduce": torch.bfloat16, "microbatches": 2}
    recordings = []
    for whose in ("torch", "ours"):
        directory = where(tmp_path, whose)
        ranks.run(2, partial(train, **low), f"{whose} {api}", directory)
        recordings.append(Recording.open(directory))
    found = compare(*recordings)
    assert found.verdict is Verdict.EQUAL, found.reason


def test_sketches_say_what_full_tensors_say(ranks, tmp_path):
    full, sketched = where(tmp_path, "full"), where(tmp_path, "sketched")
    ranks.run(2, train, "torch fsdp2", full)
    ranks.run(2, partial(train, recorder={"detail": "sketch"}), "ours fsdp1", sketched)
    a, b = Recording.open(full), Recording.open(sketched)
    assert b.manifest.detail == "sketch"
    assert compare(a, b).verdict in FINE
    # embed.weight has 104 elements, and is smaller than its sketch.
    assert np.array_equal(a.full(UPDATE, 0, "embed.weight"), b.full(UPDATE, 0, "embed.weight"))


def test_a_window_makes_steps_dense_and_the_last_step_is_recorded_if_it_is_known(tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with Recorder(tmp_path, model=model, optimizer=optimizer, every=4, dense=0, windows=[(6, 7)], steps=10) as recorder:
        for step in range(10):
            if step == 2:
                recorder.open_window(1)
            tokens = batches(step, 0, 1)[0]
            nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            with torch.no_grad():
                model(tokens)  # an evaluation is no microbatch
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    recording = Recording.open(tmp_path)
    assert recording.recorded_steps() == (0, 2, 4, 6, 8, 9)
    assert recording.activations(2) and recording.activations(6) and not recording.activations(4)
    assert recording.state_slots(9, "scale") == ("momentum_buffer",)
    assert np.isfinite(recording.losses()).all() and recording.losses().shape == (10, 1)
    assert len(recording.batch(3, 0).sample_ids) == 4


def test_steps_whose_losses_wait_on_an_accelerator_are_written_in_their_places(tmp_path, monkeypatch):
    """There a step that records no tensors keeps its loss on the device, so that the loop need not wait for it."""

    def losses(folder):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Recorder(tmp_path / folder, model=model, optimizer=optimizer, every=4, dense=1) as recorder:
            for step in range(11):
                if step == 6:
                    recorder.open_window(2)
                tokens = batches(step, 0, 1)[0]
                nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step()
        recording = Recording.open(tmp_path / folder)
        assert recording.recorded_steps() == (0, 4, 6, 7, 8)
        return recording.losses().tolist()

    torch.manual_seed(0)
    at_once = losses("at_once")
    monkeypatch.setattr(Recorder, "_on_accelerator", True)
    torch.manual_seed(0)
    assert losses("later") == at_once and len(at_once) == 11


def test_what_groups_of_parameters_have_of_their_own_is_stated_of_each(tmp_path):
    model = Net()
    biases = [param for param in model.parameters() if param.ndim == 1]
    weights = [param for param in model.parameters() if param.ndim > 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 1e-3}]
    optimizer = torch.optim.AdamW(groups, 1e-2)
    with Recorder(tmp_path, model=model, optimizer=optimizer) as recorder:
        model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
        optimizer.step()
        recorder.step()
    made = Recording.open(tmp_path).manifest
    rules = {name: stated.rule for name in made.params if (stated := stated_rule(made, "AdamW", 1, name))}
    for name, rule in rules.items():
        assert (rule.rate, rule.decay) == ((1e-3, 0.0) if len(made.params[name].shape) == 1 else (1e-2, 0.1)), name


def test_an_optimizer_with_two_epsilons_is_recorded(tmp_path):
    model = Net()
    optimizer = torch.optim.Adafactor(model.parameters(), 1e-2)
    with Recorder(tmp_path, model=model, optimizer=optimizer) as recorder:
        model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
        optimizer.step()
        recorder.step()
    settings = Recording.open(tmp_path).manifest.settings
    assert settings["optimizer"] == "Adafactor" and "eps" not in settings and "weight_decay" in settings


@pytest.mark.parametrize(
    ("flags", "kernel"),
    [({}, "for-loop"), ({"foreach": True}, "foreach"), ({"fused": True}, "fused"), ({"foreach": False}, "for-loop")],
)
def test_the_kernel_of_the_optimizer_is_stated(tmp_path, flags, kernel):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), **flags)
    with Recorder(tmp_path, model=model, optimizer=optimizer) as recorder:
        model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
        optimizer.step()
        recorder.step()
    stated = Recording.open(tmp_path).manifest.settings[PROGRAM]
    assert (stated[OPTIMIZER_KERNEL], stated["channels_last"]) == (kernel, False)


def test_convolutions_with_channels_last_are_stated(tmp_path):
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with Recorder(tmp_path, model=model) as recorder:
        model(torch.ones(2, 2, 5, 5)).sum().backward()
        recorder.step()
    assert Recording.open(tmp_path).manifest.settings[PROGRAM]["channels_last"] is True


def _in_microbatches(directory, microbatches, *, use_labels=False, ignored=0):
    """Record two steps of a net whose forward is called with some rows at a time.

    Args:
        ignored: so many targets of the first row do not count. If there are any, the loss is the mean of microbatches' means.
    """

    class Labelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, tokens, labels=None):
            return self.net(tokens)

    torch.manual_seed(0)
    model = Labelled().double()
    if ignored:  # a head of its own: in a tied weight every row has a gradient
        model.net.head.weight = nn.Parameter(model.net.head.weight.detach().clone())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(directory, model=model, optimizer=optimizer, dense=2) as recorder:
        for step in range(2):
            tokens = batches(step, 0, 1)[0]
            for rows in microbatches:
                some = tokens[rows]
                out = model(some[:, :-1], **({"labels": some[:, 1:]} if use_labels else {}))
                targets = some[:, 1:].clone()
                targets[torch.tensor(rows) == 0, :ignored] = -100
                loss = nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten())
                (loss / len(microbatches) if ignored else loss * len(some) / len(tokens)).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    return Recording.open(directory)


def _with_masked_targets(rank, world_size, directory):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 9)).double()
    model[1].requires_grad_(False)
    wrapped = nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
    tokens = torch.arange(24).reshape(4, 6) % 9
    targets = torch.where(torch.arange(4)[:, None] * 2 > torch.arange(6), -100, tokens.flip(1))  # of 24, 12 count
    with Recorder(directory, model=wrapped, dense=1) as recorder:
        own = [each.chunk(world_size)[rank] for each in (tokens, targets)]
        nn.functional.cross_entropy(wrapped(own[0]).flatten(0, 1), own[1].flatten()).backward()
        recorder.step()


def test_a_mean_over_targets_is_told_from_one_of_the_means_of_ranks(ranks, tmp_path):
    for world_size in (1, 2):
        ranks.run(world_size, _with_masked_targets, str(tmp_path / str(world_size)))
    found = compare(*(Recording.open(tmp_path / name) for name in ("1", "2")))
    assert found.verdict is Verdict.BUG and found.diagnosis is not None, found.reason
    assert "which have shares of 0.8333, 0.1667 of them" in found.diagnosis.evidence


def test_a_mean_over_targets_is_told_from_one_of_the_means_of_microbatches(tmp_path):
    whole = _in_microbatches(tmp_path / "whole", [[0, 1, 2, 3]], ignored=2)
    found = compare(whole, _in_microbatches(tmp_path / "halves", [[0, 1], [2, 3]], ignored=2))
    assert found.verdict is Verdict.BUG and found.diagnosis is not None, found.reason
    targets = batches(0, 0, 1)[0][:, 1:]
    shares = [(targets[:2].numel() - 2) / (targets.numel() - 2), targets[2:].numel() / (targets.numel() - 2)]
    text = f"halves averages the means of microbatches, which have shares of {shares[0]:.4g}, {shares[1]:.4g} of them"
    assert f"whole averages over all terms, {text}" in found.diagnosis.evidence


def _wrapped_in_turn(rank, world_size, directory, way):
    """With "again", the second step wraps the model again, and the third calls it without its wrapper and averages gradients
    itself. With "evaluated", the model is also called without its wrapper, with gradients that nothing uses."""
    torch.manual_seed(0)
    model = Net()
    first = wrapped = nn.parallel.DistributedDataParallel(model)
    with Recorder(directory, model=first, dense=3, every=1) as recorder:
        for step in range(3):
            (tokens,) = batches(step, rank, world_size)
            if way == "evaluated" and step:
                model(tokens[:1, :-1])
            if way == "again" and step:
                wrapped = nn.parallel.DistributedDataParallel(model) if step == 1 else model
            nn.functional.cross_entropy(wrapped(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            for param in model.parameters() if wrapped is model else ():
                dist.all_reduce(param.grad)
                param.grad /= world_size
            recorder.step()
            model.zero_grad()


def test_a_model_may_be_wrapped_again_or_called_without_its_wrapper(ranks, tmp_path):
    for name in ("once", "again", "evaluated"):
        ranks.run(2, _wrapped_in_turn, str(tmp_path / name), name)
    once, *others = (Recording.open(tmp_path / name) for name in ("once", "again", "evaluated"))
    for other in others:
        assert all(len(once.activations(step)) == len(other.activations(step)) > 2 for step in range(3))
        found = compare(once, other)
        assert found.verdict in FINE, found.reason


def _with_divided_state(rank, world_size, directory, divides, detail):
    torch.manual_seed(0)
    wrapped = nn.parallel.DistributedDataParallel(Net())
    make = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW) if divides else torch.optim.AdamW
    optimizer = make(wrapped.parameters(), lr=1e-2)
    with Recorder(directory, model=wrapped, optimizer=optimizer, dense=1, every=1, detail=detail) as recorder:
        for step in range(2):
            (tokens,) = batches(step, rank, world_size)
            nn.functional.cross_entropy(wrapped(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_optimizer_state_that_each_rank_has_a_share_of_is_compared(ranks, tmp_path, detail):
    for name, divides in (("whole", False), ("divided", True)):
        ranks.run(2, _with_divided_state, str(tmp_path / name), divides, detail)
    whole, divided = (Recording.open(tmp_path / name) for name in ("whole", "divided"))
    of_ranks = [divided.ranges("state", 1, name, "exp_avg") for name in divided.manifest.params]
    assert {tuple(each.rank for each in ranges) for ranges in of_ranks} == {(0,), (1,)}
    found = compare(whole, divided)
    assert found.verdict is Verdict.EQUAL and "both follow the rule of AdamW" in found.notes[0], found.reason
    assert sum(each.phase == "state" for each in found.judged) >= 2 * len(of_ranks)


def test_other_microbatches_and_further_inputs_are_comparable(tmp_path):
    whole = _in_microbatches(tmp_path / "whole", [[0, 1, 2, 3]])
    for name, microbatches in (("halves", [[0, 1], [2, 3]]), ("reversed", [[2, 3], [0, 1]])):
        found = compare(whole, _in_microbatches(tmp_path / name, microbatches))
        assert found.verdict in FINE and "other microbatches" in found.notes[0], found.reason
        assert {each.name for each in found.judged} >= {"output of the model", "output of net.blocks.1.up"}
    found = compare(whole, _in_microbatches(tmp_path / "labels", [[0, 1, 2, 3]], use_labels=True))
    assert found.verdict is Verdict.EQUAL, found.reason
    # A microbatch that is called twice is another batch.
    found = compare(whole, _in_microbatches(tmp_path / "twice", [[0, 1], [0, 1]]))
    assert found.verdict is Verdict.INCOMPARABLE and "the batch of rank 0 at step 0 differs" in found.reason


def test_hooks_and_replaced_functions_are_gone_afterwards(tmp_path):
    model, before = Net(), torch.autograd.backward
    scale, clip = torch.amp.GradScaler.scale, nn.utils.clip_grad._clip_grads_with_norm_
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder(tmp_path, model=model, optimizer=optimizer, dense=5) as recorder:
        assert torch.autograd.backward is not before
        loss = model(torch.zeros(2, 3, dtype=torch.long)).sum()
        loss.backward()
        optimizer.step()
        recorder.step()
    assert torch.autograd.backward is before
    assert (torch.amp.GradScaler.scale, nn.utils.clip_grad._clip_grads_with_norm_) == (scale, clip)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(param._backward_hooks for param in model.parameters())


def test_a_scaled_loss_is_recorded_unscaled_and_autocast_is_the_dtype_of_the_run(tmp_path):
    losses = {}
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with Recorder(tmp_path / str(scale), model=model, optimizer=optimizer) as recorder:
            for step in range(2):
                tokens = batches(step, 0, 1)[0]
                with torch.autocast("cpu", torch.bfloat16):
                    logits = model(tokens[:, :-1])
                    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                recorder.step()
                losses.setdefault(scale, []).append(loss.item())
    plain, scaled = (Recording.open(tmp_path / str(scale)) for scale in losses)
    assert plain.manifest.dtype == scaled.manifest.dtype == "bfloat16"
    assert plain.losses()[:, 0].tolist() == losses[1.0] and scaled.losses()[:, 0].tolist() == losses[1024.0]
    # A power of two: not even rounding differs.
    assert np.array_equal(plain.full(REDUCE, 1, "scale"), scaled.full(REDUCE, 1, "scale"))
    assert plain.grad_norm(1, 0) == scaled.grad_norm(1, 0)


def test_gradients_that_a_fused_optimizer_unscales_are_recorded_unscaled(tmp_path):
    for fused in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with Recorder(tmp_path / str(fused), model=model, optimizer=optimizer) as recorder:
            tokens = batches(0, 0, 1)[0]
            logits = model(tokens[:, :-1])
            scaler.scale(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())).backward()
            scaler.step(optimizer)
            recorder.step()
    loop, fused = (Recording.open(tmp_path / str(fused)) for fused in (False, True))
    assert np.array_equal(loop.full(REDUCE, 0, "scale"), fused.full(REDUCE, 0, "scale"))


def test_optimizers_that_take_turns_have_the_gradients_that_they_got_recorded(tmp_path):
    """As in an adversarial network, where backward goes through the discriminator twice."""
    torch.manual_seed(0)
    models = nn.ModuleDict({"generator": nn.Linear(3, 4), "discriminator": nn.Linear(4, 1)})
    generate, judge = models.values()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (generate, judge)]
    got = []
    with Recorder(tmp_path / "out", model=models, every=1) as recorder:
        for _ in range(2):
            fakes = generate(torch.randn(5, 3))
            for model, optimizer in zip((generate, judge), optimizers, strict=True):
                optimizer.zero_grad()
                loss = -judge(fakes) if model is generate else judge(fakes.detach()) - judge(torch.randn(5, 4))
                loss.mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                got.append(model.weight.grad.clone())
                optimizer.step()
            recorder.step()
    recording = Recording.open(tmp_path / "out")
    names = product(range(2), ("generator.weight", "discriminator.weight"))
    recorded = [torch.as_tensor(recording.full(REDUCE, *at)) for at in names]
    cosines = [torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) for a, b in zip(got, recorded, strict=True)]
    assert min(cosines) > 1 - 1e-6  # in float32; clipping leaves the direction
    assert min(torch.linalg.norm(each) for each in recorded) > 0.01  # before clipping


def test_what_nothing_reached_has_zeros_as_its_own_gradient_and_no_reduced_one(tmp_path):
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

        def forward(self, x):
            return self.used(x * self.frozen)

    model = Half()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(tmp_path, model=model, optimizer=optimizer) as recorder:
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        recorder.step()
    recording = Recording.open(tmp_path)
    assert recording.local(0, 0, "unused.weight").tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert not recording.has(BACKWARD, 0, "frozen") and recording.has(UNSHARDED, 0, "frozen")
    assert [name for name in recording.manifest.params if recording.has(REDUCE, 0, name)] == [
        "used.weight",
        "used.bias",
    ]


def test_a_model_may_be_copied_and_pickled_and_call_a_module_twice_while_it_is_recorded(tmp_path):
    block = nn.Linear(4, 4)
    model = nn.Sequential(block, nn.GELU(), block)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(tmp_path, model=model, optimizer=optimizer) as recorder:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
            copied(torch.zeros(2, 4))
            loaded(torch.zeros(2, 4))
            # A file that a recorded script writes needs nothing of this project.
            torch.save(model, file := tmp_path.parent / "model.pt")
            with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.GELU]):
                assert not torch.load(file, weights_only=True)[0]._forward_hooks
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    recording = Recording.open(tmp_path)
    calls = [(0, call, use) for call in ("0", "0 (call 2)") for use in ("input", "output")]
    assert recording.activations(1) == [(0, "", "input"), *calls, (0, "", "output")]
    grad = recording.local(0, 0, "0.weight")
    assert np.array_equal(grad, recording.full(REDUCE, 0, "0.weight"))


def test_a_loop_that_fails_leaves_no_end(tmp_path):
    model = Net()
    with pytest.raises(ZeroDivisionError), Recorder(tmp_path, model=model) as recorder:
        model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
        recorder.step()
        raise ZeroDivisionError
    with pytest.raises(RecordingError, match="cut off"):
        Recording.open(tmp_path)
    assert Recording.open(tmp_path, partial=True).num_steps == 1


class Counts(nn.Linear):
    """A model that returns integers."""

    def forward(self, x):
        return super().forward(x).argmax(-1)


def test_what_cannot_be_recorded_is_refused_with_what_to_do(tmp_path):
    model = Net()
    with pytest.raises(UsageError, match="expected a module"):
        Recorder(tmp_path, model=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="detail: expected"):
        Recorder(tmp_path, model=model, detail="some")
    with pytest.raises(UsageError, match="perturbed_run: expected 0, or the number of a perturbed run"):
        Recorder(tmp_path, model=model, perturbed_run=-1)
    with pytest.raises(RecordingError, match="no step was recorded"), Recorder(tmp_path / "a", model=model):
        pass
    with pytest.raises(UsageError, match="no backward"), Recorder(tmp_path / "b", model=model) as recorder:
        model(torch.zeros(2, 3, dtype=torch.long))
        recorder.step()
    with pytest.raises(UsageError, match="no forward"), Recorder(tmp_path / "c", model=model) as recorder:
        recorder.step(loss=1.0)
    with (
        pytest.raises(UsageError, match="each call of the model is a step"),
        Recorder(tmp_path / "e", model=model, forward_only=True) as recorder,
    ):
        recorder.step()
    counts = Counts(2, 2)
    with (
        pytest.raises(UsageError, match="a model that returns a floating tensor"),
        Recorder(tmp_path / "f", model=counts, forward_only=True),
    ):
        counts(torch.zeros(2, 2))
    with (
        pytest.raises(UsageError, match="no module is called 'layers'"),
        Recorder(tmp_path / "d", model=model, units=["layers"]) as recorder,
    ):
        model(torch.zeros(2, 3, dtype=torch.long))


def test_where_the_first_rank_cannot_begin_no_rank_does(ranks, tmp_path):
    Path(tmp_path, "notes.txt").write_text("mine")
    said = ranks.run(2, train_without_a_rank, "ours fsdp1", str(tmp_path))
    assert "not empty and not a recording" in said[0]
    assert said[1].startswith(AgreementError.__name__) and "not empty and not a recording" in said[1]


def test_units_of_a_plain_model_are_chosen_by_name_class_or_policy():
    model = nn.Sequential(nn.Embedding(4, 4), nn.ModuleDict({"body": nn.ModuleList(Block() for _ in range(3))}))
    blocks = {f"1.body.{i}" for i in range(3)}
    assert choose_units(model, None) == blocks
    assert choose_units(model, Block) == choose_units(model, [Block]) == blocks
    assert choose_units(model, "1.body.1") == {"1.body.1"}
    assert choose_units(model, lambda module, recurse, nonwrapped_numel: isinstance(module, Block)) == blocks
    assert choose_units(nn.Linear(2, 2), None) == set()
    with pytest.raises(UsageError, match="expected names or classes"):
        choose_units(model, 3)


def test_wrappers_are_in_no_name():
    model = torch.compile(Net(), backend="eager")
    names = [place.name for place in named_modules(model)]  # type: ignore[arg-type]
    assert names[:3] == ["", "", "embed"]
    assert all(place.compiled for place in list(named_modules(model))[1:])  # type: ignore[arg-type]


class Swapped(nn.Module):
    """Registers the second layer before the first one."""

    def __init__(self):
        super().__init__()
        self.second, self.first = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def test_gradients_of_a_unit_come_in_the_reverse_order_of_calls(tmp_path):
    model = nn.Sequential(Swapped(), Swapped())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(tmp_path / "run", model=model, optimizer=optimizer) as recorder:
        loss = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        recorder.step(loss=loss)
    modules = [name.rpartition(".")[0] for name in Recording.open(tmp_path / "run").backward_order]
    assert list(dict.fromkeys(modules)) == ["1.second", "1.first", "0.second", "0.first"]
