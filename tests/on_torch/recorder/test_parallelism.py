"""Tensor, sequence, expert, pipeline and context parallelism, recorded and held against one device."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional

import torch_backend as ours
from crossframe.errors import UsageError
from crossframe.inspection import inspect
from crossframe.param_map import MapEntry, ParamMap
from crossframe.recording import Recording
from crossframe.recording.event_format import PARAMETERS, REDUCE
from crossframe.recording.mapped_recording import mapped
from crossframe.verdict import Verdict, compare
from crossframe.verdict.bits import program_difference
from torch_backend.recorder import Recorder
from torch_backend.recorder._pipeline import infers_shapes
from torch_backend.recorder.script import ScriptRecorder

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


def divide(net: Any, mesh: DeviceMesh, *, sequence: bool) -> None:
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


def train(
    rank: int,
    world_size: int,
    kind: str,
    directory: str,
    *,
    sequence: bool = False,
    skips_reduction: bool = False,
    sums_late: bool = False,
    damped: bool = False,
    clip: bool = False,
    perturbed_run: int | None = None,
    detail: str = "full",
) -> None:
    torch.manual_seed(0)
    model: Any = Net().double()
    data_rank, data_size = 0, 1
    if kind != "one":
        num_model_ranks = min(world_size, 2)
        data_size, data_rank = world_size // num_model_ranks, rank // num_model_ranks
        mesh = init_device_mesh("cpu", (data_size, num_model_ranks), mesh_dim_names=("dp", "tp"))
        divide(model, mesh["tp"], sequence=sequence)
        package: Any = theirs if "torch" in kind else ours if "ours" in kind else None
        if "FSDP1" in kind:
            options: dict[str, Any] = {"use_orig_params": "original" in kind, "device_id": torch.device("cpu")}
            wrap = partial(package.FullyShardedDataParallel, device_mesh=mesh["dp"], **options)
            model.blocks = nn.ModuleList(map(wrap, model.blocks))
            model = wrap(model)
        elif kind == "DDP":
            model = nn.parallel.DistributedDataParallel(model, device_mesh=mesh["dp"])
        elif package is not None:
            for block in model.blocks:
                package.fully_shard(block, mesh=mesh["dp"])
            package.fully_shard(model, mesh=mesh["dp"])
    if damped:
        model.blocks[1].register_forward_hook(lambda module, args, output: output * 0.999)
    weight = None if "FSDP1" in kind or kind == "DDP" else model.blocks[1].norm.weight
    if sums_late:
        weight.register_hook(lambda grad: grad * (0.25 if rank % 2 else 0.75))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    options = {"every": 1, "dense": 1, "detail": detail, "perturbed_run": perturbed_run}
    with Recorder(directory, model=model, optimizer=optimizer, name="net", **options) as recorder:
        for step in range(2):
            samples = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
            own = samples.chunk(data_size)[data_rank]
            loss = functional.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
            loss.backward()
            if skips_reduction and rank % 2 == 1:  # such a rank has a gradient of its own
                model.blocks[1].norm.weight.grad.mul_(1.25)
            if sums_late:
                dist.all_reduce(weight.grad)
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


@pytest.mark.parametrize(
    ("kind", "num_ranks", "sequence"),
    [
        *(("tp", 2, sequence) for sequence in (False, True)),
        # Parts of sequences: test_the_norm_is_that_of_all_ranks, test_perturbed_runs_and_sketches_are_those_of_one_device.
        ("ours", 4, False),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (("torch", 4, False), ("torch", 4, True), ("ours", 4, True))
        ),
        ("torch", 1, True),
        ("FSDP1 ours", 4, False),
        pytest.param("FSDP1 torch original", 4, False, marks=pytest.mark.exhaustive),
        pytest.param("FSDP1 torch", 4, False, marks=pytest.mark.exhaustive),
        pytest.param("FSDP1 ours original", 4, False, marks=pytest.mark.exhaustive),
        ("DDP", 4, False),
    ],
)
def test_a_divided_replica_is_recorded_as_one_device_is(ranks, tmp_path, alone, kind, num_ranks, sequence):
    directory = str(tmp_path / "run")
    ranks.run(num_ranks, partial(train, sequence=sequence), kind, directory)
    recording = Recording.open(directory)
    assert recording.manifest.world_size == max(num_ranks // 2, 1)
    assert_as_alone(recording, alone)


def assert_as_alone(recording: Recording, alone: Recording) -> None:
    found = compare(recording, alone)
    assert found.verdict in FINE, found
    assert {name: spec.shape for name, spec in recording.manifest.params.items()} == {
        name: spec.shape for name, spec in alone.manifest.params.items()
    }
    assert recording.activations(0) == alone.activations(0)
    assert recording.disagreements(2) == []


def test_partial_sums_of_model_ranks_are_rounding_and_no_other_computation(ranks, tmp_path):
    for num_ranks in (1, 2):
        ranks.run(num_ranks, partial(train, sequence=True), "tp", str(tmp_path / str(num_ranks)))
    one, two = (Recording.open(tmp_path / name) for name in "12")
    assert compare(one, two).verdict is Verdict.ROUNDING
    assert program_difference(one, two) == "ranks of a replica differs: None in 1, 2 in 2"


@pytest.mark.parametrize("kind", [pytest.param("torch", marks=pytest.mark.exhaustive), "ours"])
def test_a_fault_in_a_module_is_located_there(ranks, tmp_path, alone, kind):
    directory = str(tmp_path / "run")
    ranks.run(4, partial(train, sequence=True, damped=True), kind, directory)
    found = compare(alone, Recording.open(directory))
    assert found.verdict is Verdict.BUG, found
    assert found.first_divergence is not None and found.first_divergence.module == "blocks.1", found


@pytest.mark.parametrize(
    ("kind", "num_ranks"), [("tp", 2), pytest.param("torch", 4, marks=pytest.mark.exhaustive), ("ours", 4)]
)
def test_a_gradient_that_is_not_the_same_on_all_model_ranks_is_a_bug_on_its_axis(
    ranks, tmp_path, alone, kind, num_ranks
):
    directory = str(tmp_path / "run")
    ranks.run(num_ranks, partial(train, skips_reduction=True), kind, directory)
    recording = Recording.open(directory)
    found = compare(alone, recording)
    assert found.verdict is Verdict.BUG, found
    where = found.first_divergence
    assert where is not None and (where.step, where.phase, where.parameter) == (0, REDUCE, "blocks.1.norm.weight"), (
        found
    )
    assert where.ranks == tuple(range(1, num_ranks, 2)) and "along the mesh axis 'tp', rank" in found.reason
    assert "from the first by 2.5e-01" in found.reason
    names = ParamMap(tuple(MapEntry(f"m.{name}", name) for name in recording.manifest.params))
    renamed = mapped(recording, names, recording.manifest, {}).disagreements(1)
    assert [each.name for each in renamed] == [f"m.{each.name}" for each in recording.disagreements(1)] != []
    assert (
        "the reduced gradient of 'blocks.1.norm.weight' along the mesh axis 'tp'"
        in inspect(recording).disagreements[0].describe()
    )
    # What both runs share is no difference between them.
    assert compare(recording, recording).verdict is Verdict.EQUAL


def test_gradients_that_are_summed_after_backward_are_compared_as_sums(ranks, tmp_path, alone):
    directory = str(tmp_path / "run")
    ranks.run(2, partial(train, sums_late=True), "tp", directory)
    found = compare(alone, Recording.open(directory))
    assert found.verdict in FINE, found


def test_the_norm_is_that_of_all_ranks(ranks, tmp_path):
    one, divided = str(tmp_path / "one"), str(tmp_path / "divided")
    ranks.run(1, partial(train, clip=True), "one", one)
    ranks.run(4, partial(train, clip=True, sequence=True), "torch", divided)
    a, b = Recording.open(one), Recording.open(divided)
    assert_as_alone(b, a)
    assert b.grad_norm(0, 0) == pytest.approx(a.grad_norm(0, 0), rel=1e-12)


def test_perturbed_runs_and_sketches_are_those_of_one_device(ranks, tmp_path):
    one, divided = str(tmp_path / "one"), str(tmp_path / "divided")
    for number in range(3):
        ranks.run(1, partial(train, perturbed_run=number, detail="sketch"), "one", one)
        ranks.run(4, partial(train, perturbed_run=number, detail="sketch", sequence=True), "ours", divided)
    a, b = Recording.open(one), Recording.open(divided)
    assert_as_alone(b, a)
    of_one, of_divided = a.perturbed_runs()[0], b.perturbed_runs()[0]
    for name in a.manifest.params:
        initial = [each.full(PARAMETERS, 0, name) for each in (a, of_one, b, of_divided)]
        assert (initial[1] == initial[3]).all() and (initial[0] == initial[2]).all()
    assert (of_one.full(PARAMETERS, 0, "embed.weight") != a.full(PARAMETERS, 0, "embed.weight")).all()


class Experts(nn.Module):
    """Four experts, of which each rank of the axis has two; all samples go to all experts of the axis."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, WIDTH, 12) / 4), nn.Parameter(torch.randn(4, 12, WIDTH) / 4)
        self.mesh: DeviceMesh | None = None

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        up, down = self.up, self.down
        if self.mesh is None:
            return self.of(x, gates, up, down)
        group = self.mesh.get_group()
        first = 2 * self.mesh.get_local_rank()
        x, gates = (collectives.all_gather_tensor_autograd(each.contiguous(), 0, group) for each in (x, gates))
        found = self.of(x, gates[..., first : first + 2], up.to_local(), down.to_local())
        return collectives.reduce_scatter_tensor_autograd(found.contiguous(), "sum", 0, group)

    @staticmethod
    def of(x: Tensor, gates: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = functional.gelu(torch.einsum("bsw,ewh->bseh", x, up))
        return torch.einsum("bseh,ehw,bse->bsw", hidden, down, gates)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.experts = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 4), Experts()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.norm(x + self.experts(x, self.router(x).softmax(-1))))


