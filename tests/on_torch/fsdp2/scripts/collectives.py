"""Custom collectives, prefetching, division of gradients, and memory and streams of collectives."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import functools
from collections import Counter
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from tests.on_torch.fsdp2.scripts import refusal, scenario
from tests.on_torch.helpers.fsdp2_models import linears, sharded_net, trained, trained_linears
from tests.on_torch.helpers.models import build_net, loss_of
from tests.on_torch.helpers.scripts import Side, counting_collectives, raised


def _counting(base: type, kind: str, seen: list[Any]) -> Any:
    """A custom collective that records its arguments."""

    class Counting(base):
        """Allocates and communicates as usual."""

        def allocate(self, size, *, dtype, device):
            seen.append([kind, "allocate", tuple(size), dtype, device.type])
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, *args, **kwargs):
            seen.append(
                [kind, tuple(output_tensor.shape), tuple(input_tensor.shape), output_tensor.dtype, group.size()]
            )
            if kind == "gather":
                return dist.all_gather_into_tensor(output_tensor, input_tensor, *args, group=group, **kwargs)
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, *args, group=group, **kwargs)

    return Counting()


def _comm_base(side: Side, name: str) -> type:
    """The base class of a custom collective; torch's is in a private module."""
    there = side.name if side.name == "torch_backend" else "torch.distributed.fsdp._fully_shard._fsdp_api"
    return getattr(import_module(there), name)


