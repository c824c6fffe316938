"""What torch's FSDP sends, seen where every collective passes the dispatcher; and small models that it wraps."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from crossframe.params import ParamSpec
from crossframe.trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Event, collectives


class Sent(NamedTuple):
    """A collective: its kind, dtype, bytes of the unsharded side, and the number of ranks."""

    kind: str
    dtype: str
    num_bytes: int
    num_ranks: int


class Watch(TorchDispatchMode):
    """Keeps every collective of more than one rank, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and ("gather" in name or "reduce" in name):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            kind = ALL_GATHER if "gather" in name else REDUCE_SCATTER if "scatter" in name else ALL_REDUCE
            # An all-gather and a reduce-scatter name both of their sides, the unsharded one whole or in equal parts.
            num_bytes = sum(t.nbytes for t in tensors) - (min(t.nbytes for t in tensors) if kind != ALL_REDUCE else 0)
            (group,) = [
                arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
            ]
            num_ranks = torch.distributed.ProcessGroup.unbox(group).size()
            if num_ranks > 1:
                self.sent.append(Sent(kind, dtype_name(tensors[0].dtype), num_bytes, num_ranks))
        return func(*args, **(kwargs or {}))


def dtype_name(dtype: torch.dtype) -> str:
    """The core's name of a dtype."""
    return str(dtype).removeprefix("torch.")


def planned(events: Iterable[Event]) -> list[Sent]:
    """The collectives of a plan, as `Watch` keeps torch's."""
    return [Sent(e.kind, e.dtype, e.num_bytes, len(e.group)) for e in collectives(events) if len(e.group) > 1]


class Unit(nn.Module):
    """A module with parameters of its own that are used before and behind the modules inside it, so that its gradients are
    complete only when theirs are."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], children: dict[str, nn.Module]) -> None:
        super().__init__()
        self.inner = list(children)
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.zeros(shape)))
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        own = list(self.parameters(recurse=False))
        for param in own:
            x = x * param.sum()
        for name in self.inner:
            x = self.get_submodule(name)(x)
        for param in own:
            x = x + param.sum()
        return x


# Each a nest of units by name; a root "" without parameters of its own is no unit.
NESTS: tuple[tuple[str, ...], ...] = (
    ("",),
    ("a",),
    ("", "a"),
    ("a", "b"),
    ("", "a", "b"),
    ("", "a", "a.b"),
    ("a", "a.b", "c"),
    ("", "a", "b", "b.c"),
    ("", "a", "a.b", "c"),
    ("", "a", "a.b", "a.b.c"),
    ("", "a", "b", "c"),
)


def shapes_of(place: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of the parameters of the unit at a place of a nest: one to three, uneven, of another size in each unit."""
    rows = 37 * (place + 1)
    return ((rows,), (5, 2), (3, 1))[: 1 + place % 3]


def build_nest(nest: Sequence[str]) -> nn.Module:
    """The modules of a nest."""

    def build(name: str) -> nn.Module:
        inside = {other.rpartition(".")[2]: build(other) for other in nest if _parent(other) == name}
        return Unit(shapes_of(nest.index(name)) if name in nest else (), inside)

    return build("")


def _parent(name: str) -> str | None:
    return name.rpartition(".")[0] if name else None


def specs_of(nest: Sequence[str]) -> list[tuple[str, tuple[ParamSpec, ...]]]:
    """The units of a nest with their parameters."""
    return [
        (name, tuple(ParamSpec(f"{name}.p{i}".lstrip("."), shape) for i, shape in enumerate(shapes_of(place))))
        for place, name in enumerate(nest)
    ]