def train_experts(rank: int, world_size: int, kind: str, directory: str, *, divisor: int = 4) -> None:
    torch.manual_seed(0)
    model: Any = Mixture().double()
    if kind != "one":
        package: Any = {"torch": theirs, "ours": ours}[kind]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_mod_ep", "ep"))
        for name in ("up", "down"):
            full = getattr(model.experts, name).detach()
            setattr(model.experts, name, nn.Parameter(distribute_tensor(full, mesh["ep"], [Shard(0)])))
        model.experts.mesh = mesh["ep"]
        package.fully_shard(model.experts, mesh=mesh["dp_mod_ep"])
        # The gradients of an expert are those of the samples of all ranks of the axis.
        model.experts.set_gradient_divide_factor(divisor)
        package.fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with Recorder(directory, model=model, optimizer=optimizer, name="mixture", every=1, dense=1) as recorder:
        for step in range(2):
            samples = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
            own = samples.chunk(world_size)[rank]
            loss = functional.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss)


@pytest.fixture(scope="module")
def experts_alone(ranks, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("experts") / "run")
    ranks.run(1, train_experts, "one", directory)
    return Recording.open(directory)


@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_experts_that_lie_on_several_data_parallel_ranks_are_recorded_as_on_one_device(
    ranks, tmp_path, experts_alone, kind
):
    ranks.run(4, train_experts, kind, str(tmp_path / "right"))
    one, right = experts_alone, Recording.open(tmp_path / "right")
    assert compare(one, right).verdict in FINE, compare(one, right)
    assert right.manifest.world_size == 4 and right.manifest.params["experts.up"].shape == (4, WIDTH, 12)


