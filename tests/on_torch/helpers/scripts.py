"""Runs a script with PyTorch's classes and with ours in the same ranks, and compares the results.

A scenario is a function of one side. It returns what a script sees: tensors, names, dtypes, attributes, and exceptions and
warnings by `raised` and `warned`. Ours must be equal bit for bit. The type of an exception must be torch's or a subclass of it.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.models import seed_cpu

PACKAGES = ("torch.distributed.fsdp", "torch_backend")


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
    """An exception; its text is not compared."""

    kind: type
    text: str = dataclasses.field(compare=False)


def raised(act: Callable[[], Any]) -> Raised | None:
    """The exception that `act` raises, or None."""
    try:
        act()
    except Exception as error:
        return Raised(type(error), str(error))
    return None


def warned(act: Callable[[], Any]) -> list[str]:
    """The types of warnings that `act` gives, except FutureWarning, which is about torch and not about its use."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return sorted({w.category.__name__ for w in caught if w.category is not FutureWarning})


@contextlib.contextmanager
def counting_collectives() -> Iterator[Counter[str]]:
    """Count all-gathers as "all" and reduce-scatters as "red", by replacing functions of torch.distributed."""
    counts: Counter[str] = Counter()

    def counting(kind: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        counts[kind] += 1
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "all_gather",  # torch's FSDP1 on the CPU
            "all_gather_single",
            "reduce_scatter_single",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
        ):
            if hasattr(dist, name):
                patch.setattr(dist, name, functools.partial(counting, name[:3], getattr(dist, name)))
        yield counts


def inputs(side: Side, seed: int = 0, width: int = 4, rows: int = 3) -> Tensor:
    """One rank's inputs of a model of linears."""
    return torch.randn(rows, width, generator=torch.Generator(DEVICE).manual_seed(10 * seed + side.rank))


def grads(model: nn.Module) -> list[Any]:
    """Copies of the gradients, which do not change as later ones accumulate."""
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def difference(theirs: Any, ours: Any, at: str = "") -> str:
    """The first difference between results of a scenario, or ""."""
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
    """The attributes and the local tensor of a DTensor."""
    return {
        "placements": [repr(placement) for placement in tensor.placements],
        "shape": tuple(tensor.shape),
        "stride": tensor.stride(),
        "mesh": _mesh_parts(tensor.device_mesh),
        "requires_grad": tensor.requires_grad,
        "local": tensor._local_tensor.detach(),
    }


@functools.cache  # DeviceMesh.mesh computes its ranks at each access, which takes a millisecond
def _mesh_parts(mesh: DeviceMesh) -> str:
    """As one text, which is compared at once: a script returns hundreds of DTensors of few meshes."""
    return f"{mesh.device_type} {mesh.mesh_dim_names} {mesh.mesh.tolist()}"


def outcomes(scenario: Callable[[Any], Any], sides: Iterable[Side]) -> list[Any]:
    """The result of a scenario on each side, from the same seed, or the exception."""
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
    """The first difference between the outcomes, or ""; torch must not raise."""
    expected, got = outcomes(scenario, (theirs, ours))
    assert not isinstance(expected, Raised), expected
    return difference(expected, got)
