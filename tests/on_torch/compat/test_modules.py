"""What is done to sharded modules, one test a row of the README's table "What works with it": hooks, parametrizations, adapters,
metrics, functional calls, profiles; and what is refused: copies, pickles, DistributedDataParallel, ZeroRedundancyOptimizer."""

import copy
import functools
import pickle

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from torch.profiler import ProfilerActivity, profile

from crossframe.errors import LayoutError, UsageError
from crossframe.state import state_key
from tests.on_torch.helpers.models import batch, build_net, loss_of
from tests.on_torch.helpers.sharded_and_plain import (
    ADAMW,
    APIS,
    EVERY_WAY,
    F64,
    SGD,
    backward_of_both,
    differing,
    full,
    refusal,
    shard,
    train,
    train_plain,
    trained,
    trained_plain,
)
from torch_backend import FullyShardedDataParallel


class _Noisy(nn.Module):
    """A parametrization by hand."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + weight.tanh()


PARAMETRIZATIONS = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral_norm": parametrizations.spectral_norm,
    "by hand": lambda linear: parametrize.register_parametrization(linear, "weight", _Noisy()),
}


def _parametrized(rank, world_size):
    def build(kind):
        model = build_net(F64, depth=1)
        PARAMETRIZATIONS[kind](model.blocks[0].up)
        return model.eval()  # the power iteration of spectral_norm would see other steps

    wrong = []
    for i, kind in enumerate(PARAMETRIZATIONS):
        plain = trained_plain(functools.partial(build, kind), SGD)
        # All under one layout of each interface, and under the others in turn.
        for api in [api for j, api in enumerate(APIS) if EVERY_WAY or j in (0, 2) or (i + j) % 3 == 0]:
            found = trained(functools.partial(build, kind), SGD, lambda model, api=api: shard(model, api), rank)
            wrong += [(kind, api)] if differing(found, plain) else []
    return wrong


def test_parametrized_modules_are_sharded(ranks):
    assert ranks.run(2, _parametrized) == [[], []]


class Adapted(nn.Module):
    """A frozen linear layer and two small trained matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=F64) / 10)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2, dtype=F64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def adapted() -> nn.Module:
    """A frozen model with adapters."""
    model = build_net(F64).requires_grad_(False)
    torch.manual_seed(5)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)  # type: ignore[arg-type]
    return model


def trained_params(model: nn.Module) -> list[nn.Parameter]:
    """What an optimizer of adapters gets."""
    return [param for param in model.parameters() if param.requires_grad]


def _adapters(rank, world_size):
    plain = adapted()
    train_plain(plain, ADAMW(trained_params(plain)))
    wrong = []
    for api in APIS:
        if api == "flat":
            said = refusal(functools.partial(shard, adapted(), api), "use_orig_params=True", kind=LayoutError)
            wrong += [(api, said)] if said else []
            continue
        model = shard(adapted(), api)
        train(model, ADAMW(trained_params(model)), rank)
        wrong += [api] if differing(full(model), full(plain)) or len(trained_params(model)) != 12 else []
    return wrong


def test_R11_a_frozen_base_with_small_trained_adapters(ranks):
    """torch warns of it under FSDP1, and so do we; one flat parameter cannot be trained in part."""
    assert ranks.run(2, _adapters) == [[], []]