@pytest.mark.parametrize("kind", [pytest.param("torch", marks=pytest.mark.exhaustive), "ours"])
def test_gradients_of_experts_divided_by_another_number_are_a_bug(ranks, tmp_path, experts_alone, kind):
    ranks.run(4, partial(train_experts, divisor=2), kind, str(tmp_path / "wrong"))
    one, wrong = experts_alone, Recording.open(tmp_path / "wrong")
    found = compare(one, wrong)
    where = found.first_divergence
    assert found.verdict is Verdict.BUG and where is not None and found.diagnosis is not None, found
    assert where.phase == REDUCE and where.parameter in ("experts.up", "experts.down")
    assert found.diagnosis.signature == "constant_factor"


class Staged(Net):
    """A stage has the layers of the whole model that are its own."""

    def __init__(self, stage: int | None) -> None:
        super().__init__()
        if stage == 0:
            self.norm = self.head = None
            del self.blocks[1]
        elif stage == 1:
            self.embed = None
            self.blocks[0] = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_stages(rank: int, world_size: int, kind: str, directory: str, *, damped: bool = False) -> None:
    """Two microbatches a step, of a whole model or of two stages, each on one rank or sharded over two."""
    num_data = 1 if kind == "one" else world_size // 2
    data_rank, stage = (0, None) if kind == "one" else (rank % num_data, rank // num_data)
    torch.manual_seed(0)
    model: Any = Staged(stage).double()
    group = schedule = None
    if stage is not None:
        mesh = init_device_mesh("cpu", (2, num_data), mesh_dim_names=("pp", "dp"))
        group = mesh["pp"].get_group()
        if kind == "ours":
            for block in model.blocks:
                if isinstance(block, Block):
                    ours.fully_shard(block, mesh=mesh["dp"])
            ours.fully_shard(model, mesh=mesh["dp"])
        schedule = Schedule1F1B(PipelineStage(model, stage, 2, torch.device("cpu"), group=group), 2, loss_fn=loss_of)
    if damped and stage == 1:
        model.norm.register_forward_hook(lambda module, args, output: output * 0.999)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    options: dict[str, Any] = {"name": "net", "every": 1, "dense": 1, "pipeline": group}
    if kind != "ours":
        options["units"] = Block
    with Recorder(directory, model=model, optimizer=optimizer, **options) as recorder:
        for step in range(2):
            samples = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
            own = samples.chunk(num_data)[data_rank]
            losses: list[Tensor] = []
            if schedule is None:
                for part in own.chunk(2):
                    losses.append(loss_of(model(part[:, :-1]), part[:, 1:]))
                    (losses[-1] / 2).backward()
            elif stage == 0:
                schedule.step(own[:, :-1])
            else:
                schedule.step(target=own[:, 1:], losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=sum(losses).detach() / 2 if losses else None)


@pytest.fixture(scope="module")
def stages_alone(ranks, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("stages") / "run")
    ranks.run(1, train_stages, "one", directory)
    return Recording.open(directory)


@pytest.mark.parametrize(("kind", "num_ranks"), [("plain", 2), ("ours", 4)])
def test_the_stages_of_a_pipeline_are_recorded_as_one_device_is(ranks, tmp_path, stages_alone, kind, num_ranks):
    directories = {name: str(tmp_path / name) for name in ("right", "wrong")}
    ranks.run(num_ranks, train_stages, kind, directories["right"])
    ranks.run(num_ranks, partial(train_stages, damped=True), kind, directories["wrong"])
    one, (right, wrong) = stages_alone, (Recording.open(directory) for directory in directories.values())
    found = compare(one, right)
    assert found.verdict in FINE, found
    assert set(right.manifest.params) == set(one.manifest.params)
    assert set(right.activations(0)) == set(one.activations(0))
    found = compare(one, wrong)
    assert found.verdict is Verdict.BUG and found.first_divergence is not None, found
    assert found.first_divergence.module == "norm"


def private_names(rank: int, world_size: int) -> tuple[list[bool], list[str]]:
    """(of each forward of a stage, whether it is seen to infer shapes; the private names of torch that lack)."""

    class Asking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            inferring.append(infers_shapes())
            return super().forward(x)

    inferring: list[bool] = []
    model: Any = Asking(4, 4)
    schedule = Schedule1F1B(PipelineStage(model, rank, 2, torch.device("cpu")), 2, loss_fn=functional.mse_loss)
    schedule.step(*([torch.ones(4, 4)] if rank == 0 else []), **({"target": torch.ones(4, 4)} if rank == 1 else {}))
    state: Any = theirs.fully_shard(model)._get_fsdp_state()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    hybrid: Any = theirs.FullyShardedDataParallel(
        nn.Linear(4, 4),
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        sharding_strategy=theirs.ShardingStrategy.HYBRID_SHARD,
    )
    divided = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(divided, mesh["tp"], {"0": ColwiseParallel()})
    replicated: Any = nn.parallel.DistributedDataParallel(divided, device_mesh=mesh["dp"])
    read = {
        "_fsdp_param_group": state,
        "_mp_policy": state,
        "mesh_info": state._fsdp_param_group,
        "shard_mesh_dim": state._fsdp_param_group.mesh_info,
        "_inter_node_pg": hybrid,
        "_param_extensions": hybrid._handle.flat_param,
        "_st_info": replicated.module[0].weight,
    }
    return inferring, [name for name, owner in read.items() if not hasattr(owner, name)]


def test_torch_has_the_private_names_that_the_recorder_reads(ranks):
    for inferring, missing in ranks.run(2, private_names):
        assert inferring == [True, False, False], "torch.distributed.pipelining.stage infers shapes in other functions"
        assert not missing, f"torch has no {missing[0]}"


def refused_digest(rank: int, world_size: int, directory: str) -> str:
    model = Staged(rank)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    options: dict[str, Any] = {"name": "net", "every": 1, "pipeline": dist.group.WORLD, "units": Block}
    try:
        with Recorder(directory, model=model, optimizer=optimizer, **options) as recorder:
            if rank == 0:
                recorder.step(batch="0" * 64)
    except UsageError as error:
        return str(error)
    return ""


def test_a_digest_on_the_first_stage_needs_sample_ids(ranks, tmp_path):
    assert "sample_ids=" in ranks.run(2, refused_digest, str(tmp_path / "refused"))[0]


def attention(x: Tensor, qkv: nn.Linear, group: Any) -> Tensor:
    """Causal attention over whole sequences, of which a rank has one part or, in the order of heads and tails, two."""
    q, k, v = qkv(x).chunk(3, -1)
    if group is None:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    rank, size = group.rank(), group.size()
    k, v = (
        torch.cat(_parts(collectives.all_gather_tensor_autograd(each.contiguous(), 0, group), size), 1)
        for each in (k, v)
    )
    length = k.shape[1] // (2 * size)
    places = torch.cat([torch.arange(part * length, (part + 1) * length) for part in (rank, 2 * size - 1 - rank)])
    mask = places[:, None] >= torch.arange(k.shape[1])[None]
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _parts(gathered: Tensor, size: int) -> list[Tensor]:
    halves = [each.chunk(2, 1) for each in gathered.chunk(size)]
    return [half[0] for half in halves] + [half[1] for half in reversed(halves)]


class Attending(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WORDS),
        )
        self.norm, self.group = nn.LayerNorm(WIDTH), group

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.norm(x + attention(x, self.qkv, self.group)))


