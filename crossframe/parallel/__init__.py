"""Models on meshes that divide them: tensor, expert and pipeline parallelism next to data parallelism (R39)."""

from crossframe.parallel.model import ParallelModel, ParallelSharding
from crossframe.parallel.stages import stages_of
from crossframe.parallel.styles import KNOWN_STYLES, Style

__all__ = ["KNOWN_STYLES", "ParallelModel", "ParallelSharding", "Style", "stages_of"]
