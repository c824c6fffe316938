"""Activation checkpointing; under tensor parallelism see tensor_parallel.py."""

# pyright: reportArgumentType=false, reportPrivateImportUsage=false

import functools
from typing import Any

from torch.distributed._composable import checkpoint as checkpoint_by_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from tests.on_torch.fsdp2.scripts import scenario
from tests.on_torch.helpers.fsdp2_models import trained
from tests.on_torch.helpers.models import build_net
from tests.on_torch.helpers.scenarios import EVERY
from tests.on_torch.helpers.scripts import Side


def _checkpointed(side: Side, how: str, reentrant: bool) -> Any:
    model = build_net(depth=2)
    model.embedding.weight.requires_grad_(not reentrant or how != "around all")
    for i, block in enumerate(model.blocks):
        if how == "inside":
            block.up = checkpoint_wrapper(block.up, _impl(reentrant))
            side.fully_shard(block)
        elif how == "around":
            model.blocks[i] = checkpoint_wrapper(side.fully_shard(block), _impl(reentrant))
        elif how == "wrapper sharded":
            model.blocks[i] = side.fully_shard(checkpoint_wrapper(block, _impl(reentrant)))
        elif how == "hooks":
            checkpoint_by_hooks(block)
            side.fully_shard(block)
        elif how == "called":
            side.fully_shard(block)
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
    return trained(side, side.fully_shard(model), steps=2)


def _impl(reentrant: bool) -> CheckpointImpl:
    return CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT


for _how in ("inside", "around", "wrapper sharded", "hooks", "called"):
    for _reentrant in (False, True):
        # Inside a unit both of torch's implementations, since the unit's hooks are around them; elsewhere one in turn.
        _is_chosen = EVERY or _how in ("inside", "hooks") or _reentrant == (_how == "around")
        if _is_chosen and not (_how == "hooks" and _reentrant):
            scenario(name=f"checkpoints_{_how.replace(' ', '_')}" + "_reentrant" * _reentrant)(
                functools.partial(_checkpointed, how=_how, reentrant=_reentrant)
            )
