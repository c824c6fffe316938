"""Models that are given DTensors, whose data-parallel ranks have other samples, recorded and held against plain tensors."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_backend as ours
from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from torch_backend.recorder import Recorder

FINE = (Verdict.EQUAL, Verdict.ROUNDING)


def train(rank: int, world_size: int, directory: str, whose: str, kind: str, *, plain: bool) -> None:
    """Train on a mesh of two dims: one shards; over the other one, weights are divided ("tp"), or samples are ("dp").

    Args:
        plain: without DTensors.
    """
    package: Any = {"torch": theirs, "ours": ours}[whose]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    # torch keeps meshes of DTensors that are equal to earlier ones, and then finds that they are not the same.
    names = ("shard", "tp") if kind == "tp" else ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=names)
    placements = [Shard(0), Replicate() if kind == "tp" else Shard(0)]
    options: dict[str, Any] = {"mesh": mesh["shard"] if kind == "tp" else mesh}
    if not plain:
        for layer, dim in ((model[0], 0), (model[2], 1)):
            for name, param in list(layer.named_parameters()):
                divided = Shard(dim) if kind == "tp" and param.ndim > dim else Replicate()
                each = distribute_tensor(param.detach(), mesh, [Replicate(), divided])
                layer.register_parameter(name, nn.Parameter(each))
        dims = DataParallelMeshDims(shard="shard", replicate="replicate" if kind == "dp" else None)
        options = {"mesh": mesh, "dp_mesh_dims": dims}
    package.fully_shard(model[0], **options)
    package.fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    num_parts, part = (2, mesh["shard"].get_local_rank()) if kind == "tp" else (4, rank)
    with Recorder(directory, model=model, optimizer=optimizer, dense=2) as recorder:
        for step in range(3):
            samples = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            x = samples.chunk(num_parts)[part]
            y = model(x if plain else DTensor.from_local(x, mesh, placements))
            y = y.redistribute(placements=placements).to_local() if isinstance(y, DTensor) else y
            loss = y.square().mean()
            loss.backward()
            optimizer.step()
            recorder.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["dp", "tp"])
def test_dtensors_are_the_samples_and_activations_of_their_ranks(ranks, tmp_path, kind):
    recordings = []
    for whose, plain in (("torch", True), ("torch", False), ("ours", False)):
        directory = str(tmp_path / f"{whose} {plain}")
        alone = plain and kind == "tp"
        ranks.run(2 if alone else 4, partial(train, directory=directory, whose=whose, kind=kind, plain=plain))
        recordings.append(Recording.open(directory))
    plain, torchs, own = recordings
    found = compare(torchs, own)
    assert found.verdict is Verdict.EQUAL, found.reason
    found = compare(plain, torchs)
    assert found.verdict in FINE, found.reason
    each = 2 if kind == "dp" else 4
    for recording in (torchs, own):
        assert len(recording.batch(0, 0).sample_ids) == each
        assert recording.activation_shape(0, 0, 0, "0", "output") == (each, 8)
