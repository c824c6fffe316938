"""crossframe: the semantics of fully sharded data parallel training in integers, enums and decisions, without any framework."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = {"CrossframeError": "errors", "MeshSpec": "mesh", "ParamSpec": "params"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that the command starts to handle signals before numpy is imported."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'layout')}"), name)
