"""Interleaved stages, some of them divided, weights divided without DTensors, and context next to tensor parallelism."""

import shutil
import warnings
from functools import partial
from io import StringIO
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from crossframe.cli.record import record_script
from crossframe.cli.training_command import TrainingCommand
from crossframe.errors import UsageError
from crossframe.recording import Recording
from crossframe.recording.event_format import UPDATE
from crossframe.verdict import Verdict, compare
from torch_backend.recorder import Recorder

WIDTH, WORDS, LENGTH, SAMPLES, BLOCKS = 8, 12, 8, 4, 4
FINE = (Verdict.EQUAL, Verdict.ROUNDING)


class Sum(torch.autograd.Function):
    """The sum over a group in forward, in backward or in both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, there: bool, back: bool) -> Tensor:
        ctx.group = group if back else None
        x = x.clone()
        if there:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grads[0].clone()
        if ctx.group is not None:
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None, None


def marked(weight: Tensor, group: Any, dim: int, stride: int, mark: bool) -> nn.Parameter:
    """This rank's part of a weight, with Megatron-LM's attributes if `mark`."""
    if group is None:
        return nn.Parameter(weight)
    runs = weight.detach().chunk(stride, dim)
    own: Any = nn.Parameter(torch.cat([run.chunk(group.size(), dim)[group.rank()] for run in runs], dim))
    if mark:
        own.tensor_model_parallel, own.partition_dim, own.partition_stride = True, dim, stride
    return own


class Up(nn.Module):
    """Two layers in one, side by side, that a group divides by rows."""

    def __init__(self, group: Any, mark: bool) -> None:
        super().__init__()
        self.group, stride = group, 2 if mark else 1
        self.weight = marked(torch.randn(32, WIDTH), group, 0, stride, mark)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x if self.group is None else Sum.apply(x, self.group, False, True), self.weight)


class Down(nn.Linear):
    """A layer that a group divides by columns. Its bias is not divided."""

    def __init__(self, group: Any, mark: bool) -> None:
        super().__init__(16 if mark else 32, WIDTH)
        self.group, self.weight = group, marked(self.weight, group, 1, 1, mark)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.linear(x, self.weight)
        return self.bias + (x if self.group is None else Sum.apply(x, self.group, True, False))


class Gated(nn.Module):
    """A residual block whose layers a group divides."""

    def __init__(self, group: Any, mark: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.gates = nn.LayerNorm(WIDTH), Up(group, mark), Down(group, mark), mark

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        if self.gates:
            gate, y = y.chunk(2, -1)
            y = y * gate.sigmoid()
        return x + self.down(functional.gelu(y))


class Block(nn.Module):
    """A residual block, after a causal mean over the positions if `mixes`."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.mixes, self.context = mixes, None
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.mixes:
            sums = x.sum(1, keepdim=True)
            x = x + (sums if self.context is None else Sum.apply(sums, self.context, True, True)) / LENGTH
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tokens to logits, or the part of that which a stage computes."""

    def __init__(self, blocks: dict[str, nn.Module], stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        self.embed: Any = nn.Embedding(WORDS, WIDTH)
        self.norm: Any = nn.LayerNorm(WIDTH)
        self.head: Any = nn.Linear(WIDTH, WORDS, bias=False)
        first, last = (len(blocks) * each // stages for each in (stage, stage + 1))
        self.blocks = nn.ModuleDict({name: block for name, block in blocks.items() if first <= int(name) < last})
        if stage > 0:
            self.embed = None
        if stage < stages - 1:
            self.norm = self.head = None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def made(stage: int = 0, stages: int = 1, *, mixes: bool = False, blocks: int = BLOCKS) -> Any:
    torch.manual_seed(0)
    return Net({str(i): Block(mixes) for i in range(blocks)}, stage, stages).double()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(
    model: Any, directory: str, *, microbatches: int = 1, group: Any = None, replicas: Any = None, **options: Any
) -> None:
    """Train a model, or the stages of `schedule`.

    Args:
        group: over which gradients are averaged, and positions are divided.
        replicas: over which gradients are averaged, and samples are divided.
    """
    schedule, after = options.pop("schedule", None), options.pop("after", None)
    parts = model if isinstance(model, list) else [model]
    every = [param for part in parts for param in part.parameters()]
    optimizer = torch.optim.AdamW(every, options.pop("rate", 1e-2), foreach=False)
    options = {"name": "net", "every": 1, "dense": 1, "units": (Block, Gated)} | options
    with Recorder(directory, model=model, optimizer=optimizer, **options) as recorder:
        for step in range(2):
            samples = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
            tokens, targets = samples[:, :-1], samples[:, 1:]
            losses: list[Tensor] = []
            if group is not None:
                tokens, targets = (each.chunk(group.size(), 1)[group.rank()] for each in (tokens, targets))
            if replicas is not None:
                tokens, targets = (each.chunk(replicas.size())[replicas.rank()] for each in (tokens, targets))
            if schedule is not None:
                is_last = options["pipeline"].rank() == options["pipeline"].size() - 1
                arguments = (tokens,) if options["pipeline"].rank() == 0 else ()
                schedule.step(*arguments, target=targets if is_last else None, losses=losses if is_last else None)
                loss = torch.stack(losses).detach().mean() if losses else None
            else:
                for x, y in zip(tokens.chunk(microbatches), targets.chunk(microbatches), strict=True):
                    losses.append(loss_of(model(x), y))
                    (losses[-1] / microbatches).backward()
                loss = torch.stack(losses).detach().mean()
            for part in parts:
                for param in part.parameters() if (averages := group or replicas) is not None else ():
                    grad = param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad
                    dist.all_reduce(grad, group=averages)
                    grad.div_(averages.size())
            if after is not None:
                after()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss)


def alone(rank: int, world_size: int, directory: str, *, microbatches: int = 1, **options: Any) -> None:
    train(made(**options), directory, microbatches=microbatches)


def interleaved(rank: int, world_size: int, directory: str, *, damped: bool = False) -> None:
    group = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)).get_group()
    parts = [made(number, BLOCKS) for number in (rank, rank + 2)]
    if damped and rank == 0:
        parts[1].blocks["2"].register_forward_hook(lambda module, args, output: output * 0.999)
    stages: list[Any] = [
        PipelineStage(part, number, BLOCKS, torch.device("cpu"), group=group)
        for part, number in zip(parts, (rank, rank + 2), strict=True)
    ]
    train(parts, directory, pipeline=group, schedule=ScheduleInterleaved1F1B(stages, SAMPLES, loss_fn=loss_of))


@pytest.fixture(scope="module")
def microbatches_alone(ranks, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("microbatches") / "run")
    ranks.run(1, partial(alone, microbatches=SAMPLES), directory)
    return Recording.open(directory)


def test_interleaved_stages_are_recorded_as_one_device_is(ranks, tmp_path, microbatches_alone):
    directories = [str(tmp_path / name) for name in ("right", "wrong")]
    ranks.run(2, interleaved, directories[0])
    ranks.run(2, partial(interleaved, damped=True), directories[1])
    one, right, wrong = microbatches_alone, *map(Recording.open, directories)
    assert compare(one, right).verdict in FINE, compare(one, right)
    assert set(right.manifest.params) == set(one.manifest.params)
    assert set(right.activations(0)) == set(one.activations(0))
    found = compare(one, wrong)
    assert found.verdict is Verdict.BUG and found.first_divergence is not None, found
    assert found.first_divergence.module == "blocks.2"


def tied(rank: int, world_size: int, directory: str, *, sums: bool = True) -> None:
    """The head is the embedding; each of two stages has a copy of it."""
    parts = [made(stage, 2) for stage in range(2)] if world_size > 1 else [made()]
    if world_size == 1:
        parts[0].head.weight = parts[0].embed.weight
        return train(parts[0], directory, microbatches=SAMPLES)
    parts[1].head.weight.data.copy_(parts[0].embed.weight.data)
    group = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)).get_group()
    weight = parts[1].head.weight if rank else parts[0].embed.weight
    stage = PipelineStage(parts[rank], rank, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, SAMPLES, loss_fn=loss_of)
    after = (lambda: dist.all_reduce(weight.grad)) if sums else None
    return train(parts[rank], directory, pipeline=group, schedule=schedule, after=after)


def test_tied_weights_of_two_stages_are_recorded_once_and_compared(ranks, tmp_path):
    ranks.run(1, tied, str(tmp_path / "one"))
    ranks.run(2, tied, str(tmp_path / "right"))
    ranks.run(2, partial(tied, sums=False), str(tmp_path / "wrong"))
    one, right, wrong = (Recording.open(tmp_path / name) for name in ("one", "right", "wrong"))
    assert compare(one, right).verdict in FINE, compare(one, right)
    assert set(right.manifest.params) == set(one.manifest.params)
    found = compare(one, wrong)
    assert found.verdict is Verdict.BUG and "mesh axis 'pp', rank 1 differ" in found.reason, found


def seeded_alike(rank: int, world_size: int, directory: str, *, rate: float = 1e-2) -> None:
    """Layers that begin with the same values, and are not tied.

    Args:
        rate: the learning rate of the second stage.
    """

    def block() -> Block:
        torch.manual_seed(0)
        return Block()

    part: Any = Net({str(i): block() for i in range(BLOCKS)}, rank, world_size).double()
    for seed, module in enumerate((part.embed, part.head)):
        if module is not None:
            nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(seed))
    if world_size == 1:
        return train(part, directory, microbatches=SAMPLES)
    group = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)).get_group()
    stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, SAMPLES, loss_fn=loss_of)
    return train(part, directory, pipeline=group, schedule=schedule, rate=rate if rank else 1e-2)


@pytest.fixture(scope="module")
def seeded_alike_alone(ranks, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("seeded alike") / "run")
    ranks.run(1, seeded_alike, directory)
    return Recording.open(directory)


def test_layers_that_begin_alike_are_not_taken_for_tied(ranks, tmp_path, seeded_alike_alone):
    ranks.run(2, seeded_alike, str(tmp_path / "stages"))
    one, stages = seeded_alike_alone, Recording.open(tmp_path / "stages")
    assert stages.manifest.params.keys() == one.manifest.params.keys()
    assert compare(one, stages).verdict in FINE, compare(one, stages)


def test_a_stage_with_another_learning_rate_is_recorded_and_found(ranks, tmp_path, seeded_alike_alone):
    ranks.run(2, partial(seeded_alike, rate=1e-3), str(tmp_path / "wrong"))
    found = compare(seeded_alike_alone, Recording.open(tmp_path / "wrong"))
    assert found.verdict is Verdict.BUG and found.first_divergence is not None, found
    assert found.first_divergence.phase == UPDATE, found.first_divergence


def sequential(rank: int, world_size: int, directory: str, *, damped: bool = False) -> None:
    """Two stages whose parameters have the same names."""
    torch.manual_seed(0)
    parts: list[Any] = [
        nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()).double(),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)).double(),
    ]
    if world_size == 1:
        return train(
            nn.Sequential(*(each for part in parts for each in part)), directory, microbatches=SAMPLES, units=None
        )
    if damped and rank == 1:
        parts[1][1].register_forward_hook(lambda module, args, output: output * 0.999)
    group = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)).get_group()
    schedule = Schedule1F1B(
        PipelineStage(parts[rank], rank, 2, torch.device("cpu"), group=group), SAMPLES, loss_fn=loss_of
    )
    return train(parts[rank], directory, pipeline=group, schedule=schedule, units=None)


def test_stages_with_the_same_names_are_recorded_by_number(ranks, tmp_path):
    for name, num_ranks, damped in (("one", 1, False), ("right", 2, False), ("wrong", 2, True)):
        ranks.run(num_ranks, partial(sequential, damped=damped), str(tmp_path / name))
    one, right, wrong = (Recording.open(tmp_path / name) for name in ("one", "right", "wrong"))
    names = [
        f"stages.{stage}.{name}" for stage, name in ((0, "0.weight"), (0, "1.weight"), (1, "0.weight"), (1, "1.bias"))
    ]
    assert {*names} <= right.manifest.params.keys() and len(right.manifest.params) == len(one.manifest.params)
    assert compare(one, right).verdict in FINE, compare(one, right)
    found = compare(one, wrong)
    assert found.verdict is Verdict.BUG and found.first_divergence is not None, found
    assert found.first_divergence.module == "4"


def wrong_stages(rank: int, world_size: int, directory: str) -> str:
    group = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)).get_group()
    with pytest.raises(UsageError) as raised:
        Recorder(directory, model=[made(rank, 2)], pipeline=group, stages=[1])
    return str(raised.value)


def test_numbers_of_stages_that_do_not_fit_raise(ranks, tmp_path):
    assert all("stages" in each for each in ranks.run(2, wrong_stages, str(tmp_path)))


def some_stages_divided(rank: int, world_size: int, directory: str, *, divided: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    part = made(stage, 2)
    if stage == divided:
        for block in part.blocks.values():
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    one = PipelineStage(part, stage, 2, torch.device("cpu"), group=group)
    train(part, directory, pipeline=group, schedule=Schedule1F1B(one, SAMPLES, loss_fn=loss_of))


@pytest.mark.parametrize("divided", [0, 1])
def test_stages_of_which_one_is_divided_are_recorded_as_one_device_is(ranks, tmp_path, microbatches_alone, divided):
    ranks.run(4, partial(some_stages_divided, divided=divided), str(tmp_path / "stages"))
    one, stages = microbatches_alone, Recording.open(tmp_path / "stages")
    assert compare(one, stages).verdict in FINE, compare(one, stages)
    assert stages.manifest.mesh.world_size == 1


def gated(rank: int, world_size: int, directory: str, *, mark: bool, states: bool = True, skips: bool = False) -> None:
    group = None if world_size == 1 else init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)).get_group()
    torch.manual_seed(0)
    model: Any = Net({str(i): Gated(group, mark) for i in range(2)}).double()
    options: dict[str, Any] = {}
    if group is not None:
        options["tensor_parallel"] = group if states else None
        options["partition"] = {} if mark else {"*.up.weight": 0, "*.down.weight": 1}
    if skips and rank == 1:
        options["after"] = lambda: model.blocks["1"].norm.weight.grad.mul_(1.25)
    train(model, directory, **options)


@pytest.mark.parametrize("mark", [True, False], ids=["attributes", "stated"])
def test_weights_divided_without_dtensors_are_recorded_in_full(ranks, tmp_path, gated_alone, mark):
    for name, skips in (("right", False), ("wrong", True)):
        ranks.run(2, partial(gated, mark=mark, skips=skips), str(tmp_path / name))
    one, right, wrong = gated_alone[mark], *(Recording.open(tmp_path / name) for name in ("right", "wrong"))
    assert compare(one, right).verdict in FINE, compare(one, right)
    assert {name: spec.shape for name, spec in right.manifest.params.items()} == {
        name: spec.shape for name, spec in one.manifest.params.items()
    }
    assert set(right.activations(0)) == set(one.activations(0))
    found = compare(one, wrong)
    assert found.verdict is Verdict.BUG and "mesh axis 'tp', rank 1 differ" in found.reason, found


def without_group(
    rank: int, world_size: int, directory: str, *, mark: bool, wrong: str = "", perturbed_run: int = 0
) -> list[str]:
    """Data-parallel ranks next to tensor-parallel ones, whose group the recorder is not told; returns the warnings."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: Any = Net({str(i): Gated(mesh["tp"].get_group(), mark) for i in range(2)}).double()
    norm = model.blocks["1"].norm.weight
    options: dict[str, Any] = {} if mark else {"partition": {"*.up.weight": 0, "*.down.weight": 1}}
    options["perturbed_run"] = perturbed_run
    if wrong and mesh[wrong].get_local_rank():
        options["after"] = lambda: norm.grad.mul_(1.25)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, directory, replicas=mesh["dp"].get_group(), **options)
    return [str(each.message) for each in caught if "not recorded" in str(each.message)]