class Measured(type(build_net(depth=1))):  # type: ignore[misc]
    """A model that counts and sums what it sees, as torchmetrics do."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("last", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output = super().forward(tokens)
        self.count += tokens.numel()
        self.total += output.detach().mean()
        self.last = output.detach().flatten()[:2]
        return output


def _measured(rank, world_size):
    wrong = []
    for api in APIS:
        found = []
        for change in (lambda model: model, lambda model, api=api: shard(model, api)):
            torch.manual_seed(0)
            model = change(Measured())
            for step in range(2):
                model(batch(step, rank)[0])
            found.append({state_key(name): buffer for name, buffer in model.named_buffers()})
        wrong += [api] if differing(found[1], found[0]) else []
    return wrong


def test_buffers_that_a_forward_changes_are_each_ranks_own(ranks):
    assert ranks.run(2, _measured) == [[], []]


def _watch(model):
    """Notes which hooks are called on which modules, in which order, with tensors of which shapes."""
    seen = []

    def note(kind, name):
        def hook(module, *given):
            tensors = [item for each in given for item in (each if isinstance(each, tuple) else (each,))]
            seen.append((kind, name, [tuple(item.shape) for item in tensors if isinstance(item, torch.Tensor)]))

        return hook

    for name, module in model.named_modules():
        name = state_key(name)
        if name.endswith(("up", "head")) and "." in name + ".":
            module.register_forward_pre_hook(note("pre", name))
            module.register_forward_hook(note("post", name))
            module.register_full_backward_pre_hook(note("backward pre", name))
            module.register_full_backward_hook(note("backward", name))
    return seen


def _hooked(rank, world_size):
    wrong = []
    x = batch(0, rank)[0]
    for api in APIS:
        # Hooks that look on, from before and from after sharding.
        for late in (False, True):
            plain, model = build_net(F64, depth=1), build_net(F64, depth=1)
            expected = _watch(plain)
            seen = [] if late else _watch(model)
            model = shard(model, api)
            seen = _watch(model) if late else seen
            for one in (plain, model):
                one(x).sum().backward()
            wrong += [] if seen == expected else [(api, late)]
        # Hooks of the whole that change what goes in and comes out.
        plain, model = build_net(F64, depth=1), shard(build_net(F64, depth=1), api)
        for one in (plain, model):
            one.register_forward_pre_hook(lambda module, args: (args[0].flip(1),))
            one.register_forward_hook(lambda module, args, output: output * 2)
        backward_of_both(plain, 0)
        loss_of(model, 0, rank).backward()
        for one in (plain, model):
            SGD(one.parameters()).step()
        wrong += [(api, "changed")] if differing(full(model), full(plain)) else []
    return wrong


BUFFER_DTYPES = (torch.int16, torch.uint16, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.int64)


def _synced_buffers(rank, world_size):
    module = nn.Linear(2, 2)
    for dtype in BUFFER_DTYPES:
        module.register_buffer(str(dtype).removeprefix("torch."), torch.tensor([[rank, 1], [2, 3]]).to(dtype).t())
    module.register_buffer("scalar", torch.tensor(rank, dtype=torch.int16))
    FullyShardedDataParallel(module, sync_module_states=True)
    return {name: buffer.to(torch.complex64) for name, buffer in module.named_buffers()}


def test_buffers_of_any_dtype_are_synchronized(ranks):
    """gloo itself moves no int16, uint16 and float8."""
    first, second = ranks.run(2, _synced_buffers)
    for name, buffer in first.items():
        expected = torch.tensor(0) if name == "scalar" else torch.tensor([[0, 2], [1, 3]])
        expected = expected.bool() if name == "bool" else expected
        assert torch.equal(buffer, second[name]) and torch.equal(buffer, expected.to(torch.complex64)), name


def test_hooks_of_modules_are_called_as_on_a_plain_model(ranks):
    assert ranks.run(2, _hooked) == [[], []]


def _called(rank, world_size):
    wrong = []
    x = batch(0, rank)[0]
    for api in APIS:
        plain, model = build_net(F64), shard(build_net(F64), api)
        own = functional_call(model, dict(model.named_parameters()), (x,))
        buffers = functional_call(model, {name: buffer * 3 for name, buffer in model.named_buffers()}, (x,))
        wrong += [] if torch.allclose(own, plain(x), rtol=1e-12) else [api]
        wrong += [] if torch.allclose(buffers, plain(x) * 3, rtol=1e-12) else [(api, "buffers")]
        if api == "flat":
            continue  # whose parameters have no names of their own
        model = shard(build_net(F64), api)
        weight = {
            name: torch.zeros(11, 7, dtype=F64) for name, _ in model.named_parameters() if name.endswith("head.weight")
        }
        said = refusal(functools.partial(functional_call, model, weight, (x,)), "head.weight", "replaced", "expected")
        wrong += [(api, said)] if said else []
    return wrong


def test_R25_functional_calls_take_buffers_and_shards_and_refuse_full_parameters(ranks):
    assert ranks.run(2, _called) == [[], []]


def _profiled(rank, world_size):
    wrong = []
    for api in APIS:
        model = shard(build_net(F64, depth=1), api)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            train(model, SGD(model.parameters()), rank, range(1))
        names = {event.key for event in profiled.key_averages()}
        wrong += [] if {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_"} <= names else [api]
    return wrong


def test_a_profile_shows_the_collectives(ranks):
    assert ranks.run(2, _profiled) == [[], []]


def _refused(rank, world_size):
    wrong = []
    for api in APIS:
        model = shard(build_net(F64), api)
        refused = {
            "copy": refusal(lambda model=model: copy.deepcopy(model), "copied", "before"),
            "pickle": refusal(lambda model=model: pickle.dumps(model), "state_dict"),
            "ddp": refusal(
                lambda model=model: DistributedDataParallel(model), "DistributedDataParallel", "HYBRID", kind=UsageError
            ),
        }
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        loss_of(model, 0, rank).backward()
        refused["zero"] = refusal(optimizer.step, "ZeroRedundancyOptimizer", "directly", kind=UsageError)
        wrong += [(api, what, said) for what, said in refused.items() if said]
    return wrong


def test_what_cannot_work_is_one_error_that_says_what_to_do(ranks):
    assert ranks.run(2, _refused) == [[], []]
