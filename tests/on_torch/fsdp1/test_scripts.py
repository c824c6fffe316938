"""What scripts do around FSDP1: each thing done with torch.distributed.fsdp and with torch_backend in the same ranks, and what
comes of it compared (see tests/on_torch/helpers/scripts.py).
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import os
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint

from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers import scripts
from tests.on_torch.helpers.scripts import compare, difference, raised, warned

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Side(scripts.Side):
    """One of the two implementations of FSDP1, in one rank."""

    use_orig_params: bool

    @property
    def policies(self) -> Any:
        """The module of wrapping policies."""
        return import_module(f"{self.name}.wrap")

    def shard(self, module: nn.Module, **options: Any) -> Any:
        """The module wrapped; torch computes on the CPU only if it is told to."""
        return self.FullyShardedDataParallel(
            module, **{"device_id": CPU, "use_orig_params": self.use_orig_params} | options
        )

    def full(self, model: nn.Module) -> dict[str, Tensor]:
        """All parameters in full."""
        with self.FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {name: param.detach().clone() for name, param in model.named_parameters()}

    def full_grads(self, model: nn.Module) -> list[Tensor | None]:
        """What is in the gradients of this rank."""
        return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


SCENARIOS: dict[str, Callable[[Side], Any]] = {}


def scenario(fn: Callable[[Side], Any]) -> Callable[[Side], Any]:
    """Register a scenario under its name."""
    SCENARIOS[fn.__name__] = fn
    return fn


# Models


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


class Nested(nn.Module):
    """Linears on two levels, as `nested` wraps them by hand: the first and the last belong to the root."""

    def __init__(self, side: Side | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        wrap = (lambda module: module) if side is None else functools.partial(side.shard, **options)
        self.layers = nn.Sequential(
            nn.Linear(4, 3),
            wrap(nn.Sequential(wrap(nn.Linear(3, 5)), nn.Linear(5, 5))),
            wrap(nn.Linear(5, 3)),
            nn.Linear(3, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def nested(side: Side, **options: Any) -> Any:
    """The nested model, wrapped by hand."""
    return side.shard(Nested(side, **options), **options)


def batch(side: Side, seed: int = 0, width: int = 4) -> Tensor:
    """One rank's inputs."""
    return torch.randn(3, width, generator=torch.Generator().manual_seed(10 * seed + side.rank))


def sgd(model: Any) -> torch.optim.Optimizer:
    """The optimizer of `trained`."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(
    side: Side, model: Any, steps: int = 2, width: int = 4, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Losses, and full parameters after some steps."""
    optimizer = optimizer or sgd(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        output = model(batch(side, step, width))
        loss = output.float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": losses, **side.full(model)}


# Construction and attributes


@scenario
def attributes_of_a_wrapper(side):
    model = nested(side, cpu_offload=side.CPUOffload(), mixed_precision=side.MixedPrecision(torch.bfloat16))
    inner = model.module.layers[1]
    return {
        "strategy": [model.sharding_strategy.name, inner.sharding_strategy.name],
        "offload": model.cpu_offload.offload_params,
        "param_dtype": model.mixed_precision.param_dtype,
        "prefetch": [model.backward_prefetch.name, model.forward_prefetch],
        "limit": model.limit_all_gathers,
        "ranks": [model.rank, model.world_size, model.process_group is dist.group.WORLD],
        "device": model.compute_device,
        "module": [type(model.module).__name__, type(inner.module[0].module).__name__],
        "found": len(side.FullyShardedDataParallel.fsdp_modules(model)),
        "roots": [m is model for m in side.FullyShardedDataParallel.fsdp_modules(model, root_only=True)],
        "below": len(side.FullyShardedDataParallel.fsdp_modules(model.module.layers)),
        "root": [model.check_is_root(), inner.check_is_root()],
    }


@scenario
def public_attributes(side):
    """What torch's own instances show without an underscore."""
    model = nested(side)
    model(batch(side))
    return {
        "training_state": hasattr(model, "training_state"),
        "params": hasattr(model, "params"),
        "rest": [name for name in ("module", "rank", "world_size", "process_group") if hasattr(model, name)],
    }


@scenario
def names_and_text(side):
    model = nested(side)
    return {
        "repr": repr(model),
        "names": [name for name, _ in model.named_parameters()],
        "modules": [name for name, _ in model.named_modules()],
        "inside": [name for name, _ in model.module.named_parameters()],
        "shapes": [tuple(param.shape) for param in model.parameters()],
        "leaves": [param.is_leaf and param.requires_grad for param in model.parameters()],
    }


@scenario
def a_flat_parameter_says_that_it_is_one(side):
    params = list(nested(side).parameters())
    return [isinstance(param, side.FlatParameter) for param in params] + [isinstance(params[0], nn.Parameter)]


@scenario
def attributes_and_items_of_the_module_are_reached(side):
    wrapped = side.shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model = nested(side)
    model.answer = 42
    model.module.question = 6
    return [type(wrapped[0]).__name__, model.question, model.answer, raised(lambda: model.nothing)]


@scenario
def a_model_without_parameters(side):
    model = side.shard(nn.Sequential(nn.ReLU(), nn.Identity()))
    x = batch(side).requires_grad_()
    model(x).sum().backward()
    return [x.grad, len(list(model.parameters()))]


@scenario
def containers_without_forward_are_warned_of(side):
    modules = [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})]
    return [warned(lambda module=module: side.shard(module)) for module in modules]


@scenario
def one_rank_is_not_sharded_and_warned_of(side):
    groups = [dist.new_group([rank]) for rank in range(side.world_size)]

    def wrap(**options):
        return side.shard(nn.Linear(3, 2), process_group=groups[side.rank], **options)

    strategies = [None, *(side.ShardingStrategy[name] for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))]
    return [warned(lambda s=s: wrap(sharding_strategy=s)) for s in strategies] + [wrap().sharding_strategy.name]