@pytest.fixture(scope="module")
def gated_alone(ranks, tmp_path_factory):
    """A recording of `gated` on one device, by `mark`."""
    folder = tmp_path_factory.mktemp("alone")
    for mark in (True, False):
        ranks.run(1, partial(gated, mark=mark), str(folder / str(mark)))
    return {mark: Recording.open(folder / str(mark)) for mark in (True, False)}


@pytest.fixture(scope="module")
def left_out(ranks, tmp_path_factory):
    """The warnings and the recording of `without_group`, by `mark`."""
    folder = tmp_path_factory.mktemp("left out")
    found = {mark: ranks.run(4, partial(without_group, mark=mark), str(folder / str(mark))) for mark in (True, False)}
    return {mark: (warned, Recording.open(folder / str(mark))) for mark, warned in found.items()}


@pytest.mark.parametrize("mark", [True, False], ids=["attributes", "stated"])
def test_weights_divided_over_unknown_ranks_are_left_out_and_the_rest_is_compared(gated_alone, left_out, mark):
    one, (found, right) = gated_alone[mark], left_out[mark]
    assert [len(each) for each in found] == [1, 0, 0, 0] and "tensor_parallel=" in found[0][0]
    divided = {f"blocks.{i}.{name}.weight" for i in range(2) for name in ("up", "down")}
    assert one.manifest.params.keys() - right.manifest.params.keys() == divided
    assert right.manifest.mesh.world_size == 2
    uses = {(module, use) for _, module, use in right.activations(0)}
    assert ("blocks.0.down", "output") in uses and ("blocks.0.down", "input") not in uses
    comparison = compare(one, right)
    assert comparison.verdict in FINE, comparison
    assert any("blocks.0.up.weight" in note and "not compared" in note for note in comparison.notes), comparison.notes


