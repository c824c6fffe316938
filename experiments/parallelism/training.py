"""Trains a transformer in one form of parallelism, with a fault or without, and records it."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional

import torch_backend
from experiments.parallelism.axis import Axis
from experiments.parallelism.model import (
    LENGTH,
    VOCABULARY,
    Block,
    Experts,
    Transformer,
    divide_by_hand,
    set_fault,
)
from experiments.untouched import forked
from torch_backend.recorder import Recorder

STEPS, SAMPLES, LIMIT, RATE = 3, 8, 0.5, 1e-2
PERTURBED_RUNS = 4


@dataclass(frozen=True)
class Form:
    """How the ranks divide the work.

    Attributes:
        tp: ranks that divide layers. sequence: whether they also divide positions.
        by_plan: by `parallelize_module` instead of by hand.
        ep: data-parallel ranks that divide experts.
        pp: stages of a pipeline.
        dp: data-parallel ranks (with `ep` those of a group of experts), sharded by fully_shard of `package`.
    """

    tp: int = 1
    sequence: bool = False
    by_plan: bool = False
    ep: int = 1
    pp: int = 1
    dp: int = 1
    package: str = ""

    @property
    def num_ranks(self) -> int:
        return self.tp * self.ep * self.pp * self.dp


FORMS = {
    "one": Form(),
    "tp": Form(tp=2),
    "tp-plan": Form(tp=2, by_plan=True),
    "tp4": Form(tp=4),
    "sp": Form(tp=2, sequence=True),
    "sp-plan": Form(tp=2, sequence=True, by_plan=True),
    "tp-torch": Form(tp=2, dp=2, package="torch"),
    "tp-ours": Form(tp=2, dp=2, package="ours"),
    "sp-torch": Form(tp=2, sequence=True, dp=2, package="torch"),
    "sp-ours": Form(tp=2, sequence=True, dp=2, package="ours"),
    "sp-plan-torch": Form(tp=2, sequence=True, by_plan=True, dp=2, package="torch"),
    "ep": Form(ep=2, package="torch"),
    "ep-torch": Form(ep=2, dp=2, package="torch"),
    "ep-ours": Form(ep=2, dp=2, package="ours"),
    "pp": Form(pp=2),
    "pp-torch": Form(pp=2, dp=2, package="torch"),
    "pp-ours": Form(pp=2, dp=2, package="ours"),
    "pp-tp": Form(pp=2, tp=2),
}


@dataclass(frozen=True)
class Run:
    """A training.

    Attributes:
        form: one of `FORMS`.
        experts: mixtures of experts instead of MLPs.
        microbatches: of a step, with as many samples each. Those of a pipeline are two.
        clip: clips gradients by their norm. dropout: drops values after each MLP.
        fault: its name, or "".
    """

    form: str = "one"
    dtype: str = "float64"
    experts: bool = False
    microbatches: int = 1
    clip: bool = False
    dropout: bool = False
    fault: str = ""

    @property
    def on_one_device(self) -> "Run":
        """The same training without parallelism and fault."""
        return replace(self, form="one", fault="")

    @property
    def num_ranks(self) -> int:
        return FORMS[self.form].num_ranks

    @property
    def num_perturbed_runs(self) -> int:
        """Those of one device measure rounding below float64."""
        return PERTURBED_RUNS if self.form == "one" and self.dtype != "float64" else 0

    @property
    def options(self) -> str:
        """What the run has beside its form and dtype, in words."""
        names = [name for name in ("clip", "dropout") if getattr(self, name)]
        return " ".join(["experts" if self.experts else "dense", *names])

    def targets(self, path: Path, log: Path) -> list[tuple[Any, ...]]:
        """The functions that record the ranks in a folder, each with its arguments."""
        return [(train_rank, self, path, each) for each in forked.ranks(self.num_ranks)]


def train_rank(run: Run, directory: Path, environment: dict[str, str]) -> int:
    """Record a training and its perturbed runs on this process, a rank of it; returns the exit status.

    Args:
        environment: as torchrun sets it; empty on one device.
    """
    with connected(environment):
        for number in range(run.num_perturbed_runs + 1):
            train(run, directory, perturbed_run=number)
    return 0


@contextmanager
def connected(environment: dict[str, str]) -> Iterator[None]:
    """A context with the default process group of an environment as torchrun sets it; with none if it is empty."""
    torch.set_num_threads(1)
    if not environment:
        yield
        return
    rank, world_size = (int(environment[name]) for name in ("RANK", "WORLD_SIZE"))
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = dist.TCPStore(address, port, world_size, is_master=rank == 0)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    yield
    dist.barrier()
    dist.destroy_process_group()


@dataclass
class _Parallel:
    """This rank's model and its place on the mesh."""

    model: Transformer
    data_rank: int = 0
    data_size: int = 1
    stage: int | None = None
    pipeline: dist.ProcessGroup | None = None
    expert_group: dist.ProcessGroup | None = None
    tp_rank: int = 0