@scenario
def refused_when_wrapping(side):
    linear, cls = nn.Linear(2, 2), side.FullyShardedDataParallel
    hybrid = side.ShardingStrategy.HYBRID_SHARD
    mesh = init_device_mesh("cpu", (side.world_size,))
    always = side.policies.always_wrap_policy
    half_and_full = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    one_frozen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    by_hand = nn.Sequential(side.shard(nn.Linear(2, 2)))
    return {
        "both ignored": raised(lambda: side.shard(linear, ignored_modules=[linear], ignored_states=[linear])),
        "mixed ignored": raised(
            lambda: side.shard(nn.Sequential(linear), ignored_states=[linear, linear.weight]),
        ),
        "not iterable": raised(lambda: side.shard(linear, ignored_modules=linear.weight.sum())),
        "not modules": raised(lambda: side.shard(linear, ignored_modules=[1])),
        "ignored unit": raised(lambda: side.shard(by_hand, ignored_modules=[by_hand[0]])),
        "twice": raised(lambda: side.shard(side.shard(nn.Linear(2, 2)), auto_wrap_policy=always)),
        "policy over hand": raised(lambda: side.shard(by_hand, auto_wrap_policy=always)),
        "hybrid without groups": raised(lambda: side.shard(nn.Linear(2, 2), sharding_strategy=hybrid)),
        "hybrid of one group": raised(
            lambda: side.shard(nn.Linear(2, 2), process_group=dist.group.WORLD, sharding_strategy=hybrid)
        ),
        "hybrid of one axis": raised(lambda: side.shard(nn.Linear(2, 2), device_mesh=mesh, sharding_strategy=hybrid)),
        "group and mesh": raised(lambda: side.shard(nn.Linear(2, 2), process_group=dist.group.WORLD, device_mesh=mesh)),
        "dtypes": raised(lambda: side.shard(half_and_full)),
        "requires_grad": raised(lambda: side.shard(one_frozen)),
        "no argument of it": raised(lambda: cls(nn.Linear(2, 2), no_such_argument=1)),
        "no function": raised(
            lambda: side.shard(nn.Linear(2, 2, device="meta"), param_init_fn=42),
        ),
        "scalar": raised(lambda: side.shard(_Scalar())),
    }


class _Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


@scenario
def units_that_differ_are_refused_when_they_run(side):
    model = Nested()
    model.layers[1] = side.shard(model.layers[1], limit_all_gathers=False)
    wrapped = side.shard(model)
    return [raised(lambda: wrapped(batch(side)))]


# Wrapping


@scenario
def wrap_inside_enable_wrap(side):
    p = side.policies
    with p.enable_wrap(wrapper_cls=side.FullyShardedDataParallel, device_id=CPU, use_orig_params=side.use_orig_params):
        first = p.wrap(nn.Linear(4, 4))
        second = p.wrap(nn.Sequential(nn.Linear(4, 4), p.wrap(nn.Linear(4, 2))), backward_prefetch=None)
    outside = p.wrap(nn.Linear(2, 2))
    model = side.shard(nn.Sequential(first, second))
    return [
        type(first).__name__,
        first.rank,
        second.backward_prefetch,
        type(outside).__name__,
        [name for name, _ in model.named_parameters()],
    ]


@scenario
def a_group_that_only_says_its_rank_and_size(side):
    """The object that PyTorch's own tests of wrapping pass instead of a process group."""

    class Group:
        def rank(self):
            return 0

        def size(self):
            return 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = side.shard(nn.Linear(3, 2), process_group=Group())
    return [model.rank, model.world_size, model.process_group.size()]


@scenario
def policies_by_type_by_size_and_by_function(side):
    p = side.policies
    found = {}
    for name, policy in {
        "always": p.always_wrap_policy,
        "classes": p.ModuleWrapPolicy({nn.Linear}),
        "size": functools.partial(p.size_based_auto_wrap_policy, min_num_params=20),
        "lambda": functools.partial(p.lambda_auto_wrap_policy, lambda_fn=lambda m: getattr(m, "out_features", 0) == 3),
        "transformer": functools.partial(p.transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}),
        "custom": p.CustomPolicy(lambda m: {"backward_prefetch": None} if isinstance(m, nn.Linear) else False),
        "leaf": functools.partial(
            p.size_based_auto_wrap_policy,
            min_num_params=1,
            force_leaf_modules={nn.Sequential},
            exclude_wrap_modules=set(),
        ),
    }.items():
        model = side.shard(Nested(), auto_wrap_policy=policy)
        found[name] = [n for n, m in model.named_modules() if isinstance(m, side.FullyShardedDataParallel)]
        found[f"{name} trained"] = trained(side, model, steps=1)
    return found


@scenario
def batch_norm_under_a_policy_keeps_its_precision(side):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    told = []

    def wrap():
        told.append(
            side.shard(
                module,
                auto_wrap_policy=side.policies.ModuleWrapPolicy({nn.Linear}),
                mixed_precision=side.MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
            )
        )

    kinds = warned(wrap)
    model = told[0]
    wrappers = side.FullyShardedDataParallel.fsdp_modules(model)
    return [kinds, [w.mixed_precision.param_dtype for w in wrappers], trained(side, model), dict(model.named_buffers())]


@scenario
def an_inner_unit_is_wrapped_again_by_a_new_root(side):
    """PyTorch's test of wrapping several times: a second root around what ran under a first."""
    torch.manual_seed(2)
    inner = nn.Sequential(side.shard(nn.Linear(4, 4)))
    model = side.shard(inner)
    results = trained(side, model)
    x = batch(side, 9)
    again = side.shard(inner)
    return [results, model(x).detach(), again(x).detach()]


# Inputs and outputs