@scenario()
def collectives_of_the_user(side):
    results = []
    for policy in (side.MixedPrecisionPolicy(), side.MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        seen: list[Any] = []
        model = sharded_net(side, mp_policy=policy)
        for unit in (model, *model.blocks):
            unit.set_custom_all_gather(_counting(_comm_base(side, "AllGather"), "gather", seen))
            unit.set_custom_reduce_scatter(_counting(_comm_base(side, "ReduceScatter"), "reduce", seen))
        results += [trained(side, model), Counter(map(repr, seen))]
    return results


@scenario()
def collectives_of_a_step(side):
    """The number of each kind, under every option that changes it."""
    results = []
    for case in ("as it is", "kept", "no sync", "not resharded after backward", "no gradient"):
        model = sharded_net(side, reshard_after_forward=False if case == "kept" else None)
        model.set_requires_gradient_sync(case != "no sync")
        model.set_reshard_after_backward(case != "not resharded after backward")
        for step in range(2):
            with CommDebugMode() as counts, torch.set_grad_enabled(case != "no gradient"):
                loss = loss_of(model, step, side.rank)
                if case != "no gradient":
                    loss.backward()
            results.append({str(kind): count for kind, count in sorted(counts.get_comm_counts().items(), key=str)})
    return results


@scenario()
def collectives_that_are_replaced_by_name(side):
    """PyTorch's own tests count collectives by replacing them in torch.distributed."""
    model = sharded_net(side)
    with counting_collectives() as counts:
        trained(side, model)
    return counts


@scenario()
def prefetched_as_told(side):
    """Only the order of all-gathers changes. Layers are told apart by their sizes."""
    model, seen = linears(4, 3, 5, 2, 7, 4), []
    layers = [side.fully_shard(layer) for layer in model]
    side.fully_shard(model)
    model.set_modules_to_forward_prefetch(layers[:2])
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
        layer.set_modules_to_backward_prefetch(layers[max(i - 2, 0) : i])
        layer.set_custom_all_gather(_counting(_comm_base(side, "AllGather"), "gather", seen))
        layer.register_forward_pre_hook(lambda module, args, i=i: seen.append(i))
        layer.register_forward_hook(lambda module, args, output, i=i: seen_in_backward(output, i))

    def seen_in_backward(output, i):
        output.register_hook(lambda grad: seen.append(-i))

    return [trained_linears(side, model), seen]


@scenario()
def prefetched_and_then_not(side):
    model = sharded_net(side)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    first = trained(side, model)
    model.blocks[0].set_modules_to_forward_prefetch([])
    model.blocks[1].set_modules_to_backward_prefetch([])
    return [first, trained(side, model)]


def _divided(side: Side, factor: float, how: str) -> Any:
    """gloo has no PREMUL_SUM, which torch uses unless sums are forced or the dtype may overflow."""
    policy = (
        side.MixedPrecisionPolicy(reduce_dtype=getattr(torch, how)) if how != "sum" else side.MixedPrecisionPolicy()
    )
    model = sharded_net(side, mp_policy=policy)
    for unit in (model, *model.blocks):
        unit.set_gradient_divide_factor(factor)
        unit.set_force_sum_reduction_for_comms(how == "sum")
    return trained(side, model)


for _factor, _kind_of_sum in ((3.0, "sum"), (1.0, "sum"), (3.0, "float64"), (8.0, "float16")):
    scenario(name=f"divided_by_{_factor:.0f}_{_kind_of_sum}")(
        functools.partial(_divided, factor=_factor, how=_kind_of_sum)
    )


@scenario()
def divided_by_the_number_of_ranks(side):
    """The only factor that torch supports on gloo for float32."""
    model = sharded_net(side)
    model.set_gradient_divide_factor(2.0)
    return trained(side, model)


@scenario()
def sums_are_forced(side):
    model = sharded_net(side)
    model.set_force_sum_reduction_for_comms(True)
    return trained(side, model)


@scenario(needs="set_reduce_scatter_max_input_buffers")
def buffers_of_reductions(side):
    """Buffers allow overlap and change no value."""
    model = sharded_net(side)
    model.set_reduce_scatter_max_input_buffers(3)
    model.blocks[0].set_reduce_scatter_max_input_buffers(1, recurse=False)
    return [
        trained(side, model),
        [raised(lambda n=n: model.set_reduce_scatter_max_input_buffers(n)) for n in (True, 2.0, "2", None, 0, -1)],
    ]


@scenario(needs="set_separate_reduce_scatter_group")
def a_group_for_reductions(side):
    model = sharded_net(side)
    model.set_separate_reduce_scatter_group()
    first = trained(side, model)
    model.set_separate_reduce_scatter_group(False, recurse=False)
    return [first, trained(side, model)]


@scenario()
def not_unsharded_in_backward(side):
    """The backward of an embedding does not need its weights."""
    model = build_net(depth=2)
    side.fully_shard(model.embedding)
    model.embedding.set_unshard_in_backward(False)
    seen = []
    model.embedding.set_custom_all_gather(_counting(_comm_base(side, "AllGather"), "gather", seen))
    return [trained(side, sharded_net(side, model)), len(seen)]


@scenario()
def memory_from_the_process_group(side):
    """gloo cannot allocate memory, so training does not change."""
    results = []
    for enable in (False, True):
        model = sharded_net(side)
        results.append(raised(lambda model=model, enable=enable: use_memory_of_the_group(model, enable)))
        results.append(trained(side, model))
    return results


def use_memory_of_the_group(model: nn.Module, enable: bool) -> None:
    """Set it on all units."""
    for unit in (model, *model.blocks):
        unit.set_allocate_memory_from_process_group_for_comm(enable)


@scenario(needs="share_comm_ctx")
def two_models_share_streams(side):
    models = [sharded_net(side), sharded_net(side)]
    side.share_comm_ctx([])
    side.share_comm_ctx(models)
    return [trained(side, model) for model in models] + [raised(lambda: side.share_comm_ctx([nn.Linear(2, 2)]))]


@refusal()
def prefetching_what_is_not_sharded(side):
    side.fully_shard(nn.Linear(4, 2)).set_modules_to_forward_prefetch([nn.Linear(2, 2)])


@refusal()
def prefetching_backward_what_is_not_sharded(side):
    side.fully_shard(nn.Linear(4, 2)).set_modules_to_backward_prefetch([nn.Linear(2, 2)])


@refusal()
def memory_that_only_one_backend_has(side):
    side.fully_shard(nn.Linear(4, 2)).set_symm_mem_for_comm("NVLINK")
