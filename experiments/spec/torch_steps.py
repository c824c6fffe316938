"""A step of torch's FSDP on any rank of a small world: what it sends, and what it holds in full."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from crossframe.api import Api
from crossframe.strategy import Strategy, Sync
from crossframe.unit_assignment import post_order
from experiments.spec.fake_ranks import fake_mesh, quiet
from experiments.spec.step_cases import Step
from experiments.spec.watch import Sent, Watch, build_nest

TORCH_NAMES = {strategy: strategy.name for strategy in Strategy} | {Strategy.HYBRID_SHARD_ZERO2: "_HYBRID_SHARD_ZERO2"}
Held = list[frozenset[str]]


def peer(step: Step, mesh: Any) -> nn.Module:
    """torch's FSDP of the step's model on a rank's mesh."""
    model = build_nest(step.nest)
    if step.api is Api.FSDP2:
        _shard_modules(step, model, mesh)
        return model
    options: dict[str, Any] = {"device_mesh": mesh} if step.strategy.is_hybrid else {}
    if step.low:
        options["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32)

    def wrap(module: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            module,
            sharding_strategy=ShardingStrategy[TORCH_NAMES[step.strategy]],
            backward_prefetch=None if step.prefetch is None else BackwardPrefetch[step.prefetch.name],
            forward_prefetch=step.forward_prefetch > 0,
            use_orig_params=step.keep_original,
            device_id=torch.device("cpu"),
            **options,
        )

    for name in reversed([name for name in step.nest if name]):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, wrap(model.get_submodule(name)))
    return wrap(model)


def _shard_modules(step: Step, model: nn.Module, mesh: Any) -> None:
    options: dict[str, Any] = {"mesh": mesh}
    if step.reshard_after_forward is not None:
        options["reshard_after_forward"] = step.reshard_after_forward
    if step.low:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for name in reversed([name for name in step.nest if name]):
        fully_shard(model.get_submodule(name), **options)
    fully_shard(model, **options)
    begun, ended = ([model.get_submodule(name) for name in names] for names in (step.nest, post_order(step.nest)))
    for at in range(len(begun)):
        following, before = begun[at + 1 : at + 1 + step.forward_prefetch], ended[max(at - 1, 0) : at]
        begun[at].set_modules_to_forward_prefetch(following)  # type: ignore[operator]
        if step.backward_by_hand:
            ended[at].set_modules_to_backward_prefetch(before)  # type: ignore[operator]


def run_step(step: Step) -> tuple[list[Sent], Held]:
    """What torch sends in a second step, and which units it holds in full behind each forward and each backward.

    The latter is empty where FSDP2 has one shard: torch copies parameters there that the core leaves where they are.
    """
    replicate = step.mesh.replicate if step.mesh.replicate > 1 or step.strategy.is_hybrid else None
    sizes = (step.mesh.world_size, None) if step.strategy is Strategy.NO_SHARD else (step.mesh.shard, replicate)
    with fake_mesh(step.rank, *sizes) as mesh, quiet():
        model: Any = peer(step, mesh)
        for _ in range(2):  # the first sets everything up
            held: Held = []
            with Watch() as watch:
                for microbatch in range(step.microbatches):
                    last = microbatch == step.microbatches - 1
                    with _unreduced(step, model, last=last):
                        loss = model(torch.ones(2)).sum()
                        held.append(_held(step, model))
                        loss.backward()
                        held.append(_held(step, model))
    return watch.sent, [] if step.api is Api.FSDP2 and step.mesh.shard == 1 else held


def _unreduced(step: Step, model: Any, *, last: bool) -> Any:
    """What is not reduced in a microbatch, said as the interface wants it."""
    if step.api is Api.FSDP1:
        return nullcontext() if last or step.sync is Sync.EACH else model.no_sync()
    model.set_requires_gradient_sync(last or step.sync is not Sync.LAST)
    if step.mesh.replicate > 1:
        model.set_requires_all_reduce(last or step.sync is not Sync.ALL_REDUCE_LAST)
    return nullcontext()


def _held(step: Step, model: nn.Module) -> frozenset[str]:
    return frozenset(name for name in step.nest if _is_full(step.api, model.get_submodule(_wrapped(step, name))))


def _wrapped(step: Step, name: str) -> str:
    """Where torch has a unit: FSDP1 puts a module of its own around each, the root's included."""
    inside = f"_fsdp_wrapped_module.{name.replace('.', '._fsdp_wrapped_module.')}" if name else ""
    return inside if step.api is Api.FSDP1 else name


def _is_full(api: Api, module: Any) -> bool:
    if api is Api.FSDP1:
        flat = module._handle.flat_param
        # What computes: a gathered buffer, or a copy in low precision, or, where nothing is sharded, the flat parameter itself.
        used = next((getattr(flat, name) for name in ("_full_param_padded", "_mp_shard") if hasattr(flat, name)), flat)
        return used.untyped_storage().size() > 0
    return fully_shard.state(module)._fsdp_param_group._sharded_state is ShardedState.UNSHARDED  # type: ignore[attr-defined]
