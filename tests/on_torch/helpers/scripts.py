"""Scripts run with PyTorch's classes and with ours in the same ranks, and what comes of it compared.

A scenario is a function of one side. It returns what a script could see: tensors, names, dtypes, attributes; `raised` and
`warned` stand for an exception and for warnings. Ours must be equal, bit for bit, and an exception must be caught by whoever
catches torch's: it has torch's type among its bases.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.on_torch.helpers.models import seed_cpu


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two implementations, in one rank."""

    name: str
    rank: int
    world_size: int

    def __getattr__(self, name: str) -> Any:
        """A public name of the package."""
        return getattr(import_module(self.name), name)


@dataclasses.dataclass(frozen=True)
class Raised:
    """An exception, as far as it is compared."""

    kind: type
    text: str = dataclasses.field(compare=False)


def raised(act: Callable[[], Any]) -> Raised | None:
    """What `act` raises, if anything."""
    try:
        act()
    except Exception as error:
        return Raised(type(error), str(error))
    return None


def warned(act: Callable[[], Any]) -> list[str]:
    """The kinds of warnings that `act` gives, but for those of torch that are not about its use."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return sorted({w.category.__name__ for w in caught if w.category is not FutureWarning})


def difference(theirs: Any, ours: Any, at: str = "") -> str:
    """Where the results of a scenario differ first, or ""."""
    if isinstance(theirs, Raised):
        if isinstance(ours, Raised) and issubclass(ours.kind, theirs.kind):
            return ""
        return f"{at}: torch raises {theirs}, ours {ours}"
    if isinstance(ours, Raised):
        return f"{at}: torch does it, ours raises {ours}"
    if isinstance(theirs, DTensor):
        if not isinstance(ours, DTensor):
            return f"{at}: torch has {theirs}, ours {ours}"
        return difference(_parts(theirs), _parts(ours), at)
    if isinstance(theirs, Tensor):
        same = isinstance(ours, Tensor) and not isinstance(ours, DTensor)
        same = same and theirs.dtype == ours.dtype and torch.equal(theirs, ours)
        return "" if same else f"{at}: torch has {theirs}, ours {ours}"
    if isinstance(theirs, dict):
        if not isinstance(ours, dict) or list(theirs) != list(ours):
            return f"{at}: torch has {list(theirs)}, ours {list(ours) if isinstance(ours, dict) else ours}"
        return next(filter(None, (difference(theirs[key], ours[key], f"{at}/{key}") for key in theirs)), "")
    if isinstance(theirs, list | tuple):
        if type(theirs) is not type(ours) or len(theirs) != len(ours):
            return f"{at}: torch has {theirs}, ours {ours}"
        parts = (difference(a, b, f"{at}/{i}") for i, (a, b) in enumerate(zip(theirs, ours, strict=True)))
        return next(filter(None, parts), "")
    return "" if theirs == ours else f"{at}: torch has {theirs!r}, ours {ours!r}"


def _parts(tensor: DTensor) -> dict[str, Any]:
    """What a DTensor is, without communication."""
    return {
        "placements": [repr(placement) for placement in tensor.placements],
        "shape": tuple(tensor.shape),
        "stride": tensor.stride(),
        "mesh": _mesh_parts(tensor.device_mesh),
        "requires_grad": tensor.requires_grad,
        "local": tensor._local_tensor.detach(),
    }


@functools.cache  # a mesh works out its ranks anew each time, for a millisecond
def _mesh_parts(mesh: DeviceMesh) -> list[Any]:
    return [mesh.device_type, mesh.mesh_dim_names, mesh.mesh.tolist()]


def outcomes(scenario: Callable[[Any], Any], sides: Iterable[Side]) -> list[Any]:
    """What comes of a scenario on each side, each from the same seed; an exception is an outcome too."""
    results = []
    for side in sides:
        seed_cpu(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                results.append(scenario(side))
            except Exception as error:
                results.append(Raised(type(error), str(error)))
    return results


def compare(scenario: Callable[[Any], Any], theirs: Side, ours: Side) -> str:
    """Where the outcomes differ first, or ""; torch's must not be an exception."""
    expected, got = outcomes(scenario, (theirs, ours))
    assert not isinstance(expected, Raised), expected
    return difference(expected, got)
