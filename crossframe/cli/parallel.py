"""The options of `crossframe layout` and `crossframe plan` for tensor, expert and pipeline parallelism."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from crossframe.cli.option_values import choice
from crossframe.errors import UsageError
from crossframe.mesh import EXPERT, PIPELINE, REPLICATE, SHARD, TENSOR, MeshSpec, ParallelMesh
from crossframe.parallel import ParallelModel, Style
from crossframe.parallel.styles import known_rules
from crossframe.quoting import quote
from crossframe.shapes import ModelShapes


@dataclass(frozen=True)
class ParallelOptions:
    """The sizes of the model axes, and how they divide a model.

    Attributes:
        tp, ep, pp: ranks of tensor, expert and pipeline parallelism. Ranks of ep are also shards of all but the experts.
        styles: "PATTERN=STYLE" each, after the known styles.
        stages: "PATTERN=STAGE" each.

    Raises:
        UsageError: a size below 1, or an option without effect on these axes.
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    styles: Sequence[str] = ()
    stages: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "pp"):
            if (size := getattr(self, name)) < 1:
                raise UsageError(f"{name}: expected a number of ranks of at least 1, got {size}")
        if self.styles and self.is_plain:
            raise UsageError("parallel: styles are of modules that --tp or --ep divides; pass the size of one")
        if self.stages and self.pp == 1:
            raise UsageError("stage: without --pp there is one stage; pass the number of stages")

    @property
    def is_plain(self) -> bool:
        """Whether no axis divides the model."""
        return self.tp == self.ep == self.pp == 1

    def num_data_ranks(self, world_size: int) -> int:
        """Number of data parallel ranks of one part of the model, those of ep among them.

        Raises:
            UsageError: axes that do not divide the world.
        """
        if world_size % (self.tp * self.pp):
            raise UsageError(
                f"tp, pp: expected sizes whose product divides {world_size} ranks, got {self.tp} x {self.pp}; change one of them "
                "or the world size"
            )
        return world_size // (self.tp * self.pp)

    def model(self, shapes: ModelShapes, data: MeshSpec) -> ParallelModel:
        """The model on the mesh (pp, replicate, dp, ep, tp).

        Args:
            data: the data parallel ranks of one part.

        Raises:
            UsageError: a size of ep that does not divide the shard group, or an invalid style or stage.
        """
        if data.shard % self.ep:
            raise UsageError(f"ep: expected a divisor of the {data.shard} ranks of a shard group, got {self.ep}")
        sizes = {
            PIPELINE: self.pp,
            REPLICATE: data.replicate,
            SHARD: data.shard // self.ep,
            EXPERT: self.ep,
            TENSOR: self.tp,
        }
        rules = [*known_rules(shapes.params), *map(_style, self.styles)]
        return ParallelModel(shapes, ParallelMesh.of(**sizes), rules, tuple(map(_stage, self.stages)))

    def text(self) -> str:
        """The sizes of the axes that divide the model, as a part of a title."""
        return "".join(f", {name} {size}" for name in ("tp", "ep", "pp") if (size := getattr(self, name)) > 1)


def _style(asked: str) -> tuple[str, Style]:
    pattern, sign, style = asked.rpartition("=")
    if not sign or not pattern:
        raise UsageError(f"parallel: expected PATTERN=STYLE, for instance '*.up_proj=colwise', got {quote(asked)}")
    return pattern, choice("parallel", Style, style)


def _stage(asked: str) -> tuple[str, int]:
    found = re.fullmatch(r"(.+)=(-?\d{1,9})", asked)
    if not found:
        raise UsageError(f"stage: expected PATTERN=STAGE, for instance 'lm_head*=-1', got {quote(asked)}")
    return found[1], int(found[2])
