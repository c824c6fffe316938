"""Tensor and sequence parallelism, alone and under fully_shard, recorded and held against one device."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional

import torch_backend as ours
from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from torch_backend.recorder import Recorder

WIDTH, WORDS, LENGTH, SAMPLES = 8, 12, 6, 4
FINE = (Verdict.EQUAL, Verdict.ROUNDING)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def divide(net: Any, mesh: DeviceMesh, *, sequence: bool, skips_reduction: bool) -> None:
    """Tensor parallelism in the blocks; with `sequence`, positions are divided between them too."""
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(
            net,
            mesh,
            {
                "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "norm": SequenceParallel(),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            },
        )
    for block in net.blocks:
        parallelize_module(block, mesh, plan)
    if skips_reduction and mesh.get_local_rank() == 1:
        net.blocks[1].norm.weight.register_hook(lambda grad: grad * 1.25)


def train(
    rank: int,
    world_size: int,
    kind: str,
    directory: str,
    *,
    sequence: bool = False,
    skips_reduction: bool = False,
    half: bool = False,
    clip: bool = False,
    perturbed_run: int | None = None,
    detail: str = "full",
) -> None:
    torch.manual_seed(0)
    model: Any = Net().double()
    data_rank, data_size = 0, 1
    if kind != "one":
        data_size = world_size // 2
        data_rank = rank // 2
        mesh = init_device_mesh("cpu", (data_size, 2), mesh_dim_names=("dp", "tp"))
        divide(model, mesh["tp"], sequence=sequence, skips_reduction=skips_reduction)
        package: Any = {"torch": theirs, "ours": ours}.get(kind)
        if package is not None:
            for block in model.blocks:
                package.fully_shard(block, mesh=mesh["dp"])
            package.fully_shard(model, mesh=mesh["dp"])
    if half:
        with torch.no_grad():
            for block in model.blocks:
                block.register_forward_hook(lambda module, args, output: output * 0.999)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    options = {"every": 1, "dense": 1, "detail": detail, "perturbed_run": perturbed_run}
    with Recorder(directory, model=model, optimizer=optimizer, name="net", **options) as recorder:
        for step in range(2):
            samples = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
            own = samples.chunk(data_size)[data_rank]
            loss = functional.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss)


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("alone") / "run")
    ranks.run(1, train, "one", directory)
    return Recording.open(directory)


@pytest.mark.parametrize("sequence", [False, True], ids=["tensors", "sequence"])
@pytest.mark.parametrize(("kind", "num_ranks"), [("tp", 2), ("torch", 4), ("ours", 4)])
def test_a_divided_replica_is_recorded_as_one_device_is(ranks, tmp_path, alone, kind, num_ranks, sequence):
    directory = str(tmp_path / "run")
    ranks.run(num_ranks, partial(train, sequence=sequence), kind, directory)
    recording = Recording.open(directory)
    assert recording.manifest.world_size == num_ranks // 2
    found = compare(recording, alone)
    assert found.verdict in FINE, found
    assert {name: spec.shape for name, spec in recording.manifest.params.items()} == {
        name: spec.shape for name, spec in alone.manifest.params.items()
    }
    assert recording.activations(0) == alone.activations(0)