def train(run: Run, directory: Path, *, perturbed_run: int) -> None:
    """Record one training on this rank of the process group."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank if run.fault == "initial_values" else 0)
    model = Transformer(experts=run.experts, dropout=run.dropout).to(getattr(torch, run.dtype))
    placed = _parallel(run, model)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, foreach=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    schedule = None if placed.stage is None else _schedule(run, placed)
    options: dict[str, Any] = {"every": 1, "dense": STEPS, "units": Block, "perturbed_run": perturbed_run}
    if FORMS[run.form].package:
        del options["units"]
    with Recorder(
        directory, model=model, optimizer=optimizer, name="transformer", pipeline=placed.pipeline, **options
    ) as recorder:
        for step in range(STEPS):
            seed = step + (100 * placed.tp_rank if run.fault == "tp_batches" else 0)
            generator = torch.Generator().manual_seed(seed)
            samples = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
            own = samples.chunk(placed.data_size)[placed.data_rank]
            loss = _forward_and_backward(run, placed, schedule, own, samples)
            _average_experts(run, placed)
            norm = _clip(run, placed) if run.clip else None
            optimizer.step()
            optimizer.zero_grad()
            if not (run.fault == "stage_rate" and placed.stage == 0):
                scheduler.step()
            recorder.step(loss=loss, grad_norm=norm)


def _forward_and_backward(run: Run, placed: _Parallel, schedule: Any, own: Tensor, samples: Tensor) -> Tensor | None:
    """Gradients of a step; returns the loss, on the last stage of a pipeline."""
    losses: list[Tensor] = []
    if schedule is None:
        for part in own.chunk(run.microbatches):
            losses.append(_loss_of(placed.model(part[:, :-1]), part[:, 1:]))
            (losses[-1] / run.microbatches).backward()
    elif placed.stage == 0:
        schedule.step(own[:, :-1])
    else:
        if run.fault == "stage_targets":  # data ranks of the last stage are counted from its end
            own = samples.chunk(placed.data_size)[placed.data_size - 1 - placed.data_rank]
        schedule.step(target=own[:, 1:], losses=losses)
    if run.fault == "loss_divided" and losses:
        return torch.stack(losses).detach().sum()  # their loss function has divided them
    return torch.stack(losses).detach().mean() if losses else None


def _loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _parallel(run: Run, model: Transformer) -> _Parallel:
    """Divide a model as its form says."""
    form, package = FORMS[run.form], {"torch": torch_fsdp, "ours": torch_backend}.get(FORMS[run.form].package)
    set_fault(model, run.fault)
    if form.num_ranks == 1:
        return _Parallel(model)
    if form.ep > 1:
        return _divided_experts(run, model, package)
    axes = {"pp": form.pp, "dp": form.dp, "tp": form.tp}
    sizes = {name: size for name, size in axes.items() if size > 1}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    placed = _Parallel(model)
    if form.dp > 1:
        placed.data_rank, placed.data_size = mesh["dp"].get_local_rank(), form.dp
    if form.pp > 1:
        placed.stage, placed.pipeline = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
        model.keep_stage(placed.stage)
    if form.tp > 1:
        placed.tp_rank = mesh["tp"].get_local_rank()
        if form.by_plan:
            _divide_by_plan(model, mesh["tp"], sequence=form.sequence)
        else:
            divide_by_hand(model, Axis(mesh["tp"], form.sequence), run.fault)
    if package is not None:
        for block in model.layers:
            if isinstance(block, Block):
                package.fully_shard(block, mesh=mesh["dp"])
        package.fully_shard(model, mesh=mesh["dp"])
        if run.fault == "divide_world":
            sharded: list[Any] = [model, *model.layers]
            for module in sharded:
                module.set_gradient_divide_factor(dist.get_world_size())
                module.set_force_sum_reduction_for_comms(True)
    return placed


def _divide_by_plan(model: Any, mesh: DeviceMesh, *, sequence: bool) -> None:
    column: Any = ColwiseParallel(input_layouts=Shard(1)) if sequence else ColwiseParallel()
    row: Any = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    names = {"attention.query": column, "attention.key": column, "attention.value": column, "attention.out": row}
    plan = names | {"mlp.up": column, "mlp.down": row}
    if sequence:
        plan |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        ends: dict[str, Any] = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, ends)
    for block in model.layers:
        parallelize_module(block, mesh, plan)


def _divided_experts(run: Run, model: Any, package: Any) -> _Parallel:
    """Experts over an axis of data-parallel ranks; without further ranks, fully_shard leaves them to `_average_experts`."""
    form, world_size = FORMS[run.form], dist.get_world_size()
    mesh = init_device_mesh("cpu", (form.dp, form.ep), mesh_dim_names=("dp_mod_ep", "ep"))
    data = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    ignored: set[nn.Parameter] = set()
    mixtures: list[Any] = [each for each in model.modules() if isinstance(each, Experts)]
    for module in mixtures:
        module.divided(Axis(mesh["ep"]), shares_batch=False)
        if form.dp == 1:
            ignored |= set(module.parameters())
            continue
        package.fully_shard(module, mesh=mesh["dp_mod_ep"])
        # An expert's gradients are sums over the samples of all ranks of the axis.
        module.set_gradient_divide_factor(form.dp if run.fault == "expert_divisor" else world_size)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that multiplies
    set_fault(model, run.fault)
    for block in model.layers:
        package.fully_shard(block, mesh=data, ignored_params=ignored)
    package.fully_shard(model, mesh=data, ignored_params=ignored)
    group = data.get_group() if form.dp == 1 else None
    return _Parallel(model, dist.get_rank(), world_size, expert_group=group)


def _average_experts(run: Run, placed: _Parallel) -> None:
    """Experts that no fully_shard reduces have gradients of all samples: the mean over ranks divides them."""
    if placed.expert_group is None:
        return
    for name, param in placed.model.named_parameters():
        if ".experts." in name and param.grad is not None:
            grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            if run.fault == "expert_group":
                dist.all_reduce(grad, group=placed.expert_group)
            grad.div_(placed.expert_group.size())


def _schedule(run: Run, placed: _Parallel) -> Any:
    """Two stages that run forward and backward of microbatches in turn."""
    assert placed.stage is not None
    model: Any = placed.model
    loss = _loss_of
    if run.fault == "loss_divided":
        loss = lambda logits, targets: _loss_of(logits, targets) / run.microbatches  # noqa: E731
    kind = _LateStage if run.fault == "stale_buffer" and placed.stage == 1 else PipelineStage
    stage = kind(model, placed.stage, 2, torch.device("cpu"), group=placed.pipeline)
    divides = not (run.fault == "stage_scale" and placed.stage == 0)
    return Schedule1F1B(stage, run.microbatches, loss_fn=loss, scale_grads=divides)


class _LateStage(PipelineStage):
    """A stage that computes every second microbatch on what the one before left in the buffer."""

    received: tuple[Tensor, ...] = ()
    calls = 0

    def forward_maybe_with_nosync(self, *args: Tensor, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls % 2 == 0:
            pairs = zip(args, self.received, strict=True)
            return super().forward_maybe_with_nosync(*(x + (old - x).detach() for x, old in pairs), **kwargs)
        self.received = tuple(x.detach() for x in args)
        return super().forward_maybe_with_nosync(*args, **kwargs)


def _clip(run: Run, placed: _Parallel) -> float:
    """Clip by the norm of all gradients; returns the norm."""
    grads = [param.grad for param in placed.model.parameters() if param.grad is not None]
    squares = _squares(grads, whole=run.fault != "clip_local")
    if placed.pipeline is not None and run.fault != "clip_stage":
        dist.all_reduce(squares, group=placed.pipeline)
    norm = math.sqrt(squares.item())
    for grad in grads:
        grad.mul_(min(1.0, LIMIT / norm))
    return norm


def _squares(grads: Iterable[Tensor], *, whole: bool) -> Tensor:
    """The sum of squares of gradients, or of this rank's parts of them."""
    parts = [
        (grad.full_tensor() if whole else grad.to_local()) if isinstance(grad, DTensor) else grad for grad in grads
    ]
    return torch.stack([part.double().square().sum() for part in parts]).sum()
