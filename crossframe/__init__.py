"""crossframe: the semantics of fully sharded data parallel training in integers, enums and decisions, without any framework."""

from crossframe.errors import CrossframeError
from crossframe.layout import FlatLayout, Layout, PerParamLayout, Piece, RaggedLayout, Sharding, overlay
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec

__version__ = "0.1.0"

__all__ = [
    "CrossframeError",
    "FlatLayout",
    "Layout",
    "MeshSpec",
    "ParamSpec",
    "PerParamLayout",
    "Piece",
    "RaggedLayout",
    "Sharding",
    "overlay",
]
