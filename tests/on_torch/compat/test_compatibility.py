"""What is used around training works on sharded models, one test a row of the README's table "What works with it": compilation,
activation checkpointing, averaged models, optimizers, schedulers, scalers; clipping is in engine/test_clipping.py.

Each row is tried under both interfaces and every layout at 2 ranks, where the mean of two gradients is the same in any order
(R32), so that the model that trains beside them is a plain one. It works, or it is one error that names what to do instead.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from crossframe.state import state_key
from tests.on_torch.helpers.models import Block, batch, build_net, loss_of
from tests.on_torch.helpers.sharded_and_plain import (
    ADAMW,
    APIS,
    EVERY_WAY,
    F64,
    FSDP1,
    FSDP2,
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
from torch_backend import FullyShardedDataParallel as FSDP
from torch_backend import fully_shard
from torch_backend.sharded_grad_scaler import ShardedGradScaler

# A model, sharded and plain, and what it holds after some steps


# torch.compile and activation checkpointing


def _compiled(rank, world_size):
    def inside(model, api, backend="eager"):
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
        return shard(model, api)

    def inside_ahead_of_time(model, api):
        return inside(model, api, "aot_eager")

    def around_each(model, api):
        model = shard(model, api)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend="eager")
        return model

    def around(model, api):
        return torch.compile(shard(model, api), backend="eager")

    def in_place(model, api):
        model = shard(model, api)
        model.compile(backend="eager")
        return model

    build = functools.partial(build_net, F64, depth=1)
    plain, wrong = trained_plain(build, SGD), []
    # What happens around the module does not depend on the layout. The other ways of both interfaces are compared bit for bit in
    # engine/test_integrations.py and fsdp2/scripts/training.py.
    ways = {"orig": (inside_ahead_of_time, in_place), "per_param": (inside_ahead_of_time, around_each)}
    if EVERY_WAY:
        ways = dict.fromkeys(ways, (inside_ahead_of_time, around_each, around, in_place))
    for api in APIS:
        for way in ways.get(api, (inside,)):
            torch._dynamo.reset()
            names = differing(trained(build, SGD, functools.partial(way, api=api), rank), plain)
            wrong += [(api, way.__name__, names)] if names else []
    torch._dynamo.reset()
    return wrong


@pytest.mark.exhaustive
def test_compiled_blocks_and_models_train_as_plain_ones(ranks):
    assert ranks.run(2, _compiled) == [[], []]


def _checkpointed(rank, world_size):
    def inside(model, api, wrap):
        apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda m: isinstance(m, Block))
        return shard(model, api)

    def outside(model, api, wrap):
        model = shard(model, api)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = wrap(block)
        return model

    def applied_after(model, api, wrap):
        model = shard(model, api)
        apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda m: isinstance(m, Block))
        return model

    build = functools.partial(build_net, F64, depth=2)
    wraps = {impl.name: functools.partial(checkpoint_wrapper, checkpoint_impl=impl) for impl in CheckpointImpl}
    tries = [(way, kind) for way in (inside, outside, applied_after) for kind in wraps] + [(outside, "offloaded")]
    wraps["offloaded"] = offload_wrapper
    plain, wrong = trained_plain(build, SGD), []
    for i, api in enumerate(APIS):
        # All of them under one layout of each interface, and under the other three each once.
        for way, kind in tries if EVERY_WAY or api in ("orig", "per_param") else tries[i // 2 :: 3]:
            change = functools.partial(way, api=api, wrap=wraps[kind])
            names = differing(trained(build, SGD, change, rank), plain)
            wrong += [(api, way.__name__, kind, names)] if names else []
    return wrong


def test_activation_checkpointing_inside_and_outside_of_units(ranks):
    assert ranks.run(2, _checkpointed) == [[], []]


# Averaged models


def _averaged(rank, world_size):
    """An averaged model is copied before sharding and sharded alike; it is evaluated after each step."""
    wrong, ways = [], ({"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, {})
    for i, api in enumerate(APIS):
        # Both under one layout of each interface, and under the others one in turn.
        for options in ways if EVERY_WAY or api in ("orig", "per_param") else (ways[i % 2],):
            plain, model = build_net(F64, depth=2), build_net(F64, depth=2)
            plain_average, average = AveragedModel(plain, **options), AveragedModel(model, **options)
            average.module, model = shard(average.module, api), shard(model, api)
            optimizers = SGD(plain.parameters()), SGD(model.parameters())
            for step in range(2):
                train_plain(plain, optimizers[0], range(step, step + 1))
                train(model, optimizers[1], rank, range(step, step + 1))
                plain_average.update_parameters(plain)
                # The outermost unit stays full behind an evaluation; what it holds is renewed by hand, since no optimizer steps.
                if api in FSDP2:
                    average.module.reshard()
                average.update_parameters(model)
                if api in FSDP1:
                    with FSDP.summon_full_params(average.module, recurse=False, writeback=False):
                        pass
                with torch.no_grad():
                    outputs = average(batch(step, rank)[0]), plain_average(batch(step, rank)[0])
                wrong += [] if torch.allclose(*outputs, rtol=1e-12) else [(api, len(options), step)]
            names = differing(full(average.module), full(plain_average.module))
            names += [refusal(lambda model=model: AveragedModel(model), "copied", "before")]
            wrong += [(api, names)] if any(names) else []
    return wrong


def test_averaged_models_are_copied_before_sharding(ranks):
    assert ranks.run(2, _averaged) == [[], []]


def _averaged_by_hand(rank, world_size):
    """Averages in a list of shards, which are put into the model and taken out again."""
    wrong = []
    for api in APIS:
        results = []
        for model in (build_net(F64, depth=1), shard(build_net(F64, depth=1), api)):
            optimizer = SGD(model.parameters())
            average = [param.detach().clone() for param in model.parameters()]
            for step in range(2):
                steps = range(step, step + 1)
                train_plain(model, optimizer, steps) if not results else train(model, optimizer, rank, steps)
                for mean, param in zip(average, model.parameters(), strict=True):
                    mean.lerp_(param.detach(), 0.1)
            with torch.no_grad():
                kept = [param.detach().clone() for param in model.parameters()]
                for param, mean in zip(model.parameters(), average, strict=True):
                    param.copy_(mean)
                results.append([model(batch(0, rank)[0]), full(model)])
                if results[1:] and api in FSDP2:
                    model.reshard()
                for param, value in zip(model.parameters(), kept, strict=True):
                    param.copy_(value)
            results[-1].append(full(model))
        (plain_output, *plain_params), (output, *params) = results
        wrong += [] if torch.allclose(output, plain_output, rtol=1e-12) else [api]
        wrong += [api for a, b in zip(params, plain_params, strict=True) if differing(a, b)]
    return wrong


def test_averages_by_hand_are_put_into_the_model_and_taken_out(ranks):
    assert ranks.run(2, _averaged_by_hand) == [[], []]


class _Normed(nn.Sequential):
    """A batch norm between two linear layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        self.blocks = [self[0]]


