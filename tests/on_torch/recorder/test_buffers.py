"""Buffers of models, recorded after each step."""

import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from crossframe.errors import UsageError
from crossframe.recording import Recording, Sketch
from crossframe.verdict import Verdict, compare
from crossframe.verdict.measure.buffers import averaged_parameter
from tests.on_torch.helpers.recorded_loops import KINDS
from torch_backend.compat._dtypes import to_numpy
from torch_backend.recorder import Recorder, script
from torch_backend.recorder._module_tree import LARGEST_IN_FULL, named_buffers

WIDTH = 4
STATISTICS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.up(x)))


class Net(nn.Module):
    """Blocks with batch norms, and a center that all ranks share."""

    center: Tensor

    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)
        self.register_buffer("center", torch.zeros(2))
        self.momentum = momentum

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.head(x) - self.center
        if self.training:
            mean = x.detach().mean(0)
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            self.center.lerp_(mean, self.momentum)
        return x


def train(
    rank: int, world_size: int, kind: str, directory: str, *, momentum: float = 0.1
) -> list[dict[str, np.ndarray]]:
    """The buffers of this rank before the first step and after each of two steps."""
    torch.manual_seed(0)
    net = Net(momentum).double()
    model = KINDS[kind](net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = [_copies(net)]
    with Recorder(directory, model=model, optimizer=optimizer, name="net", every=1, dense=1) as recorder:
        for step in range(2):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            loss = model(x.chunk(world_size)[rank]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss)
            found.append(_copies(net))
    return found


def _copies(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: to_numpy(value).copy() for name, value in named_buffers(model)}


@pytest.mark.parametrize("kind", ["ddp", "ours fsdp1", "ours fsdp2", "torch fsdp2"])
def test_each_rank_records_its_own_buffers(ranks, tmp_path, kind):
    directory = str(tmp_path / "run")
    of_ranks = ranks.run(2, train, kind, directory)
    recording = Recording.open(directory)
    names = ["center", *(f"blocks.{i}.{name}" for i in range(2) for name in STATISTICS)]
    assert recording.initial_buffers() == names and sorted(recording.buffers(1)) == sorted(names)
    for rank, found in enumerate(of_ranks):
        for step, buffers in enumerate(found, -1):
            for name, value in buffers.items():
                assert np.array_equal(recording.buffer(step, rank, name), value), (rank, step, name)
    other = recording.buffer(1, 1, "blocks.0.norm.running_mean")
    assert not np.array_equal(recording.buffer(1, 0, "blocks.0.norm.running_mean"), other)


def test_a_reduced_buffer_is_compared_with_one_device(ranks, tmp_path):
    """Of buffers that ranks do not share, nothing is said: without batch norms, whose output depends on the rank."""
    one, two, wrong = (str(tmp_path / name) for name in ("one", "two", "wrong"))
    ranks.run(1, train_without_norms, one)
    ranks.run(2, train_without_norms, two)
    ranks.run(2, partial(train_without_norms, momentum=0.2), wrong)
    found = compare(Recording.open(one), Recording.open(two))
    assert found.verdict in (Verdict.EQUAL, Verdict.ROUNDING), found.reason
    assert [each.name for each in found.judged if each.phase == "buffers"] == ["center", "center"]
    found = compare(Recording.open(one), Recording.open(wrong))
    assert found.verdict is Verdict.BUG and found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.buffer) == (0, "center")
    assert found.diagnosis is not None and "2 times as much" in found.diagnosis.evidence


def test_a_buffer_that_each_microbatch_changes_is_not_compared_with_other_microbatches(ranks, tmp_path):
    one, two = (str(tmp_path / name) for name in ("one", "two"))
    ranks.run(1, partial(train_without_norms, microbatches=2), one)
    ranks.run(2, train_without_norms, two)
    found = compare(Recording.open(one), Recording.open(two))
    assert not [each for each in found.judged if each.phase == "buffers"]
    assert any(
        "'center', which is no parameter, is not compared: the models are called for" in note for note in found.notes
    )


