"""Mixed precision, conversion, and autocast."""

# pyright: reportAttributeAccessIssue=false

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from tests.on_torch.fsdp2.scripts import scenario
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.fsdp2_models import linears, look, sharded_net, trained, trained_linears, values
from tests.on_torch.helpers.models import batch as token_batch
from tests.on_torch.helpers.models import build_net, loss_of, seed_cpu
from tests.on_torch.helpers.scenarios import EVERY
from tests.on_torch.helpers.scripts import Side, inputs, raised


@scenario()
def policy_attributes(side):
    policy = side.MixedPrecisionPolicy()
    given = side.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float16, False)
    mine = [policy, given, side.OffloadPolicy(), side.CPUOffloadPolicy(), side.CPUOffloadPolicy(pin_memory=False)]
    return [
        [dataclasses.asdict(each) for each in mine],
        raised(lambda: setattr(policy, "param_dtype", torch.float16)),
        given == side.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float16, False),
        issubclass(side.CPUOffloadPolicy, side.OffloadPolicy),
        [repr(each) for each in mine],
        hash(policy) == hash(side.MixedPrecisionPolicy()),
    ]


_POLICIES = {
    "bf16": {"param_dtype": torch.bfloat16},
    "bf16_reduced_in_fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "fp16": {"param_dtype": torch.float16},
    "reduced_in_bf16": {"reduce_dtype": torch.bfloat16},
    "reduced_in_fp64": {"reduce_dtype": torch.float64},
    "as_it_is": {"param_dtype": torch.float32, "reduce_dtype": torch.float32},
}


# One `param_dtype` alone and one `reduce_dtype` alone are enough.
_CHOSEN_POLICIES = (
    _POLICIES if EVERY else {name: _POLICIES[name] for name in _POLICIES if name not in ("bf16", "reduced_in_fp64")}
)


for _name, _policy in _CHOSEN_POLICIES.items():

    def _in_low_precision(side: Side, policy: dict[str, Any]) -> Any:
        model = sharded_net(side, mp_policy=side.MixedPrecisionPolicy(**policy))
        seen = []
        model.blocks[0].up.register_forward_hook(
            lambda module, args, output: seen.append([args[0].dtype, output.dtype])
        )
        tokens, _ = token_batch(0, side.rank)
        return [model(tokens).dtype, seen, trained(side, model)]

    scenario(name=f"low_precision_{_name}")(functools.partial(_in_low_precision, policy=_policy))


@scenario()
def outputs_are_cast(side):
    model = build_net(depth=2)
    low = side.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    for block in model.blocks:
        side.fully_shard(block.up, mp_policy=low)
        side.fully_shard(block.down, mp_policy=side.MixedPrecisionPolicy(output_dtype=torch.float32))
        block.down.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    side.fully_shard(model, mp_policy=side.MixedPrecisionPolicy(output_dtype=torch.float64))
    tokens, _ = token_batch(0, side.rank)
    return [model(tokens).dtype, trained(side, model)]


@scenario()
def inputs_are_cast(side):
    """Floating inputs are cast in positional and keyword arguments, containers and dataclasses, unless the policy says not to."""

    @dataclasses.dataclass
    class Record:
        """A dataclass of tensors."""

        x: Tensor
        mask: Tensor

    class Look(nn.Module):
        """Records the dtypes of its inputs."""

        def __init__(self):
            super().__init__()
            seed_cpu(11)
            self.linear = nn.Linear(4, 2)

        def forward(self, x, /, pair, *, record, ids):
            seen.append([x.dtype, pair[0].dtype, pair[1]["y"].dtype, record.x.dtype, record.mask.dtype, ids.dtype])
            return self.linear(x.to(self.linear.weight.dtype)), record

    results = []
    for cast in (True, False):
        seen = []
        policy = side.MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=cast)
        model = side.fully_shard(Look(), mp_policy=policy)
        x, mask = inputs(side), torch.ones(3, dtype=torch.bool)
        output, record = model(x, (x.double(), {"y": x.half()}), record=Record(x, mask), ids=torch.arange(3))
        output.sum().backward()
        results += [seen, output.dtype, type(record).__name__, record.x.dtype, values(model)]
    return results


@scenario()
def units_with_policies_of_their_own(side):
    """Norms in full precision inside a model in low precision."""
    model = build_net(depth=2)
    low = side.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        side.fully_shard(block.norm, mp_policy=side.MixedPrecisionPolicy(output_dtype=torch.bfloat16))
        side.fully_shard(block, mp_policy=low)
    model.blocks[0].norm.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    return trained(side, side.fully_shard(model, mp_policy=low))


@scenario()
def models_of_other_dtypes(side):
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        results.append(trained_linears_cast(side, side.fully_shard(linears(4, 3, 2).to(dtype)), dtype))
    return results


def trained_linears_cast(side: Side, model: nn.Module, dtype: torch.dtype) -> list[Any]:
    """As `trained`, with inputs of a dtype."""
    return trained(side, model, loss=lambda step: model(inputs(side, step).to(dtype)).square().mean())


@scenario()
def frozen_parameters_of_another_dtype(side):
    model = linears(4, 3, 2)
    model[0].bfloat16().requires_grad_(False)
    model[0].register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    model[0].register_forward_hook(lambda module, args, output: output.float())
    return trained_linears(side, side.fully_shard(model))


@scenario(differs="rejected")
def frozen_integers(side):
    """Quantised and trained parameters in one unit, each gathered in its own dtype."""

    class Quantised(nn.Module):
        """A frozen int8 weight with trained scales."""

        def __init__(self):
            super().__init__()
            seed_cpu(11)
            weight = torch.randint(-9, 9, (5, 4), dtype=torch.int8)
            self.weight, self.frozen_half = nn.Parameter(weight, False), nn.Parameter(torch.ones(3).half(), False)
            self.scale = nn.Parameter(torch.rand(5, 1))

        def forward(self, x):
            return x @ (self.weight * self.scale).to(x.dtype).t() * self.frozen_half.sum()

    results = []
    for policy in (side.MixedPrecisionPolicy(), side.MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        model = side.fully_shard(Quantised(), mp_policy=policy)
        optimizer = torch.optim.SGD([model.scale], lr=0.1)
        loss = lambda step, model=model: model(inputs(side, step)).float().square().mean()  # noqa: E731
        results += [trained(side, model, optimizer=optimizer, loss=loss), look(model)]
        model.unshard()
        results += [look(model), [param.detach().clone() for param in model.parameters()]]
        model.reshard()
    return results


@scenario()
def autocast_around(side):
    model = sharded_net(side)

    def loss(step):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return loss_of(model, step, side.rank)

    return trained(side, model, loss=loss)


@scenario()
def converted_before_the_first_step(side):
    """Between steps torch gathers in the old dtype and raises; see test_fully_shard.py."""
    model = side.fully_shard(linears(4, 3, 5))
    results = []
    for convert in (nn.Module.double, nn.Module.bfloat16, nn.Module.float):
        convert(model)
        results += [look(model), values(model)]
    model.to(torch.float64)
    return [results, trained_linears_cast(side, model, torch.float64)]