def _batch_norms(rank, world_size):
    generator = torch.Generator().manual_seed(rank)
    loader = [torch.randn(6, 4, generator=generator, dtype=F64) for _ in range(3)]
    wrong = []
    for api in APIS:
        found = []
        for sharded in (False, True):
            torch.manual_seed(1)
            model = _Normed().to(F64)
            if sharded:
                model = FSDP(model, use_orig_params=api == "orig") if api in FSDP1 else fully_shard(model)
            update_bn(loader, model)
            found.append({state_key(name): buffer for name, buffer in model.named_buffers()})
        wrong += [api] if differing(found[1], found[0]) else []
    return wrong


def test_update_bn_takes_each_ranks_own_data(ranks):
    assert ranks.run(2, _batch_norms) == [[], []]


# Optimizers


OPTIMIZERS = {
    "AdamW": ("foreach", "fused", "amsgrad", "maximize"),
    "SGD": ("foreach", "fused"),
    "Adagrad": ("foreach", "fused"),
    **dict.fromkeys(("RMSprop", "NAdam", "Adadelta", "Adamax", "RAdam", "ASGD", "Rprop"), ("foreach",)),
}
# Operators that torch's DTensors have not.
NOT_OF_DTENSORS = {("SGD", "fused"), ("Adagrad", "fused"), ("Rprop", "foreach")}


