"""The reference: sharded training in numpy, with all ranks in one process. It is slow and simple; tests compare backends with it.

`collectives` implements collectives; `unit` shards a bucket and reduces its gradients; `grad_norm` clips them; `bucket` is the
memory of a bucket on each rank; `live_unit` is a unit in training; `world` executes a plan; `optim` has the optimizers, and
`net` a network to train.

`experiments.spec.histories` checks it against a simpler model.
"""

from crossframe.reference.collectives import all_gather, all_reduce, reduce_scatter
from crossframe.reference.live_unit import LiveUnit
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