class _Point(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class _Pair:
    x: Tensor
    y: Tensor


class _Formed(nn.Module):
    """A linear map whose input and output have some form."""

    def __init__(self, take: Callable[..., Tensor], give: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.take, self.give = take, give
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.give(self.second(self.first(self.take(*args, **kwargs))))


class _Around(nn.Module):
    """What passes inputs and outputs on as they are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@scenario
def inputs_and_outputs_of_any_form(side):
    x = batch(side)
    forms = {
        "dict": (lambda d: d["a"], lambda y: {"a": y, "b": y * 2}, ({"a": x},), {}),
        "keywords": (lambda a, b=None: a + b, lambda y: [y, y], (x,), {"b": x}),
        "list": (lambda xs: xs[0] + xs[1], lambda y: (y, None, 3), ([x, x],), {}),
        "named": (lambda p: p.x + p.y, lambda y: _Point(y, y), (_Point(x, x),), {}),
        "data class": (lambda p: p.x, lambda y: _Pair(y, y), (_Pair(x, x),), {}),
        "ordered": (lambda d: d["a"], lambda y: collections.OrderedDict(b=y, a=y), (collections.OrderedDict(a=x),), {}),
        "none": (lambda: x, lambda y: y, (), {}),
    }
    results = {}
    low = side.MixedPrecision(torch.bfloat16)
    for name, (take, give, args, kwargs) in forms.items():
        for precision in (None, low):
            module = _Formed(take, give)
            module.second = side.shard(module.second, mixed_precision=precision)
            model = side.shard(_Around(side.shard(module, mixed_precision=precision)), mixed_precision=precision)
            if precision is not None and name == "none":
                continue  # the input is made inside, in full precision
            output = model(*args, **kwargs)
            tensors = _tensors(output)
            torch.stack([t.float().sum() for t in tensors]).sum().backward()
            results[f"{name} {precision is not None}"] = [
                type(output).__name__,
                [t.detach() for t in tensors],
                side.full_grads(model),
            ]
    return results


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [value.x, value.y]  # type: ignore[attr-defined]
    values = value.values() if isinstance(value, dict) else value
    return [v for v in values if isinstance(v, Tensor)]


@scenario
def gradients_reach_the_inputs_in_their_dtype(side):
    results = []
    for low in (None, torch.bfloat16):
        model = nested(side, mixed_precision=side.MixedPrecision(low))
        x = batch(side).requires_grad_()
        model(x).float().square().sum().backward()
        results.append(x.grad)
    return results


@scenario
def an_output_that_is_left_out_of_the_loss(side):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.a, self.b = side.shard(nn.Linear(4, 4)), side.shard(nn.Linear(4, 4))

        def forward(self, x):
            return self.a(x), self.b(x)

    results = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        model = side.shard(Two(), sharding_strategy=side.ShardingStrategy[strategy])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(side, step))[step % 2].sum().backward()
            optimizer.step()
        results.append(side.full(model))
    return results


@scenario
def a_module_whose_output_takes_no_gradient(side):
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.a, self.b = side.shard(nn.Linear(4, 4)), side.shard(nn.Linear(4, 4))

        def forward(self, x):
            return self.a(x) + self.b(x).detach()

    model = side.shard(Detached())
    model(batch(side)).sum().backward()
    return [side.full_grads(model), trained(side, model)]


@scenario
def forward_several_times_before_backward(side):
    results = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        model = nested(side, sharding_strategy=side.ShardingStrategy[strategy])
        x, y = batch(side, 1), batch(side, 2)
        (model(x).sum() + model(y).square().sum() + model(x).sum()).backward()
        results.append([side.full_grads(model), trained(side, model)])
    return results


# Training


@scenario
def more_ranks_than_elements(side):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((1,), 2.0))

        def forward(self, x):
            return x * self.weight

    return trained(side, side.shard(nn.Sequential(side.shard(Scale()), nn.Linear(4, 1, bias=False))))


@scenario
def forward_without_gradients_and_in_evaluation(side):
    results = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        for low in (None, torch.bfloat16):
            model = nested(
                side,
                sharding_strategy=side.ShardingStrategy[strategy],
                mixed_precision=side.MixedPrecision(low),
                forward_prefetch=True,
            )
            x = batch(side)
            with torch.no_grad():
                before, evaluated = model(x), model.eval()(x)
            results += [before, evaluated, trained(side, model.train())]
            with torch.no_grad():
                results.append(model(x))
    return results


@scenario
def accumulation_with_and_without_no_sync(side):
    results = []
    for turns in ((True, True, False), (True, False), (False, False), (False, True, False)):
        model = nested(side)
        for i, silent in enumerate(turns):
            with model.no_sync() if silent else contextlib.nullcontext():
                model(batch(side, i)).square().sum().backward()
        grads = side.full_grads(model)
        results.append([grads, trained(side, model)])
    return results


@scenario
def clipping_by_several_norms(side):
    results = []
    for norm_type in (1, 2, 2.5, float("inf"), "inf"):
        for max_norm in (0.01, 100):
            model = nested(side)
            model(batch(side)).square().sum().backward()
            results += [model.clip_grad_norm_(max_norm, norm_type=norm_type), side.full_grads(model)]
    return results


@scenario
def clipping_an_inner_unit_is_refused(side):
    model = nested(side)
    model(batch(side)).sum().backward()
    return [raised(lambda: model.module.layers[1].clip_grad_norm_(1.0))]


@scenario
def clipping_without_gradients(side):
    model = nested(side)
    model(batch(side))
    norms = []
    kinds = warned(lambda: norms.append(model.clip_grad_norm_(1.0)))
    return [norms[0], kinds]


@scenario
def clipping_gradients_that_stay_in_low_precision(side):
    results = []
    for keep in (False, True):
        precision = side.MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=keep)
        model = nested(side, mixed_precision=precision)
        model(batch(side)).float().square().sum().backward()
        results += [model.clip_grad_norm_(0.1), side.full_grads(model)]
    return results


@scenario
def two_groups_of_parameters(side):
    """The biases without decay, by name."""
    model = nested(side)
    if not side.use_orig_params:
        return []
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0, "lr": 0.05},
        ],
        lr=0.01,
        foreach=True,
    )
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(batch(side, step)).square().sum().backward()
        optimizer.step()
    return [side.full(model), [tuple(p.shape) for p in model.parameters()]]


@scenario
def names_and_shapes_inside_forward(side):
    seen = []

    class Looking(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            seen.append([(n, tuple(p.shape)) for n, p in self.named_parameters()])
            return self.linear(x)

    model = side.shard(nn.Sequential(side.shard(Looking()), nn.Linear(4, 4)))
    model(batch(side)).sum().backward()
    return seen if side.use_orig_params else []


@scenario
def parameters_after_forward(side):
    """Shapes that a script sees between forward and backward."""
    results = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        model = nested(side, sharding_strategy=side.ShardingStrategy[strategy])
        output = model(batch(side))
        if side.use_orig_params or strategy == "FULL_SHARD":
            inner = model.module.layers[2]
            results.append([(n, tuple(p.shape)) for n, p in inner.named_parameters()])
        output.sum().backward()
        results.append([(n, tuple(p.shape)) for n, p in model.named_parameters()])
    return results


@scenario
def frozen_units_beside_trained_ones(side):
    results = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        torch.manual_seed(5)
        trunk = nn.Sequential(side.shard(nn.Linear(4, 4).requires_grad_(False)), nn.ReLU())
        head = side.shard(nn.Linear(4, 2))
        model = side.shard(nn.Sequential(trunk, head), sharding_strategy=side.ShardingStrategy[strategy])
        results.append([trained(side, model), [p.requires_grad for p in model.parameters()]])
    return results


@scenario
def gradients_of_gradients_are_refused(side):
    return [
        raised(lambda: nested(side)(batch(side)).square().sum().backward(create_graph=True)),
        raised(
            lambda: (
                nested(side, sharding_strategy=side.ShardingStrategy.NO_SHARD)(batch(side))
                .square()
                .sum()
                .backward(create_graph=True)
            )
        ),
    ]


@scenario
def activations_that_are_computed_again(side):
    results = {}
    for reentrant in (True, False):

        class Again(nn.Module):
            def __init__(self, inside, reentrant=reentrant):
                super().__init__()
                self.inside, self.reentrant = inside, reentrant

            def forward(self, x):
                return checkpoint(self.inside, x, use_reentrant=self.reentrant)

        torch.manual_seed(6)
        inner = side.shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        results[f"around {reentrant}"] = trained(side, side.shard(nn.Sequential(nn.Linear(4, 4), Again(inner))))
        torch.manual_seed(6)
        inner = side.shard(Again(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
        results[f"inside {reentrant}"] = trained(side, side.shard(nn.Sequential(nn.Linear(4, 4), inner)))
    torch.manual_seed(6)
    inner = side.shard(checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    model = side.shard(nn.Sequential(nn.Linear(4, 4), inner))
    results["wrapper"] = [trained(side, model), [name for name, _ in model.named_parameters()]]
    return results


@scenario
def hooks_of_the_users(side):
    seen = []
    model = nested(side)
    inner = model.module.layers[2]
    inner.register_forward_pre_hook(lambda m, a: seen.append(("pre", tuple(a[0].shape))))
    inner.register_forward_hook(lambda m, a, o: seen.append(("post", tuple(o.shape))))
    inner.register_full_backward_hook(lambda m, gi, go: seen.append(("back", tuple(go[0].shape))))
    model.module.layers[1].module[1].register_forward_hook(lambda m, a, o: o * 2)
    return [trained(side, model, steps=2), seen]


# Ignored, deferred, applied


@scenario
def ignored_modules_and_states(side):
    results = []
    for how in ("modules", "states", "params"):
        module = Nested()
        left = module.layers[1]
        given = {
            "modules": {"ignored_modules": [left]},
            "states": {"ignored_states": [left]},
            "params": {"ignored_states": list(left.parameters())},
        }[how]
        model = side.shard(module, **given)
        shapes = [(n, tuple(p.shape)) for n, p in model.named_parameters()]
        model(batch(side, 0)).sum().backward()
        results.append([shapes, side.full_grads(model), list(side.full(model))])
    return results


@scenario
def everything_is_ignored(side):
    module = nn.Linear(4, 2)
    return warned(lambda: side.shard(module, ignored_modules=[module]))


@scenario
def a_model_on_meta(side):
    results = []
    for fn in (None, _init):
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))
        torch.manual_seed(7)
        model = side.shard(module, param_init_fn=fn, auto_wrap_policy=side.policies.ModuleWrapPolicy({nn.Sequential}))
        shapes = {name: tuple(value.shape) for name, value in side.full(model).items()}
        results.append([shapes, trained(side, model) if fn else None])
    return results


def _init(module: nn.Module) -> None:
    module.to_empty(device=CPU, recurse=False)
    with torch.no_grad():
        for i, param in enumerate(module.parameters(recurse=False)):
            param.copy_(torch.arange(param.numel()).view_as(param) / 10 + i)


@scenario
def a_module_on_meta_that_cannot_be_reset(side):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, device="meta"))

    caught = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        caught.append(raised(lambda: side.shard(Bare())))
    return [caught[0] is not None]


@scenario
def apply_sees_full_parameters(side):
    model = nested(side)
    seen = []

    @torch.no_grad()
    def fill(module):
        if isinstance(module, nn.Linear):
            seen.append(tuple(module.weight.shape))
            module.weight.copy_(torch.arange(module.weight.numel()).view_as(module.weight) / 50)

    returned = model.apply(fill)
    return [sorted(seen), side.full(model), returned is model, trained(side, model)]


@scenario
def apply_while_summoned_is_refused(side):
    model = nested(side)
    with side.FullyShardedDataParallel.summon_full_params(model):
        return [raised(lambda: model.apply(lambda module: None))]


@scenario
def states_of_the_first_rank(side):
    def build(seed):
        torch.manual_seed(seed)
        norm = nn.BatchNorm1d(4)
        norm.register_buffer("running_mean", torch.full((4,), float(seed)))
        return nn.Sequential(nn.Linear(4, 4), norm)

    try:
        model = side.shard(build(side.rank), sync_module_states=True)
    except ValueError:  # torch has no such thing on the CPU
        model = side.shard(build(0))
    return [side.full(model), dict(model.named_buffers()), trained(side, model)]


# Precision


@scenario
def dtypes_inside_forward(side):
    seen = []

    class Looking(nn.Linear):
        def forward(self, x):
            seen.append((x.dtype, self.weight.dtype, self.scale.dtype, self.count.dtype))
            return super().forward(x)

    for policy in (
        {"param_dtype": torch.bfloat16},
        {"param_dtype": torch.bfloat16, "buffer_dtype": torch.float16},
        {"reduce_dtype": torch.bfloat16},
        {"buffer_dtype": torch.bfloat16},
        {"param_dtype": torch.bfloat16, "cast_forward_inputs": True, "cast_root_forward_inputs": False},
    ):
        inner = Looking(4, 4)
        inner.register_buffer("scale", torch.ones(2))
        inner.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        precision = side.MixedPrecision(**policy)
        model = side.shard(nn.Sequential(side.shard(inner, mixed_precision=precision)), mixed_precision=precision)
        output = model(batch(side))
        output.float().sum().backward()
        seen.append(
            (
                output.dtype,
                *(p.dtype for p in model.parameters()),
                *(g.dtype for g in side.full_grads(model) if g is not None),
            )
        )
        seen.append([b.dtype for b in model.buffers()])
        with side.FullyShardedDataParallel.summon_full_params(model):
            seen.append([t.dtype for t in (*model.parameters(), *model.buffers())])
    return seen


@scenario
def half_after_wrapping(side):
    model = nested(side).half()
    results = trained(side, _Halved(model)) if side.use_orig_params else [p.dtype for p in model.parameters()]
    return [results, [p.dtype for p in model.parameters()]]


class _Halved(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.half())


@scenario
def autocast_around(side):
    model = nested(side)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch(side))
    output.float().square().sum().backward()
    return [output.detach(), side.full_grads(model)]


class Buffered(nn.Module):
    """A linear and a floating buffer; remembers the dtypes that it computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.linspace(0.1, 1.7, 4))
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [x.dtype, self.linear.weight.dtype, self.scale.dtype]  # type: ignore[assignment]
        return self.linear(x.to(self.linear.weight.dtype)) * self.scale


def evaluated_in_full(side: Side, strategy: str, **precision: Any) -> list[Any]:
    """Training and evaluation in turns, of all and of one unit alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        torch.manual_seed(2)
        model, options = nn.Sequential(Buffered(), Buffered()), {"sharding_strategy": side.ShardingStrategy[strategy]}
        inner = list(model)
        options["mixed_precision"] = side.MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16, **precision)
        model[1] = side.shard(model[1], **options)
        model = side.shard(model, **options)
    optimizer, found = sgd(model), []
    for step, (outer_trains, inner_trains) in enumerate([(True, True), (False, False), (True, False), (True, True)]):
        model.train(outer_trains)
        inner[1].train(inner_trains)
        model[1].train(inner_trains)
        with torch.set_grad_enabled(step == 0):
            output = model(batch(side, step))
        found.append([output.detach(), *(module.seen for module in inner), *model.buffers()])
        found[-1][3:] = [buffer.clone() for buffer in found[-1][3:]]
        if step == 0:
            output.float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


@scenario
def full_precision_in_evaluation_where_the_environment_asks_for_it(side):
    return evaluated_in_full(side, "FULL_SHARD")


@scenario
def full_precision_in_evaluation_of_units_that_stay_unsharded(side):
    return evaluated_in_full(side, "SHARD_GRAD_OP", cast_forward_inputs=True)


@scenario
def full_precision_in_evaluation_of_what_is_not_sharded(side):
    return evaluated_in_full(side, "NO_SHARD", cast_root_forward_inputs=False)


@scenario
def a_scaler_around_a_step(side):
    scaler = import_module(f"{side.name}.sharded_grad_scaler").ShardedGradScaler("cpu", init_scale=4.0)
    model = nested(side)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(batch(side, step)).square().sum()
        scaler.scale(loss).backward()
        if step == 2 and side.rank == 1:
            next(p for p in model.parameters() if p.grad is not None and p.grad.numel()).grad[0] = float("inf")
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
    return [scaler.get_scale(), side.full(model)]


@scenario
def a_scaler_in_a_group_that_only_says_its_rank_and_size(side):
    class Group:
        def rank(self):
            return 0

        def size(self):
            return 1

    cls = import_module(f"{side.name}.sharded_grad_scaler").ShardedGradScaler
    scaler = cls("cpu", init_scale=2.0, process_group=Group(), enabled=True)
    return scaler.scale(torch.full((1,), 4.0))


# Communication hooks, hybrid sharding


@scenario
def communication_hooks(side):
    results = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        model = nested(side, sharding_strategy=side.ShardingStrategy[strategy])
        hook = default_hooks.allreduce_hook if strategy == "NO_SHARD" else default_hooks.reduce_scatter_hook
        model.register_comm_hook(default_hooks.DefaultState(_world()), hook)
        results.append(trained(side, model))
        model = nested(side, sharding_strategy=side.ShardingStrategy[strategy])
        seen = []
        model.register_comm_hook(seen, _double)
        results.append(trained(side, model))
        if strategy != "NO_SHARD":  # where torch pads what nothing is sharded of
            results.append(seen)
    return results


def _double(seen, full, shard=None):
    """A reduction of one's own: this rank's gradient, doubled, and no collective."""
    seen.append((tuple(full.shape), None if shard is None else tuple(shard.shape)))
    if shard is None:
        full.mul_(2)
    else:
        start = dist.get_rank() * shard.numel()
        shard.copy_(full[start : start + shard.numel()] * 2)


@scenario
def refused_communication_hooks(side):
    state = default_hooks.DefaultState(_world())
    model = nested(side)
    model(batch(side))
    inner = raised(lambda: model.module.layers[1].register_comm_hook(state, default_hooks.reduce_scatter_hook))
    model.register_comm_hook(state, default_hooks.reduce_scatter_hook)
    twice = raised(lambda: model.register_comm_hook(state, default_hooks.reduce_scatter_hook))
    return [inner, twice]


@scenario
def a_communication_hook_under_hybrid_sharding(side):
    mesh = init_device_mesh("cpu", (1, side.world_size), mesh_dim_names=("replicate", "shard"))
    model = side.shard(nn.Linear(4, 2), device_mesh=mesh, sharding_strategy=side.ShardingStrategy.HYBRID_SHARD)
    state = default_hooks.DefaultState(_world())
    return [raised(lambda: model.register_comm_hook(state, default_hooks.reduce_scatter_hook))]


@scenario
def hybrid_sharding_by_mesh_and_by_groups(side):
    results = []
    for name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        mesh = init_device_mesh("cpu", (1, side.world_size), mesh_dim_names=("replicate", "shard"))
        strategy = side.ShardingStrategy[name]
        model = nested(side, device_mesh=mesh, sharding_strategy=strategy)
        groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
        other = nested(side, process_group=groups, sharding_strategy=strategy)
        results += [trained(side, model), trained(side, other), model.sharding_strategy.name, model.world_size]
        results.append([model.process_group.size(), model.process_group is groups[0]])
    return results


# Copies, devices, the optimizer in backward


@scenario
def copies_of_parameters_and_of_models(side):
    model = nested(side)
    with side.FullyShardedDataParallel.summon_full_params(model):
        params = copy.deepcopy(list(model.parameters()))
    return [[p.detach() for p in params], [type(p).__name__ for p in params]]


@scenario
def moved_and_cast_between_steps(side):
    model = nested(side)
    first = trained(side, model)
    model.to(CPU)
    model.double()
    return [first, [p.dtype for p in model.parameters()], [b.dtype for b in model.buffers()]]


@scenario
def requires_grad_is_set_on_the_wrapper(side):
    model = nested(side)
    model.module.layers[1].requires_grad_(False)
    results = trained(side, model)
    model.requires_grad_(True)
    return [results, trained(side, model)]


@scenario
def a_failed_forward_and_then_a_step(side):
    model = nested(side)
    wrong = raised(lambda: model(torch.zeros(3, 9)))
    return [wrong, raised(lambda: model.no_such_method())]


@scenario
def no_sync_of_an_inner_unit(side):
    model = nested(side)
    model(batch(side)).sum().backward()

    def enter():
        with model.module.layers[2].no_sync():
            pass

    return [raised(enter)]


@scenario
def roots_beside_each_other(side):
    """The model itself is not wrapped, its parts are."""
    torch.manual_seed(8)
    model = nn.Sequential(side.shard(nn.Linear(4, 4)), nn.ReLU(), side.shard(nn.Linear(4, 2)))
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(side, step)).square().sum().backward()
        optimizer.step()
    return side.full(model)


@scenario
def checkpointing_is_applied_after_wrapping(side):
    torch.manual_seed(9)
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    policy = side.policies.ModuleWrapPolicy({nn.Sequential})
    model = side.shard(module, auto_wrap_policy=policy)
    optimizer = sgd(model)
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Sequential) and m is not module)
    return [trained(side, model, optimizer=optimizer), [name for name, _ in model.named_parameters()]]


@scenario
def an_optimizer_that_steps_in_backward(side):
    model = nested(side)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1}, register_hook=False)
    if not side.use_orig_params:
        return [raised(lambda: model(batch(side)))]
    for step in range(3):
        model(batch(side, step)).square().sum().backward()
    return [side.full(model), side.full_grads(model)]


@scenario
def modules_of_all_kinds(side):
    """Modules that keep their parameters in ways of their own."""

    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.ParameterList([torch.ones(4), torch.full((4,), 2.0)])
            self.named = nn.ParameterDict({"b": torch.ones(4), "a": torch.zeros(4)})

        def forward(self, x):
            return sum(x * row for row in self.rows) + self.named["a"] + self.named["b"] * len(self.rows)

    class First(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)[0]

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            return self.inner(x, x, x, need_weights=False)[0]

    results = {}
    for name, make in {
        "lists": Lists,
        "lstm": lambda: First(nn.LSTM(4, 3, num_layers=2, batch_first=True)),
        "gru": lambda: First(nn.GRU(4, 3, batch_first=True)),
        "attention": Attention,
        "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True),
        "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    }.items():
        torch.manual_seed(10)
        model = side.shard(nn.Sequential(nn.Linear(4, 4), side.shard(make())))
        optimizer = sgd(model)
        for step in range(2):
            optimizer.zero_grad()
            model(batch(side, step).view(1, 3, 4)).square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            results[name] = [side.full(model), model.eval()(batch(side).view(1, 3, 4))]
    return results


@scenario
def channels_last(side):
    torch.manual_seed(11)
    module: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 2))
    module = module.to(memory_format=torch.channels_last)
    model = side.shard(module)
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step + side.rank))
        model(x.to(memory_format=torch.channels_last)).square().sum().backward()
        optimizer.step()
    pieces = [p.detach().clone() for p in model.parameters()]
    with side.FullyShardedDataParallel.summon_full_params(model):
        strides = [p.stride() for p in model.parameters()]
    return [side.full(model), strides, pieces]


@scenario
def gradients_under_no_sync(side):
    """What a script sees in the gradients before they are reduced, and after."""
    results = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        for low in (None, torch.bfloat16):
            precision = side.MixedPrecision(low, reduce_dtype=torch.float32)
            model = side.shard(
                nn.Linear(4, 2), mixed_precision=precision, sharding_strategy=side.ShardingStrategy[strategy]
            )
            with model.no_sync():
                for seed in range(2):
                    model(batch(side, seed)).float().sum().backward()
                    seen = [p.grad for p in model.parameters()]
                    results.append([None if grad is None else (grad.dtype, tuple(grad.shape)) for grad in seen])
            model(batch(side)).float().sum().backward()
            results.append(side.full_grads(model))
    return results


@scenario
def data_and_gradients_are_replaced(side):
    """A parameter's data, or its gradient, by another."""
    if not side.use_orig_params:
        return []
    results = []
    for what in ("data", "grad", "none", "data between", "wrong grad"):
        torch.manual_seed(12)
        model = side.shard(nn.Linear(4, 2, bias=False))
        weight = model.module.weight
        model(batch(side)).sum().backward()
        output = model(batch(side)) if what == "data between" else None
        if what in ("data", "data between"):
            weight.data = weight.data + 1
        elif what == "grad":
            weight.grad = torch.ones_like(weight)
        elif what == "none":
            weight.grad = None
        if what == "wrong grad":
            results.append(raised(lambda w=weight: setattr(w, "grad", torch.zeros(w.numel() + 1))))
        else:
            output = model(batch(side)) if output is None else output
            output.sum().backward()
            results.append([output.detach(), side.full_grads(model), side.full(model)])
    return results


@scenario
def a_parameter_is_replaced(side):
    """By one without a gradient, where there was one."""
    if not side.use_orig_params:
        return []
    torch.manual_seed(12)
    model = side.shard(nn.Linear(4, 2, bias=False))
    model(batch(side)).sum().backward()
    model.module.weight = nn.Parameter(torch.full_like(model.module.weight, 0.25))
    output = model(batch(side))
    output.sum().backward()
    return [output.detach(), side.full(model), side.full_grads(model)]


@scenario
def data_of_a_wrong_shape_is_refused(side):
    if not side.use_orig_params:
        return []
    model = side.shard(nn.Linear(4, 2, bias=False))
    weight = model.module.weight
    weight.data = torch.zeros(weight.numel() + 1)
    return [raised(lambda: model(batch(side)))]


@scenario
def summoned_between_forwards(side):
    results = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        model = nested(side, sharding_strategy=side.ShardingStrategy[strategy])
        first = model(batch(side)).square().sum()
        with side.FullyShardedDataParallel.summon_full_params(model):
            results.append([tuple(p.shape) for p in model.parameters()])
        second = model(batch(side, 1)).square().sum()
        with side.FullyShardedDataParallel.summon_full_params(model, writeback=False):
            pass
        (first + second).backward()
        results += [side.full_grads(model), trained(side, model)]
    return results


@scenario
def collectives_that_are_replaced_by_name(side):
    """PyTorch's own tests count the collectives, and look at what they are given, by replacing them in torch.distributed."""
    seen = []

    def counting(kind, original):
        def replaced(*args, **kwargs):
            seen.append(kind)
            return original(*args, **kwargs)

        return replaced

    model = nested(side)
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "all_gather",  # torch on the CPU
            "all_gather_single",
            "reduce_scatter_single",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
        ):
            if hasattr(dist, name):
                patch.setattr(dist, name, counting(name[:3], getattr(dist, name)))
        model(batch(side)).sum().backward()
        with model.no_sync():
            model(batch(side)).sum().backward()
        model(batch(side)).sum().backward()
    return collections.Counter(seen)


