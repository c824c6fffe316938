"""The two interfaces of torch's FSDP, which shard by the same ideas and differ in particulars."""

from enum import Enum


class Face(Enum):
    """Whose particulars hold.

    | | FSDP1, `FullyShardedDataParallel` | FSDP2, `fully_shard` |
    |---|---|---|
    | order of a unit's parameters (R01) | module pre-order | depth-first post-order |
    | root after forward (R13) | stays full | stays full unless the user said otherwise |
    | unreduced gradients (R15) | full, in the dtype that computed them | full, in the reduction's dtype |
    | division (R26) | around the sum, in every dtype | by the collective in float32 and bfloat16, else around the sum |
    | earlier microbatches (R28) | added behind everything | added ahead of the sum over replicas |
    | unused parameter in a used unit (R29) | zeros | none |
    """

    FSDP1 = "fsdp1"
    FSDP2 = "fsdp2"
