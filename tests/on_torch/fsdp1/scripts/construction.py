"""Construction and attributes of wrapped modules, ignored modules, and what wrapping rejects."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.on_torch.fsdp1.scripts import scenario
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.fsdp1_models import Nested, OneRankGroup, nested, sgd, trained
from tests.on_torch.helpers.scripts import grads, inputs, raised, warned


@scenario()
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


@scenario()
def public_attributes(side):
    """Attributes of torch's wrapper without an underscore."""
    model = nested(side)
    model(inputs(side))
    return {
        "training_state": hasattr(model, "training_state"),
        "params": hasattr(model, "params"),
        "rest": [name for name in ("module", "rank", "world_size", "process_group") if hasattr(model, name)],
    }


@scenario()
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


@scenario()
def a_flat_parameter_says_that_it_is_one(side):
    params = list(nested(side).parameters())
    return [isinstance(param, side.FlatParameter) for param in params] + [isinstance(params[0], nn.Parameter)]


@scenario("orig")
def attributes_and_items_of_the_module_are_reached(side):
    wrapped = side.shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model = nested(side)
    model.answer = 42
    model.module.question = 6
    return [type(wrapped[0]).__name__, model.question, model.answer, raised(lambda: model.nothing)]


@scenario("flat")
def a_model_without_parameters(side):
    model = side.shard(nn.Sequential(nn.ReLU(), nn.Identity()))
    x = inputs(side).requires_grad_()
    model(x).sum().backward()
    return [x.grad, len(list(model.parameters()))]


@scenario("orig")
def containers_without_forward_are_warned_of(side):
    modules = [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})]
    return [warned(lambda module=module: side.shard(module)) for module in modules]


@scenario(differs="torch warns even where no strategy is given")
def one_rank_is_not_sharded_and_warned_of(side):
    groups = [dist.new_group([rank]) for rank in range(side.world_size)]

    def wrap(**options):
        return side.shard(nn.Linear(3, 2), process_group=groups[side.rank], **options)

    strategies = [None, *(side.ShardingStrategy[name] for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))]
    return [warned(lambda s=s: wrap(sharding_strategy=s)) for s in strategies] + [wrap().sharding_strategy.name]


@scenario("flat")
def refused_when_wrapping(side):
    linear, cls = nn.Linear(2, 2), side.FullyShardedDataParallel
    hybrid = side.ShardingStrategy.HYBRID_SHARD
    mesh = init_device_mesh(DEVICE.type, (side.world_size,))
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


@scenario()
def units_that_differ_are_refused_when_they_run(side):
    model = Nested()
    model.layers[1] = side.shard(model.layers[1], limit_all_gathers=False)
    wrapped = side.shard(model)
    return [raised(lambda: wrapped(inputs(side)))]


@scenario("flat")
def a_group_that_only_says_its_rank_and_size(side):
    """PyTorch's own tests of wrapping pass such an object instead of a process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = side.shard(nn.Linear(3, 2), process_group=OneRankGroup())
    return [model.rank, model.world_size, model.process_group.size()]


@scenario("orig")
def an_inner_unit_is_wrapped_again_by_a_new_root(side):
    """A second root around modules that ran under a first, as in PyTorch's own tests."""
    torch.manual_seed(2)
    inner = nn.Sequential(side.shard(nn.Linear(4, 4)))
    model = side.shard(inner)
    results = trained(side, model)
    x = inputs(side, 9)
    again = side.shard(inner)
    return [results, model(x).detach(), again(x).detach()]


@scenario()
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
        model(inputs(side, 0)).sum().backward()
        results.append([shapes, grads(model), list(side.full(model))])
    return results


@scenario("flat")
def everything_is_ignored(side):
    module = nn.Linear(4, 2)
    return warned(lambda: side.shard(module, ignored_modules=[module]))


@scenario("orig")
def roots_beside_each_other(side):
    """The parts of a model are wrapped, the model is not."""
    torch.manual_seed(8)
    model = nn.Sequential(side.shard(nn.Linear(4, 4)), nn.ReLU(), side.shard(nn.Linear(4, 2)))
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        model(inputs(side, step)).square().sum().backward()
        optimizer.step()
    return side.full(model)


@scenario(differs="rejected; torch's outer wrapper has no parameters of its own")
def a_wrapper_is_wrapped(side):
    torch.manual_seed(15)
    model = side.shard(side.shard(nn.Linear(4, 2)))
    return [[name for name, _ in model.named_parameters()], trained(side, model)]
