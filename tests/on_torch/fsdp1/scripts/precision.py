"""Mixed precision, conversion, autocast, and full precision in evaluation."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.on_torch.fsdp1.scripts import scenario
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.fsdp1_models import Side, nested, sgd, trained
from tests.on_torch.helpers.scripts import grads, inputs


@scenario("orig")
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
        output = model(inputs(side))
        output.float().sum().backward()
        seen.append(
            (
                output.dtype,
                *(p.dtype for p in model.parameters()),
                *(g.dtype for g in grads(model) if g is not None),
            )
        )
        seen.append([b.dtype for b in model.buffers()])
        with side.FullyShardedDataParallel.summon_full_params(model):
            seen.append([t.dtype for t in (*model.parameters(), *model.buffers())])
    return seen


@scenario()
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


@scenario("flat")
def autocast_around(side):
    model = nested(side)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        output = model(inputs(side))
    output.float().square().sum().backward()
    return [output.detach(), grads(model)]


class Buffered(nn.Module):
    """A linear and a floating buffer; records the dtypes in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.linspace(0.1, 1.7, 4))
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [x.dtype, self.linear.weight.dtype, self.scale.dtype]  # type: ignore[assignment]
        return self.linear(x.to(self.linear.weight.dtype)) * self.scale


def evaluated_in_full(side: Side, strategy: str, **precision: Any) -> list[Any]:
    """Training and evaluation in turn, of all units and of one alone."""
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
            output = model(inputs(side, step))
        found.append([output.detach(), *(module.seen for module in inner), *model.buffers()])
        found[-1][3:] = [buffer.clone() for buffer in found[-1][3:]]
        if step == 0:
            output.float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


@scenario("orig")
def full_precision_in_evaluation_where_the_environment_asks_for_it(side):
    return evaluated_in_full(side, "FULL_SHARD")


@scenario("flat")
def full_precision_in_evaluation_of_units_that_stay_unsharded(side):
    return evaluated_in_full(side, "SHARD_GRAD_OP", cast_forward_inputs=True)


@scenario("orig")
def full_precision_in_evaluation_of_what_is_not_sharded(side):
    return evaluated_in_full(side, "NO_SHARD", cast_root_forward_inputs=False)