@scenario
def attributes_for_hybrid_sharding(side):
    """Names with an underscore that PyTorch's own tests of hybrid sharding read."""
    mesh = init_device_mesh("cpu", (1, side.world_size), mesh_dim_names=("replicate", "shard"))
    model = side.shard(nn.Linear(4, 2), device_mesh=mesh, sharding_strategy=side.ShardingStrategy.HYBRID_SHARD)
    model(batch(side))
    return [hasattr(model, "_inter_node_pg"), hasattr(model, "_device_mesh"), hasattr(model, "_is_root")]


@scenario
def a_batch_norm_in_training_and_evaluation(side):
    torch.manual_seed(13)
    model = side.shard(nn.Sequential(nn.Linear(4, 4), side.shard(nn.BatchNorm1d(4))))
    results = trained(side, model)
    model.eval()
    return [results, dict(model.named_buffers()), model(batch(side)).detach()]


@scenario
def tied_weights_below_the_root(side):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(14)
            self.embedding = nn.Embedding(5, 4)
            self.middle = side.shard(nn.Linear(4, 4))
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x):
            return self.head(self.middle(self.embedding(x.argmax(-1).clamp(max=4))))

    model = side.shard(Tied())
    return [trained(side, model), [name for name, _ in model.named_parameters(remove_duplicate=False)]]


