"""Units on different meshes, with different layouts, or sharded on other dims, recorded and held against one device."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import Shard
from torch.nn import functional

import torch_backend as ours
from crossframe.inspection import inspect
from crossframe.layout import FlatLayout
from crossframe.recording import Recording
from crossframe.recording.event_format import PARAMETERS, REDUCE
from crossframe.verdict import Verdict, compare
from tests.on_torch.recorder.test_further_parallelism import Gated
from tests.on_torch.recorder.test_further_parallelism import Net as GatedNet
from tests.on_torch.recorder.test_parallelism import FINE, LENGTH, SAMPLES, WORDS, Net, divide
from torch_backend.recorder import Recorder, _model_view, _sharding_libraries, _unit_meshes

PACKAGES: dict[str, Any] = {"ours": ours, "torch": theirs}
Meshes = dict[str, DeviceMesh]


def on_columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 else None


def shard(model: Any, kind: str, package: Any, meshes: Meshes) -> Any:
    """The sharded model. The root has the mesh of all ranks, under tensor parallelism its half."""
    if kind == "columns":
        for module in (*model.blocks, model):
            package.fully_shard(module, mesh=meshes["all"], shard_placement_fn=on_columns)
    elif kind == "hybrid unit":
        for block, name in zip(model.blocks, ("hybrid", "all"), strict=True):
            package.fully_shard(block, mesh=meshes[name])
        package.fully_shard(model, mesh=meshes["all"])
    elif kind == "halves":
        package.fully_shard(model.blocks[0], mesh=meshes["hybrid"]["shard"])
        package.fully_shard(model, mesh=meshes["all"])
    elif kind == "crossed":
        package.fully_shard(model.blocks[0], mesh=meshes["hybrid"]["shard"], layout="flat")
        package.fully_shard(model, mesh=meshes["hybrid"]["replicate"], layout="ragged")
    elif kind == "FSDP1":
        wrap, strategies = (
            package.FullyShardedDataParallel,
            ShardingStrategy if package is theirs else ours.ShardingStrategy,
        )
        options: dict[str, Any] = {"use_orig_params": package is theirs, "device_id": torch.device("cpu")}
        hybrid = options | {"device_mesh": meshes["hybrid"], "sharding_strategy": strategies.HYBRID_SHARD}
        model.blocks[0] = wrap(model.blocks[0], **hybrid)
        model = wrap(model, device_mesh=meshes["all"], **options)
    elif kind == "layouts over tp":
        divide(model, meshes["hybrid"]["shard"], sequence=False)
        for block in model.blocks:
            package.fully_shard(block, mesh=meshes["hybrid"]["replicate"])
        package.fully_shard(model.embed, mesh=meshes["hybrid"]["replicate"], layout="flat")
        package.fully_shard(model, mesh=meshes["hybrid"]["replicate"], layout="ragged")
    return model


def train(model: Any, directory: str, data: tuple[int, int], *, joins: Any = None, **options: Any) -> None:
    """Train for two steps.

    Args:
        data: the place among the data-parallel ranks.
        joins: is called between backward and the optimizer's step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with Recorder(directory, model=model, optimizer=optimizer, name="net", every=1, dense=1, **options) as recorder:
        for step in range(2):
            samples = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
            own = samples.chunk(data[1])[data[0]]
            loss = functional.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
            loss.backward()
            if joins is not None:
                joins()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss)


def made() -> Any:
    torch.manual_seed(0)
    return Net().double()


def alone(rank: int, world_size: int, directory: str) -> None:
    train(made(), directory, (0, 1))


CASES = [
    *(("columns", name) for name in ("ours", "torch")),
    *((kind, "torch") for kind in ("hybrid unit", "FSDP1")),
    *((kind, "ours") for kind in ("halves", "crossed", "layouts over tp")),
]


