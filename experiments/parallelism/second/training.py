"""Trains Llama or Megatron's layers in one form of parallelism, with a fault or without, and records it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import torch_backend
from experiments.parallelism.axis import Axis
from experiments.parallelism.second.llama import LENGTH, VOCABULARY, Context, Decoder, Mixture, divide_layers
from experiments.parallelism.second.megatron import GPT, Block, sum_sequence_gradients
from experiments.parallelism.training import connected
from experiments.untouched import forked
from torch_backend.recorder import Recorder

STEPS, SAMPLES, MICROBATCHES, LIMIT, RATE = 3, 8, 4, 0.5, 1e-2
PERTURBED_RUNS = 4


@dataclass(frozen=True)
class Form:
    """How the ranks divide the work.

    Attributes:
        pp: ranks of a pipeline. chunks: stages of each of them. tied: the embedding is the head.
        dp: data-parallel ranks. replicas: groups of them that each have all shards (HSDP).
        cp: ranks that divide positions. order: "rank" or "head_tail".
        ep: ranks to which tokens are sent.
        tp: ranks that divide layers. sequence: whether they also divide positions.
        megatron: the layers of `megatron.py`.
        package: whose fully_shard shards over data- and context-parallel ranks: "torch", "ours", "ddp", or "" for sums by hand.
    """

    pp: int = 1
    chunks: int = 1
    tied: bool = False
    replicas: int = 1
    dp: int = 1
    cp: int = 1
    order: str = "rank"
    ep: int = 1
    tp: int = 1
    sequence: bool = False
    megatron: bool = False
    package: str = ""

    @property
    def axes(self) -> dict[str, int]:
        """Name and size of the axes of the mesh."""
        sizes = {"pp": self.pp, "replicate": self.replicas, "dp": self.dp, "cp": self.cp, "ep": self.ep, "tp": self.tp}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def num_ranks(self) -> int:
        return math.prod(self.axes.values())


FORMS = {
    "one": Form(),
    "one-microbatches": Form(),
    "one-tied": Form(tied=True),
    "one-megatron": Form(megatron=True),
    "pp-interleaved": Form(pp=2, chunks=2),
    "pp-interleaved-torch": Form(pp=2, chunks=2, dp=2, package="torch"),
    "pp-interleaved-ours": Form(pp=2, chunks=2, dp=2, package="ours"),
    "pp-interleaved-tp": Form(pp=2, chunks=2, tp=2),
    "pp-tied": Form(pp=2, tied=True),
    "cp": Form(cp=2),
    "cp-head-tail": Form(cp=2, order="head_tail"),
    "cp-tp": Form(cp=2, tp=2),
    "cp-torch": Form(dp=2, cp=2, package="torch"),
    "cp-ours": Form(dp=2, cp=2, package="ours"),
    "ep-hand": Form(dp=2, ep=2),
    "ep-dispatch-torch": Form(dp=2, ep=2, package="torch"),
    "ep-dispatch-ours": Form(dp=2, ep=2, package="ours"),
    "hsdp": Form(replicas=2, dp=2, package="torch"),
    "sp-loss": Form(tp=2, sequence=True),
    "sp-loss-torch": Form(dp=2, tp=2, sequence=True, package="torch"),
    "megatron": Form(tp=2, megatron=True),
    "megatron-sp": Form(tp=2, sequence=True, megatron=True),
    "megatron-ddp": Form(dp=2, tp=2, megatron=True, package="ddp"),
}


@dataclass(frozen=True)
class Run:
    """A training.

    Attributes:
        form: one of `FORMS`.
        experts: mixtures of experts instead of MLPs. clip: clips gradients. dropout: drops values in Megatron's layers.
        fault: its name, or "".
    """

    form: str = "one"
    dtype: str = "float64"
    experts: bool = False
    clip: bool = False
    dropout: bool = False
    fault: str = ""

    @property
    def on_one_device(self) -> "Run":
        """The same training without parallelism and fault."""
        form = FORMS[self.form]
        of_stages = "one-tied" if form.tied else "one-microbatches"
        return replace(self, form=of_stages if form.pp > 1 else "one-megatron" if form.megatron else "one", fault="")

    @property
    def num_ranks(self) -> int:
        return FORMS[self.form].num_ranks

    @property
    def num_perturbed_runs(self) -> int:
        """Those of one device measure rounding below float64."""
        return PERTURBED_RUNS if self.num_ranks == 1 and self.dtype != "float64" else 0

    @property
    def options(self) -> str:
        """What the run has beside its form and dtype, in words."""
        names = [name for name in ("clip", "dropout") if getattr(self, name)]
        return " ".join(["experts" if self.experts else "dense", *names])

    def targets(self, path: Path, log: Path) -> list[tuple[Any, ...]]:
        """The functions that record the ranks in a folder, each with its arguments."""
        return [(train_rank, self, path, each) for each in forked.ranks(self.num_ranks)]


def train_rank(run: Run, directory: Path, environment: dict[str, str]) -> int:
    """Record a training and its perturbed runs on this process, a rank of it; returns the exit status."""
    with connected(environment):
        for number in range(run.num_perturbed_runs + 1):
            train(run, directory, perturbed_run=number)
    return 0


@dataclass
class _Placed:
    """This rank's parts of the model and its place on the mesh."""

    parts: list[Any]
    mesh: Any = None
    data_rank: int = 0
    data_size: int = 1
    context: Context = field(default_factory=Context)
    axes: dict[str, Axis] = field(default_factory=dict)
    stages: list[int] = field(default_factory=list)

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for part in self.parts for param in part.parameters()]


