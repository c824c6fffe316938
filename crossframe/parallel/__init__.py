"""Models on meshes that divide them: tensor, expert and pipeline parallelism next to data parallelism (R39)."""

from crossframe.parallel.model import ParallelModel, ParallelSharding
from crossframe.parallel.stages import stages_of
from crossframe.parallel.styles import KNOWN_STYLES, Style
from crossframe.parallel.traffic import Traffic, idle_share, model_traffic, token_shares

__all__ = [
    "KNOWN_STYLES",
    "ParallelModel",
    "ParallelSharding",
    "Style",
    "Traffic",
    "idle_share",
    "model_traffic",
    "stages_of",
    "token_shares",
]