def test_perturbed_runs_have_the_ranks_of_the_run(ranks, tmp_path, left_out):
    shutil.copytree(left_out[True][1].directory, tmp_path / "run")
    ranks.run(4, partial(without_group, mark=True, perturbed_run=1), str(tmp_path / "run"))
    found = Recording.open(tmp_path / "run")
    assert [each.manifest.mesh for each in found.perturbed_runs()] == [found.manifest.mesh]


def test_ranks_that_disagree_are_found_where_divided_weights_are_left_out(ranks, tmp_path, gated_alone):
    ranks.run(4, partial(without_group, mark=True, wrong="tp"), str(tmp_path / "wrong"))
    found = compare(gated_alone[True], Recording.open(tmp_path / "wrong"))
    assert found.verdict is Verdict.BUG and "mesh axis 'tp', ranks 1, 3 differ" in found.reason, found


def two_axes(rank: int, world_size: int, directory: str, *, skips: str = "") -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model, group = made(mixes=True, blocks=1), mesh["cp"].get_group()
    for block in model.blocks.values():
        block.context = group
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    options: dict[str, Any] = {}
    if skips and mesh[skips].get_local_rank():
        options["after"] = lambda: model.norm.weight.grad.mul_(1.25)
    train(model, directory, group=group, context=group, **options)


