"""Random trees under `fully_shard`, torch's and ours: options, how they are drawn, and what a run does with them."""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.on_torch.helpers.paired_runs import STEPS, Case, Options, Run, drawn, dtype_named
from tests.on_torch.helpers.random_trees import Grower, Part, Unit, written

LOW = ("bfloat16", "float16")
# Leaves whose backward reads none of their parameters.
UNREAD = ("vector", "empty", "buffers", "embedding", "plain")


@dataclass(frozen=True, repr=False)
class Precision:
    """A MixedPrecisionPolicy; dtypes by name."""

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True

    def __repr__(self) -> str:
        """As an expression that makes it."""
        return written(self)


@dataclass(frozen=True, repr=False)
class ShardOptions(Options):
    """How a tree is sharded, and what a run does with it.

    Attributes:
        reshard: `reshard_after_forward` of the root; `inner_reshard`: of all other units.
        replicate: replicas in a mesh of two axes; 0 for one axis.
        gives_mesh: the mesh of one axis is given, not left to the default.
        precision: the policy, of the units that `precision_in` says: "all", "root" or "inner".
        offload: shards live on the CPU, of the units there are.
        last_dim: parameters are sharded on their last dim where it divides evenly.
        grouped: units that are children of one module are sharded as a list.
        forward_prefetch, backward_prefetch: how many units ahead each unit gathers, by the order of registration.
        divide: the divide factor of gradients. `force_sum`: collectives only sum.
        partial: microbatches that are not reduced are, but for the all-reduce over replicas.
        keeps: parameters stay full after the backward of all microbatches but the last.
        marks_last: backwards of all microbatches but the last are said not to be the last.
        zeros_unused: parameters that are not used are reduced as zeros.
        no_unshard: units whose backward does not read their parameters do not gather them there.
        switches: parameters stay full after an evaluation's forward, and are freed after a training forward.
        unshards: parameters are gathered by hand before each step: "" or "now", "later" for asynchronously, "waited" for
            that with a wait, or "undone" for a reshard after it.
        edits: between steps, "local" parts of parameters are changed, or a state dict is changed and loaded: "load", or
            "assign" for in place of the parameters.
        method: the root is called by another method than forward.
        separate_group: reduce-scatters have a process group of their own. `buffers`: how many of their inputs are kept.
        comms: all-gathers and reduce-scatters are the user's. `hook`: so is something after the reduction.
    """

    api: ClassVar[str] = "fsdp2"
    reshard: bool | int | None = None
    inner_reshard: bool | int | None = None
    replicate: int = 0
    gives_mesh: bool = False
    precision: Precision | None = None
    precision_in: str = "all"
    offload: bool = False
    last_dim: bool = False
    grouped: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    divide: float | None = None
    force_sum: bool = False
    partial: bool = False
    keeps: bool = False
    marks_last: bool = False
    zeros_unused: bool = False
    no_unshard: bool = False
    switches: bool = False
    unshards: str = ""
    method: bool = False
    separate_group: bool = False
    buffers: int = 1
    comms: bool = False
    hook: bool = False

    def simpler(self) -> "Iterator[Options]":
        """Options that are simpler by one thing each."""
        yield from super().simpler()
        if self.precision is not None:
            for f in fields(self.precision):
                if getattr(self.precision, f.name) != f.default:
                    yield replace(self, precision=replace(self.precision, **{f.name: f.default}))


# Drawing


def draw_case(seed: int, world_size: int) -> Case:
    """The case of a seed. At 2 ranks the tree computes really; at 3 and 4 half of them do, in float64 and within a bound."""
    rng = random.Random(f"fully_shard, {seed} at {world_size}")
    real = world_size <= 2 or rng.random() < 0.35
    bits = world_size <= 2 or not real
    options = draw_options(rng, world_size, bits=bits)
    one_dtype = options.grouped or rng.random() < 0.6
    dtypes = ("float64",) if not bits else (rng.choice(("float32", "float32", "float64")),) * one_dtype
    grower = Grower(
        rng,
        exact=not real,
        batch_norms=options.precision is None,
        dtypes=dtypes or ("float32", "float32", "float64"),
        frozen_dtypes=("float32", "float64", "bfloat16") if bits and rng.random() < 0.3 else (),
        ignores=rng.random() < 0.25,
        skips=drawn(rng, 0.25, world_size, 0),
    )
    return Case(grower.tree(), options, world_size, bits)