def train(run: Run, directory: Path, *, perturbed_run: int) -> None:
    """Record one training on this rank of the process group."""
    form = FORMS[run.form]
    placed = _placed(run)
    optimizer = torch.optim.AdamW(placed.params, RATE, foreach=False)
    step_of = _step(run, placed)
    options: dict[str, Any] = {"every": 1, "dense": STEPS, "perturbed_run": perturbed_run}
    if form.package not in ("torch", "ours"):
        options["units"] = Block if form.megatron else LlamaDecoderLayer
    if form.pp > 1:
        options["pipeline"] = placed.axes["pp"].group
    if form.cp > 1:
        options["context"] = placed.axes["cp"].group
        options["context_order"] = form.order
    if form.megatron and form.tp > 1:
        options["tensor_parallel"] = placed.axes["tp"].group
    torch.manual_seed(1 + (placed.axes["tp"].rank if run.fault == "dropout_group" and "tp" in placed.axes else 0))
    model: Any = placed.parts if len(placed.parts) > 1 else placed.parts[0]
    with Recorder(directory, model=model, optimizer=optimizer, name="llama", **options) as recorder:
        for step in range(STEPS):
            samples = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
            loss = step_of(samples)
            norm = _clip(run, placed) if run.clip else None
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss, grad_norm=norm)


def _loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _placed(run: Run) -> _Placed:
    """Make this rank's parts of the model as its form says."""
    form = FORMS[run.form]
    if form.num_ranks == 1:
        return _Placed([_made(run, None)])
    mesh = init_device_mesh("cpu", tuple(form.axes.values()), mesh_dim_names=tuple(form.axes))
    axes = {name: Axis(mesh[name], form.sequence) for name in form.axes}
    placed = _Placed([], mesh, axes=axes)
    over_data = [axes[name] for name in ("replicate", "dp", "ep") if name in axes]
    for axis in over_data:
        placed.data_rank = placed.data_rank * axis.size + axis.rank
        placed.data_size *= axis.size
    if form.pp > 1:
        placed.stages = [axes["pp"].rank + form.pp * chunk for chunk in range(form.chunks)]
        placed.parts = [_made(run, None, (stage, form.pp * form.chunks)) for stage in placed.stages]
    else:
        placed.parts = [_made(run, axes.get("tp"))]
    placed.context = Context(axes.get("cp"), form.order, run.fault)
    for part in placed.parts:
        if not form.megatron:
            part.see(placed.context)
        if form.tp > 1 and not form.megatron:
            divide_layers(part, mesh["tp"], sequence=form.sequence, fault=run.fault)
        for module in part.modules():
            if form.ep > 1 and isinstance(module, Mixture):
                module.divided(axes["ep"])
                module.fault = run.fault
    _shard(run, placed)
    return placed