def train_without_norms(
    rank: int, world_size: int, directory: str, *, momentum: float = 0.1, microbatches: int = 1
) -> None:
    torch.manual_seed(0)
    net = Net(momentum).double()
    net.blocks = nn.ModuleList()
    model = net if world_size == 1 else nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with Recorder(directory, model=model, optimizer=optimizer, name="net", every=1, dense=1) as recorder:
        for step in range(2):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            parts = x.chunk(world_size)[rank].chunk(microbatches)
            loss = sum(model(part).square().mean() / microbatches for part in parts)
            assert isinstance(loss, Tensor)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss)


class Kinds(nn.Module):
    """Buffers of many dtypes, one of them under two names, and one that is made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("pointer", torch.tensor(5))
        self.register_buffer("phases", torch.tensor([1 + 2j, 3j]))
        self.register_buffer("low", torch.tensor([0.5, 1.5], dtype=torch.bfloat16))
        self.register_buffer("long", torch.arange(3000.0), persistent=False)
        self.register_buffer("flags", torch.tensor([True]))
        self.register_buffer("nowhere", torch.zeros(3, device="meta"))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.inner = nn.Module()
        self.inner.register_buffer("same", self.pointer)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(1))
        for buffer in (self.pointer, self.phases, self.low, self.long):
            buffer += 1
        return x * self.weight


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_buffers_of_every_dtype_are_recorded(tmp_path, detail):
    model = Kinds()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(tmp_path / "run", model=model, optimizer=optimizer, dense=1, every=1, detail=detail) as recorder:
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            recorder.step()
    recording = Recording.open(tmp_path / "run")
    assert recording.initial_buffers() == ["pointer", "phases", "low", "long"]
    assert recording.buffers(0) == ["pointer", "phases", "low", "long", "late"]
    pointer, phases, low, long = (recording.buffer(0, 0, name) for name in recording.initial_buffers())
    assert isinstance(pointer, np.ndarray) and (pointer.dtype, pointer.tolist(), pointer.shape) == (np.float64, 6.0, ())
    assert isinstance(phases, np.ndarray) and phases.tolist() == [[2.0, 2.0], [1.0, 3.0]]
    assert isinstance(low, np.ndarray) and low.dtype.name == "bfloat16" and low.tolist() == [1.5, 2.5]
    assert isinstance(long, Sketch) is (detail == "sketch")
    assert recording.buffer_shape(0, 0, "long") == (3000,)


class Unusual(nn.Module):
    """Buffers that have no values that could be read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        for name, value in {
            "csr": torch.eye(3).to_sparse_csr(),
            "csc": torch.eye(3).to_sparse_csc(),
            "mkldnn": torch.ones(3).to_mkldnn(),
            "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "eighth": torch.ones(3).to(torch.float8_e4m3fn),
            "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "many": torch.zeros(LARGEST_IN_FULL + 1, dtype=torch.uint8),
            "freed": torch.ones(3),
        }.items():
            self.register_buffer(name, value)
        self.register_buffer("unmade", nn.UninitializedBuffer())
        self.register_buffer("large", torch.zeros(LARGEST_IN_FULL + 1))
        self.freed.untyped_storage().resize_(0)  # type: ignore[union-attr, operator]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor", "ignore:Sparse CSC tensor", "ignore:The PyTorch API of nested")
@pytest.mark.filterwarnings("ignore:.*quantiz.*:DeprecationWarning", "ignore:.*quantiz.*:UserWarning")
def test_buffers_without_values_are_left_out(tmp_path):
    model = Unusual()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lazy = {"lazy": nn.LazyLinear(2)}
    with Recorder(tmp_path / "run", model=model, optimizer=optimizer, beside=lazy, detail="full") as recorder:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        recorder.step()
    recording = Recording.open(tmp_path / "run")
    assert recording.initial_buffers() == ["large"] and isinstance(recording.buffer(-1, 0, "large"), Sketch)


SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
model.register_buffer("center", torch.zeros(2, dtype=torch.float64))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
seen = []
for step in range(3):
    x = torch.randn(6, 4, dtype=torch.float64)
    optimizer.zero_grad()
    out = model(x)
    out.square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        model.center += out.mean(0)
        if "evaluates" in sys.argv:
            model(x)  # in training mode, which moves the running mean
    seen.append({name: value.clone() for name, value in model.named_buffers()})
torch.save(seen, sys.argv[1])
if "fails" in sys.argv:
    raise ValueError("at its end")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Record a script in this process: (the buffers that it saw after each step, the recording)."""

    def run(name, *arguments, text=SCRIPT, **options):
        monkeypatch.setattr(sys, "argv", sys.argv)
        path, seen = tmp_path / "script.py", tmp_path / f"{name}.pt"
        path.write_text(text)
        given: dict[str, Any] = {"directory": str(tmp_path / name), "every": 1, "dense": 1} | options
        ends = pytest.raises(ValueError, match="at its end") if "fails" in arguments else nullcontext()
        with ends:
            assert script.run([str(path), str(seen), *arguments], **given) == 0
        return torch.load(seen), Recording.open(tmp_path / name, partial=True)

    return run


@pytest.mark.parametrize("arguments", [(), ("evaluates",), ("fails",)], ids=" ".join)
def test_what_a_script_changes_after_the_optimizer_is_of_the_same_step(run, arguments):
    """But for the last step: what follows it may belong to an evaluation. It is there, also if the script fails after it."""
    seen, recording = run("run", *arguments)
    assert recording.num_steps == 3 and not recording.has_buffer(2, "center")
    for step, buffers in enumerate(seen[:-1]):
        for name, value in buffers.items():
            assert np.array_equal(recording.buffer(step, 0, name), to_numpy(value)), (step, name)


def test_running_statistics_that_an_evaluation_changes_are_a_bug(run):
    """Losses and parameters are equal in every bit."""
    _, right = run("right")
    _, wrong = run("wrong", "evaluates")
    found = compare(right, wrong)
    assert found.verdict is Verdict.BUG and found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.buffer) == (0, "1.running_mean")
    assert max(found.loss_differences) == 0.0 == max(found.parameter_differences[0])


class Stage(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): Block()})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def train_stages(rank: int, world_size: int, directory: str) -> list[dict[str, np.ndarray]]:
    torch.manual_seed(rank)
    model: Any = Stage(rank).double()
    group = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)).get_group()
    stage = PipelineStage(model, rank, 2, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).square().mean())
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    found = []
    with Recorder(
        directory, model=model, optimizer=optimizer, pipeline=group, every=1, dense=1, units=Block
    ) as recorder:
        for step in range(2):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            losses: list[Tensor] = []
            schedule.step(x) if rank == 0 else schedule.step(target=x, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=sum(losses).detach() / 2 if losses else None)  # type: ignore[union-attr]
            found.append(_copies(model))
    return found


def test_buffers_of_all_stages_are_those_of_one_rank(ranks, tmp_path):
    directory = str(tmp_path / "run")
    of_stages = ranks.run(2, train_stages, directory)
    recording = Recording.open(directory)
    assert recording.manifest.world_size == 1
    for index, found in enumerate(of_stages):
        for step, buffers in enumerate(found):
            assert sorted(buffers) == sorted(f"layers.{index}.{name}" for name in STATISTICS)
            for name, value in buffers.items():
                assert np.array_equal(recording.buffer(step, 0, name), value), (step, name)


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.arange(4.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.add_(1.0)
        return self.up(x)


def train_divided(rank: int, world_size: int, directory: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model: Any = Divided().double()
    parallelize_module(model, mesh, {"up": ColwiseParallel(output_layouts=Replicate())})
    model.scale = distribute_tensor(model.scale, mesh, [Shard(0)])
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with Recorder(directory, model=model, optimizer=optimizer, every=1, dense=1) as recorder:
        loss = model(torch.ones(2, WIDTH, dtype=torch.float64)).square().mean()
        loss.backward()
        optimizer.step()
        recorder.step(loss=loss)


def test_a_divided_buffer_is_recorded_in_full(ranks, tmp_path):
    directory = str(tmp_path / "run")
    ranks.run(2, train_divided, directory)
    recording = Recording.open(directory)
    assert [recording.buffer(step, 0, "scale").tolist() for step in (-1, 0)] == [[0, 1, 2, 3], [1, 2, 3, 4]]  # type: ignore[union-attr]


BESIDE = """
import copy, sys, torch
from torch import nn
torch.manual_seed(0)
class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(2).double())
    def forward(self, student, teacher):
        loss = (student - (teacher - self.center)).square().mean()
        self.center.lerp_(teacher.mean(0), 0.5 if "wrong" in sys.argv else 0.1)
        return loss
