"""The reference: sharded training in numpy, all ranks in one process. Slow, plain, and what the backends are held against."""

from crossframe.reference.collectives import all_gather, all_reduce, reduce_scatter
from crossframe.reference.world import ReferenceUnit

__all__ = ["ReferenceUnit", "all_gather", "all_reduce", "reduce_scatter"]