@scenario
def a_wrapper_is_wrapped(side):
    torch.manual_seed(15)
    model = side.shard(side.shard(nn.Linear(4, 2)))
    return [[name for name, _ in model.named_parameters()], trained(side, model)]


# What is not the same yet, by scenario, with original parameters or without or both; and why.
KNOWN = {
    "one_rank_is_not_sharded_and_warned_of": ("both", "where no strategy is given torch warns too"),
    "clipping_without_gradients": ("both", "torch warns on a rank without gradients"),
    "parameters_after_forward": (
        "orig",
        "torch shows full parameters between forward and backward where they are not freed",
    ),
    "no_sync_of_an_inner_unit": ("both", "torch refuses with a RuntimeError; ours does it"),
    "gradients_under_no_sync": ("both", "torch shows the gradients that are not reduced yet"),
    "attributes_for_hybrid_sharding": ("both", "_inter_node_pg, _device_mesh and _is_root are missing"),
    "a_wrapper_is_wrapped": ("both", "refused; torch's outer one has no parameters of its own"),
    "channels_last": ("both", "torch keeps strides, and flattens in the order of memory"),
}


# What looks at parameters, gradients or their names, which original parameters and flat ones show in different ways. Each of the
# others runs with one of the two, in turn, and with both in `pytest --exhaustive`.
OF_PARAMETERS = {
    *(
        "a_flat_parameter_says_that_it_is_one",
        "a_model_on_meta",
        "a_parameter_is_replaced",
        "accumulation_with_and_without_no_sync",
    ),
    *(
        "an_optimizer_that_steps_in_backward",
        "apply_sees_full_parameters",
        "attributes_of_a_wrapper",
        "clipping_by_several_norms",
    ),
    *(
        "clipping_gradients_that_stay_in_low_precision",
        "copies_of_parameters_and_of_models",
        "data_and_gradients_are_replaced",
    ),
    *(
        "data_of_a_wrong_shape_is_refused",
        "frozen_units_beside_trained_ones",
        "half_after_wrapping",
        "ignored_modules_and_states",
    ),
    *("more_ranks_than_elements", "moved_and_cast_between_steps", "names_and_shapes_inside_forward", "names_and_text"),
    *(
        "public_attributes",
        "requires_grad_is_set_on_the_wrapper",
        "states_of_the_first_rank",
        "summoned_between_forwards",
    ),
    *("tied_weights_below_the_root", "two_groups_of_parameters", "units_that_differ_are_refused_when_they_run"),
}


