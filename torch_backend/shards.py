"""The shards of a model on this rank, in the core's terms: for recorders, comparisons and checkpoints."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from crossframe.layout import Layout
from torch_backend.engine._bucket import Bucket
from torch_backend.engine._unit_tree import named_units


@dataclass(frozen=True)
class LocalPiece:
    """A range of a parameter's elements on this rank, with their reduced gradient or None.

    `values` and `grad` are 1-D and alias the shard and its gradient.
    """

    unit: str
    name: str
    start: int
    stop: int
    values: Tensor
    grad: Tensor | None


def sharded_units(model: nn.Module) -> list[tuple[str, list[Bucket]]]:
    """The units of a model by name, with either API, the outermost first."""
    return [(named.name, named.unit.buckets) for named in named_units(model)]


def layouts_of(model: nn.Module) -> list[tuple[str, Layout]]:
    """(unit name, layout) of all buckets, with the parameters' names in the model."""
    return [(named.name, each.layout) for named in named_units(model) for each in named.buckets]


def local_pieces(model: nn.Module, rank: int) -> Iterator[LocalPiece]:
    """All pieces of this rank, in unit order, without padding (R06)."""
    for named in named_units(model):
        for each in named.buckets:
            bucket, layout = each.bucket, each.layout
            index = {spec.name: i for i, spec in enumerate(layout.params)}
            grads = bucket.registrar.grads()
            for piece in layout.pieces(rank):
                i = index[piece.name]
                values = bucket.store.pieces[i]
                yield LocalPiece(named.name, piece.name, piece.param_start, piece.param_stop, values, grads[i])