@pytest.mark.parametrize(("axis", "others"), [pytest.param("cp", "2, 3", marks=pytest.mark.exhaustive), ("tp", "1, 3")])
def test_context_next_to_tensor_parallelism_names_the_axis(ranks, tmp_path, axis, others):
    ranks.run(1, partial(alone, mixes=True, blocks=1), str(tmp_path / "one"))
    ranks.run(4, two_axes, str(tmp_path / "right"))
    ranks.run(4, partial(two_axes, skips=axis), str(tmp_path / "wrong"))
    one, right, wrong = (Recording.open(tmp_path / name) for name in ("one", "right", "wrong"))
    assert compare(one, right).verdict in FINE, compare(one, right)
    assert set(right.activations(0)) == set(one.activations(0))
    found = compare(one, wrong)
    assert found.verdict is Verdict.BUG and f"mesh axis {axis!r}, ranks {others} differ" in found.reason, found


def stages_of_parts(rank: int, world_size: int, directory: str, *, damped: bool = False) -> None:
    """Two stages, each on two ranks that have halves of the sequences."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    stage, group, context = mesh["pp"].get_local_rank(), mesh["pp"].get_group(), mesh["cp"].get_group()
    part = made(stage, 2, mixes=True)
    for block in part.blocks.values():
        block.context = context
    if damped and stage == 1:
        part.blocks["2"].register_forward_hook(lambda module, args, output: output * 0.999)
    one = PipelineStage(part, stage, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(one, SAMPLES, loss_fn=loss_of)
    train(part, directory, group=context, context=context, pipeline=group, schedule=schedule)


def test_stages_of_parts_of_sequences_are_recorded_as_one_device_is(ranks, tmp_path):
    ranks.run(1, partial(alone, mixes=True, microbatches=SAMPLES), str(tmp_path / "one"))
    ranks.run(4, stages_of_parts, str(tmp_path / "right"))
    ranks.run(4, partial(stages_of_parts, damped=True), str(tmp_path / "wrong"))
    one, right, wrong = (Recording.open(tmp_path / name) for name in ("one", "right", "wrong"))
    assert compare(one, right).verdict in FINE, compare(one, right)
    assert set(right.activations(0)) == set(one.activations(0)) and right.manifest.mesh.world_size == 1
    found = compare(one, wrong)
    assert found.verdict is Verdict.BUG and found.first_divergence is not None, found
    assert found.first_divergence.module == "blocks.2"


SCRIPT = """
import os
import sys