def _variants(name: str) -> tuple[str, ...]:
    if name in OF_PARAMETERS or name in KNOWN or EXHAUSTIVE in os.environ:
        return ("orig", "flat")
    others = [other for other in SCENARIOS if other not in OF_PARAMETERS and other not in KNOWN]
    return (("orig", "flat")[others.index(name) % 2],)


def _cases():
    assert KNOWN.keys() | OF_PARAMETERS <= SCENARIOS.keys()
    for name in SCENARIOS:
        for variant in _variants(name):
            where, why = KNOWN.get(name, ("", ""))
            marks = [pytest.mark.xfail(strict=True, reason=why)] if where in (variant, "both") else []
            yield pytest.param(name, variant == "orig", id=f"{name}-{variant}", marks=marks)


def _compare(rank: int, world_size: int, name: str, use_orig_params: bool) -> str:
    sides = [
        Side(package, rank, world_size, use_orig_params) for package in ("torch.distributed.fsdp", "torch_backend")
    ]
    return compare(SCENARIOS[name], *sides)


@pytest.mark.parametrize(("name", "use_orig_params"), list(_cases()))
def test_R32_a_script_sees_what_it_sees_under_torch(ranks, name, use_orig_params):
    assert ranks.run(2, _compare, name, use_orig_params) == ["", ""]