def draw_options(rng: random.Random, world_size: int, *, bits: bool) -> ShardOptions:
    """Random options, most of them as by default."""
    maybe = partial(drawn, rng)
    sizes = [n for n in range(2, world_size) if world_size % n == 0]
    replicas = [n for n in range(1, world_size + 1) if world_size % n == 0]
    some = (None, None, *LOW, "float32")

    def draw_precision() -> Precision:
        param_dtype = rng.choice((None, *LOW, *LOW, "float32"))
        return Precision(param_dtype, rng.choice(some), rng.choice(some), rng.random() < 0.7)

    def draw_reshard() -> bool | int | None:
        size = rng.choice(sizes) if sizes and rng.random() < 0.4 else None
        choice = rng.choice((None, None, True, False))
        return choice if size is None else size

    reshard, inner_reshard, replicate = draw_reshard(), draw_reshard(), maybe(0.3, lambda: rng.choice(replicas), 0)
    if replicate:  # a size divides the shard axis
        shard_size = world_size // replicate
        reshard, inner_reshard = (
            r if type(r) is not int or shard_size % r == 0 else True for r in (reshard, inner_reshard)
        )
    micro = rng.choice(((True,), (True,), (True, True), (False, True), (False, True, True)))
    options = ShardOptions(
        optimizer=rng.choice(("sgd", "momentum", *["adamw"] * bits)),
        micro=micro,
        forwards=maybe(0.1, 2, 1),
        clip=maybe(0.3, lambda: (rng.choice((0.01, 0.5, 100.0)), rng.choice((1.0, 2.0, 3.0, float("inf")))), None),
        evals=rng.random() < 0.3,
        edits=maybe(0.3, lambda: rng.choice(("local", "load", "assign")), ""),
        zero=rng.choice(("none", "none", "zeros", "model")),
        watches=rng.random() < 0.5,
        reshard=reshard,
        inner_reshard=inner_reshard,
        replicate=replicate,
        gives_mesh=rng.random() < 0.2,
        precision=maybe(0.4, draw_precision, None) if bits else None,
        precision_in=rng.choice(("all", "all", "root", "inner")),
        offload=rng.random() < 0.1,
        last_dim=rng.random() < 0.2,
        grouped=rng.random() < 0.2,
        forward_prefetch=maybe(0.2, lambda: rng.randint(1, 2), 0),
        backward_prefetch=maybe(0.2, lambda: rng.randint(1, 2), 0),
        divide=maybe(0.15, lambda: rng.choice((1.0, 2.0, 3.0, 4.0)), None),
        force_sum=rng.random() < 0.15,
        partial=rng.random() < 0.4,
        keeps=rng.random() < 0.3 and len(micro) > 1,
        marks_last=rng.random() < 0.3 and len(micro) > 1,
        zeros_unused=rng.random() < 0.2,
        no_unshard=rng.random() < 0.15,
        switches=rng.random() < 0.15,
        unshards=maybe(0.25, lambda: rng.choice(("now", "later", "waited", "undone")), ""),
        method=rng.random() < 0.15,
        separate_group=rng.random() < 0.1,
        buffers=maybe(0.1, 2, 1),
        comms=rng.random() < 0.1,
        hook=rng.random() < 0.1,
        # Past the second step, norms upon norms make more of a rounding than the bound of the real trees allows for.
        steps=STEPS if bits else 2,
    )
    return replace(
        options,
        precision_in=options.precision_in if options.precision else "all",
        no_unshard=options.no_unshard and not options.grouped,  # it is set for all modules of a list
        partial=options.partial and not all(options.micro),
    )


# Sharding