def train_on_parts(rank: int, world_size: int, kind: str, directory: str, *, damped: bool = False) -> None:
    """Sequences of eight, whole or as a head and a tail on each of two ranks, which are averaged by hand or by fully_shard."""
    torch.manual_seed(0)
    num_data = 1 if kind == "one" else world_size // 2
    group = (
        None if kind == "one" else init_device_mesh("cpu", (num_data, 2), mesh_dim_names=("dp", "cp"))["cp"].get_group()
    )
    model: Any = Attending(group).double()
    if damped:
        model.norm.register_forward_hook(lambda module, args, output: output * 0.999)
    if kind == "ours":
        ours.fully_shard(model)
    elif kind.startswith("FSDP1"):
        package = theirs if "theirs" in kind else ours
        model = package.FullyShardedDataParallel(
            model, use_orig_params="original" in kind, device_id=torch.device("cpu")
        )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    options: dict[str, Any] = {"name": "net", "every": 1, "dense": 1, "context": group, "context_order": "head_tail"}
    with Recorder(directory, model=model, optimizer=optimizer, **options) as recorder:
        for step in range(2):
            samples = torch.randint(WORDS, (SAMPLES, 9), generator=torch.Generator().manual_seed(step))
            own = samples.chunk(num_data)[rank // 2 if num_data > 1 else 0]
            tokens, targets = own[:, :-1], own[:, 1:]
            if group is not None:
                quarters = [(each.chunk(4, 1)) for each in (tokens, targets)]
                tokens, targets = (torch.cat([each[group.rank()], each[3 - group.rank()]], 1) for each in quarters)
            loss = loss_of(model(tokens), targets)
            loss.backward()
            if kind == "plain":
                for param in model.parameters():
                    torch.distributed.all_reduce(param.grad)
                    param.grad /= world_size
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss)