def _optimized(rank, world_size):
    wrong, build = [], functools.partial(build_net, F64, depth=1)
    others = [api for api in APIS if api != "per_param"]
    for i, (name, flags) in enumerate(OPTIMIZERS.items()):
        for j, flag in enumerate(flags):
            make = functools.partial(getattr(torch.optim, name), lr=1e-2, **{flag: True})
            plain = trained_plain(build, make)
            # All with DTensors, which have operators of their own; with plain shards each under one of the others in turn.
            for api in APIS if EVERY_WAY else ("per_param", others[(i + j) % len(others)]):
                try:
                    names = differing(trained(build, make, lambda m, api=api: shard(m, api), rank), plain)
                except NotImplementedError as error:
                    names = [str(error)]
                if bool(names) != (api == "per_param" and (name, flag) in NOT_OF_DTENSORS):
                    wrong.append((api, name, flag, names))
    return wrong


def test_optimizers_step_in_each_of_their_ways(ranks):
    """capturable= is for CUDA alone."""
    assert ranks.run(2, _optimized) == [[], []]


def _scheduled(rank, world_size):
    schedulers = {
        "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
        "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5),
        "sequence": lambda optimizer: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [1]
        ),
    }
    wrong = []
    for i, api in enumerate(APIS):
        # A scheduler sees groups of parameters, in which no layout shows: one in turn.
        for name, schedule in list(schedulers.items()) if EVERY_WAY else [list(schedulers.items())[i % 3]]:
            plain, model = build_net(F64, depth=1), shard(build_net(F64, depth=1), api)
            optimizers = ADAMW(plain.parameters()), ADAMW(model.parameters())
            scheduled = [schedule(optimizer) for optimizer in optimizers]
            for step in range(3):
                train_plain(plain, optimizers[0], range(step, step + 1))
                train(model, optimizers[1], rank, range(step, step + 1))
                for one in scheduled:
                    one.step()
            wrong += [(api, name)] if differing(full(model), full(plain)) else []
    return wrong


def test_learning_rates_are_scheduled(ranks):
    assert ranks.run(2, _scheduled) == [[], []]


def _in_backward(rank, world_size):
    """An optimizer for each parameter, which steps as soon as its gradient is there."""
    wrong = []
    for api in APIS:
        plain, model = build_net(F64, depth=1), shard(build_net(F64, depth=1), api)
        train_plain(plain, ADAMW(plain.parameters()))
        optimizers = {param: ADAMW([param]) for param in model.parameters()}

        def step(param, optimizers=optimizers):
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
        for number in range(2):
            loss_of(model, number, rank).backward()
        wrong += [api] if differing(full(model), full(plain)) else []
    return wrong


def test_optimizers_step_inside_backward(ranks):
    assert ranks.run(2, _in_backward) == [[], []]


# Gradient scalers


def _scaled(rank, world_size):
    """A step with an infinity in one rank's shard, which no rank takes, and a good one, which all do."""
    wrong = []
    for api in APIS:
        for scaler_of in (ShardedGradScaler, torch.amp.GradScaler) if api in FSDP2 else (ShardedGradScaler,):
            plain, model = build_net(depth=1), shard(build_net(depth=1), api)
            optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
            scaler = scaler_of("cpu", init_scale=4.0, growth_interval=1)
            before = full(model)
            scaler.scale(loss_of(model, 0, rank)).backward()
            if rank == 1:
                held = (
                    getattr(grad, "_local_tensor", grad)
                    for param in model.parameters()
                    if (grad := param.grad) is not None
                )
                held = (getattr(grad, "local", grad) for grad in held)
                next(grad for grad in held if grad.numel()).view(-1)[0] = torch.inf
            scaler.step(optimizers[1])
            scaler.update()
            skipped = scaler.get_scale() == 2.0 and not differing(full(model), before)
            optimizers[1].zero_grad()
            backward_of_both(plain, 1)
            optimizers[0].step()
            scaler.scale(loss_of(model, 1, rank)).backward()
            scaler.unscale_(optimizers[1])
            scaler.step(optimizers[1])
            scaler.update()
            went = scaler.get_scale() == 4.0 and not differing(full(model), full(plain))
            wrong += [] if skipped and went else [(api, scaler_of.__name__, skipped, went)]
    return wrong


def test_scalers_skip_a_step_on_all_ranks_or_none(ranks):
    """torch.amp.GradScaler sees FSDP1's shards of its own rank alone: ShardedGradScaler is for these."""
    assert ranks.run(2, _scaled) == [[], []]