def sharded(rank: int, world_size: int, directory: str, cases: list[tuple[str, str]], *, forgets: bool = False) -> None:
    meshes = {
        "all": init_device_mesh("cpu", (4,), mesh_dim_names=("all",)),
        "hybrid": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
    }
    for kind, name in cases:
        model = shard(made(), kind, PACKAGES[name], meshes)

        def average(model: Any = model, kind: str = kind) -> None:
            """The mean over the halves of ranks, which no mesh of a unit joins. Each half has the mean of its own samples."""
            others = [] if kind == "halves" else [model.embed, model.blocks[1], model.norm, model.head]
            for modules, axis in (([model.blocks[0]], "replicate"), (others, "shard")):
                for param in (param for module in modules for param in module.parameters()):
                    grad = param.grad.local if hasattr(param.grad, "local") else param.grad.to_local()
                    dist.all_reduce(grad, group=meshes["hybrid"][axis].get_group())
                    grad.div_(2)

        options = {"joins": average} if kind in ("halves", "crossed") and not forgets else {}
        data = (rank // 2, 2) if "tp" in kind else (rank, 4)
        train(model, f"{directory}/{kind} {name}", data, **options)


@pytest.fixture(scope="module")
def recordings(ranks, tmp_path_factory) -> dict[Any, Recording]:
    directory = str(tmp_path_factory.mktemp("meshes"))
    ranks.run(1, alone, f"{directory}/one")
    ranks.run(4, sharded, directory, CASES)
    return {"one": Recording.open(f"{directory}/one")} | {
        case: Recording.open(f"{directory}/{' '.join(case)}") for case in CASES
    }


def activations(recording: Recording) -> set[tuple[int, str, str]]:
    """Those of modules with parameters, and of the model; others depend on which modules are units."""
    return {at for at in recording.activations(0) if at[1] not in ("blocks.0", "blocks.1")}


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_units_of_any_mesh_are_recorded_as_one_device_is(recordings, case):
    one, other = recordings["one"], recordings[case]
    assert compare(one, other).verdict in FINE, compare(one, other)
    assert other.manifest.world_size == (2 if "tp" in case[0] else 4)
    assert {name: spec.shape for name, spec in other.manifest.params.items()} == {
        name: spec.shape for name, spec in one.manifest.params.items()
    }
    for name in one.manifest.params:
        assert (one.full(PARAMETERS, 0, name) == other.full(PARAMETERS, 0, name)).all()
        assert other.has(REDUCE, 1, name) and other.state_slots(1, name) == ("exp_avg", "exp_avg_sq")
    assert activations(other) == activations(one)


def test_halves_that_are_not_averaged_are_a_bug(ranks, tmp_path, recordings):
    ranks.run(4, partial(sharded, forgets=True), str(tmp_path), [("halves", "ours")])
    found = compare(recordings["one"], Recording.open(tmp_path / "halves ours"))
    assert found.verdict is Verdict.BUG and found.first_divergence is not None, found
    assert found.first_divergence.parameter is not None and found.first_divergence.parameter.startswith("blocks.0")


def gated(rank: int, world_size: int, directory: str, kinds: list[str]) -> None:
    """Weights that are divided without DTensors, two ranks each, of data-parallel ranks that shard the parts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if world_size > 1 else None
    for kind in kinds:
        torch.manual_seed(0)
        group = None if mesh is None else mesh["tp"].get_group()
        model: Any = GatedNet({str(i): Gated(group, False) for i in range(2)}).double()
        options: dict[str, Any] = {}
        if mesh is not None:
            options = {"tensor_parallel": group, "partition": {"*.up.weight": 0, "*.down.weight": 1}}
            if kind == "FSDP1":
                model = ours.FullyShardedDataParallel(model, device_mesh=mesh["dp"], device_id=torch.device("cpu"))
            else:
                for block in model.blocks.values():
                    PACKAGES[kind].fully_shard(block, mesh=mesh["dp"])
                PACKAGES[kind].fully_shard(model, mesh=mesh["dp"])
        train(model, f"{directory}/{kind}", (0, 1) if mesh is None else (mesh["dp"].get_local_rank(), 2), **options)


def test_weights_divided_without_dtensors_are_recorded_under_fsdp(ranks, tmp_path):
    ranks.run(1, gated, str(tmp_path), ["one"])
    ranks.run(4, gated, str(tmp_path), ["ours", "torch", "FSDP1"])
    one = Recording.open(tmp_path / "one")
    for kind in ("ours", "torch", "FSDP1"):
        other = Recording.open(tmp_path / kind)
        assert compare(one, other).verdict in FINE, (kind, compare(one, other))
        assert other.manifest.params["blocks.0.up.weight"].shape == one.manifest.params["blocks.0.up.weight"].shape
        assert activations(other) == activations(one) and other.manifest.world_size == 2


def other_layout(rank: int, world_size: int, directory: str, kind: str) -> None:
    """Shards of which rank 1 says that they lie elsewhere than the recorder expects."""
    torch_fsdp1, torch_fsdp2 = _sharding_libraries.torch_fsdp1, _sharding_libraries.torch_fsdp2

    def moved(*args: Any) -> Any:
        engine = (torch_fsdp1 if kind == "FSDP1" else torch_fsdp2)(*args)
        root = engine.buckets[0]
        if kind == "FSDP1":
            (start, stop), *ranges = root.ranges or ()
            changed: dict[str, Any] = {"ranges": [(start, stop + rank), *ranges]}
        else:
            changed = {"layout": FlatLayout(root.layout.params, world_size, keep_original=True)}
        return replace(engine, buckets=[replace(root, **changed), *engine.buckets[1:]])

    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("all",))
    if kind == "FSDP1":
        options: dict[str, Any] = {"device_mesh": mesh, "use_orig_params": True, "device_id": torch.device("cpu")}
        model: Any = theirs.FullyShardedDataParallel(made(), **options)
    else:
        model = theirs.fully_shard(made(), mesh=mesh)
    with mock.patch.multiple(_model_view, torch_fsdp1=moved, torch_fsdp2=moved), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Recorder: not recorded: embed.weight: the elements on each rank")
        train(model, directory, (rank, world_size))


@pytest.mark.parametrize(("kind", "lost"), [("FSDP1", {"embed.weight"}), ("FSDP2", set())])
def test_an_unknown_layout_costs_no_more_than_its_parameters(ranks, recordings, tmp_path, kind, lost):
    ranks.run(2, partial(other_layout, kind=kind), str(tmp_path / "two"))
    one, two = recordings["one"], Recording.open(tmp_path / "two")
    assert one.manifest.params.keys() - two.manifest.params.keys() == lost
    found = compare(one, two)
    assert found.verdict in FINE, found
    assert any("embed.weight, which two did not record" in note for note in found.notes) == bool(lost), found.notes


def train_on_halves(rank: int, _: int, directory: str, trains: tuple[int, ...], options: Any) -> None:
    """Each half of the ranks shards a model of its own, and has other samples."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("halves", "shard"))
    if rank not in trains:
        return
    torch.manual_seed(0)
    model = PACKAGES[options].fully_shard(nn.Linear(4, 2).double(), mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(directory, model=model, optimizer=optimizer) as recorder:
        model(torch.full((2, 4), 1.0 + rank).double()).square().mean().backward()
        optimizer.step()
        recorder.step()


@pytest.mark.parametrize("whose", PACKAGES)
def test_ranks_that_fully_shard_was_not_given_are_replicas_that_differ(ranks, tmp_path, whose):
    ranks.run(4, partial(train_on_halves, directory=str(tmp_path / "out"), trains=(0, 1, 2, 3), options=whose))
    recording = Recording.open(tmp_path / "out")
    assert (recording.manifest.mesh.replicate, recording.manifest.mesh.shard) == (2, 2)
    assert len(recording.batch(0, 0).sample_ids) == 2
    said = [each.describe() for each in inspect(recording).disagreements]
    assert any("the reduced gradient of 'weight' differs between ranks 0, 2" in each for each in said), said


def test_ranks_that_train_nothing_are_not_waited_for_long(ranks, tmp_path):
    ranks.run(4, partial(_alone, directory=str(tmp_path / "out")))
    assert Recording.open(tmp_path / "out").manifest.world_size == 2


def _alone(rank: int, world_size: int, directory: str) -> None:
    with mock.patch.object(_unit_meshes, "_SECONDS", 1):
        train_on_halves(rank, world_size, directory, (0, 1), "ours")


@pytest.mark.parametrize("whose", PACKAGES)
def test_a_model_computes_in_the_dtype_of_its_units_if_the_root_has_no_parameters(tmp_path, whose):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        package = PACKAGES[whose]
        model = nn.Sequential(nn.Linear(4, 2))
        for module in (model[0], model):
            package.fully_shard(module, mp_policy=package.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Recorder(tmp_path / "out", model=model, optimizer=optimizer) as recorder:
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            recorder.step()
    finally:
        dist.destroy_process_group()
    assert Recording.open(tmp_path / "out").manifest.dtype == "bfloat16"
