"""The reference: sharded training in numpy, all ranks in one process. Slow, plain, and what the backends are held against.

`collectives` moves and sums; `unit` shards one bucket and reduces its gradients; `bucket` is each rank's memory of it; `live` is
a unit through its life; `world` executes a plan; `optim` and `net` are what is trained by and what is trained.

`experiments.spec.histories` checks it against a simpler model.
"""

from crossframe.reference.collectives import all_gather, all_reduce, reduce_scatter
from crossframe.reference.live import LiveUnit
from crossframe.reference.net import Layers, Net
from crossframe.reference.optim import SGD, AdamW
from crossframe.reference.redistribute import apply_overlay
from crossframe.reference.unit import ReferenceUnit
from crossframe.reference.world import World

__all__ = [
    "SGD",
    "AdamW",
    "Layers",
    "LiveUnit",
    "Net",
    "ReferenceUnit",
    "World",
    "all_gather",
    "all_reduce",
    "apply_overlay",
    "reduce_scatter",
]