@cache
def device_mesh(shape: tuple[int, ...]) -> Any:
    """A mesh of all ranks, made once."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _last_dim(size: int, param: nn.Parameter) -> Shard | None:
    return Shard(param.ndim - 1) if param.numel() and param.shape[-1] % size == 0 else None


def shard(root: nn.Module, options: ShardOptions, api: Any) -> Any:
    """The tree's module as a model of `api`: torch.distributed.fsdp or torch_backend."""
    world_size = dist.get_world_size()
    ignored = {p for m in root.modules() if isinstance(m, Part) and m.node.ignored for p in m.parameters()}
    units: list[Any] = [m for m in root.modules() if isinstance(m, Unit)]

    def arguments(*, is_root: bool) -> dict[str, Any]:
        given: dict[str, Any] = {}
        reshard = options.reshard if is_root else options.inner_reshard
        if reshard is not None:
            given["reshard_after_forward"] = reshard
        if options.replicate:
            given["mesh"] = device_mesh((options.replicate, world_size // options.replicate))
        elif options.gives_mesh:
            given["mesh"] = device_mesh((world_size,))
        if options.precision is not None and options.precision_in in ("all", "root" if is_root else "inner"):
            values = {f.name: getattr(options.precision, f.name) for f in fields(Precision)}
            for name in ("param_dtype", "reduce_dtype", "output_dtype"):
                values[name] = dtype_named(values[name])
            given["mp_policy"] = api.MixedPrecisionPolicy(**values)
        if options.offload:
            given["offload_policy"] = api.CPUOffloadPolicy(pin_memory=False)
        if options.last_dim:
            given["shard_placement_fn"] = partial(_last_dim, world_size // (options.replicate or 1))
        if ignored:
            given["ignored_params"] = ignored
        return given

    def visit(module: nn.Module) -> None:
        units_here = []
        for child in module.children():  # each once, also one with two names
            if child not in visited:
                visited.add(child)
                visit(child)
                if isinstance(child, Unit):
                    units_here.append(child)
        groups = [units_here] if options.grouped and len(units_here) > 1 else units_here
        for group in groups:
            api.fully_shard(group, **arguments(is_root=False))

    visited = {root}
    visit(root)
    api.fully_shard(root, **arguments(is_root=True))
    for number, unit in enumerate(units):
        assert isinstance(unit, api.FSDPModule)
        if options.forward_prefetch:
            unit.set_modules_to_forward_prefetch(units[number + 1 :][: options.forward_prefetch])
        if options.backward_prefetch:
            unit.set_modules_to_backward_prefetch(units[:number][::-1][: options.backward_prefetch])
        if options.divide is not None:
            unit.set_gradient_divide_factor(options.divide)
        if options.force_sum:
            unit.set_force_sum_reduction_for_comms(True)
        if options.no_unshard and _reads_nothing(unit):
            unit.set_unshard_in_backward(False)
        if options.comms:
            unit.set_custom_all_gather(_all_gather(api))
            unit.set_custom_reduce_scatter(_reduce_scatter(api))
        if options.hook:
            unit.set_all_reduce_hook(_halve)
    model: Any = root
    # Where ranks use different parameters, torch mixes up gradients unless it is told to send zeros (R29).
    skips = any(m.node.skipped_by >= 0 for m in root.modules() if isinstance(m, Part))
    if options.zeros_unused or (skips and api.__name__ != "torch_backend"):
        model.set_reduce_scatter_unused_params(True)
    if options.separate_group:
        model.set_separate_reduce_scatter_group(True)
    if options.buffers > 1:
        model.set_reduce_scatter_max_input_buffers(options.buffers)
    return model


def _reads_nothing(unit: nn.Module) -> bool:
    """Whether backward reads no parameter of the unit."""
    own = [m for m in unit.modules() if isinstance(m, Part) and (m is unit or not isinstance(m, Unit))]
    return all(m.node.kind in (*UNREAD, "group") for m in own)


def _halve(reduced: torch.Tensor) -> None:
    reduced.mul_(0.5)


def _all_gather(api: Any) -> Any:
    """An all-gather by the user. torch's base classes are not public."""

    base: Any = getattr(api, "AllGather", object)

    class Gather(base):
        def allocate(self, size, *, dtype, device):  # type: ignore[no-untyped-def]
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):  # type: ignore[no-untyped-def]
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    return Gather()


def _reduce_scatter(api: Any) -> Any:
    """A reduce-scatter by the user."""

    base: Any = getattr(api, "ReduceScatter", object)

    class Scatter(base):
        def allocate(self, size, *, dtype, device):  # type: ignore[no-untyped-def]
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):  # type: ignore[no-untyped-def]
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

    return Scatter()


def _is_everywhere(param: DTensor) -> bool:
    """Whether every rank has elements of a parameter."""
    (dim,) = (placement.dim for placement in param.placements if isinstance(placement, Shard))
    size, num = param.shape[dim], param.device_mesh.shape[-1]
    return param.numel() > 0 and -(-size // num) * (num - 1) < size


# Training


class ShardedRun(Run):
    """A run of FSDP2."""

    def wrap(self, root: nn.Module) -> Any:
        """By the options."""
        return shard(root, self.case.options, self.api)

    def entry(self) -> Any:
        """Forward, or another method."""
        if not self.case.options.method:
            return self.model
        self.api.register_fsdp_forward_method(self.model, "along")
        return self.model.along

    @property
    def units(self) -> list[Any]:
        """All of them, parents first."""
        return [m for m in self.model.modules() if isinstance(m, self.api.FSDPModule)]

    @contextmanager
    def _set(self, number: int) -> Iterator[None]:
        options, last = self.case.options, number == len(self.case.options.micro) - 1
        reduced = options.micro[number]
        if not all(options.micro):
            if options.partial:
                self.model.set_requires_all_reduce(reduced)
            else:
                self.model.set_requires_gradient_sync(reduced)
        if options.keeps:
            self.model.set_reshard_after_backward(last)
        if options.marks_last:
            self.model.set_is_last_backward(last)
        yield
        shown = [(name, isinstance(param, DTensor)) for name, param in self.params()]
        self.note("sharded", shown, f"after microbatch {number}")

    def microbatch(self, number: int) -> AbstractContextManager:
        """What of the gradients is reduced, and what is kept."""
        return self._set(number)

    def before_step(self) -> None:
        """Gather by hand."""
        how = self.case.options.unshards
        if not how:
            return
        for unit in self.units:
            handle = unit.unshard(async_op=how in ("later", "waited"))
            if how == "waited":
                handle.wait()
        if how != "later":
            for name, param in self.params():
                self.note("gathered", param, name)
        if how == "undone":
            for unit in self.units:
                unit.reshard()

    def clip(self, max_norm: float, norm_type: float) -> Any:
        """By torch's own function, over what is sharded."""
        params = [param for param in self.model.parameters() if isinstance(param, DTensor)]
        if norm_type == float(
            "inf"
        ):  # there is no largest of no elements, and a rank that raises leaves the others waiting
            params = [param for param in params if _is_everywhere(param)]
        norm = nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def edit(self) -> None:
        """Change the parts that this rank has; the same on replicas."""
        edits = self.case.options.edits
        with torch.no_grad():
            if edits == "local":
                for param in self.model.parameters():
                    local = param.to_local() if isinstance(param, DTensor) else param
                    local.mul_(0.5).add_(0.25)
            else:
                state = {name: value * 0.5 for name, value in self.model.state_dict().items()}
                self.model.load_state_dict(state, assign=edits == "assign")
        if edits == "assign":  # other parameters than those that the optimizer has
            self.optimizer = self.new_optimizer()

    def evaluate(self) -> None:
        """A forward without gradients, after which parameters may stay full."""
        switches = self.case.options.switches
        if switches:
            self.model.set_reshard_after_forward(False)
        super().evaluate()
        for name, param in self.params():
            self.note("after evaluation", param, name)
        if switches:
            self.model.set_reshard_after_forward(True)

    def note_full(self) -> None:
        """Full parameters and gradients."""
        for name, param in self.params():
            for what, tensor in (("full", param), ("full grad", param.grad)):
                self.note(what, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, name)