class Trainer(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
def train(student, teacher, loss_of):
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(6, 4, dtype=torch.float64)
        with torch.no_grad():
            target = teacher(x)
        loss_of(student(x), target).backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), student.parameters()):
                mine.lerp_(theirs, 0.5)
            trainer.count += 1
        seen.append({"loss.center": loss_of.center.clone(), "teacher.0.weight": teacher[0].weight.detach().clone(),
                     "trainer.count": trainer.count.double()})
student = nn.Sequential(nn.Linear(4, 2)).double()
teacher, loss, trainer, seen = copy.deepcopy(student), Loss(), Trainer(student), []
frozen, backbone = nn.Linear(2, 2).requires_grad_(False), nn.Linear(1025, 1025)
optimizer = torch.optim.SGD(student.parameters(), 0.1)
train(student, teacher, loss)
torch.save(seen, sys.argv[1])
"""


def test_modules_that_a_script_holds_beside_the_model_are_recorded(run):
    """A teacher, a loss with state, and what has the model inside: a teacher is an average of the parameters."""
    seen, right = run("right", text=BESIDE)
    constant = ["frozen.weight", "frozen.bias"]
    assert sorted(right.initial_buffers()) == sorted([*constant, "teacher.0.bias", *seen[0]])
    assert sorted(right.buffers(1)) == sorted(["teacher.0.bias", *seen[0]])
    assert set(right.manifest.params) == {"0.weight", "0.bias"}
    for step, values in enumerate(seen[:-1]):
        for name, value in values.items():
            assert np.array_equal(right.buffer(step, 0, name), to_numpy(value)), (step, name)
    assert averaged_parameter(right, 1, 0, "teacher.0.weight") == "0.weight"
    _, wrong = run("wrong", "wrong", text=BESIDE)
    found = compare(right, wrong)
    assert found.verdict is Verdict.BUG and found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.buffer) == (0, "loss.center")


WITHIN = """
import torch
from torch import nn
torch.manual_seed(0)
class Holder(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.register_buffer("count", torch.zeros(()))
net = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
holder = Holder(net[0])
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(2):
    optimizer.zero_grad()
    net(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    holder.count += 1
torch.save([], __import__("sys").argv[1])
"""


def test_parts_of_the_model_are_not_beside_it(run):
    _, recording = run("run", text=WITHIN)
    assert recording.initial_buffers() == ["holder.count"] and recording.num_steps == 2
    assert recording.buffer(0, 0, "holder.count") == 1


def test_modules_beside_the_model_are_given_by_name(tmp_path):
    model, average = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options: dict[str, Any] = {"model": model, "optimizer": optimizer, "every": 1}
    with Recorder(tmp_path / "run", beside={"average": average}, **options) as recorder:
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            average.weight += 1
        recorder.step()
    recording = Recording.open(tmp_path / "run")
    assert recording.initial_buffers() == ["average.weight", "average.bias"] and recording.buffers(0) == [
        "average.weight"
    ]
    with pytest.raises(UsageError, match="beside: expected modules by name, got 'average': 1"):
        Recorder(tmp_path / "other", beside={"average": 1}, **options)  # type: ignore[dict-item]