def _made(run: Run, axis: Axis | None, part: tuple[int, int] = (0, 1)) -> Any:
    torch.manual_seed(0)
    if FORMS[run.form].megatron:
        model: Any = GPT(axis, dropout=run.dropout, fault=run.fault)
    else:
        model = Decoder(experts=run.experts, tied=FORMS[run.form].tied, part=part)
    return model.to(getattr(torch, run.dtype))


def _shard(run: Run, placed: _Placed) -> None:
    """Shard the parts over data- and context-parallel ranks by fully_shard or DDP, if the form says so."""
    form, mesh = FORMS[run.form], placed.mesh
    if form.package == "ddp":
        model = placed.parts[0]
        if run.fault == "data_group":
            model._ddp_params_and_buffers_to_ignore = {"output_layer.bias"}
        placed.parts = [DistributedDataParallel(model, process_group=mesh["dp"].get_group())]
    package: Any = {"torch": torch_fsdp, "ours": torch_backend}.get(form.package)
    if package is None:
        return
    data = mesh["replicate", "dp"] if form.replicas > 1 else mesh["dp"]
    if form.cp > 1:
        data = mesh["dp", "cp"]._flatten("dp_cp")
    if form.ep > 1:
        data = mesh["dp", "ep"]._flatten("dp_ep")
    for part in placed.parts:
        ignored = {param for name, param in part.named_parameters() if "router" in name and run.fault == "router_sum"}
        sharded = [*part.layers.values(), part]
        for module in part.modules():
            if form.ep > 1 and isinstance(module, Mixture):
                package.fully_shard(module.experts, mesh=mesh["dp"])
                module.experts.set_gradient_divide_factor(dist.get_world_size())  # type: ignore[operator]
                module.experts.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        for module in sharded:
            package.fully_shard(module, mesh=data, ignored_params=ignored)
            if run.fault == "axis_divisor":  # only the data-parallel ranks are counted
                module.set_gradient_divide_factor(form.dp)
                module.set_force_sum_reduction_for_comms(True)
        if run.fault == "replica_gradient":
            part.set_requires_all_reduce(False)


def _step(run: Run, placed: _Placed) -> Callable[[Tensor], Tensor | None]:
    """The function from the samples of all ranks to the loss, on the last stage of a pipeline, that leaves gradients."""
    schedule = _schedule(run, placed) if placed.stages else None
    return lambda samples: _gradients(run, placed, schedule, samples)


def _gradients(run: Run, placed: _Placed, schedule: Any, samples: Tensor) -> Tensor | None:
    form, axes, model = FORMS[run.form], placed.axes, placed.parts[0]
    rank, size = placed.data_rank, placed.data_size
    own = samples.chunk(size)[rank]
    tokens, targets = own[:, :-1], own[:, 1:]
    if schedule is not None:
        return _pipelined(run, placed, schedule, samples)
    if form.cp > 1:
        inputs = placed.context.own
        if run.fault == "context_chunk":  # ranks count the parts of a sequence from its end
            inputs = placed.context.all.chunk(axes["cp"].size)[-1 - axes["cp"].rank]
        tokens, targets = tokens[:, inputs], targets[:, placed.context.own]
    microbatches = MICROBATCHES if run.form in ("one-microbatches", "one-tied") else 1
    losses: list[Tensor] = []
    for x, y in zip(tokens.chunk(microbatches), targets.chunk(microbatches), strict=True):
        if form.sequence and not form.megatron:
            with loss_parallel():
                losses.append(_loss_of(model(x), y))
                losses[-1].backward()
            continue
        logits = model(x)
        plain = model.module if form.package == "ddp" else model
        losses.append(plain.loss(logits, y) if form.megatron else _loss_of(logits, y))
        (losses[-1] / microbatches).backward()
    _sum_by_hand(run, placed)
    return torch.stack([loss.detach() for loss in losses]).mean() if len(losses) > 1 else losses[0].detach()