sys.path.insert(0, os.getcwd())

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor.experimental import context_parallel
from tests.on_torch.recorder.test_further_parallelism import (
    BLOCKS, LENGTH, SAMPLES, WORDS, Gated, Net, loss_of, made
)

kind, microbatches = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
rank, group, parts = 0, None, [made(mixes=microbatches == 1)]
if kind != "one":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    rank, group = mesh.get_local_rank(), mesh.get_group()
if "divided" in sys.argv:
    torch.manual_seed(0)
    parts = [Net({str(i): Gated(group, True) for i in range(2)}).double()]
if kind == "stages":
    numbers = rank, rank + 2
    parts = [made(number, BLOCKS) for number in numbers]
    of = lambda part, number: PipelineStage(part, number, BLOCKS, torch.device("cpu"))  # of all ranks
    schedule = ScheduleInterleaved1F1B([*map(of, parts, numbers)], SAMPLES, loss_fn=loss_of)
elif kind == "context":
    for block in parts[0].blocks.values():
        block.context = group
optimizers = [torch.optim.AdamW(part.parameters(), 1e-2, foreach=False) for part in parts]
for step in range(2):
    samples = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    x, y = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
    if kind == "stages":
        schedule.step(*([] if rank else [x]), target=y if rank else None)
    elif kind == "context":
        with context_parallel(mesh, buffers=[x, y], buffer_seq_dims=[1, 1]):
            loss_of(parts[0](x), y).backward()
        for param in parts[0].parameters():
            dist.all_reduce(param.grad)
            param.grad.div_(2)
    else:
        for own, targets in zip(x.chunk(microbatches), y.chunk(microbatches)):
            (loss_of(parts[0](own), targets) / microbatches).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
if kind != "one":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("kind", "microbatches"), [("stages", SAMPLES), ("context", 1), ("divided", 1)])
def test_unchanged_parallel_scripts_are_recorded(forks, tmp_path, kind, microbatches):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    options = {"every": 1, "dense": 1, "perturbed_runs": 0, "windows": (), "overwrite": False}
    for name, ranks in (("one", None), (kind, 2)):
        given = options | {"output": tmp_path / name}
        console = Console(file=StringIO())
        more = ("divided",) if kind == "divided" else ()
        command = TrainingCommand(path, (name, str(microbatches), *more), nproc_per_node=ranks)
        record_script(command, console=console, **given)
    one, divided = Recording.open(tmp_path / "one"), Recording.open(tmp_path / kind)
    assert compare(one, divided).verdict in FINE, compare(one, divided)
    assert divided.manifest.mesh.world_size == 1
    if kind == "divided":  # the recorder does not know over which ranks
        assert one.manifest.params.keys() - divided.manifest.params.keys() >= {"blocks.0.up.weight"}
        assert {module for _, module, _ in divided.activations(0)} >= {"blocks.0.down", "blocks.0.norm", "head"}
    else:
        assert set(divided.activations(0)) == set(one.activations(0))