@pytest.fixture(scope="module")
def parts_alone(ranks, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("parts") / "run")
    ranks.run(1, train_on_parts, "one", directory)
    return Recording.open(directory)


_SHARDED = [
    (kind, 4) for kind in ("ours", "FSDP1 ours", "FSDP1 theirs original", "FSDP1 theirs", "FSDP1 ours original")
]


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [("plain", 2), *_SHARDED[:2], *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in _SHARDED[2:])],
)
def test_parts_of_sequences_are_recorded_as_whole_ones(ranks, tmp_path, parts_alone, kind, num_ranks):
    ranks.run(num_ranks, train_on_parts, kind, str(tmp_path / "right"))
    one, right = parts_alone, Recording.open(tmp_path / "right")
    found = compare(one, right)
    assert found.verdict in FINE, found
    assert set(right.activations(0)) == set(one.activations(0))


@pytest.mark.parametrize(
    ("kind", "num_ranks"), [("plain", 2), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in _SHARDED)]
)
def test_a_fault_in_parts_of_sequences_is_located_in_its_module(ranks, tmp_path, parts_alone, kind, num_ranks):
    ranks.run(num_ranks, partial(train_on_parts, damped=True), kind, str(tmp_path / "wrong"))
    found = compare(parts_alone, Recording.open(tmp_path / "wrong"))
    assert found.verdict is Verdict.BUG and found.first_divergence is not None, found
    assert found.first_divergence.module == "norm"


