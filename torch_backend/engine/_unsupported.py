"""Unsupported uses of sharded modules (pickling, DistributedDataParallel): errors that name the alternative."""

from typing import Any, NoReturn

from torch import nn

from crossframe.errors import UsageError


def refuse_to_pickle(module: nn.Module, protocol: Any) -> NoReturn:
    """The `__reduce_ex__` of sharded modules."""
    raise UsageError(
        f"a sharded {type(module).__name__} cannot be pickled: it holds process groups and one rank's shards. Save "
        "model.state_dict(), and load it into a model that is built and sharded again"
    )


@property
def refuse_ddp(module: nn.Module) -> NoReturn:
    """The `_ddp_params_and_buffers_to_ignore` of sharded modules, which DistributedDataParallel reads first. Its next operation
    would hang."""
    raise UsageError(
        "DistributedDataParallel around a sharded module would average gradients that are reduced already. For replicas of "
        "shards use sharding_strategy=ShardingStrategy.HYBRID_SHARD, or fully_shard with a mesh of two axes"
    )