def _sum_by_hand(run: Run, placed: _Placed) -> None:
    """Average gradients over the ranks that no package averages them over."""
    form, model = FORMS[run.form], placed.parts[0]
    if form.megatron and not form.package:
        sum_sequence_gradients(model)
    if form.package or not (form.cp > 1 or form.ep > 1):
        return
    for name, param in model.named_parameters():
        grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        if form.cp > 1 and not (run.fault == "context_gradient" and name == "norm.weight"):
            dist.all_reduce(grad, group=placed.axes["cp"].group)
            grad.div_(form.cp)
        if form.ep > 1:
            of_experts = placed.axes["ep" if run.fault == "expert_group" else "dp"].group
            dist.all_reduce(grad, group=of_experts if ".experts." in name else dist.group.WORLD)
            grad.div_(dist.get_world_size())


def _pipelined(run: Run, placed: _Placed, schedule: Any, samples: Tensor) -> Tensor | None:
    form, losses = FORMS[run.form], []
    rank, size = placed.data_rank, placed.data_size
    own, first = samples.chunk(size)[rank], samples.chunk(size)[rank]
    if run.fault == "microbatch_rank":
        first = samples.chunk(size)[(rank + 1) % size]
    targets = own[:, 1:]
    if run.fault == "microbatch_order":  # the last stage has its microbatches in another order
        targets = torch.cat(targets.chunk(MICROBATCHES)[::-1])
    arguments = (first[:, :-1],) if 0 in placed.stages else ()
    is_last = form.pp * form.chunks - 1 in placed.stages
    schedule.step(*arguments, target=targets if is_last else None, losses=losses if is_last else None)
    if form.tied and run.fault != "tied_gradient":
        part = placed.parts[0]
        weight = part.embed_tokens.weight if 0 in placed.stages else part.lm_head.weight
        dist.all_reduce(weight.grad, group=placed.axes["pp"].group)
    if not losses:
        return None
    return torch.stack(losses).detach().mean() * (form.chunks if run.fault == "stage_divisor" else 1)


def _schedule(run: Run, placed: _Placed) -> Any:
    """Runs forward and backward of the stages of this rank in turn."""
    form, group = FORMS[run.form], placed.axes["pp"].group
    loss = _loss_of
    if run.fault == "stage_divisor":  # each stage of a rank counts as one more accumulation
        loss = lambda logits, targets: _loss_of(logits, targets) / form.chunks  # noqa: E731
    stages: list[Any] = []
    for part, index in zip(placed.parts, placed.stages, strict=True):
        kind = _LateStage if run.fault == "stale_chunk" and index == 2 else PipelineStage
        stages.append(kind(part, index, form.pp * form.chunks, torch.device("cpu"), group=group))
    if form.chunks == 1:
        return Schedule1F1B(stages[0], MICROBATCHES, loss_fn=loss)
    return ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss)


class _LateStage(PipelineStage):
    """A stage that computes each microbatch after the first on the values of the one before."""

    before: tuple[Tensor, ...] = ()

    def forward_maybe_with_nosync(self, *args: Tensor, **kwargs: Any) -> Any:
        received, self.before = self.before or args, tuple(x.detach().clone() for x in args)
        used = (x + (old - x).detach() for x, old in zip(args, received, strict=True))
        return super().forward_maybe_with_nosync(*used, **kwargs)


def _clip(run: Run, placed: _Placed) -> float:
    """Clip by the norm of all gradients; returns the norm."""
    grads = [param.grad for param in placed.params if param.grad is not None]
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    squares = torch.stack([grad.double().square().sum() for grad in whole]).sum()
    if "pp" in placed.axes:
        dist.all_reduce(squares, group=placed.axes["pp"].group)
    norm = math.sqrt(squares.item())
    for grad in grads:
        grad.mul_(min(1.0, LIMIT / norm))
    return norm