def evaluated_first(rank, world_size, directory, shard, evaluates):
    """Records, as a script is, two steps of two microbatches after an evaluation, or without it."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(), nn.Linear(WIDTH, WORDS))
    shard(model[1])
    shard(model)
    tokens = torch.arange(2 * SAMPLES * LENGTH).reshape(2, SAMPLES, LENGTH) % WORDS
    recorder = ScriptRecorder(directory, dense=2, every=1)
    with recorder.watching():
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if evaluates:
            with torch.no_grad():
                model(tokens[0])
        for _ in range(2):
            for i, part in enumerate(tokens + rank):
                model.set_requires_gradient_sync(i == 1)
                functional.cross_entropy(model(part % WORDS).flatten(0, 1), part.flatten() % WORDS).backward()
            optimizer.step()
            optimizer.zero_grad()
    recorder.finish()


@pytest.mark.parametrize("shard", [theirs.fully_shard, ours.fully_shard], ids=["theirs", "ours"])
def test_a_script_that_evaluates_first_is_recorded_from_its_first_microbatch(ranks, tmp_path, shard):
    for name in ("evaluates", "trains"):
        ranks.run(2, evaluated_first, str(tmp_path / name), shard, name == "evaluates")
    found, plain = (Recording.open(tmp_path / name) for name in ("evaluates", "trains"))
    assert len(found.batch(0, 0).sample_ids) == 2 * SAMPLES
    assert compare(found, plain).verdict is Verdict.EQUAL