# Where torch fails


def _after_forward(side: Side, low: torch.dtype | None, before: str) -> Any:
    """Losses of a training that a forward came before, which no backward followed."""
    model = nested(
        side, mixed_precision=side.MixedPrecision(low), sharding_strategy=side.ShardingStrategy.SHARD_GRAD_OP
    )
    optimizer = sgd(model)
    with torch.inference_mode() if before == "inference" else contextlib.nullcontext():
        for _ in range(before != "nothing"):
            model(batch(side))
    return trained(side, model, optimizer=optimizer)["losses"]


def _departs(rank: int, world_size: int, use_orig_params: bool) -> list[tuple[bool, bool]]:
    """Whether a forward without a backward leaves later steps unchanged: with torch's, and with ours."""
    results = []
    for low, before in ((None, "forward"), (torch.bfloat16, "forward"), (None, "inference")):
        same = []
        for package in ("torch.distributed.fsdp", "torch_backend"):
            side = Side(package, rank, world_size, use_orig_params)
            expected = _after_forward(side, low, "nothing")
            try:
                same.append(difference(expected, _after_forward(side, low, before)) == "")
            except (RuntimeError, AssertionError):
                same.append(False)
        results.append(tuple(same))
    return results


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
def test_R12_a_forward_without_backward_changes_no_later_step(ranks, use_orig_params):
    # Under torch, gradients of the next step get lost under mixed precision, and what was gathered in inference mode cannot be
    # trained with.
    for results in ranks.run(2, _departs, use_orig_params):
        assert results == [(True, True), (False, True), (False, True)]


def _twice(rank: int, world_size: int, strategy: str, use_orig_params: bool) -> list[Any]:
    results = []
    for package in ("torch.distributed.fsdp", "torch_backend"):
        side = Side(package, rank, world_size, use_orig_params)
        model = nested(side, sharding_strategy=side.ShardingStrategy[strategy])
        loss = model(batch(side)).square().sum()
        loss.backward(retain_graph=True)
        once = side.full_grads(model)
        again = raised(loss.backward)
        doubled = [None if grad is None else grad * 2 for grad in once]
        results.append(again.kind if again else difference(doubled, side.full_grads(model)))
    return results


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_R28_a_graph_is_gone_through_twice(ranks, strategy, use_orig_params):
    # torch has freed the parameters by then. Twice the same gradient is its double, exactly.
    for theirs, ours in ranks.run(2, _twice, strategy, use_orig_params):
        assert theirs is RuntimeError
        assert ours == ""
