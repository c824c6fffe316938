"""The two APIs of torch's FSDP, and where their results differ."""

from enum import Enum


class Api(Enum):
    """The API whose behavior applies.

    | | FSDP1, `FullyShardedDataParallel` | FSDP2, `fully_shard` |
    |---|---|---|
    | order of a unit's parameters (R01) | module pre-order | depth-first post-order |
    | root after forward (R13) | stays full | stays full unless the user passed `reshard_after_forward` |
    | unreduced gradients (R15) | full, in the dtype of compute | full, in the dtype of the reduction |
    | division (R26) | around the sum, in every dtype | by the collective in float32 and bfloat16, else around the sum |
    | earlier microbatches (R28) | added after the reduction | added before the sum over replicas |
    | unused parameter in a used unit (R29) | zeros | none |
    """

    FSDP1 = "fsdp1"
    FSDP2 = "fsdp2"
